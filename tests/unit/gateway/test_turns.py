"""The order in which requests begin where more come than the process can begin, and which are refused meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from services.gateway import admission
from services.gateway.admission import AGAIN_S, MOST_AGAIN, TURNS, Arrival, Refusals, Turns
from services.gateway.auth import Caller
from services.gateway.errors import ApiError
from tests.support import generations


def arrival(priority: str = "normal", tenant: str = "t", has_others: bool = False, **body: Any) -> Arrival:
    caller = Caller(tenant, has_others=has_others)
    return Arrival.of({"priority": priority, **body}, b"{}", caller, time.monotonic() - 1.0)


async def begun(turns: Turns, *arrivals: Arrival) -> list[int]:
    """Return the numbers of these in the order in which they began; all come in one round of the event loop."""
    order: list[int] = []

    async def begin(number: int, one: Arrival) -> None:
        await turns.wait(one)
        order.append(number)

    await asyncio.gather(*(begin(number, one) for number, one in enumerate(arrivals)))
    return order


async def refused(turns: Turns, one: Arrival, before: Sequence[Arrival] = (), has_place: bool = False) -> str:
    """Return the code with which a request is refused that comes behind others; empty when it begins."""
    others = [asyncio.create_task(turns.wait(each)) for each in before]
    await asyncio.sleep(0)  # they come first
    try:
        await turns.wait(one, has_place)
    except ApiError as error:
        assert (error.status, int(error.headers["Retry-After"]) >= 1) == (429, True)
        return str(error.code)
    finally:
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return ""


FIRST = [arrival("low") for _ in range(TURNS)]


async def test_better_class_begins_before_all_that_wait() -> None:
    order = await begun(
        Turns(0.5, 60.0), *FIRST, *(arrival("low") for _ in range(20)), arrival("high"), arrival("realtime")
    )
    assert order[TURNS : TURNS + 2] == [TURNS + 21, TURNS + 20]
    assert sorted(order) == [*range(TURNS + 22)]


async def test_tenants_of_a_class_take_turns() -> None:
    many = [arrival(tenant="a") for _ in range(8)]
    order = await begun(Turns(0.5, 60.0), *FIRST, *many, arrival(tenant="b"))
    assert order[TURNS : TURNS + 2] == [TURNS, TURNS + 8]


async def test_requests_begin_a_few_in_a_round() -> None:
    turns, rounds = Turns(0.5, 60.0), []
    tasks = [asyncio.create_task(turns.wait(arrival())) for _ in range(3 * TURNS)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rounds.append(sum(task.done() for task in tasks))
    assert max(later - before for before, later in pairwise([0, *rounds])) == TURNS
    assert [task.result() for task in tasks] == [False] * TURNS + [True] * 2 * TURNS


async def test_requests_that_waited_take_the_turns_of_their_round() -> None:
    turns = Turns(0.5, 60.0)
    tasks = [asyncio.create_task(turns.wait(arrival())) for _ in range(2 * TURNS)]
    seen = []
    for _ in range(4):
        await asyncio.sleep(0)
        seen.append((len(turns), turns.are_taken))
    await asyncio.gather(*tasks)
    assert seen == [(TURNS, True), (0, True), (0, False), (0, False)]


async def test_crowd_refuses_less_urgent_classes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TURN_REQUESTS", 10)
    crowd = [*FIRST, *(arrival("low") for _ in range(5))]
    assert await refused(Turns(0.5, 60.0), arrival("low"), crowd) == "queue_full"
    assert await refused(Turns(0.5, 60.0), arrival("low"), crowd[:-1]) == ""
    assert await refused(Turns(0.5, 60.0), arrival("realtime"), crowd) == ""
    assert await refused(Turns(0.5, 60.0), arrival("low"), crowd, has_place=True) == ""


async def test_crowd_of_one_tenant_leaves_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TURN_REQUESTS", 10)
    crowd = [*FIRST, *(arrival(tenant="a", has_others=True) for _ in range(4))]
    assert await refused(Turns(0.5, 60.0), arrival(tenant="a", has_others=True), crowd) == "tenant_queue_full"
    assert await refused(Turns(0.5, 60.0), arrival(tenant="b", has_others=True), crowd) == ""


async def test_request_past_its_deadline_does_not_begin() -> None:
    assert await refused(Turns(0.5, 60.0), arrival(deadline_ms=500), FIRST) == "deadline_unreachable"
    assert await refused(Turns(0.5, 60.0), arrival(deadline_ms=60_000), FIRST) == ""


async def test_request_that_waits_too_long_is_refused_and_forgotten() -> None:
    turns = Turns(0.5, 1e-9)
    assert await refused(turns, arrival("low"), FIRST) == "overloaded"
    assert len(turns) == 0


async def test_request_whose_handler_is_gone_is_forgotten() -> None:
    turns = Turns(0.5, 60.0)
    tasks = [asyncio.create_task(turns.wait(one)) for one in [*FIRST, *(arrival("low") for _ in range(3))]]
    await asyncio.sleep(0)
    assert len(turns) == 3
    tasks[TURNS].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (len(turns), [task.cancelled() for task in tasks].index(True)) == (0, TURNS)


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({}, ("normal", 0, 1)),
        ({"priority": "low", "deadline_ms": 70, "min_tokens": 3}, ("low", 70, 3)),
        ({"priority": ["low"], "deadline_ms": "70", "min_tokens": True}, ("normal", 0, 1)),
        ({"priority": "urgent", "deadline_ms": -1, "min_tokens": 1.5}, ("normal", 0, 1)),
    ],
)
def test_arrival_reads_no_field_that_is_not_valid(body: dict[str, Any], read: tuple[str, int, int]) -> None:
    one = Arrival.of(body, b"{}", Caller("t"), 0.0)
    assert (one.priority, one.deadline_ms, one.least_tokens) == read


@pytest.mark.parametrize(
    ("code", "after_s", "one", "is_refused"),
    [
        ("queue_full", 0.5, arrival("low"), True),
        ("queue_full", AGAIN_S + 0.1, arrival("low"), False),
        ("queue_full", 0.5, arrival("normal"), False),
        ("queue_full", 0.5, arrival("low", tenant="u"), False),
        ("overloaded", 0.5, arrival("low"), True),
        ("overloaded", 0.5, arrival("low", ttft_slo_ms=9), False),
        ("overloaded", 0.5, arrival("low", background=True), False),
        ("rate_limit_exceeded", 0.5, arrival("low"), False),
    ],
)
def test_refusal_holds_for_more_of_its_tenant_and_class(
    code: str, after_s: float, one: Arrival, is_refused: bool
) -> None:
    found = Refusals()
    spec = generations.spec(prompts=[[1]], priority="low")
    found.note(spec, "t", ApiError(429, "no", code=code, retry_after_s=7.5), 100.0)
    again = found.again(one, 100.0 + after_s)
    assert (again and (again.code, again.headers["Retry-After"])) == ((code, "8") if is_refused else None)


def test_refusal_does_not_hold_for_smaller_requests_or_beyond_its_time() -> None:
    found = Refusals()
    error = ApiError(429, "no", code="queue_full", retry_after_s=0.4)
    found.note(generations.spec(prompts=[[1] * 10], priority="normal"), "t", error, 100.0)
    assert found.again(arrival(), 100.1) is None, "of two bytes"
    found.note(generations.spec(prompts=[[1]], priority="normal"), "t", error, 100.0)
    assert found.again(arrival(), 100.3)
    assert found.again(arrival(), 100.4) is None


def test_refusals_are_bounded() -> None:
    found = Refusals()
    error = ApiError(429, "no", code="queue_full", retry_after_s=9)
    for number in range(MOST_AGAIN + 1):
        found.note(generations.spec(prompts=[[1]], priority="normal"), str(number), error, 100.0)
    assert found.again(arrival(tenant="0"), 100.1) is None
    assert found.again(arrival(tenant=str(MOST_AGAIN)), 100.1)

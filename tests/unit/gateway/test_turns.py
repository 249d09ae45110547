"""The order in which requests begin where more come than the process can begin, and which are refused meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from services.gateway import request
from services.gateway.admission import AGAIN_S, MAX_AGAIN, TURNS, Refusals, Turns
from services.gateway.auth import Caller
from services.gateway.errors import ApiError
from services.gateway.request import Arrival
from shared.tasks import end
from tests.support.gateway import generations


def arrival(
    priority: str = "normal", tenant: str = "t", has_others: bool = False, named: bool = False, **body: Any
) -> Arrival:
    """Return one that came a second ago, with a body of 4 bytes."""
    caller = Caller(tenant, has_others=has_others)
    return Arrival.of({"priority": priority, **body}, b"{  }", caller, time.monotonic() - 1.0, named)


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
        await turns.wait(replace(one, has_place=has_place))
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


async def test_requests_begin_a_few_in_a_round() -> None:
    turns, rounds = Turns(0.5, 60.0), []
    tasks = [asyncio.create_task(turns.wait(arrival())) for _ in range(3 * TURNS)]
    async with asyncio.timeout(30):
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
        seen.append(turns.are_taken)
    await asyncio.gather(*tasks)
    assert seen == [True, True, False, False]


async def test_named_requests_are_bounded_and_leave_room_to_better_classes() -> None:
    crowd = [arrival("low", "a", True, named=True) for _ in range(300)]
    assert await refused(Turns(0.5, 60.0), arrival("low", "a", True, named=True), crowd) == "tenant_queue_full"
    assert await refused(Turns(0.5, 60.0), arrival("realtime", "b", True), crowd) == ""


async def test_place_exceeds_the_bound_by_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "TURN_REQUESTS", 40)
    for held, code in ((20, ""), (21, ""), (22, "queue_full")):
        crowd = [*FIRST, *(arrival("normal") for _ in range(held))]
        assert await refused(Turns(0.5, 60.0), arrival("low"), crowd) == "queue_full"
        assert await refused(Turns(0.5, 60.0), arrival("low"), crowd, has_place=True) == code


async def test_request_past_its_deadline_does_not_begin() -> None:
    assert await refused(Turns(0.5, 60.0), arrival(deadline_ms=500, named=True), FIRST) == "", "it may run already"
    assert await refused(Turns(0.5, 60.0), arrival(deadline_ms=500), FIRST) == "deadline_unreachable"
    assert await refused(Turns(0.5, 60.0), arrival(deadline_ms=60_000), FIRST) == ""


@pytest.fixture
async def better() -> AsyncIterator[Callable[[Turns], Awaitable[None]]]:
    """Keep all turns taken by requests of class realtime, one for each that has begun."""
    tasks: list[asyncio.Task[None]] = []

    async def keep(turns: Turns) -> None:
        while True:
            await turns.wait(arrival("realtime"))

    async def begin(turns: Turns) -> None:
        tasks.extend(asyncio.create_task(keep(turns)) for _ in range(3 * TURNS))
        await asyncio.sleep(0)

    yield begin
    await end(*tasks)


Better = Callable[[Turns], Awaitable[None]]


async def test_request_that_waits_too_long_is_refused_and_forgotten(
    better: Better, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "TURN_REQUESTS", 40)
    turns = Turns(0.5, 0.02)
    await better(turns)
    for _ in range(2):
        low = [asyncio.create_task(turns.wait(arrival("low"))) for _ in range(8)]
        async with asyncio.timeout(30):
            found = await asyncio.gather(*low, return_exceptions=True)
        assert [isinstance(one, ApiError) and one.code for one in found] == ["overloaded"] * 8


async def test_request_whose_handler_is_gone_is_forgotten(better: Better, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "TURN_REQUESTS", 40)
    turns = Turns(0.5, 60.0)
    await better(turns)
    for _ in range(2):
        low = [asyncio.create_task(turns.wait(arrival("low"))) for _ in range(8)]
        await asyncio.sleep(0)
        for task in low:
            task.cancel()
        found = await asyncio.gather(*low, return_exceptions=True)
        assert [type(one) for one in found] == [asyncio.CancelledError] * 8


@pytest.mark.parametrize("own", [{"background": True}, {"ttft_slo_ms": 9}, {"named": True}, {}])
async def test_longest_wait_is_for_no_request_that_sets_its_own(own: dict[str, Any]) -> None:
    assert await refused(Turns(0.5, 1e-9), arrival(**own), FIRST) == ("" if own else "overloaded")
    assert await refused(Turns(0.5, 1e-9), arrival(), FIRST, has_place=True) == ""


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


FULL = [b"full", 900]


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [
        (FULL, True), ([b"tenant", 900, 2], True), ([b"late"], True),
        ([b"backlog", False, "requests", 9, 9, 1.0], True), ([b"backlog", False, "bytes", 9, 9, 1.0], False),
        ([b"bytes", 9, 9, 0, 9], False), ([b"tenant bytes", 9, 9, 0, 9, 2], False),
        ([b"rate", 9, b"tokens"], False), ([b"expired"], False),
    ],
)  # fmt: skip
def test_refusal_for_bytes_or_for_the_request_itself_holds_for_no_other(answer: list[Any], is_kept: bool) -> None:
    found = Refusals()
    error = ApiError(429, "no", code="queue_full", retry_after_s=9)
    found.note(generations.spec(prompts=[[1]], priority="normal"), "t", answer, error, 100.0)
    assert (found.find_repeat(arrival(), 100.1) is not None) is is_kept


def test_refusals_keep_neither_the_request_nor_what_has_expired() -> None:
    found = Refusals()

    class Body(str): ...

    def refuse() -> weakref.ref[Body]:
        body = Body("long")
        error = ApiError(429, "no", code="queue_full", retry_after_s=9)
        found.note(generations.spec(prompts=[[1]], priority="normal"), "t", FULL, error, 100.0)
        with pytest.raises(ApiError):
            raise error
        return weakref.ref(body)

    body = refuse()
    gc.collect()
    assert (body(), len(found)) == (None, 1)
    error = ApiError(429, "no", code="queue_full", retry_after_s=9)
    found.note(generations.spec(prompts=[[1]], priority="normal"), "u", FULL, error, 100.0 + AGAIN_S)
    assert len(found) == 1


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
        ("queue_full", 0.5, arrival("low", max_tokens=0), False),
    ],
)
def test_refusal_holds_for_more_of_its_tenant_and_class(
    code: str, after_s: float, one: Arrival, is_refused: bool
) -> None:
    found = Refusals()
    spec = generations.spec(prompts=[[1]], priority="low")
    found.note(spec, "t", FULL, ApiError(429, "no", code=code, retry_after_s=7.5), 100.0)
    again = found.find_repeat(one, 100.0 + after_s)
    assert (again and (again.code, again.headers["Retry-After"])) == ((code, "8") if is_refused else None)


def test_refusal_does_not_hold_for_smaller_requests_or_beyond_its_time() -> None:
    found = Refusals()
    error = ApiError(429, "no", code="queue_full", retry_after_s=0.4)
    found.note(generations.spec(prompts=[[1] * 10], priority="normal"), "t", FULL, error, 100.0)
    assert found.find_repeat(arrival(), 100.1) is None, "of four bytes"
    found.note(generations.spec(prompts=[[1]], priority="normal"), "t", FULL, error, 100.0)
    assert found.find_repeat(arrival(), 100.3)
    assert found.find_repeat(arrival(), 100.4) is None


def test_refusals_are_bounded() -> None:
    found = Refusals()
    error = ApiError(429, "no", code="queue_full", retry_after_s=9)
    for number in range(MAX_AGAIN + 1):
        found.note(generations.spec(prompts=[[1]], priority="normal"), str(number), FULL, error, 100.0)
    assert found.find_repeat(arrival(tenant="0"), 100.1) is None
    assert found.find_repeat(arrival(tenant=str(MAX_AGAIN)), 100.1)

"""Threads for the texts of requests: a tenant that takes all of its own leaves others to another tenant."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from services.gateway import request
from services.gateway.errors import ApiError
from services.gateway.request import ARRIVAL, THREADS, Arrival, Line, TenantThreads, WaitingRequest
from tests.support.waiting import wait_until

TENANT_THREADS = (THREADS + 1) // 2
"""That one tenant gets alone."""


class Work:
    """Calls that block until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.running = 0

    def __call__(self) -> None:
        self.running += 1
        self.go.wait(300)


@pytest.fixture
async def work() -> AsyncIterator[Work]:
    made = Work()
    yield made
    made.go.set()


def arrival(tenant: str, priority: str = "normal", **more: Any) -> Arrival:
    return Arrival(tenant, True, priority, 0, 0, time.monotonic(), **more)


async def of_tenant(threads: TenantThreads, tenant: str, work: Work) -> None:
    ARRIVAL.set(arrival(tenant))
    await threads.run(work)


async def test_tenant_with_much_work_leaves_threads_to_another(work: Work) -> None:
    threads = TenantThreads()
    greedy = [asyncio.create_task(of_tenant(threads, "greedy", work)) for _ in range(2 * THREADS)]
    await wait_until(lambda: work.running == TENANT_THREADS)
    modest = Work()
    modest.go.set()
    async with asyncio.timeout(30):
        await asyncio.create_task(of_tenant(threads, "modest", modest))
        assert work.running == TENANT_THREADS
        work.go.set()
        await asyncio.gather(*greedy)
    assert work.running == 2 * THREADS


async def test_two_tenants_with_much_work_leave_a_thread_to_the_next(work: Work) -> None:
    threads = TenantThreads()
    tasks = [asyncio.create_task(of_tenant(threads, name, work)) for name in "ab" for _ in range(2 * THREADS)]
    await wait_until(lambda: work.running > TENANT_THREADS)
    modest = Work()
    modest.go.set()
    async with asyncio.timeout(30):
        await asyncio.create_task(of_tenant(threads, "modest", modest))
        assert work.running < THREADS
        work.go.set()
        await asyncio.gather(*tasks)


async def test_work_of_a_cancelled_caller_keeps_its_thread_to_its_end(work: Work) -> None:
    threads = TenantThreads()
    left = [asyncio.create_task(of_tenant(threads, "greedy", work)) for _ in range(TENANT_THREADS)]
    await wait_until(lambda: work.running == TENANT_THREADS)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    waiting = Work()
    waiting.go.set()
    more = asyncio.create_task(of_tenant(threads, "greedy", waiting))
    async with asyncio.timeout(30):
        await asyncio.create_task(of_tenant(threads, "modest", waiting))  # the loop has turned meanwhile
        assert waiting.running == 1
        work.go.set()
        await more
    assert waiting.running == 2


async def test_work_that_waits_for_a_thread_is_forgotten_with_its_caller(work: Work) -> None:
    threads = TenantThreads()
    greedy = [asyncio.create_task(of_tenant(threads, "greedy", work)) for _ in range(TENANT_THREADS)]
    await wait_until(lambda: work.running == TENANT_THREADS)
    waiting = Work()
    gone, text = asyncio.create_task(of_tenant(threads, "greedy", waiting)), weakref.ref(waiting)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    del waiting, gone
    gc.collect()
    assert text() is None
    work.go.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*greedy)


async def refused(threads: TenantThreads, one: Arrival) -> ApiError:
    """Return the error of work that comes now."""

    async def ask() -> None:
        ARRIVAL.set(one)
        await threads.run(int)

    async with asyncio.timeout(30):
        with pytest.raises(ApiError) as error:
            await asyncio.create_task(ask())
    assert error.value.status == 429
    return error.value


Fill = Callable[..., Awaitable[None]]


@pytest.fixture
async def fill(work: Work) -> AsyncIterator[Fill]:
    """Return a function that has all threads of a tenant at work, and lets more of its work wait."""
    tasks: list[asyncio.Task[None]] = []

    async def begin(threads: TenantThreads, waiting: int, tenant: str = "greedy") -> None:
        tasks.extend(asyncio.create_task(of_tenant(threads, tenant, work)) for _ in range(TENANT_THREADS + waiting))
        await wait_until(lambda: work.running == TENANT_THREADS)

    yield begin
    work.go.set()
    await asyncio.gather(*tasks)


async def test_work_that_waits_is_bounded_and_leaves_room_to_better_classes(
    fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "TURN_REQUESTS", 10)
    threads = TenantThreads(0.5)
    await fill(threads, 4)  # of 8 of class normal a tenant may have 4
    assert (await refused(threads, arrival("greedy"))).code == "tenant_queue_full"
    low = await refused(threads, arrival("greedy", "low"))
    assert "are waiting for a thread for their texts" in low.message and int(low.headers["Retry-After"]) >= 1
    ARRIVAL.set(arrival("modest"))
    async with asyncio.timeout(30):
        assert await threads.run(int) == 0, "another tenant has threads"


async def test_work_that_waits_too_long_or_past_its_deadline_is_refused(fill: Fill) -> None:
    threads = TenantThreads(1.0, 0.02)
    await fill(threads, 0)
    assert (await refused(threads, arrival("greedy"))).code == "overloaded"
    late = arrival("greedy", deadline_ms=1, ttft_slo_ms=9)
    assert (await refused(threads, late)).code == "deadline_unreachable"


async def test_work_that_is_not_done_at_the_deadline_is_refused(work: Work) -> None:
    threads = TenantThreads()

    async def ask(may_exist: bool) -> None:
        ARRIVAL.set(arrival("t", deadline_ms=20, may_exist=may_exist))
        await threads.run(work)

    named = asyncio.create_task(ask(may_exist=True))
    async with asyncio.timeout(30):
        with pytest.raises(ApiError) as late:
            await asyncio.create_task(ask(may_exist=False))
        assert (late.value.status, late.value.code) == (429, "deadline_unreachable")
        assert not named.done(), "a request that may exist goes on"
        work.go.set()
        await named


async def test_answer_that_comes_with_the_timeout_is_returned() -> None:
    """What it stands for has begun: a client that gets 429 sends its request again."""
    line = Line(WaitingRequest, "a thread", 1, 1.0, 0.0)
    waiting = asyncio.create_task(line.wait(replace(arrival("a"), arrived_at=time.monotonic() - 1, deadline_ms=1)))

    def answer() -> None:
        ((first,), _) = line.take(time.monotonic())
        first.answer.set_result("begun")

    asyncio.get_running_loop().call_soon(answer)  # behind the first step of the task, before its timeout
    async with asyncio.timeout(30):
        assert await waiting == "begun"


async def test_work_is_not_looked_through_while_all_threads_are_taken(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, looks = TenantThreads(), list[float]()
    tasks = [asyncio.create_task(of_tenant(threads, f"tenant {number}", work)) for number in range(THREADS)]
    await wait_until(lambda: work.running == THREADS)
    take = Line.take

    def noted(line: Line[Any], now: float, *rest: Any) -> Any:
        looks.append(now)
        return take(line, now, *rest)

    monkeypatch.setattr(Line, "take", noted)
    tasks += [asyncio.create_task(of_tenant(threads, f"waiting {number}", work)) for number in range(99)]
    await asyncio.sleep(0)
    assert not looks
    work.go.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)
    assert work.running == THREADS + 99


async def test_refusal_of_work_is_given_a_place(fill: Fill) -> None:
    placed: list[Arrival] = []

    def note(error: ApiError, one: Arrival) -> ApiError:
        placed.append(one)
        return error

    threads, one = TenantThreads(1.0, 0.02, note), arrival("greedy")
    await fill(threads, 0)
    await refused(threads, one)
    assert placed == [one]


async def test_errors_of_work_are_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        await TenantThreads().run(divmod, 1, 0)


async def test_caller_without_a_thread_gets_the_error_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, submit, refused = TenantThreads(), ThreadPoolExecutor.submit, []

    def limited(pool: ThreadPoolExecutor, *given: Any) -> Any:
        if not refused:
            refused.append(given)
            raise RuntimeError("can't start new thread")
        return submit(pool, *given)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", limited)
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="new thread"):
            await threads.run(int)
        assert await threads.run(int) == 0

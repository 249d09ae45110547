"""New requests on their way through the gateway's backlog into a real Redis: many in one call, by class, in time."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from protos import queue_pb2
from services.gateway import admission, request
from services.gateway.auth import Caller
from services.gateway.delivery import dispatcher
from services.gateway.delivery.stream import Generation
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from shared.keys import CLASSES
from tests.support.gateway import generations
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import DEADLINE, LENGTH, Line, ScriptedScheduler
from tests.support.waiting import wait_until


@pytest.fixture
def gateway(local_gateway: Gateway) -> Gateway:
    return local_gateway


@pytest.fixture
def scheduler(redis_server: RedisServer, gateway: Gateway) -> ScriptedScheduler:
    return ScriptedScheduler(redis_server.client, gateway.settings.keys).lead()


async def begin(gateway: Gateway, name: str, priority: str = "normal", tenant: str = "t", **more: Any) -> Generation:
    started = more.pop("started", time.monotonic())
    spec = generations.spec(id=f"cmpl-{name}", priority=priority, **more)
    return await gateway.admission.begin(spec, Caller(tenant), started)


class Held:
    """Jobs for Redis that stand still while a test fills the backlog."""

    def __init__(self, gateway: Gateway) -> None:
        self._go = asyncio.Event()
        gateway.dispatcher.submit(self._hold)
        self._gateway = gateway

    async def _hold(self) -> None:
        await self._go.wait()

    async def __aenter__(self) -> Held:
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._go.set()


def order(gateway: Gateway, redis_server: RedisServer) -> dict[str, list[str]]:
    """Return the ids in each stream, in the order in which they came."""
    client: Any = redis_server.client
    found = {}
    for name in CLASSES:
        rows = client.xrange(gateway.settings.keys.requests(name))
        found[name] = [queue_pb2.Request.FromString(row[b"r"]).id for _, row in rows]
    return found


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_that_wait_are_enqueued_by_one_call(
    gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    enqueue = gateway.dispatcher.scripts.enqueue

    async def counted(keys: Any, arguments: Any) -> Any:
        calls.append((len(keys) - 3) // 4)
        return await enqueue(keys, arguments)

    monkeypatch.setattr(gateway.dispatcher.scripts, "enqueue", counted)
    async with Held(gateway):
        begun = [asyncio.create_task(begin(gateway, f"{name}-{n}", name)) for n in range(5) for name in CLASSES]
        await turns(10)
    generations_ = await asyncio.gather(*begun)
    assert calls == [20]
    assert order(gateway, redis_server) == {name: [f"cmpl-{name}-{n}" for n in range(5)] for name in CLASSES}
    for one in generations_:
        one.close()


async def test_new_request_waits_for_one_question_at_most(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    enqueue = gateway.dispatcher.scripts.enqueue

    async def noted(keys: Any, arguments: Any) -> Any:
        order.append("enqueue")
        return await enqueue(keys, arguments)

    async def question() -> None:
        order.append("question")

    monkeypatch.setattr(gateway.dispatcher.scripts, "enqueue", noted)
    async with Held(gateway):
        await turns(3)
        held = Held(gateway)
        asked = [asyncio.create_task(gateway.dispatcher.ask(question)) for _ in range(100)]
        await turns(3)
    async with held:
        await turns(3)  # all that waits is known, and no request
        begun = asyncio.create_task(begin(gateway, "urgent", "realtime"))
        await turns(10)
    (await begun).close()
    await asyncio.gather(*asked)
    assert order.index("enqueue") <= 1
    assert order.count("question") == 100


async def test_commands_have_the_time_of_the_calls_beside_them(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of clients that leave at once are heard beside a backlog that is never empty."""
    order: list[str] = []
    begun: list[asyncio.Task[Generation]] = []
    enqueue, now = gateway.dispatcher.scripts.enqueue, time.monotonic()
    monkeypatch.setattr(dispatcher, "time", SimpleNamespace(monotonic=lambda: now))

    async def slow_enqueue(keys: Any, arguments: Any) -> Any:
        nonlocal now
        order.append("enqueue")
        now += 3
        if len(begun) < 4:
            begun.append(asyncio.create_task(begin(gateway, f"next-{len(begun)}")))
        return await enqueue(keys, arguments)

    async def command() -> None:
        nonlocal now
        order.append("command")
        now += 1

    async def question() -> None:
        order.append("question")

    monkeypatch.setattr(gateway.dispatcher.scripts, "enqueue", slow_enqueue)
    async with Held(gateway):
        await turns(3)
        for _ in range(4):
            gateway.dispatcher.submit(command)
        asked = [asyncio.create_task(gateway.dispatcher.ask(question)) for _ in range(2)]
        await turns(3)
        gateway.dispatcher.submit(command)
        begun.append(asyncio.create_task(begin(gateway, "first")))
        await turns(10)
    await asyncio.gather(*asked)
    await wait_until(lambda: order.count("enqueue") == 4)
    for generation in await asyncio.gather(*begun):
        generation.close()
    assert order == [
        "enqueue", "command", "command", "command", "enqueue", "command", "question", "enqueue", "question", "command",
        "enqueue",
    ]  # fmt: skip


async def test_many_commands_refuse_no_question(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_QUESTIONS", 2)

    async def nothing() -> None: ...

    async with Held(gateway):
        for _ in range(9):
            gateway.dispatcher.submit(nothing)
        asked = [asyncio.create_task(gateway.dispatcher.ask(nothing)) for _ in range(3)]
        await turns(3)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(answer, ApiError) and answer.status for answer in answers] == [False, False, 429]


async def test_silent_request_in_the_backlog_is_not_taken_for_lost(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "BATCH_REQUESTS", 1)
    monkeypatch.setattr(dispatcher, "SILENT_S", 0.0)

    def has_looked(before: int) -> bool:
        return gateway.cluster.unfinished_count != before

    async with Held(gateway):
        begun = [asyncio.create_task(begin(gateway, name)) for name in ("a", "b", "c")]
        await wait_until(lambda: len(gateway.dispatcher.streams) == len(begun))
        for looked_at in (-1, -2):  # the second look is whole
            gateway.cluster.unfinished_count = looked_at
            await wait_until(partial(has_looked, looked_at))
    for generation in await asyncio.gather(*begun):
        assert generation.stream.failure is None
        generation.close()


async def test_long_prompt_travels_in_a_separate_key(gateway: Gateway, scheduler: ScriptedScheduler) -> None:
    prompt = list(range(5, 25)) * 1000
    generation = await begin(gateway, "long", prompts=[prompt])
    claimed = await asyncio.to_thread(scheduler.claim)
    assert (claimed.request.prompts_apart, claimed.prompts) == (True, [prompt])
    generation.close()


async def test_deadline_that_passes_before_redis_answers_is_429(gateway: Gateway, redis_server: RedisServer) -> None:
    async with Held(gateway):
        with pytest.raises(ApiError) as refused:
            await begin(gateway, "r", deadline_ms=50)
    assert (refused.value.status, refused.value.code) == (429, "deadline_unreachable")
    assert not gateway.dispatcher.streams
    (await begin(gateway, "next")).close()
    assert not redis_server.client.exists(gateway.settings.keys.req("cmpl-r"))


async def test_deadline_counts_from_the_arrival_at_the_gateway(gateway: Gateway, scheduler: ScriptedScheduler) -> None:
    generation = await begin(gateway, "r", deadline_ms=600_000, started=time.monotonic() - 500)
    claimed = await asyncio.to_thread(scheduler.claim)
    assert 10_000 < claimed.request.deadline_ms <= 100_000
    generation.close()


async def test_gateway_ends_a_request_past_its_deadline(
    gateway: Gateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = await begin(gateway, "r", deadline_ms=60_000)
    claimed = await asyncio.to_thread(scheduler.claim)
    scheduler.publish(Line(claimed.id, 0, [50]))
    assert [delta.finish_reason for delta in await generation.next()] == [None]
    generation.end_at(time.monotonic())
    assert await reasons(generation) == ["deadline"]
    scheduler.publish(Line(claimed.id, 1, [51], finish=DEADLINE))
    generation.close()
    monkeypatch.setattr(admission, "DEADLINE_GRACE_S", -60.0)  # as if the deadline had passed meanwhile
    late = await begin(gateway, "late", deadline_ms=60_000)
    assert await reasons(late) == ["deadline"]
    late.close()


async def reasons(generation: Generation) -> list[str | None]:
    """Return the finish reason of each delta, to the end."""
    found = []
    async with asyncio.timeout(60):
        while not generation.is_done:
            found += [delta.finish_reason for delta in await generation.next()]
    return found


async def test_full_backlog_is_429_by_class_and_tenant(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "BACKLOG_REQUESTS", 10)
    async with Held(gateway):
        waiting = [asyncio.create_task(begin(gateway, str(n))) for n in range(8)]
        await turns(10)
        with pytest.raises(ApiError) as refused:
            await begin(gateway, "more")
        waiting.append(asyncio.create_task(begin(gateway, "urgent", "realtime")))
        await turns(10)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert int(refused.value.headers["Retry-After"]) >= 1
    for one in await asyncio.gather(*waiting):
        one.close()


async def test_request_past_its_deadline_or_without_its_client_leaves_the_backlog(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "BACKLOG_REQUESTS", 5)
    async with Held(gateway):
        late = [begin(gateway, f"late-{n}", deadline_ms=50) for n in range(4)]
        found = await asyncio.gather(*late, return_exceptions=True)
        assert [isinstance(one, ApiError) and one.code for one in found] == ["deadline_unreachable"] * 4
        gone = [asyncio.create_task(begin(gateway, f"gone-{n}")) for n in range(4)]
        await turns(10)
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        waiting = [asyncio.create_task(begin(gateway, str(n))) for n in range(4)]
        await turns(10)
    for one in await asyncio.gather(*waiting):
        one.close()


async def test_records_of_silent_requests_are_read_together(
    gateway: Gateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [await begin(gateway, str(n)) for n in range(5)]
    keys = gateway.settings.keys
    scheduler.client.config_resetstat()
    for n in range(5):
        scheduler.client.set(keys.out(f"cmpl-{n}", 0), b"\x32\0\0\0")
    scheduler.client.delete(keys.out("cmpl-3", 0))
    scheduler.client.lpush(keys.out("cmpl-3", 0), "of another type")
    monkeypatch.setattr(dispatcher, "SILENT_S", 0.0)
    rows = await asyncio.gather(*(one.next(30) for n, one in enumerate(begun) if n != 3))
    assert [[delta.token_ids for delta in deltas] for deltas in rows] == [[[50]]] * 4
    stats: Any = scheduler.client.info("commandstats")
    assert stats["cmdstat_exec"]["calls"] < 5, "not one for each request"
    for one in begun:
        one.close()


async def test_record_serves_a_request_after_its_stream_was_trimmed(
    gateway: Gateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = await begin(gateway, "r")
    claimed = await asyncio.to_thread(scheduler.claim)
    scheduler.publish(Line(claimed.id, 0, [50]))
    deltas = await generation.next(30)
    scheduler.end(claimed, [[50, 51, 52]], [LENGTH])
    monkeypatch.setattr(dispatcher, "SILENT_S", 0.0)
    async with asyncio.timeout(60):
        while not generation.is_done:
            deltas += await generation.next()
    assert [token for delta in deltas for token in delta.token_ids] == [50, 51, 52]
    assert deltas[-1].finish_reason == "length"
    generation.close()


async def test_record_is_read_behind_an_entry_that_was_skipped(
    gateway: Gateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "SILENT_S", 3600.0)
    generation = await begin(gateway, "r")
    claimed = await asyncio.to_thread(scheduler.claim)
    scheduler.end(claimed, [[50]], [LENGTH])
    scheduler.client.xadd(gateway.settings.keys.tokens(claimed.request.gateway), {"b": b"\xff\xff\xff"})
    (delta,) = await generation.next(30)
    assert (delta.token_ids, delta.finish_reason) == ([50], "length")
    generation.close()

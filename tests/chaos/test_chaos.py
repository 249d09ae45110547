"""The beginning of `make test-faults`: each kind of fault once, in any order, under load; nothing lost, nothing twice.

Its parts, too: the proxy, what is seen of a stack at rest, and that what dies is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from shared.keys import GROUP
from shared.settings import DEMO_MODEL
from tests.chaos.harness.checker import check_rest
from tests.chaos.harness.faults import KINDS
from tests.chaos.harness.proxy import Proxy
from tests.chaos.harness.rest import SEQUENCES, observe, unfinished
from tests.chaos.harness.run import SEED, Result, Scenario, chaos
from tests.chaos.harness.stack import REDIS, SHARD, ChaosStack, until
from tests.support.waiting import free_port

FAULTS = len(KINDS)
"""They come in turn, so each comes once."""
GAP_S = 1.0
"""Between two faults. Recovery from one lasts longer: then two are under way."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    scenario = Scenario(DEMO_MODEL, SEED, seconds=60.0 * FAULTS, faults=FAULTS, gap_s=GAP_S, clients=8)
    directory = tmp_path_factory.mktemp("chaos")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(chaos(directory, scenario, print))


@pytest.mark.timeout(1080)
def test_nothing_is_lost_or_repeated_and_the_stack_settles(result: Result) -> None:
    assert result.violations == []


def test_every_fault_came_and_clients_felt_it(result: Result) -> None:
    figures = result.figures()
    assert sum(figures["faults"].values()) == FAULTS
    assert figures["faults"].keys() == set(KINDS)
    assert figures["finished"] > FAULTS
    assert figures["reconnects"] > 0
    assert all(figures["clients"].values()), "a plan was never drawn"


# What the harness itself sees and does


@pytest.fixture
async def redis_alone(tmp_path: Path) -> AsyncIterator[ChaosStack]:
    """The Redis of a stack and nothing else, with stats of a scheduler at rest."""
    stack = ChaosStack(tmp_path, DEMO_MODEL)
    await stack.processes[REDIS].start()
    try:
        await until("Redis answers", stack.redis_answers, 60)
        await stack.redis.hset(stack.keys.stats(SHARD), mapping=dict.fromkeys((*SEQUENCES, "blocks_cached"), "0"))
        await stack.redis.hset(stack.keys.stats(SHARD), mapping={"blocks_free": "8", "blocks_total": "8"})
        await stack.redis.expire(stack.keys.stats(SHARD), 60)
        for stream in stack.keys.request_streams():
            await stack.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        yield stack
    finally:
        await stack.__aexit__()


async def _lose_an_ack(stack: ChaosStack) -> None:
    stream = stack.keys.requests("low")
    entry = await stack.redis.xadd(stream, {"r": b""})
    await stack.redis.xreadgroup(GROUP, SHARD, {stream: ">"})
    await stack.redis.xdel(stream, entry)


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (_lose_an_ack, "pending low"),
        (lambda stack: stack.redis.xadd(stack.keys.requests("high"), {"r": b""}), "entries high"),
        (lambda stack: stack.redis.set(stack.keys.out("a", 0), b""), "orcinus:{demo-model}:out:a:0"),
        (lambda stack: stack.redis.hset(stack.keys.stats(SHARD), "blocks_free", "7"), "blocks"),
        (lambda stack: stack.redis.hset(stack.keys.queue, "tokens", -3), "queue tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_left_in_a_real_redis_is_seen(
    redis_alone: ChaosStack, plant: Callable[[ChaosStack], Awaitable[object]], where: str
) -> None:
    before = await observe(redis_alone)
    assert check_rest(before, before) == []
    await plant(redis_alone)
    assert [found.where for found in check_rest(before, await observe(redis_alone))] == [where]


async def test_killed_process_is_restarted_and_redis_keeps_its_data(redis_alone: ChaosStack) -> None:
    redis = redis_alone.processes[REDIS]
    await redis_alone.redis.hset(redis_alone.keys.req("a"), mapping={"state": "running", "gateway": "g"})
    before = redis.pid

    async def written() -> bool:
        """Behind a slow fsync Redis answers before it has given the log to the system."""
        return (await redis_alone.redis.info("persistence"))["aof_buffer_length"] == 0

    await until("the log has it", written, 60)
    redis.signal(signal.SIGKILL)

    async def again() -> bool:
        return redis.pid not in (0, before) and await redis_alone.redis_answers()

    await until("Redis is back", again, 60)
    assert redis.exits == [-signal.SIGKILL]
    assert await unfinished(redis_alone) == [("a", "g")]


@pytest.fixture
async def echo() -> AsyncIterator[Proxy]:
    """A proxy in front of a server that says everything again."""

    async def say_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    port, target = free_port(), free_port()
    server = await asyncio.start_server(say_again, "127.0.0.1", target)
    proxy = await Proxy(port, target).start()
    try:
        yield proxy
    finally:
        await proxy.stop()
        server.close()


async def said_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    async with asyncio.timeout(60):
        return await reader.readexactly(len(data))


async def test_slow_or_bytewise_proxy_loses_nothing(echo: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    data = random.Random(1).randbytes(300_000)
    assert await said_again(reader, writer, data) == data
    echo.latency_s, echo.byte_by_byte = 0.01, True
    assert await said_again(reader, writer, data) == data
    writer.close()


async def test_proxy_that_is_cut_resets_and_takes_the_next_one(echo: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    assert await said_again(reader, writer, b"before") == b"before"
    echo.cut()
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    assert await said_again(reader, writer, b"after") == b"after"
    writer.close()


async def test_half_open_connection_is_silent_and_dead_when_proxy_heals(echo: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    assert await said_again(reader, writer, b"before") == b"before"
    echo.go_silent()
    writer.write(b"into the void")
    late, late_writer = await asyncio.open_connection("127.0.0.1", echo.port)
    late_writer.write(b"nor this")
    echo.heal()
    async with asyncio.timeout(60):
        for one in (reader, late):
            with contextlib.suppress(ConnectionResetError):
                assert await one.read() == b""

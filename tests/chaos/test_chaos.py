"""The beginning of `make test-faults`: each kind of fault once, in any order, under load; nothing lost, nothing twice.

Its parts, too: what is seen of a stack at rest, and that what dies is started again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from shared.keys import GROUP
from shared.settings import DEMO_MODEL
from tests.chaos.harness.checker import check_rest
from tests.chaos.harness.faults import KINDS
from tests.chaos.harness.rest import SEQUENCES, observe, unfinished
from tests.chaos.harness.run import SEED, Result, Scenario, chaos
from tests.chaos.harness.target.stack import REDIS, SHARD, ChaosStack, until

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
    assert figures["accepted_drafts"] > 0
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

"""The placer over a real Redis: what it writes, what it takes over, and that two of them never write at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.placer.service import Placer
from shared.keys import PLACER, PLACER_KEYS, Keys
from shared.placement import Placement, read_placements
from shared.settings import PlacerSettings
from shared.tasks import end
from tests.support.stack import RedisServer
from tests.support.waiting import wait_until

NAMES = ("a", "org/B")


@pytest.fixture
def client(redis_server: RedisServer) -> Any:
    redis_server.client.flushall()
    return redis_server.client


@asynccontextmanager
async def placing(redis_server: RedisServer, names: Sequence[str] = NAMES) -> AsyncIterator[asyncio.Task[int]]:
    settings = PlacerSettings(redis_url=redis_server.url, models=Path("none"))
    task = asyncio.create_task(Placer(settings, names, 1).run())
    try:
        yield task
    finally:
        await end(task)


def placements(client: Any) -> dict[str, Placement]:
    key = PLACER_KEYS.placements
    return read_placements(client.hgetall(key)) if client.type(key) == b"hash" else {}


def awake(client: Any, *names: str) -> Callable[[], bool]:
    return lambda: tuple(name for name, each in sorted(placements(client).items()) if each.awake) == names


def serve(client: Any, name: str, workers: int) -> None:
    keys = Keys(name)
    client.set(keys.lease("shard-0"), "1")
    client.hset(keys.stats("shard-0"), mapping={"workers": workers, "parked": 0, "waiting": 0, "running": 0})


async def test_first_model_is_awake_until_another_has_a_request(redis_server: RedisServer, client: Any) -> None:
    client.set(PLACER_KEYS.placements, "of another type")
    async with placing(redis_server):
        await wait_until(awake(client, "a"))
        serve(client, "a", 1)
        await wait_until(lambda: placements(client)["a"].load_ms > 0)
        assert placements(client)["org/B"].wake_ms[0] > 0
        client.xadd(Keys("org/B").requests("low"), {"r": "x"})
        await wait_until(awake(client, "org/B"))  # the other one is idle
        serve(client, "a", 0)
        client.set(PLACER_KEYS.placements, "of another type")
        await wait_until(awake(client, "org/B"))


@pytest.mark.parametrize(
    ("suspects", "requests", "woken"),
    [(0, 0, "c"), (0, 1, "org/B"), (1, 0, "org/B")],
    ids=["without a gateway", "others wait", "their worker died"],
)
async def test_requests_without_a_gateway_wake_no_model(
    redis_server: RedisServer, client: Any, suspects: int, requests: int, woken: str
) -> None:
    serve(client, "a", 1)
    for name in ("org/B", "c"):  # the first one has waited longer
        serve(client, name, 0)
        client.xadd(Keys(name).requests("low"), {"r": "x"}, id="5-1" if name == "org/B" else "*")
    client.hset(Keys("org/B").stats("shard-0"), mapping={"parked": 2, "suspects": suspects})
    client.hset(Keys("org/B").queue, "requests", requests)
    client.hset(PLACER_KEYS.placements, "org/B", Placement(False, since_ms=6).encode())
    async with placing(redis_server, (*NAMES, "c")):
        await wait_until(awake(client, "a"))
        await wait_until(awake(client, woken))


async def test_next_placer_goes_on_where_one_was_killed(redis_server: RedisServer, client: Any) -> None:
    client.hset(PLACER_KEYS.placements, "org/B", Placement(True, 700, 5).encode())
    client.hset(PLACER_KEYS.placements, "gone", Placement(True, 700, 5).encode())
    client.hset(PLACER_KEYS.placements, "a", b"no record")
    async with placing(redis_server):
        await wait_until(lambda: b"gone" not in client.hgetall(PLACER_KEYS.placements))
        assert awake(client, "org/B")()
        found = placements(client)["org/B"]
        assert (found.load_ms, found.since_ms) == (700, 5)


async def test_placer_that_lost_its_lease_writes_nothing_and_ends(redis_server: RedisServer, client: Any) -> None:
    async with placing(redis_server) as task:
        await wait_until(awake(client, "a"))
        client.set(PLACER_KEYS.shard_epoch(PLACER), "7")
        client.set(PLACER_KEYS.lease(PLACER), "7", px=60_000)
        client.delete(PLACER_KEYS.placements)
        assert await asyncio.wait_for(task, 30) == 1
        assert not client.exists(PLACER_KEYS.placements)
        assert client.get(PLACER_KEYS.lease(PLACER)) == b"7"

"""The placer over a real Redis: what it writes, what it takes over, and that two of them never write at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.placer import decide, service
from services.placer.service import Placer
from shared.errors import ConfigurationError
from shared.keys import PLACER, PLACER_KEYS, Keys
from shared.placement import MOST_MS, Placement, read_placements
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


def live(client: Any) -> None:
    """Leave in Redis what a placer for NAMES does that lives."""
    client.hset(PLACER_KEYS.placements, mapping={name: Placement(name == "a").encode() for name in NAMES})
    client.set(PLACER_KEYS.lease(PLACER), "7:living")


def hash_reads(client: Any) -> int:
    """Return how often a whole hash was read: by a placer when it begins and, while it stands by, at each look."""
    return int(client.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"])


def serve(client: Any, name: str, workers: int) -> None:
    keys = Keys(name)
    client.set(keys.lease("shard-0"), "1")
    client.hset(keys.stats("shard-0"), mapping={"workers": workers, "parked": 0, "waiting": 0, "running": 0})


async def test_first_model_is_awake_until_another_has_a_request(redis_server: RedisServer, client: Any) -> None:
    client.set(PLACER_KEYS.placements, "of another type")
    async with placing(redis_server):
        await wait_until(awake(client, "a"))
        await wait_until(lambda: placements(client)["a"].wake_ms[0] > 0)  # it was seen without a worker
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


@pytest.mark.parametrize(("load_ms", "most_ms"), [(100, 400), (0, MOST_MS)], ids=["measured before", "never measured"])
async def test_load_is_measured_from_the_wake_to_another_worker(
    redis_server: RedisServer, client: Any, load_ms: int, most_ms: int
) -> None:
    serve(client, "org/B", 1)  # that of its last turn, which has not ended yet
    client.hset(PLACER_KEYS.placements, "a", Placement(True, since_ms=5).encode())
    client.hset(PLACER_KEYS.placements, "org/B", Placement(False, load_ms, since_ms=5).encode())
    serve(client, "a", 1)
    client.xadd(Keys("org/B").requests("low"), {"r": "x"})
    async with placing(redis_server):
        await wait_until(awake(client, "org/B"))
        await wait_until(lambda: placements(client)["org/B"].wake_ms[0] == 0)  # it serves, as far as one can see
        assert placements(client)["org/B"].load_ms == load_ms
        serve(client, "org/B", 0)
        await wait_until(lambda: placements(client)["org/B"].wake_ms[0] > 0)
        serve(client, "org/B", 1)
        await wait_until(lambda: placements(client)["org/B"].wake_ms[0] == 0)
        assert 250 < placements(client)["org/B"].load_ms <= most_ms


async def test_load_that_failed_is_counted_until_one_succeeds(redis_server: RedisServer, client: Any) -> None:
    client.hset(PLACER_KEYS.placements, "a", Placement(True, since_ms=5, failed=2).encode())
    async with placing(redis_server):
        await wait_until(lambda: placements(client)["a"].wake_ms[0] > 0)
        assert placements(client)["a"].failed == 2
        serve(client, "a", 1)
        await wait_until(lambda: placements(client)["a"].failed == 0)


async def test_model_that_is_given_up_has_failed(
    redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "UNKNOWN_GIVE_UP_MS", 1)
    client.xadd(Keys("org/B").requests("low"), {"r": "x"})
    async with placing(redis_server):
        await wait_until(awake(client, "org/B"))
        assert [placements(client)[name].failed for name in NAMES] == [1, 0]


async def test_placer_outlives_a_refused_look_at_the_clock(
    redis_server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with placing(redis_server) as task:
        await wait_until(awake(client, "a"))
        client.acl_setuser("default", enabled=True, nopass=True, categories=["+@all"], commands=["-time"], keys=["*"])
        try:
            await wait_until(lambda: task.done() or "models not looked at" in caplog.text)
        finally:
            client.acl_setuser("default", enabled=True, nopass=True, commands=["+time"])
        assert not task.done()
        client.xadd(Keys("org/B").requests("low"), {"r": "x"})
        serve(client, "a", 1)
        await wait_until(awake(client, "org/B"))


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


async def test_placer_for_other_models_is_refused_while_the_first_lives(
    redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LEASE_MS", 500)
    live(client)
    async with placing(redis_server, ("a", "other")) as second:
        with pytest.raises(ConfigurationError, match=r"^Redis at .*: has a placer for other models, a, org/B;"):
            await asyncio.wait_for(second, 30)
    assert placements(client).keys() == set(NAMES)


async def test_placer_for_other_models_follows_one_that_died(redis_server: RedisServer, client: Any) -> None:
    client.hset(PLACER_KEYS.placements, "gone", Placement(True, 700, 5).encode())
    client.set(PLACER_KEYS.lease(PLACER), "7:dead", px=service.LEASE_MS)
    async with placing(redis_server):
        await wait_until(lambda: placements(client).keys() == set(NAMES))


async def test_placer_for_the_same_models_stands_by(
    redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LEASE_MS", 500)
    live(client)
    looks = hash_reads(client)
    async with placing(redis_server, NAMES[::-1]) as second:
        await wait_until(lambda: second.done() or hash_reads(client) > looks + 1)
        assert not second.done()

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
from shared.placement import MAX_MS, Placement, read_placements
from shared.redis_client import connect
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
    client.set(PLACER_KEYS.lease(PLACER), "7:5eed", px=60_000)
    client.set(PLACER_KEYS.shard_epoch(PLACER), "7:5eed 60000", px=60_000)


def hash_reads(client: Any) -> int:
    """Return how often a whole hash was read: by a placer when it begins and, while it stands by, at each look."""
    return int(client.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"])


def clock_reads(client: Any) -> int:
    """Return how often Redis's clock was read: by a placer at each look."""
    return int(client.info("commandstats").get("cmdstat_time", {"calls": 0})["calls"])


def serve(client: Any, name: str, workers: int) -> None:
    keys = Keys(name)
    client.set(keys.lease("shard-0"), "1", px=60_000)
    client.hset(keys.stats("shard-0"), mapping={"workers": workers, "parked": 0, "waiting": 0, "running": 0})


FUTURE = 10**15
"""A time of Redis's clock, ms, in 30,000 years."""


@pytest.mark.parametrize("spoil", ["lease", "placements"])
async def test_key_of_another_type_ends_no_standby(
    redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """The key gets its type after the placer has begun to wait, and before it begins to place."""
    monkeypatch.setattr(service, "LEASE_MS", 500)
    live(client)
    looks = hash_reads(client)
    async with placing(redis_server):
        await wait_until(lambda: hash_reads(client) > looks)
        keys = {"lease": PLACER_KEYS.lease(PLACER), "placements": PLACER_KEYS.placements}
        client.delete(keys[spoil])
        client.rpush(keys[spoil], "of another type")
        if spoil != "lease":
            client.delete(keys["lease"])
        await wait_until(lambda: client.type(keys["lease"]) == b"string")
        await wait_until(awake(client, "a"))


async def test_model_wakes_for_requests_with_ids_of_the_future(redis_server: RedisServer, client: Any) -> None:
    """Redis gives such an id to each request that comes behind a foreign entry."""
    serve(client, "a", 1)
    client.hset(PLACER_KEYS.placements, "a", Placement(True, 300).encode())
    client.hset(PLACER_KEYS.placements, "org/B", Placement(False, 300).encode())
    client.xadd(Keys("a").requests("low"), {"r": "x"})  # always work
    client.xadd(Keys("org/B").requests("low"), {"r": "x"}, id=f"{FUTURE}-1")
    async with placing(redis_server):
        await wait_until(awake(client, "org/B"))


async def test_clock_of_redis_that_is_set_back_keeps_no_model_awake(
    redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes back by an hour once the placer has seen what waits and what serves."""
    offset_s = 3600

    def connected(*arguments: Any, **options: Any) -> Any:
        made: Any = connect(*arguments, **options)
        made.set_response_callback("TIME", lambda reply, **_: (int(reply[0]) + offset_s, int(reply[1])))
        return made

    monkeypatch.setattr(service, "connect", connected)
    serve(client, "a", 1)
    now_ms = int(client.time()[0] + offset_s) * 1000
    client.hset(PLACER_KEYS.placements, "a", Placement(True, 300, now_ms).encode())
    client.hset(PLACER_KEYS.placements, "org/B", Placement(False, 300, now_ms).encode())
    client.xadd(Keys("a").requests("low"), {"r": "x"}, id=f"{now_ms}-1")
    async with placing(redis_server):
        await wait_until(lambda: any(each.wake_ms[0] for each in placements(client).values()))
        client.xadd(Keys("org/B").requests("low"), {"r": "x"}, id=f"{now_ms}-1")
        offset_s = 0
        await wait_until(awake(client, "org/B"))


async def test_foreign_fields_of_the_placements_are_deleted(redis_server: RedisServer, client: Any) -> None:
    foreign: list[tuple[bytes, bytes]] = [
        (b"\xff", b"x"), (b"a", b"\xff"), (b"org/B", b"[" * 5000), (b"c", Placement(True).encode()), (b"", b"NaN"),
        (b"d", Placement(True, since_ms=FUTURE).encode().replace(b"[0,", b"[1e999,")),
    ]  # fmt: skip
    for name, value in foreign:
        client.hset(PLACER_KEYS.placements, name, value)
    async with placing(redis_server):
        await wait_until(lambda: set(client.hkeys(PLACER_KEYS.placements)) == {b"a", b"org/B"})
        await wait_until(awake(client, "a"))


@pytest.mark.parametrize("kind", ["string", "list", "hash", "zset"])
async def test_foreign_keys_of_models_end_no_placer(redis_server: RedisServer, client: Any, kind: str) -> None:
    """The last model goes on as if the other one's keys were not there."""
    keys = Keys("a")
    found = [keys.lease("shard-0"), keys.stats("shard-0"), keys.queue, *keys.request_streams()]
    write: dict[str, Callable[[str], Any]] = {
        "string": lambda key: client.set(key, b"\xff"), "list": lambda key: client.rpush(key, b"\xff"),
        "hash": lambda key: client.hset(key, mapping={"workers": b"\xff", "requests": "9" * 40, "parked": "NaN"}),
        "zset": lambda key: client.zadd(key, {b"\xff": float("inf")}),
    }  # fmt: skip
    for key in found:
        write[kind](key)
    async with placing(redis_server) as task:
        await wait_until(lambda: bool(placements(client)) and placements(client)["a"].wake_ms[0] > 0)
        assert not task.done()


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


@pytest.mark.parametrize(("load_ms", "most_ms"), [(100, 400), (0, MAX_MS)], ids=["measured before", "never measured"])
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


async def test_turn_begins_when_what_ran_before_is_computed_again(redis_server: RedisServer, client: Any) -> None:
    client.hset(PLACER_KEYS.placements, "a", Placement(True, 1).encode())
    client.hset(PLACER_KEYS.placements, "org/B", Placement(False, 1, since_ms=5).encode())
    serve(client, "a", 1)
    client.hset(Keys("a").stats("shard-0"), mapping={"resuming": 1, "running": 1})
    for name in NAMES:
        client.xadd(Keys(name).requests("realtime"), {"r": "x"}, id="5-1")
    async with placing(redis_server):
        await wait_until(lambda: bool(placements(client)["org/B"].wake_ms[0]))
        looks = clock_reads(client)
        await wait_until(lambda: clock_reads(client) > looks + 3)  # each a turn or more after the one before
        assert awake(client, "a")()
        client.hset(Keys("a").stats("shard-0"), "resuming", 0)
        await wait_until(awake(client, "org/B"))


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

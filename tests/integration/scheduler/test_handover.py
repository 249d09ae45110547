"""Requests between shards, on a real Redis: what an orphan left behind, moves that are repeated or come too late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from protos import queue_pb2
from services.scheduler.requests.claims import Claims, Holdings
from services.scheduler.requests.handover import RequestHandover
from services.scheduler.requests.intake import Claimed, Clock, Intake
from services.scheduler.shard.lease import Lease
from services.scheduler.shard.shards import Shards
from shared.columns import pack
from shared.errors import LeaseLostError
from shared.keys import GROUP, Keys
from shared.redis_client import Scripts, connect
from shared.settings import SchedulerSettings
from tests.support.scripted_scheduler import Line, ScriptedScheduler
from tests.support.stack import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


class Taker:
    """shard-1 without a core: its lease, and what it does with other shards."""

    def __init__(self, url: str) -> None:
        self.settings = SchedulerSettings(redis_url=url, shard="shard-1", lease_ms=60_000)
        self.keys: Keys = self.settings.keys
        self.redis = connect(self.settings)
        self.scripts = Scripts(self.redis)
        self.lease = self.lease_of("shard-1")
        self.intake = Intake(self.redis, self.redis, self.scripts, self.keys, "shard-1", self.lease, Clock())
        nobody: Any = None
        self.handover = RequestHandover(
            self.scripts, self.keys, "shard-1", self.lease, nobody, nobody, {}, lambda _: None
        )

    def lease_of(self, shard: str) -> Lease:
        return Lease(self.scripts, self.keys, shard, self.settings.lease_ms)

    async def enqueue(self, name: str, entry: str = "*") -> None:
        request = queue_pb2.Request(
            id=name, tenant="t", gateway="g", prompts=queue_pb2.Prompts(tokens=[pack([5, 6])]), n=1, max_tokens=20
        )
        await self.redis.xadd(self.keys.requests("normal"), {"r": request.SerializeToString()}, id=entry)
        ((added, _),) = await self.redis.xrevrange(self.keys.requests("normal"), count=1)
        record = {"state": "queued", "tenant": "t", "gateway": "g", "class": "normal", "tokens": 2, "enqueued_ms": 1}
        await self.redis.hset(self.keys.req(name), mapping={**record, "entry": added})

    async def found(self) -> list[Claimed]:
        """What a rebuild takes up."""
        claimed: list[Claimed] = []
        await self.intake.pending([], claimed.extend)
        return claimed


@contextlib.asynccontextmanager
async def taking(server: RedisServer) -> Any:
    server.client.flushall()
    taker = Taker(server.url)
    await taker.intake.prepare()
    assert await taker.lease.take()
    yield taker
    await taker.redis.aclose()


def scripted(server: RedisServer, taker: Taker) -> ScriptedScheduler:
    return ScriptedScheduler(server.client, taker.keys, "shard-0").lead()


async def test_an_orphans_requests_go_on_with_their_tokens_and_what_its_control_stream_said(
    server: RedisServer,
) -> None:
    async with taking(server) as taker:
        for name in ("runs", "stopped", "waits"):
            await taker.enqueue(name)
        orphan = scripted(server, taker)
        for _ in range(3):
            orphan.claim()
        for name in ("runs", "stopped"):
            orphan.publish(Line(name, 0, [50, 51]), started=[name], checkpoints=[(name, 0, 0, [50, 51])])
        orphan.publish(Line("runs", 2, [52]))  # only the gateway's stream has it
        control = [taker.keys.prefix]
        await taker.scripts.control([taker.keys.req("stopped")], [*control, "stop", b"", "g", "", 0, 1])
        await taker.scripts.control([taker.keys.req("runs")], [*control, "cancel", b"", "g", ""])
        orphan.resign()

        await taker.handover.take_from("shard-0", taker.lease_of("shard-0"), taker.intake)
        assert not await taker.redis.exists(taker.keys.lease("shard-0"))
        found = {item.request.id: item for item in await taker.found()}
        assert sorted(found) == ["runs", "stopped"]
        assert found["runs"].request.outputs[0].tolist() == [50, 51, 52]
        assert found["runs"].cancelled
        assert found["stopped"].stops == {0: 1}
        assert await taker.redis.hmget(taker.keys.req("runs"), "shard", "epoch") == [
            b"shard-1", str(taker.lease.epoch).encode(),
        ]  # fmt: skip
        assert [item.request.id for item in await taker.intake.read([4, 4, 4, 4])] == ["waits"]


async def test_a_shard_that_is_led_again_keeps_what_it_has(server: RedisServer) -> None:
    async with taking(server) as taker:
        await taker.enqueue("r")
        scripted(server, taker).claim()  # it has not resigned
        await taker.handover.take_from("shard-0", taker.lease_of("shard-0"), taker.intake)
        assert await taker.redis.hget(taker.keys.req("r"), "shard") == b"shard-0"
        assert await taker.found() == []


async def test_whoever_led_an_orphan_before_writes_nothing_any_more(server: RedisServer) -> None:
    async with taking(server) as taker:
        await taker.enqueue("r")
        paused = taker.lease_of("shard-0")
        assert await paused.take()
        await taker.redis.delete(paused.key)  # it was paused for longer than its lease
        await paused.write(["SET", taker.keys.dead, "nobody had the shard meanwhile"])
        await taker.redis.delete(paused.key)
        await taker.handover.take_from("shard-0", taker.lease_of("shard-0"), taker.intake)
        with pytest.raises(LeaseLostError):
            await paused.write(["SET", taker.keys.dead, "too late"])


async def test_leases_of_several_shards_outlive_a_redis_that_was_away(server: RedisServer) -> None:
    async with taking(server) as taker:
        leases = [taker.lease, taker.lease_of("shard-2")]
        assert await leases[1].take()
        for lease in leases:
            await taker.redis.delete(lease.key)
        for lease in leases:  # also of the shard whose epoch is not the highest
            await lease.write(["SET", taker.keys.dead, "told"])


async def test_a_move_that_is_repeated_takes_nothing_back(server: RedisServer) -> None:
    async with taking(server) as taker:
        await taker.enqueue("r")
        giver = scripted(server, taker)
        claimed = giver.claim()
        giver.publish(Line("r", 0, [50]), started=["r"])
        row = [taker.keys.req("r"), claimed.stream, claimed.entry]

        async def give(taken_by: str) -> int:
            args = [giver.epoch, GROUP, "shard-0", taken_by, *row]
            return int(await taker.scripts.give([taker.keys.lease("shard-0")], args))

        assert await give("shard-1") == 1
        assert await give("shard-2") == 0
        assert [item.request.id for item in await taker.found()] == ["r"]
        released = [giver.epoch, GROUP, *row, b"payload"]
        assert await taker.scripts.release([taker.keys.lease("shard-0")], released) == 0


async def test_others_are_those_with_a_worker_and_orphans_those_left_for_three_leases(server: RedisServer) -> None:
    async with taking(server) as taker:
        shards = Shards(taker.redis, taker.keys, "shard-1", 1000)
        await shards.look(0.0)
        assert (shards.others, shards.orphans, shards.pending) == ([], [], 0)
        for name in ("a", "b"):
            await taker.enqueue(name)
        other = scripted(server, taker)
        other.claim()
        await taker.redis.zadd(taker.keys.workers, {"worker-0": 1})
        await taker.redis.hset(taker.keys.worker("worker-0"), "shard", "shard-0")
        await shards.look(1.0)
        assert (shards.others, shards.orphans) == (["shard-0"], [])
        other.stats(draining=1)
        await shards.look(2.0)
        assert shards.others == []
        other.resign()
        for now_s, orphans in ((3.0, []), (5.9, []), (6.1, ["shard-0"])):
            await shards.look(now_s)
            assert shards.orphans == orphans
        other.lead(draining=0)
        await shards.look(7.0)
        assert (shards.others, shards.orphans) == (["shard-0"], [])


async def test_the_age_of_what_nobody_claimed_is_that_of_the_first_behind_the_claimed(server: RedisServer) -> None:
    async with taking(server) as taker:
        shards = Shards(taker.redis, taker.keys, "shard-1", 1000)
        for name, entry in (("a", "1000-0"), ("b", "2000-0"), ("c", "2000-1")):
            await taker.enqueue(name, entry)
        other = scripted(server, taker)
        for added_ms in (1000, 2000, 2000, None):
            before = await taker.redis.time()
            await shards.look(0.0)
            after = await taker.redis.time()
            realtime, high, normal, low = shards.unclaimed_ms
            assert realtime == high == low == 0
            if added_ms is None:
                assert normal == 0
            else:
                assert 1000 * before[0] <= normal + added_ms <= 1000 * (after[0] + 1)
                other.claim()


async def test_a_shard_that_drains_passes_on_what_it_is_given_meanwhile(server: RedisServer) -> None:
    async with taking(server) as taker:
        held, given = Holdings(), []

        class Passing:
            async def hand_back(self) -> int:
                return 0

            async def give(self, shards: list[str]) -> None:
                for name in list(held.entries):
                    entry = held.entries[name]
                    given.append(name)
                    await taker.handover.move(taker.lease, "shard-1", shards[0], [entry])
                    held.drop(name)

        def take(claimed: list[Claimed]) -> None:
            for item in claimed:
                held.add(item.request.id, item.entry)

        some: Any = SimpleNamespace(others=["shard-2"], claim_begins=lambda: None, claim_answered=lambda: None)
        passing: Any = Passing()
        claims = Claims(taker.intake, held, some, passing, some, take, lambda: False, taker.lease_of)
        await taker.enqueue("r")
        giver = scripted(server, taker)
        claimed = giver.claim()
        row = [taker.keys.req("r"), claimed.stream, claimed.entry]
        await taker.scripts.give([taker.keys.lease("shard-0")], [giver.epoch, GROUP, "shard-0", "shard-1", *row])
        claims.drain()
        await claims.run()
        assert given == ["r"]
        assert await taker.redis.hget(taker.keys.req("r"), "shard") == b"shard-2"

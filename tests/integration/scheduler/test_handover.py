"""Leases, and requests between shards, on a real Redis: what an orphan left behind, moves that are repeated or late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protos import queue_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits, NewRequest, StepResult
from services.scheduler.requests.claims import Claims, Holdings
from services.scheduler.requests.handover import STRANDED_S, RequestHandover
from services.scheduler.requests.intake import Claimed, Clock, Entry, Intake
from services.scheduler.requests.publisher import Publisher
from services.scheduler.shards import Shards
from shared.errors import LeaseLostError
from shared.keys import GROUP, Keys
from shared.lease import Lease
from shared.redis_client import Scripts, connect
from shared.settings import SchedulerSettings
from shared.tasks import end
from shared.wire.columns import pack
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import Line, ScriptedScheduler


def tokens_of(request: NewRequest) -> list[int]:
    """Return what the first choice of a request had before."""
    assert request.outputs is not None
    tokens: list[int] = request.outputs[0].tolist()
    return tokens


class Taker:
    """shard-1 without a core: its lease, and what it does with other shards."""

    def __init__(self, url: str) -> None:
        self.settings = SchedulerSettings(redis_url=url, shard="shard-1", lease_ms=60_000)
        self.keys: Keys = self.settings.keys
        self.redis: Any = connect(self.settings, socket_timeout_s=60.0)
        self.scripts = Scripts(self.redis)
        self.lease = self.lease_of("shard-1")
        self.intake = Intake(self.redis, self.redis, self.scripts, self.keys, "shard-1", self.lease, Clock())
        absent: Any = None
        self.handover = RequestHandover(
            self.scripts, self.keys, "shard-1", self.lease, absent, absent, {}, lambda _: None, absent
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
        """Return what a rebuild takes up."""
        claimed: list[Claimed] = []
        await self.intake.read_pending([], claimed.extend)
        return claimed


@pytest.fixture
async def taker(redis_server: RedisServer) -> AsyncIterator[Taker]:
    redis_server.client.flushall()
    made = Taker(redis_server.url)
    await made.intake.prepare()
    assert await made.lease.take()
    yield made
    await made.redis.aclose()


@pytest.fixture
def shard_0(redis_server: RedisServer, taker: Taker) -> ScriptedScheduler:
    """The scheduler of shard-0, which does not lead yet."""
    return ScriptedScheduler(redis_server.client, taker.keys, "shard-0")


async def test_requests_of_an_orphan_keep_tokens_and_commands(taker: Taker, shard_0: ScriptedScheduler) -> None:
    for name in ("runs", "stopped", "waits"):
        await taker.enqueue(name)
    shard_0.lead()
    for _ in range(3):
        shard_0.claim()
    for name in ("runs", "stopped"):
        shard_0.publish(Line(name, 0, [50, 51]), started=[name], checkpoints=[(name, 0, 0, [50, 51])])
    shard_0.publish(Line("runs", 2, [52]))  # only the gateway's stream has it
    control = [taker.keys.prefix]
    await taker.scripts.control([taker.keys.req("stopped")], [*control, "stop", b"", "g", "", 0, 1])
    await taker.scripts.control([taker.keys.req("runs")], [*control, "cancel", b"", "g", ""])
    shard_0.resign()

    await taker.handover.take_from("shard-0", taker.lease_of("shard-0"), taker.intake)
    assert not await taker.redis.exists(taker.keys.lease("shard-0"))
    found = {item.request.id: item for item in await taker.found()}
    assert sorted(found) == ["runs", "stopped"]
    assert tokens_of(found["runs"].request) == [50, 51, 52]
    assert found["runs"].is_cancelled
    assert found["stopped"].stops == {0: 1}
    assert await taker.redis.hmget(taker.keys.req("runs"), "shard", "epoch") == [
        b"shard-1", str(taker.lease.epoch).encode(),
    ]  # fmt: skip
    assert [item.request.id for item in await taker.intake.read([4, 4, 4, 4])] == ["waits"]


async def test_request_begun_without_a_token_is_taken_up_as_begun(taker: Taker, shard_0: ScriptedScheduler) -> None:
    """Its scheduler died behind the first step. The record says `running`, so it cannot return to the queue."""
    for name in ("began", "waits"):
        await taker.enqueue(name)
    shard_0.lead()
    for _ in range(2):
        shard_0.claim()
    shard_0.publish(started=["began"])
    lease = taker.lease_of("shard-0")
    lease.epoch = int(await taker.redis.get(lease.key) or 0)
    rebuilt = Intake(taker.redis, taker.redis, taker.scripts, taker.keys, "shard-0", lease, Clock())
    found: list[Claimed] = []
    await rebuilt.read_pending([], found.extend)
    assert {item.request.id: item.request.has_begun for item in found} == {"began": True, "waits": False}


async def test_shard_that_is_led_again_keeps_its_requests(taker: Taker, shard_0: ScriptedScheduler) -> None:
    await taker.enqueue("r")
    shard_0.lead().claim()  # it has not resigned
    await taker.handover.take_from("shard-0", taker.lease_of("shard-0"), taker.intake)
    assert await taker.redis.hget(taker.keys.req("r"), "shard") == b"shard-0"
    assert await taker.found() == []


async def test_former_leader_of_an_orphan_writes_nothing(taker: Taker) -> None:
    await taker.enqueue("r")
    paused = taker.lease_of("shard-0")
    assert await paused.take()
    await taker.redis.delete(paused.key)  # it was paused for longer than its lease
    await paused.write(["SET", taker.keys.dead, "no other shard led meanwhile"])
    await taker.redis.delete(paused.key)
    await taker.handover.take_from("shard-0", taker.lease_of("shard-0"), taker.intake)
    with pytest.raises(LeaseLostError):
        await paused.write(["SET", taker.keys.dead, "too late"])


async def test_leases_of_several_shards_survive_an_outage_of_redis(taker: Taker) -> None:
    leases = [taker.lease, taker.lease_of("shard-2")]
    assert await leases[1].take()
    for lease in leases:
        await taker.redis.delete(lease.key)
    for lease in leases:  # also of the shard without the highest epoch
        await lease.write(["SET", taker.keys.dead, "told"])


async def test_repeated_move_takes_nothing_back(taker: Taker, shard_0: ScriptedScheduler) -> None:
    await taker.enqueue("r")
    shard_0.lead()
    claimed = shard_0.claim()
    shard_0.publish(Line("r", 0, [50]), started=["r"])
    row: list[Any] = [taker.keys.req("r"), claimed.stream, claimed.entry]

    async def give(taken_by: str) -> int:
        args = [shard_0.epoch, GROUP, "shard-0", taken_by, *row]
        return int(await taker.scripts.give([taker.keys.lease("shard-0"), taker.keys.queue], args))

    assert await give("shard-1") == 1
    assert await give("shard-2") == 0
    assert [item.request.id for item in await taker.found()] == ["r"]
    released = [shard_0.epoch, GROUP, *row, b"payload"]
    assert await taker.scripts.release([taker.keys.lease("shard-0"), taker.keys.queue], released) == 0


async def test_orphans_are_shards_without_a_leader_for_three_leases(taker: Taker, shard_0: ScriptedScheduler) -> None:
    shards = Shards(taker.redis, taker.keys, "shard-1", 1000)
    await shards.look(0.0)
    assert (shards.other_shards, shards.orphans, shards.pending_requests) == ([], [], 0)
    for name in ("a", "b"):
        await taker.enqueue(name)
    shard_0.lead()
    shard_0.claim()
    await taker.redis.zadd(taker.keys.workers, {"worker-0": 1})
    await taker.redis.hset(taker.keys.worker("worker-0"), "shard", "shard-0")
    await shards.look(1.0)
    assert (shards.other_shards, shards.orphans) == (["shard-0"], [])
    shard_0.stats(draining=1)
    await shards.look(2.0)
    assert shards.other_shards == []
    shard_0.resign()
    for now_s, orphans in ((3.0, []), (5.9, []), (6.1, ["shard-0"])):
        await shards.look(now_s)
        assert shards.orphans == orphans
    shard_0.lead(draining=0)
    await shards.look(7.0)
    assert (shards.other_shards, shards.orphans) == (["shard-0"], [])


async def test_unclaimed_age_is_that_of_the_first_unclaimed_request(taker: Taker, shard_0: ScriptedScheduler) -> None:
    shards = Shards(taker.redis, taker.keys, "shard-1", 1000)
    for name, entry in (("a", "1000-0"), ("b", "2000-0"), ("c", "2000-1")):
        await taker.enqueue(name, entry)
    shard_0.lead()
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
            shard_0.claim()


async def test_draining_shard_passes_on_what_it_is_given(taker: Taker, shard_0: ScriptedScheduler) -> None:
    held, given = Holdings(), []

    class Passing:
        async def hand_back(self) -> int:
            return 0

        async def give(self, shards: dict[str, str]) -> None:
            for name in list(held.entries):
                entry = held.entries[name]
                given.append(name)
                await taker.handover.move(taker.lease, "shard-1", next(iter(shards)), [entry])
                held.drop(name)

        async def settle_stranded(self, shards: dict[str, str], now_s: float) -> None: ...

    def take(claimed: list[Claimed]) -> None:
        for item in claimed:
            held.add(item.request.id, item.entry)

    some: Any = SimpleNamespace(
        other_shards=["shard-2"], identities={"shard-2": ""}, claim_begins=lambda: None, claim_answered=lambda: None
    )  # fmt: skip
    passing: Any = Passing()
    claims = Claims(taker.intake, held, some, passing, some, take, lambda: False, taker.lease_of)
    await taker.enqueue("r")
    shard_0.lead()
    claimed = shard_0.claim()
    row: list[Any] = [taker.keys.req("r"), claimed.stream, claimed.entry]
    await taker.scripts.give(
        [taker.keys.lease("shard-0"), taker.keys.queue], [shard_0.epoch, GROUP, "shard-0", "shard-1", *row]
    )
    claims.drain()
    await claims.run()
    assert given == ["r"]
    assert await taker.redis.hget(taker.keys.req("r"), "shard") == b"shard-2"


async def test_late_write_does_not_take_back_a_released_lease(taker: Taker) -> None:
    await taker.lease.write(["SET", taker.keys.events, "kept"])
    await taker.lease.release()
    with pytest.raises(LeaseLostError):
        await taker.lease.write(["SET", taker.keys.events, "late"])
    assert not await taker.redis.exists(taker.lease.key)
    assert await taker.redis.get(taker.keys.events) == b"kept"


async def test_rebuild_finds_tokens_that_only_a_gateway_stream_has(taker: Taker, shard_0: ScriptedScheduler) -> None:
    """The request went from gateway to gateway meanwhile."""
    shard_0.shard = "shard-1"
    shard_0.lead()
    await taker.enqueue("r")
    shard_0.claim()
    shard_0.publish(Line("r", 0, [50, 51]), gateway="a", started=["r"], checkpoints=[("r", 0, 0, [50, 51])])
    for gateway in "bacacd":  # b was sent what no checkpoint has; the scheduler hears of none behind it
        await taker.scripts.control([taker.keys.req("r")], [taker.keys.prefix, "adopt", b"", gateway, "t"])
        if gateway == "b":
            shard_0.publish(Line("r", 2, [52, 53]), gateway="b")
    shard_0.resign()
    assert await taker.lease.take()
    (found,) = await taker.found()
    assert (found.request.gateway, tokens_of(found.request)) == ("d", [50, 51, 52, 53])
    assert await taker.redis.hget(taker.keys.req("r"), "former") == b" g b a c "


class Giver:
    """shard-1 with a core that has run requests on a replica of some identity; ended: by request, why."""

    def __init__(self, taker: Taker, names: list[str], identity: str) -> None:
        self.core, self.ended = Scheduler(lookahead=0), dict[str, str]()
        self.entries: dict[str, Entry] = {}
        self.publisher = Publisher(
            taker.scripts, taker.keys, taker.lease, self.entries, lambda name: None, self.core.outputs
        )
        self.handover = RequestHandover(
            taker.scripts, taker.keys, "shard-1", taker.lease, self.core, self.publisher, self.entries,
            self._forget, self._end,
        )  # fmt: skip
        self.join(identity)
        for name in names:
            self.core.add(NewRequest(name, [np.arange(1, 6, dtype=np.int32)], 20, gateway="g"), 1)

    def join(self, identity: str) -> int:
        return self.core.join(Limits(8, 64, 4, 64, 64, identity=identity))

    def step(self) -> None:
        step, outcome = self.core.plan(2, 0)
        self.publisher.put(outcome)
        assert step is not None
        slots = step.chunk_slots[step.samples]
        self.publisher.put(self.core.apply(StepResult(step.id, 0, slots, slots * 0 + 7, step_ns=1000), 3), 1)

    def _forget(self, name: str) -> None:
        self.entries.pop(name, None)

    def _end(self, name: str, finish: Finish, text: str) -> None:
        assert finish is Finish.ERROR
        self.ended[name] = text


async def test_request_with_tokens_is_given_to_equal_numerics_alone(taker: Taker, shard_0: ScriptedScheduler) -> None:
    """A scheduler that takes over reads the numerics in the record of the request."""
    shard_0.shard = "shard-1"
    names = ["a", "b"]
    for name in names:
        await taker.enqueue(name)
    giver = Giver(taker, names, "h float32 int8")
    for item in await taker.intake.read([4, 4, 4, 4]) + await taker.intake.read([4, 4, 4, 4]):
        giver.entries[item.request.id] = item.entry
    writing = asyncio.create_task(giver.publisher.run(lambda: None))
    giver.step()
    await giver.publisher.caught_up()
    assert await taker.redis.hget(taker.keys.req("a"), "numerics") == b"h float32 int8"
    found = {item.request.id: item.request for item in await taker.found()}
    assert found["b"].identity == "h float32 int8" and tokens_of(found["b"]) == [7]

    giver.core.lose(0, 4)
    await giver.handover.settle_stranded({}, 4.0)
    assert not giver.core.stranded_requests(), "without any worker all wait"
    for equal in ("h float32 int8", ""):
        await giver.handover.settle_stranded({"shard-2": "h float32 none", "shard-3": equal}, 4.0)
        assert not giver.core.stranded_requests() and len(giver.entries) == 2, (
            "the lost worker may be back before GIVE_S"
        )
    await giver.handover.settle_stranded({"shard-2": "h float32 none"}, 5.0)
    assert await giver.handover.give({"shard-2": "h float32 none"}) == 0
    assert giver.core.stranded_requests() == dict.fromkeys(names, "h float32 int8"), "without a replica here, too"
    giver.join("h float32 none")
    assert giver.core.stranded_requests() == dict.fromkeys(names, "h float32 int8")
    await giver.handover.settle_stranded({"shard-2": "h float32 none"}, 6.0)
    assert not giver.ended and giver.entries.keys() == set(names)
    assert await giver.handover.give({"shard-2": "h float32 none", "shard-3": "h float32 int8"}, ["a"]) == 1
    assert await taker.redis.hget(taker.keys.req("a"), "shard") == b"shard-3"
    giver.core.lose(0, 7)
    await giver.handover.settle_stranded({}, 7.0)
    giver.join("h float32 none")
    await giver.handover.settle_stranded({}, 5.0 + STRANDED_S)
    assert giver.ended.keys() == {"b"} and "'h float32 int8', of which none came within 60 s" in giver.ended["b"]
    await end(writing)


async def test_shards_tell_their_numerics(taker: Taker, shard_0: ScriptedScheduler) -> None:
    shard_0.lead(numerics="h float32 int8")
    shards = Shards(taker.redis, taker.keys, "shard-1", 1000)
    await taker.redis.hset(taker.keys.shards, "shard-0", "1")
    await shards.look(0.0)
    assert shards.identities == {"shard-0": "h float32 int8"}

"""Several workers of one shard: what waits when one of them dies, and how shards share the workers there are."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from services.scheduler.core.types import Finish
from services.scheduler.quarantine import REPLICA_WAIT_S
from services.scheduler.workers.fleet import AVOID_S, Fleet
from services.scheduler.workers.loop import WorkerContext, WorkerLoop
from services.scheduler.workers.registry import Registration, WorkerRegistry
from shared.settings import SchedulerSettings
from tests.unit.scheduler.quarantined import LIMITS, SECOND, Shard


class Workers(Shard):
    """A shard in which a request called `poison` kills its worker."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.deaths: list[int] = []

    def in_step(self, replica: int) -> set[str]:
        step = self.house.workers[replica].queue[0]
        table = self.core.replicas[replica].table
        return {table.request[slot].id for slot in step.chunk_slots.tolist()}

    def at(self, replica: int) -> set[str]:
        """Requests that run there."""
        table = self.core.replicas[replica].table
        return {request.id for request, on in zip(table.request, table.active, strict=True) if on}

    def round(self, poison: str = "") -> None:
        """A step of each worker; one with the poison in its step dies, and is there again after it."""
        for replica in sorted(self.house.workers):
            while self.house.plan(replica) is not None:
                pass
        for replica in sorted(self.house.workers):
            if not self.house.workers[replica].queue:
                continue
            requests = self.in_step(replica)
            if poison in requests:
                self.deaths.append(replica)
                self.house.lose(replica)
                self.quarantine.link_lost(f"worker-{replica}", f"{len(self.deaths)}", requests, requests)
                continue
            before = {name: len(self.house.published[name, 0]) for name in requests}
            self.house.answer(replica)
            moved = {name for name, count in before.items() if len(self.house.published[name, 0]) > count}
            self.quarantine.on_progress(moved, self.house.now)
            for name in moved & self.house.ended.keys():
                self.quarantine.remove(name, self.house.now)
        self.core.check()
        self.house.now += SECOND // 100

    def back(self) -> None:
        """The worker that died last registers anew."""
        number = self.house.join(LIMITS)
        assert number == self.deaths[-1]
        self.quarantine.on_link(f"worker-{number}", "another", self.house.now)

    def fleet(self, workers: Any = None) -> tuple[Fleet, WorkerContext]:
        unused: Any = None
        context = WorkerContext(self.core, self.quarantine, unused, unused, unused, unused, unused, unused)
        return Fleet(SchedulerSettings(shard="a"), workers, context, unused), context

    def running(self, name: str) -> bool:
        return name in self.core.records and self.core.records[name].sequences[0].slot >= 0


def test_poisonous_request_kills_one_worker_at_a_time() -> None:
    shard = Workers(2)
    for number in range(8):
        shard.arrive(f"r{number}", seed=number)
    shard.arrive("poison", seed=99)
    for _ in range(40):
        shard.round("poison")
        if len(shard.house.workers) == 1:
            for _ in range(3):  # until it is back: none that was with it runs at the other
                shard.round("poison")
            shard.back()
        if shard.given_up:
            break
    assert shard.given_up == ["poison"]
    assert len(set(shard.deaths)) == 1, "the other worker never ran it"
    for _ in range(200):
        shard.round()
    assert set(shard.house.ended) == {"poison", *(f"r{n}" for n in range(8))}
    assert all(shard.house.ended[f"r{n}"] != [Finish.ERROR] for n in range(8))


def test_silent_worker_is_dead_and_another_is_emptied() -> None:
    shard = Workers(2)
    for number in range(6):
        shard.arrive(f"r{number}", seed=number)
    shard.round()
    shard.round()
    at_it = shard.at(0)
    shard.house.lose(0)
    shard.quarantine.link_lost("worker-0", "first", at_it, at_it)
    shard.round()
    assert not any(shard.running(name) for name in at_it), "it is not known yet whether they killed it"
    shard.quarantine.find_dead(lambda name: name == "worker-0", shard.house.now)
    shard.round()
    assert not any(shard.running(name) for name in at_it), "a new worker may come"
    shard.house.now += int(REPLICA_WAIT_S * SECOND)
    shard.quarantine.check_gateways({"g"}, shard.house.now)
    for _ in range(400):
        shard.round()
    assert set(shard.house.ended) == {f"r{n}" for n in range(6)}
    assert not shard.given_up and not shard.quarantine.has_suspects


async def test_figures_of_replicas_add_up_to_those_of_all() -> None:
    shard = Workers(2)
    for number in range(5):
        shard.arrive(f"r{number}", seed=number)
    for _ in range(3):
        shard.round()
    fleet, context = shard.fleet()
    for number, role in enumerate(("", "decode")):
        link: Any = SimpleNamespace(info=SimpleNamespace(role=role, vector_size=0), epoch=7 + number, drains=False)
        fleet.loops[f"w{number}"] = WorkerLoop(link, number, LIMITS.slots, context)
    fleet.loops["w1"].give_away()
    rows, all_of = fleet.replicas(), shard.core.stats()
    assert [(row["role"], row["state"], row["epoch"], row["number"], row["slots"]) for row in rows.values()] == [
        ("", "serving", 7, 0, LIMITS.slots), ("decode", "leaving", 8, 1, LIMITS.slots),
    ]  # fmt: skip
    assert [row["running"] for row in rows.values()] == [len(shard.at(0)), len(shard.at(1))]
    for name in ("running", "blocks_total", "blocks_free", "blocks_cached", "blocks_draining", "prefix_hit_tokens"):
        assert sum(row[name] for row in rows.values()) == all_of[name], name
    shard.core.confine({"r0"})
    shard.core.assign_dock(shard.house.now)
    docks = [row["dock"] for row in fleet.replicas().values()]
    assert sorted(docks) == [0, 1]
    shard.house.lose(0)
    del fleet.loops["w0"]
    assert fleet.replicas().keys() == {"w1"}


class Redis:
    """Workers' records as Redis has them: of each its shard, and its slots behind a slash."""

    def __init__(self, **shards: str) -> None:
        self.records = {name.replace("_", "-"): shard for name, shard in shards.items()}

    async def zrange(self, key: str, first: int, last: int, withscores: bool) -> list[tuple[bytes, float]]:
        return [(name.encode(), 1.0) for name in self.records]

    def pipeline(self, transaction: bool) -> Redis:
        self.asked: list[str] = []
        return self

    def hgetall(self, key: str) -> None:
        self.asked.append(key)

    async def execute(self, raise_on_error: bool = True) -> list[dict[bytes, bytes]]:
        shards = {key: self.records[key].encode().partition(b"/") for key in self.asked}
        written = {b"ready": b"1", b"address": b"a", b"run": b"5"}
        return [
            written | {b"identity": key.encode(), b"shard": shard, b"slots": slots or b"1"}
            for key, (shard, _, slots) in shards.items()
        ]


KEYS: Any = SimpleNamespace(workers="workers", epoch="epoch", prefix="", worker=str)
SCRIPTS: Any = SimpleNamespace(take_worker="take_worker", give_worker="give_worker")


class Lease:
    """Every worker that is asked for is ours."""

    text = "1"

    def __init__(self) -> None:
        self.given: list[list[Any]] = []

    async def run_fenced(self, script: str, keys: list[str], args: list[Any]) -> int:
        if script == SCRIPTS.give_worker:
            self.given.append([*keys, *args])
        return 7


class Others:
    """What a look at the other shards showed."""

    def __init__(self, live: tuple[str, ...], starving: tuple[str, ...]) -> None:
        self.show(live, starving)

    def show(self, live: tuple[str, ...], starving: tuple[str, ...]) -> None:
        self.live, self.workerless, self.leased_shards = list(live), list(starving), set(live)


async def taken(redis: Redis, others: Others, held: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """What shard `a` takes beside those held; and which it gives away then."""
    workers = WorkerRegistry(redis, SCRIPTS, KEYS, "a", Lease(), others, 1000)
    await workers.look()
    names = list(held)
    while (found := await workers.take(names, {}, {}, "")) is not None:
        assert isinstance(found, Registration) and found.epoch == 7
        names.append(found.id)
    return names[len(held) :], workers.to_give(dict.fromkeys(names, 0))


@pytest.mark.parametrize(
    ("records", "others", "held", "takes", "gives"),
    [
        ({"w0": "", "w1": "", "w2": ""}, Others((), ()), (), ["w0", "w1", "w2"], ""),
        ({"w0": "", "w1": ""}, Others(("b",), ("b",)), (), ["w0"], ""),
        ({"w0": "", "w1": "", "w2": ""}, Others(("b",), ("b",)), (), ["w0", "w1"], ""),
        ({"w0": "a", "w1": "a"}, Others(("b",), ("b",)), ("w0", "w1"), [], "w0"),
        ({"w0": "a", "w1": "a"}, Others(("b",), ()), ("w0", "w1"), [], ""),
        ({"w0": "a", "w1": "a", "w2": ""}, Others(("b",), ("b",)), ("w0", "w1"), [], ""),
        ({"w0": "gone"}, Others((), ()), (), ["w0"], ""),
        ({"w0": "a", "w1": "gone"}, Others((), ()), ("w0",), [], ""),
        ({"w0": "/8", "w1": "/64", "w2": "/8"}, Others(("b",), ("b",)), (), ["w1"], ""),
        ({"w0": "a/8", "w1": "/64", "w2": "b/64"}, Others(("b",), ()), ("w0",), ["w1"], ""),
        ({"w0": "a/8", "w1": "/64"}, Others(("b",), ("b",)), ("w0",), [], ""),
        ({"w0": "a/8", "w1": "a/64", "w2": "a/48"}, Others(("b",), ("b",)), ("w0", "w1", "w2"), [], "w1"),
        ({"w0": "b", "w1": "a", "w2": "b", "w3": "a"}, Others(("b", "c"), ("c",)), ("w1", "w3"), [], ""),
        ({"w0": "b", "w1": "a/2", "w2": "b", "w3": "a"}, Others(("b", "c"), ("c",)), ("w1", "w3"), [], "w1"),
    ],
)
async def test_shard_takes_its_share_of_slots_and_returns_a_worker(
    records: dict[str, str], others: Others, held: tuple[str, ...], takes: list[str], gives: str
) -> None:
    assert await taken(Redis(**records), others, held) == (takes, gives)


class OneRecord(Lease):
    """The lease of a shard that takes and gives in records that all see."""

    def __init__(self, redis: Redis, shard: str) -> None:
        super().__init__()
        self.records, self.shard = redis.records, shard

    async def run_fenced(self, script: str, keys: list[str], args: list[Any]) -> int:
        owner, _, slots = self.records[keys[0]].partition("/")
        if owner not in ("", self.shard):
            return 0
        self.records[keys[0]] = f"/{slots}" if script == SCRIPTS.give_worker else f"{self.shard}/{slots}"
        return 5


async def test_least_epoch_of_a_worker_that_is_gone_is_forgotten() -> None:
    redis = Redis(w0="/8", w1="/8")
    workers = WorkerRegistry(redis, SCRIPTS, KEYS, "a", Lease(), Others((), ()), 1000)
    await workers.look()
    kept, gone = (worker.identity for worker in workers.ready)
    workers.least_epochs = {kept: 5, gone: 7}
    del redis.records["w1"]
    await workers.look()
    assert workers.least_epochs == {kept: 5}


@pytest.mark.parametrize("seed", range(12))
async def test_shards_joining_in_turn_get_workers_and_then_settle(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"s{number}" for number in range(rng.randint(1, 4))]
    redis = Redis(**{f"w{n}": f"/{rng.choice((8, 8, 64))}" for n in range(rng.randint(len(names), 8))})
    live: dict[str, WorkerRegistry] = {}
    seen: dict[str, Others] = {}
    held: dict[str, set[str]] = {}
    moves: list[int] = []
    for _ in range(60):
        if len(live) < len(names) and rng.random() < 0.3:
            name = names[len(live)]
            seen[name] = Others((), ())
            live[name] = WorkerRegistry(redis, SCRIPTS, KEYS, name, OneRecord(redis, name), seen[name], 1000)
            held[name] = set()
        moves.append(0)
        for name in rng.sample(sorted(live), len(live)):
            workers, mine = live[name], held[name]
            others = tuple(other for other in live if other != name)
            seen[name].show(others, tuple(other for other in others if not held[other]))
            await workers.look()
            while (found := await workers.take(mine, {}, {}, "")) is not None:
                mine.add(found.id)
                moves[-1] += 1
            if given := workers.to_give(dict.fromkeys(mine, 0)):
                await workers.give_back(next(worker for worker in workers.ready if worker.id == given))
                mine.remove(given)
                moves[-1] += 1
    assert all(held.values()) and set().union(*held.values()) == redis.records.keys()
    assert len(live) == len(names) and not sum(moves[-10:])


@pytest.mark.parametrize(
    ("record", "others", "gives"), [("a", Others(("b",), ("b",)), [["w1", "1", "a", 5]]), ("b", Others(("b",), ()), [])]
)
async def test_lost_worker_that_the_shard_avoids_is_freed(record: str, others: Others, gives: list[list[Any]]) -> None:
    shard, lease = Workers(1), Lease()
    shard.arrive("r0", seed=0)
    shard.quarantine.link_lost("w1", "w1", {"r0"}, {"r0"})  # the connection broke; the process lives
    workers = WorkerRegistry(Redis(w0="a", w1=record), SCRIPTS, KEYS, "a", lease, others, 1000)
    fleet, _ = shard.fleet(workers)
    fleet.tasks["w0"] = linked = asyncio.create_task(asyncio.Event().wait())
    fleet.failures_s["w1"] = time.monotonic()
    await fleet.look()
    linked.cancel()
    shard.round()
    assert not lease.given and not shard.running("r0"), "its record may have outlived it"
    fleet.failures_s["w1"] -= AVOID_S
    await fleet.look()
    shard.round()
    assert lease.given == gives
    assert shard.running("r0") and not shard.quarantine.has_suspects

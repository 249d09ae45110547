"""Three shards on the real scripts in a random order: claim, lose answers, hand back, give, repeat calls, pause beyond
their lease, take over what an orphan left, end. Each request has one owner throughout, ends once, and leaves nothing
behind. The schedulers here are their Redis side alone: no core, no worker.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from protos import queue_pb2
from services.scheduler.requests.handover import RequestHandover
from services.scheduler.requests.intake import Claimed, Clock, Entry, Intake
from shared.errors import LeaseLostError
from shared.keys import GROUP, grammar_name
from shared.lease import Lease
from shared.redis_client import Scripts, connect
from shared.settings import SchedulerSettings
from shared.wire.columns import pack
from tests.integration.redis.script_calls import KEYS, enqueue, publication
from tests.support.kept_bytes import kept_bytes
from tests.support.stack import RedisServer

SHARDS = ("shard-0", "shard-1", "shard-2")
STEPS = 250


@dataclass
class Process:
    """One scheduler of a shard. It may be paused while another one leads."""

    shard: str
    lease: Lease
    intake: Intake
    handover: RequestHandover
    held: dict[str, Entry] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)


class World:
    """Draws each event from `chance`."""

    def __init__(self, redis: Any, chance: random.Random) -> None:
        self.redis = redis
        self.chance = chance
        self.scripts = Scripts(redis)
        self.processes: list[Process] = []
        self.enqueued = 0
        self.ended: Counter[str] = Counter()

    def lease_of(self, shard: str) -> Lease:
        return Lease(self.scripts, KEYS, shard, 600_000)

    async def begin(self, shard: str) -> None:
        """A scheduler starts, and leads if no other does."""
        lease = self.lease_of(shard)
        if await lease.take():
            intake = Intake(self.redis, self.redis, self.scripts, KEYS, shard, lease, Clock())
            absent: Any = None
            handover = RequestHandover(self.scripts, KEYS, shard, lease, absent, absent, {}, lambda _: None, absent)
            process = Process(shard, lease, intake, handover)
            self.processes.append(process)
            await self.rebuild(process)

    async def arrive(self) -> None:
        name = f"r{self.enqueued}"
        self.enqueued += 1
        wire = queue_pb2.Request(
            id=name, tenant="alice", gateway="g", prompts=queue_pb2.Prompts(tokens=[pack([5] * 10)]), n=1, max_tokens=9
        )
        setattr(wire, "class", 2)
        text = self.chance.choice(["", "one " * 300, "another " * 300])
        wire.sampling.grammar = grammar = grammar_name("alice", text) if text else ""
        reply = await enqueue(self.scripts, name, request=wire.SerializeToString(), most=1 << 30, of_tenant=1 << 30,
                              concurrent=1 << 20, grammar=grammar, text=text)  # fmt: skip
        assert reply[0] == b"ok"

    async def read(self, process: Process) -> None:
        for item in await process.intake.read([2, 2, 2, 2], one=True):
            self.check_grammar(item)
            process.held[item.request.id] = item.entry

    async def strand(self, process: Process) -> None:
        """The answer of a read is lost, or the process is paused right behind it."""
        await self.redis.xreadgroup(GROUP, process.shard, {KEYS.requests("normal"): ">"}, count=1)

    async def rebuild(self, process: Process) -> None:
        def add(found: list[Any]) -> None:
            for item in found:
                assert item.request.id not in process.held
                self.check_grammar(item)
                process.held[item.request.id] = item.entry
                if item.request.outputs[0].size:
                    process.begun.add(item.request.id)

        await process.intake.read_pending(process.held, add)

    def check_grammar(self, item: Claimed) -> None:
        name = item.entry.request.sampling.grammar
        assert not item.error
        assert name == (grammar_name("alice", item.request.grammar) if item.request.grammar else "")

    async def publish(self, process: Process, end: bool) -> None:
        if not process.held:
            return
        name = self.chance.choice(sorted(process.held))
        entry = process.held[name]
        rows = [name, entry.stream, entry.id, "2", 10, "1", ""] if end else []
        checkpoint = [name, 0, 0, pack([7]), 0, 0]
        args = publication(process.lease.text, ["g", b""], checkpoint, [name], rows)
        await self.say(process, self.scripts.publish, [KEYS.queue], args)
        process.begun.add(name)
        if end:
            self.ended[name] += 1
            self.drop(process, name)

    def drop(self, process: Process, name: str) -> None:
        process.held.pop(name)
        process.begun.discard(name)

    async def say(self, process: Process, script: Any, keys: list[Any], args: list[Any]) -> Any:
        """Its answer may be lost: then it is said again, now and, by a process that was paused, at any time."""
        answer = await process.lease.run_fenced(script, keys, args)
        if self.chance.random() < 0.4:
            await process.lease.run_fenced(script, keys, args)
        return answer

    async def hand_back(self, process: Process) -> None:
        entries = [entry for name, entry in process.held.items() if name not in process.begun][-2:]
        for entry in entries:
            self.drop(process, entry.request.id)
        await process.handover.release(process.lease, entries)
        if self.chance.random() < 0.4:
            await process.handover.release(process.lease, entries)

    async def give(self, process: Process) -> None:
        entries = [process.held[name] for name in sorted(process.begun)]
        taker = self.chance.choice([shard for shard in SHARDS if shard != process.shard])
        for entry in entries:
            self.drop(process, entry.request.id)
        await process.handover.move(process.lease, process.shard, taker, entries)
        if self.chance.random() < 0.4:
            await process.handover.move(process.lease, process.shard, self.chance.choice(SHARDS), entries)

    async def inherit(self, process: Process) -> None:
        """Only from a shard without a lease, which the lease itself decides."""
        orphan = self.chance.choice([shard for shard in SHARDS if shard != process.shard])
        await process.handover.take_from(orphan, self.lease_of(orphan), process.intake)

    async def run_out(self, process: Process) -> None:
        """The process is paused for longer than its lease. It continues unaware, or another process leads."""
        if await self.redis.get(process.lease.key) == process.lease.text.encode():
            await self.redis.delete(process.lease.key)

    async def step(self) -> None:
        what = self.chance.choice(["arrive", "arrive", "begin", "read", "read", "read", "token", "end", "end", "strand",
                                   "rebuild", "hand_back", "give", "inherit", "run_out", "resign"])  # fmt: skip
        if what == "arrive":
            return await self.arrive()
        if what == "begin" or not self.processes:
            return await self.begin(self.chance.choice(SHARDS))
        process = self.chance.choice(self.processes)
        try:
            if what in ("token", "end"):
                await self.publish(process, what == "end")
            elif what == "resign":
                await process.lease.release()
                self.processes.remove(process)
            else:
                await getattr(self, what)(process)
        except LeaseLostError:
            self.processes.remove(process)  # it leaves with status 1
        return None

    async def leaders(self) -> dict[str, Process]:
        """Return the process of each shard that may write: no other has had the lease since."""
        found = {}
        for process in self.processes:
            last = await self.redis.get(KEYS.shard_epoch(process.shard))
            if last and last.split()[0] == process.lease.text.encode():
                assert process.shard not in found
                found[process.shard] = process
        return found

    async def check(self) -> None:
        """Every request that has not ended is in the stream once, and with one shard, or in the queue."""
        stream = KEYS.requests("normal")
        rows = await self.redis.xrange(stream)
        entries = {entry: queue_pb2.Request.FromString(row[b"r"]).id for entry, row in rows}
        pending = {row["message_id"]: row["consumer"].decode()
                   for row in await self.redis.xpending_range(stream, GROUP, "-", "+", 1000)}  # fmt: skip
        live = {f"r{number}" for number in range(self.enqueued)} - {*self.ended}
        assert sorted(entries.values()) == sorted(live)
        assert pending.keys() <= entries.keys()
        owner = {entries[entry]: shard for entry, shard in pending.items()}
        for shard, process in (await self.leaders()).items():
            for name in process.held:
                assert owner[name] == shard, f"{name} is held by {shard} and pending with {owner[name]}"
        waiting = 0
        for name in live:
            record = await self.redis.hgetall(KEYS.req(name))
            assert entries[record[b"entry"]] == name
            waiting += b"started_ms" not in record
            if b"shard" in record:
                assert record[b"shard"].decode() == owner[name]
        queue = await self.redis.hgetall(KEYS.queue)
        assert int(queue.get(b"requests", 0)) == waiting
        assert int(queue.get(b"tokens", 0)) == int(queue.get(b"tokens:normal", 0)) == 10 * waiting
        assert int(await self.redis.hget(KEYS.queue_tenants, "alice") or 0) == 10 * waiting
        named = Counter(row[b"grammar"] for _, row in rows if b"grammar" in row)
        found = await self.redis.hgetall(KEYS.queue_grammars)
        texts = {name.removeprefix(b"text:"): text for name, text in found.items() if name.startswith(b"text:")}
        assert texts.keys() == named.keys()
        assert {b"requests:" + name: b"%d" % count for name, count in named.items()}.items() <= found.items()
        assert len(found) == 3 * len(named)
        stored = sum(int(row[b"bytes"]) for _, row in rows) + sum(map(len, texts.values()))
        stored += kept_bytes(await self.redis.xrange(KEYS.queue_kept))
        assert int(queue.get(b"bytes", 0)) == int(await self.redis.hget(KEYS.queue_bytes, "alice") or 0) == stored
        assert int(await self.redis.hget(KEYS.bucket("alice"), "running") or 0) == len(live)

    async def finish(self) -> None:
        """All lease-holders leave; one scheduler ends what there is."""
        for shard in SHARDS:
            await self.redis.delete(KEYS.lease(shard))
        self.processes.clear()
        await self.begin(SHARDS[0])
        (last,) = self.processes
        for orphan in SHARDS[1:]:
            await last.handover.take_from(orphan, self.lease_of(orphan), last.intake)
        await self.rebuild(last)
        while len(self.ended) < self.enqueued:
            await self.read(last)
            while last.held:
                await self.publish(last, end=True)
        await self.check()
        assert set(self.ended.values()) <= {1}


@pytest.mark.parametrize("seed", range(3))
async def test_each_request_has_one_owner_and_ends_once(
    redis_server: RedisServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.requests.intake.BLOCK_MS", 1)
    redis = connect(SchedulerSettings(redis_url=redis_server.url), socket_timeout_s=60.0)
    await redis.flushall()
    world = World(redis, random.Random(seed))
    await Intake(redis, redis, world.scripts, KEYS, "", world.lease_of(""), Clock()).prepare()
    for _ in range(STEPS):
        await world.step()
        await world.check()
    await world.finish()
    await redis.aclose()

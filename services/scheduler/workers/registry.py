"""The model's workers as Redis shows them, and which of them this shard may have.

With several shards each has its share of the slots that are ready: a shard takes workers until it has that, leaves one
for each shard that has none, and gives one back where none is left. What was of a shard without a lease is free for
those who have none at once, for others after a while, so that a scheduler that starts again finds its workers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis

from services.scheduler.shard.lease import Lease
from services.scheduler.shard.shards import LEASES, Shards
from shared.keys import Keys
from shared.redis_client import Scripts

SILENT_S = 2.5
"""A worker registers every second; one that has not for so long is taken to be dead."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker's record in Redis."""

    id: str
    address: str
    identity: str
    shard: str = ""
    epoch: int = 0  # of the Run for which the shard took it; 0: not taken
    slots: int = 1  # sequences that it runs at once


class WorkerRegistry:
    """`look`, then the rest acts on what it showed."""

    def __init__(
        self, redis: Redis, scripts: Scripts, keys: Keys, shard: str, lease: Lease, shards: Shards, lease_ms: int
    ) -> None:
        self._redis = redis
        self._scripts = scripts
        self._keys = keys
        self._shard = shard
        self._lease = lease
        self._shards = shards
        self._patience_s = LEASES * lease_ms / 1000
        self.ready: list[Registration] = []
        self._seen: dict[str, tuple[float, float]] = {}  # id -> last registration, since when
        self._unled: dict[str, float] = {}  # shard that has workers and no lease -> since when

    async def look(self) -> None:
        """Reads the records. Raises what redis-py raises; then what was seen before is forgotten."""
        seen, self._seen = self._seen, {}
        members: list[Any] = await self._redis.zrange(self._keys.workers, 0, -1, withscores=True)
        names = [member.decode() for member, _ in members]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(self._keys.worker(name))
        replies: list[dict[bytes, bytes]] = await pipe.execute() if names else []
        now, self.ready = time.monotonic(), []
        for name, (_, score), reply in zip(names, members, replies, strict=True):
            record = {key.decode(): value.decode() for key, value in reply.items()}
            if not record:
                continue
            before = seen.get(name, (score, now))
            self._seen[name] = before if before[0] == score else (score, now)
            if record.get("ready") == "1" and record.get("address"):
                identity, shard, run = record.get("identity", ""), record.get("shard", ""), int(record.get("run", 0))
                slots = int(record.get("slots", 1))
                self.ready.append(Registration(name, record["address"], identity, shard, run, slots))
        led = {self._shard, *self._shards.led}
        shards = {worker.shard for worker in self.ready if worker.shard and worker.shard not in led}
        self._unled = {shard: self._unled.get(shard, now) for shard in shards}

    def silent(self, name: str) -> bool:
        """Has that worker let SILENT_S pass, at least, without a word? Nothing is known after a failed look."""
        if name not in self._seen:
            return bool(self._seen) or not self.ready
        return time.monotonic() - self._seen[name][1] >= SILENT_S

    def _full(self, held: Collection[str]) -> bool:
        """Has this shard its share with those `held`? It is never less than one worker."""
        share = sum(worker.slots for worker in self.ready) / (1 + len(self._shards.live))
        return bool(held) and sum(worker.slots for worker in self.ready if worker.id in held) >= share

    @property
    def _free(self) -> set[str]:
        """Those that no shard has that lives."""
        taken = {self._shard, *self._shards.led}
        return {worker.id for worker in self.ready if worker.shard not in taken}

    def surplus(self, running: Mapping[str, int]) -> str:
        """The worker that this shard gives to one that lives and has none; empty if it does not. It does when none is
        free and of those that have several it has most; the worker is one with which the two have most alike.
        running: of each that it has, the sequences there."""
        if self._free or not self._shards.starving:
            return ""
        shards: dict[str, list[int]] = {}
        for worker in self.ready:
            shards.setdefault(worker.shard, []).append(worker.slots)
        several = {name: sum(slots) for name, slots in shards.items() if len(slots) > 1}
        if max(several, key=lambda name: (several[name], name), default="") != self._shard:
            return ""
        mine = [worker for worker in self.ready if worker.id in running]
        all_of = several[self._shard]
        return min(mine, key=lambda w: (abs(all_of - 2 * w.slots), running[w.id], w.id)).id if len(mine) > 1 else ""

    async def take(
        self, held: Collection[str], after: Mapping[str, float], avoid: Collection[str], before: str
    ) -> Registration | None:
        """One more than those `held`, if there is one for us. The compare-and-set makes it ours, and lets go of the one
        that we had `before`. after: identity -> moment (monotonic s) before which it is not dialled again; those whose
        identity is in `avoid` come last."""
        now = time.monotonic()
        if self._full(held):
            return None
        free = self._free.difference(held)
        others = free if held and len(free) <= len(self._shards.starving) else set()
        may = [w for w in self.ready if w.id not in {*held, *others} and after.get(w.identity, 0.0) <= now]
        for worker in sorted(may, key=lambda w: (w.identity in avoid, w.shard != self._shard, -w.slots)):
            unled_s = now - self._unled.get(worker.shard, now)
            if held and worker.shard not in ("", self._shard) and unled_s < self._patience_s:
                continue
            names = [self._keys.worker(worker.id), self._keys.epoch, self._keys.worker(before or worker.id)]
            words = [self._lease.epoch, self._shard, self._keys.prefix]
            if epoch := int(await self._lease.fenced(self._scripts.take_worker, names, words)):
                return replace(worker, epoch=epoch)
        return None

    def beyond(self, held: Collection[str]) -> list[Registration]:
        """Those that are not `held` and will not be: this shard has its share, or another one that lives has them."""
        full = self._full(held)
        return [w for w in self.ready if w.id not in held and (full or w.shard in self._shards.led)]

    async def give_back(self, worker: Registration) -> None:
        """Another shard may have it, unless one has it already."""
        words = [self._lease.epoch, self._shard, worker.epoch]
        await self._lease.fenced(self._scripts.give_worker, [self._keys.worker(worker.id)], words)

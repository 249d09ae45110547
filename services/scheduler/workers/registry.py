"""The workers of the model as Redis shows them, and which of them this shard may have.

Each shard has its share of the ready slots: it takes workers until it has that share, leaves one for each shard without
a worker, and gives one back when no worker is free. A worker of a shard without a lease is free at once for a shard
without workers, and after a while for the other shards, so that a restarted scheduler keeps its workers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.asyncio import Redis

from services.scheduler.shards import LEASES, Shards
from shared.dead_letters import DeadLetters, integer, text
from shared.keys import Keys
from shared.lease import Lease
from shared.redis_client import Scripts, Value

SILENT_S = 2.5
"""A worker registers every second; it counts as dead after so long without a registration."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The record of a worker in Redis."""

    id: str
    address: str
    identity: str
    shard: str = ""
    epoch: int = 0  # of the Run for which a shard took it; 0 means not taken
    slots: int = 1  # sequences that it runs at once


MAX_SLOTS = 1 << 20


def decode_worker(name: str, record: Mapping[bytes, bytes]) -> Registration | None:
    """Return what a worker wrote of itself if it may be taken, else None; its shard is read by `decode_run`.

    Raises ValueError for a record of no worker.
    """
    address = text(record.get(b"address", b""))
    if record.get(b"ready") != b"1" or not address:
        return None
    slots = integer(record.get(b"slots"), 1, MAX_SLOTS, default=1)
    return Registration(name, address, text(record.get(b"identity", b"")), slots=slots)


def decode_run(record: Mapping[bytes, bytes]) -> tuple[str, int]:
    """Return the shard that took a worker, and the epoch of its Run. Raises ValueError for other contents."""
    return text(record.get(b"shard", b"")), integer(record.get(b"run"))


class WorkerRegistry:
    """The ready workers. `look` reads them; the other methods act on the last look."""

    def __init__(
        self,
        redis: Redis,
        scripts: Scripts,
        keys: Keys,
        shard: str,
        lease: Lease,
        shards: Shards,
        lease_ms: int,
        letters: DeadLetters | None = None,
    ) -> None:
        self._letters = letters or DeadLetters()
        self._redis = redis
        self._scripts = scripts
        self._keys = keys
        self._shard = shard
        self._lease = lease
        self._shards = shards
        self._patience_s = LEASES * lease_ms / 1000
        self.ready: list[Registration] = []
        self.least_epochs: dict[str, int] = {}  # of the next Run by identity: above what the worker has seen
        self._sightings: dict[str, tuple[float, float]] = {}  # id -> last registration, since when
        self._unled_since: dict[str, float] = {}  # shard that has workers and no lease -> since when

    @property
    def token(self) -> str:
        """Return that of the lease, by which workers let this shard begin a Run."""
        return self._lease.token

    async def look(self) -> None:
        """Read the records. Raises what redis-py raises; then the last look is forgotten."""
        seen, self._sightings = self._sightings, {}
        members: list[Any] = await self._redis.zrange(self._keys.workers, 0, -1, withscores=True)
        scores = [(self._letters.read(self._keys.workers, member, text), score) for member, score in members]
        members = [(name, score) for name, score in scores if name]
        names = [name for name, _ in members]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(self._keys.worker(name))
        replies: list[Any] = await pipe.execute(raise_on_error=False) if names else []
        now, self.ready = time.monotonic(), []
        for name, (_, score), reply in zip(names, members, replies, strict=True):
            if not reply:
                continue
            before = seen.get(name, (score, now))
            self._sightings[name] = before if before[0] == score else (score, now)
            worker = self._letters.read(self._keys.worker(name), reply, partial(decode_worker, name))
            if worker is not None:
                # The worker never rewrites these two: where they cannot be read, no shard has it.
                shard, run = self._letters.read(self._keys.worker(name), reply, decode_run) or ("", 0)
                self.ready.append(replace(worker, shard=shard, epoch=run))
        identities = {worker.identity for worker in self.ready}
        self.least_epochs = {name: epoch for name, epoch in self.least_epochs.items() if name in identities}
        led = {self._shard, *self._shards.leased_shards}
        shards = {worker.shard for worker in self.ready if worker.shard and worker.shard not in led}
        self._unled_since = {shard: self._unled_since.get(shard, now) for shard in shards}

    def silent(self, name: str) -> bool:
        """Return whether the worker has not registered for SILENT_S; False after a failed look."""
        if name not in self._sightings:
            return bool(self._sightings) or not self.ready
        return time.monotonic() - self._sightings[name][1] >= SILENT_S

    def _full(self, held: Collection[str]) -> bool:
        """Return whether the `held` workers are this shard's share, which is at least one worker."""
        share = sum(worker.slots for worker in self.ready) / (1 + len(self._shards.live))
        return bool(held) and sum(worker.slots for worker in self.ready if worker.id in held) >= share

    @property
    def _free(self) -> set[str]:
        """Return the workers that no live shard has."""
        taken = {self._shard, *self._shards.leased_shards}
        return {worker.id for worker in self.ready if worker.shard not in taken}

    def to_give(self, running: Mapping[str, int]) -> str:
        """Return the worker that this shard gives to a live shard without one; empty if it gives none.

        If no worker is free, the shard with the largest number of slots gives, among the shards with several workers.
        It gives the worker that makes the two shares as equal as possible. running: sequences by worker id, of the
        workers of this shard.
        """
        if self._free or not self._shards.workerless:
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
        """Take one more worker than those `held` and return it; None if this shard may have no other.

        A script takes it with compare-and-set, and releases the worker `before`. after: identity -> monotonic s before
        which the worker is not dialled again; identities in `avoid` come last.
        """
        now = time.monotonic()
        if self._full(held):
            return None
        free = self._free.difference(held)
        others = free if held and len(free) <= len(self._shards.workerless) else set()
        candidates = [w for w in self.ready if w.id not in {*held, *others} and after.get(w.identity, 0.0) <= now]
        for worker in sorted(candidates, key=lambda w: (w.identity in avoid, w.shard != self._shard, -w.slots)):
            unled_s = now - self._unled_since.get(worker.shard, now)
            if held and worker.shard not in ("", self._shard) and unled_s < self._patience_s:
                continue
            names = [self._keys.worker(worker.id), self._keys.epoch, self._keys.worker(before or worker.id)]
            least = self.least_epochs.get(worker.identity, 0)
            words: list[Value] = [self._lease.text, self._shard, self._keys.prefix, least]
            if epoch := int(await self._lease.run_fenced(self._scripts.take_worker, names, words)):
                return replace(worker, epoch=epoch)
        return None

    def unwanted_workers(self, held: Collection[str]) -> list[Registration]:
        """Return the workers that are not `held` and will not be: the share is full, or a live shard has them."""
        full = self._full(held)
        return [w for w in self.ready if w.id not in held and (full or w.shard in self._shards.leased_shards)]

    async def give_back(self, worker: Registration) -> None:
        """Release a worker, unless another shard has it already."""
        words: list[Value] = [self._lease.text, self._shard, worker.epoch]
        await self._lease.run_fenced(self._scripts.give_worker, [self._keys.worker(worker.id)], words)

"""The other shards of the model: shards that can take requests, and shards without a scheduler.

Read once a second; the claiming task acts on the last result (docs/protocol.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.dead_letters import DeadLetters, integer, text
from shared.keys import CLASSES, GROUP, Keys
from shared.redis_client import KEPT_TTL_MS, Unavailable

log = logging.getLogger("orcinus.scheduler")

LOOK_S = 1.0
LEASES = 3
"""A shard is an orphan after LEASES lease times without a lease: a standby or a restart comes sooner."""


class Shards:
    """The result of the last look; before the first one this shard is alone."""

    def __init__(self, redis: Redis, keys: Keys, shard: str, lease_ms: int, letters: DeadLetters | None = None) -> None:
        self._letters = letters or DeadLetters()
        self._redis = redis
        self._keys = keys
        self._shard = shard
        self._patience_s = LEASES * lease_ms / 1000
        self._gone_since: dict[
            str, float
        ] = {}  # shard without a lease, with pending requests -> time of the first look
        self.other_shards: list[str] = []  # with a lease and a worker, not draining
        self.identities: dict[
            str, str
        ] = {}  # of the workers of `other_shards`; empty: not known, or it does not matter
        self.live: list[str] = []  # with a lease, with or without a worker, not draining
        self.workerless: list[str] = []  # of the live ones, those without a worker
        self.leased_shards: set[str] = set()  # with a lease
        self.orphans: list[str] = []
        self.pending_requests = 0  # of this shard, in Redis's lists
        self.unclaimed_ms = [0] * len(CLASSES)  # age of the first request that no shard has claimed, by class
        self.looks = 0

    async def run(self, looked: Callable[[], None]) -> None:
        """Read the other shards until cancelled; call `looked` after each look."""
        while True:
            try:
                await self.look(time.monotonic())
                looked()
            except Unavailable as error:
                log.warning("other shards not read: %s; retrying", error)
            await asyncio.sleep(LOOK_S)

    async def look(self, now_s: float) -> None:
        pending, last = await self._read_pending()
        self.unclaimed_ms = await self._unclaimed_ages(last)
        registered = await self._register()
        names = sorted({*pending, *registered, *await self._of_workers()} - {self._shard})
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(self._keys.lease(name))
            pipe.hmget(self._keys.stats(name), ["workers", "draining", "numerics"])
        replies: list[Any] = await pipe.execute(raise_on_error=False) if names else []
        led = {
            name: self._letters.read(self._keys.stats(name), stats, _state) or (0, 0, "")
            for name, lease, stats in zip(names, replies[::2], replies[1::2], strict=True)
            if self._letters.read(self._keys.lease(name), lease, bool)
        }
        self.other_shards = [name for name, (workers, drains, _) in led.items() if workers and not drains]
        self.identities = {name: led[name][2] for name in self.other_shards}
        self.leased_shards = {*led}
        self.live = [name for name, (_, drains, _) in led.items() if not drains]
        self.workerless = [name for name in self.live if name not in self.other_shards]
        if forgotten := registered - {*led, *pending, self._shard}:
            await self._redis.hdel(self._keys.shards, *forgotten)
        self._gone_since = {
            name: self._gone_since.get(name, now_s)
            for name, count in pending.items()
            if count and name in {*names} - {*led}
        }
        self.orphans = [name for name, since in self._gone_since.items() if now_s - since >= self._patience_s]
        self.pending_requests = pending.get(self._shard, 0)
        self.looks += 1

    async def _register(self) -> set[str]:
        """Write the name of this shard and return all names: a shard may have neither requests nor workers."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.hset(self._keys.shards, self._shard, "1")
        pipe.pexpire(self._keys.shards, KEPT_TTL_MS)
        pipe.hgetall(self._keys.shards)
        return {*self._letters.read_all(self._keys.shards, (await pipe.execute())[2], text)}

    async def _read_pending(self) -> tuple[dict[str, int], list[str]]:
        """Return the pending requests of each shard, and for each class the last id in any pending list."""
        pipe = self._redis.pipeline(transaction=False)
        for stream in self._keys.request_streams():
            pipe.xpending(stream, GROUP)
        counts: dict[str, int] = {}
        last = ["0-0"] * len(CLASSES)
        for number, reply in enumerate(await pipe.execute(raise_on_error=False)):
            if isinstance(reply, ResponseError) and "NOGROUP" in str(reply):
                continue  # Redis came back empty
            if isinstance(reply, Exception):
                raise reply
            if reply["pending"]:
                last[number] = reply["max"].decode()
            for row in reply["consumers"]:
                name = self._letters.read(self._keys.request_streams()[number], row["name"], text)
                if name is None:
                    continue
                counts[name] = counts.get(name, 0) + row["pending"]
        return counts, last

    async def _unclaimed_ages(self, last: list[str]) -> list[int]:
        """Return the age of the first entry behind the last claimed one, by class, in ms; 0 without such an entry.

        A claimed request is pending until it ends and deleted at its end, so entries behind it were never claimed.
        """
        pipe = self._redis.pipeline(transaction=False)
        for stream, claimed in zip(self._keys.request_streams(), last, strict=True):
            pipe.xrange(stream, f"({claimed}", "+", count=1)
        pipe.time()
        *first_entries, (seconds, micros) = await pipe.execute()
        now_ms = 1000 * seconds + micros // 1000
        return [max(0, now_ms - int(rows[0][0].split(b"-")[0])) if rows else 0 for rows in first_entries]

    async def _of_workers(self) -> set[str]:
        """Return the shards that have taken a worker."""
        members: Any = await self._redis.zrange(self._keys.workers, 0, -1)
        read_all, key = self._letters.read_all, self._keys.workers
        pipe = self._redis.pipeline(transaction=False)
        for name in (names := read_all(key, members, text)):
            pipe.hget(self._keys.worker(name), "shard")
        replies = await pipe.execute(raise_on_error=False) if names else []
        return {*read_all(key, (shard for shard in replies if shard), text)} - {""}


def _state(reply: list[bytes | None]) -> tuple[int, int, str]:
    """Return the number of workers of a shard, whether it drains, and what decides the numbers of its workers."""
    workers, drains, identity = reply
    return integer(workers), integer(drains), text(identity or b"")

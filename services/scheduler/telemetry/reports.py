"""What the scheduler tells about itself: stats, heartbeat, events, dead requests. Losing one of them harms nobody."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from redis.asyncio import Redis

from services.scheduler.shard.lease import Lease
from services.scheduler.tasks import end
from shared.errors import LeaseLostError
from shared.keys import Keys
from shared.redis_client import KEPT_TTL_MS, LIVE_TTL_MS, Unavailable

log = logging.getLogger("orcinus.scheduler")

HISTORY_ROWS = 3600
EVENTS_ROWS = 10_000
DEAD_ROWS = 1_000
HEARTBEAT_MS = 5_000


class Reports:
    """Writes to Redis beside the hot path; each stream is bounded and each key has a TTL."""

    def __init__(self, redis: Redis, lease: Lease, keys: Keys, shard: str, scheduler_id: str) -> None:
        self._redis = redis
        self._lease = lease
        self._keys = keys
        self._shard = shard
        self._alive = keys.alive("scheduler", scheduler_id)
        self._tasks: set[asyncio.Future[None]] = set()
        self.last_step = 0
        self.answered = 0  # steps answered since the start

    async def heartbeat(self) -> None:
        """Until cancelled: this process lives, and this is the last step it applied."""
        while True:
            try:
                await self._redis.set(self._alive, self.last_step, px=HEARTBEAT_MS)
            except Unavailable as error:
                log.warning("no heartbeat: %s", error)
            await asyncio.sleep(HEARTBEAT_MS / 5000)

    async def forget(self) -> None:
        """Takes the heartbeat back at a clean stop, once what is still to be recorded is, or when cancelled."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._redis.delete(self._alive)
        except Unavailable as error:
            log.warning("the heartbeat was not taken back: %s", error)
        finally:
            await end(*self._tasks)

    async def stats(
        self,
        fields: Mapping[str, float | int | str],
        iterations: Mapping[str, int | bytes],
        replicas: Mapping[str, Mapping[str, float | int | str]],
    ) -> None:
        """Rewrites `stats:{shard}`, `stats:{shard}:iterations` and `stats:{shard}:replicas` (by worker id), and appends
        the first to its history.

        Raises LeaseLostError.
        """
        key, history = self._keys.stats(self._shard), self._keys.stats_history(self._shard)
        last, each = self._keys.iterations(self._shard), self._keys.replicas(self._shard)
        rows = [word for name, figures in replicas.items() for word in (name, json.dumps(figures))]
        row = [word for item in fields.items() for word in item]
        await self._lease.write(
            ["HSET", key, *row],
            ["PEXPIRE", key, KEPT_TTL_MS],
            ["XADD", history, "MAXLEN", "~", HISTORY_ROWS, "*", *row],
            ["PEXPIRE", history, LIVE_TTL_MS],
            ["HSET", last, *(word for item in iterations.items() for word in item)],
            ["PEXPIRE", last, KEPT_TTL_MS],
            ["DEL", each],  # one that is lost is not there any more
            *([["HSET", each, *rows], ["PEXPIRE", each, KEPT_TTL_MS]] if rows else []),
        )

    async def gateways_alive(self, names: Iterable[str]) -> set[str]:
        """Those of `names` whose heartbeat is there."""
        asked = list(names)
        found = await self._redis.mget([self._keys.alive("gateway", name) for name in asked]) if asked else []
        return {name for name, beat in zip(asked, found, strict=True) if beat is not None}

    def event(self, kind: str, text: str, **ids: str) -> None:
        """Appends to `events` in the background."""
        self._later(self._append(self._keys.events, EVENTS_ROWS, {"kind": kind, "text": text, **ids}))

    def dead(self, request_id: str, text: str) -> None:
        """Records a request that kept failing."""
        self.event("dead", text, request=request_id)
        self._later(self._append(self._keys.dead, DEAD_ROWS, {"request": request_id, "text": text}))

    async def _append(self, key: str, rows: int, fields: dict[str, str]) -> None:
        row = {"time_ms": str(int(time.time() * 1000)), "shard": self._shard, **fields}
        words = [word for item in row.items() for word in item]
        try:
            await self._lease.write(["XADD", key, "MAXLEN", "~", rows, "*", *words])
        except (*Unavailable, LeaseLostError) as error:
            log.warning("%s was not recorded: %s", fields, error)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

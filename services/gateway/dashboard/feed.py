"""Read what the live page shows from Redis, once a second, by one task for all viewers and only while there are any.

A viewer that does not keep up misses frames and delays no other: only the newest frame of each kind waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.gateway.errors import RETRY, unavailable
from shared.redis_client import Unreachable, connect
from shared.settings import GatewaySettings
from shared.tasks import end
from shared.telemetry.process_usage import ProcessUsage
from shared.telemetry.stack_view import HISTORY, HISTORY_S, StackReader, View

log = logging.getLogger("orcinus.gateway")

EVERY_S = 1.0
MAX_VIEWERS = 32
POINTS = 600
"""Rows of a longer history: a chart has no more pixels for them."""
FAILED = (*Unreachable, RedisError)


class Viewer:
    """One page that is open."""

    __slots__ = ("_frame", "_past", "_ready", "needs_past")

    def __init__(self) -> None:
        self._past: bytes | None = None
        self._frame: bytes | None = None
        self._ready = asyncio.Event()
        self.needs_past = True  # until the first frames with it

    def put(self, frame: bytes, past: bytes | None) -> None:
        """Hold the newest frame; it replaces one that was not taken."""
        self._frame = frame
        self._past = past or self._past
        self.needs_past = self.needs_past and past is None
        self._ready.set()

    async def take(self) -> bytes:
        """Wait for a frame, and return the history, if there is one, before it."""
        await self._ready.wait()
        self._ready.clear()
        frames = (self._past or b"") + (self._frame or b"")
        self._past = self._frame = None
        return frames


class Feed:
    """Frames of the stack as server-sent events: `past` once (five minutes of history), then `now` each second."""

    def __init__(self, settings: GatewaySettings, gateway_id: str) -> None:
        self._settings = settings
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._past: dict[str, dict[str, list[float]]] = {}
        self._gateway_id = gateway_id
        self._usage = ProcessUsage()
        self._read_lock = asyncio.Lock()  # one long history at a time

    async def history(self, seconds: int) -> bytes:
        """Return the history of every shard as JSON. Raise ApiError(503) when Redis does not answer."""
        async with self._read_lock:
            redis = connect(self._settings, connections=1, socket_timeout_s=2.0)
            try:
                return orjson.dumps(await StackReader(redis, self._settings.keys).histories(seconds, POINTS))
            except FAILED as error:
                raise unavailable(f"Redis does not answer: {error}; {RETRY}", "redis_unavailable", 5) from error
            finally:
                await _close(redis)

    def enter(self) -> Viewer:
        """Return a new viewer, which has to `leave`. Raise ApiError(503) when too many watch."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise unavailable(f"too many open pages (limit {MAX_VIEWERS}); close one", "too_many_viewers", 10)
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return viewer

    async def leave(self, viewer: Viewer) -> None:
        """Remove a viewer; the last one ends the reading."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            task, self._task = self._task, None
            await end(task)

    async def _run(self) -> None:
        """Read and send frames, until the last viewer has left."""
        redis = connect(self._settings, connections=1, socket_timeout_s=2.0)
        reader = StackReader(redis, self._settings.keys)
        self._past = {}
        try:
            while True:
                started_at = time.monotonic()
                frame = _event("now", await self._look(reader))
                is_past_due = bool(self._past) and any(viewer.needs_past for viewer in self._viewers)
                past = _event("past", self._past) if is_past_due else None
                for viewer in self._viewers:
                    viewer.put(frame, past if viewer.needs_past else None)
                await asyncio.sleep(max(0.1, EVERY_S - (time.monotonic() - started_at)))
        finally:
            await _close(redis)

    async def _look(self, reader: StackReader) -> View:
        try:
            view = await reader.look() | {"gateway": {"id": self._gateway_id, **self._usage.fields()}}
            for shard, state in view["shards"].items():
                await self._remember(reader, shard, state["stats"], view["time_ms"])
        except FAILED as error:
            return {"error": f"Redis does not answer: {str(error) or type(error).__name__}"}
        except (KeyError, TypeError, ValueError) as error:  # another version or program wrote it
            log.warning("state of the stack in Redis is unreadable: %r", error)
            return {"error": f"state of the stack in Redis is unreadable: {error!r}"}
        return view

    async def _remember(self, reader: StackReader, shard: str, stats: dict[str, Any], now_ms: int) -> None:
        """Keep five minutes of a shard: read them from Redis once, then append the statistics of each look."""
        if shard not in self._past:
            self._past[shard] = await reader.history(shard, now_ms - 1000 * HISTORY_S)
        columns = self._past[shard]
        at = stats.get("time_ms", 0)
        if not columns["time_ms"] or at > columns["time_ms"][-1]:
            for name in HISTORY:
                columns[name].append(stats.get(name, 0))
        late = next((i for i, t in enumerate(columns["time_ms"]) if t > at - 1000 * HISTORY_S), 0)
        for column in columns.values():
            del column[:late]


def _event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


async def _close(redis: Redis) -> None:
    try:
        await redis.aclose()
    except FAILED as error:
        log.debug("the feed's connection did not close: %s", error)

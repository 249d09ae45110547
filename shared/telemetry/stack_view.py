"""The view of a running stack in Redis, for the gateway's live page and for `orcinus top`.

`StackReader.look` takes two or three round trips and returns plain JSON. It reads only keys that docs/redis.md lists.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from shared.dead_letters import DeadLetters
from shared.keys import PLACER, PLACER_KEYS, Keys
from shared.placement import read_placements
from shared.wire.columns import unpack

DISCOVER_S = 10.0
EVENTS = 50
DEAD = 20
HISTORY_S = 300
LONGEST_S = 3600
"""The scheduler keeps an hour."""
HISTORY_ROWS = 60
"""Rows per read. A row has about seventy fields, so a larger read would delay the other clients of Redis."""

HISTORY = (
    "time_ms", "tok_s", "ttft_ms_p50", "ttft_ms_p99", "tbt_ms_p50", "tbt_ms_p99", "running", "waiting", "swapped",
    "waiting_realtime", "waiting_high", "waiting_normal", "waiting_low", "blocks_total", "blocks_free", "blocks_cached",
    "blocks_draining", "host_blocks_total", "host_blocks_free", "device_idle_pct", "step_ms",
    "finished", "cancelled", "failed", "ttft_predicted_ms_p50", "ttft_error_ms_p50", "cpu_pct", "rss_bytes",
)  # fmt: skip
"""The fields of `stats:{shard}:history` in the charts."""

ROLES = ("gateway", "scheduler", "worker")
View = dict[str, Any]


class StackReader:
    """Reads one model's stack. Raises what redis-py raises."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._shards: set[str] = set()
        self._alive: set[tuple[str, str]] = set()
        self._letters = DeadLetters()
        self._discovered_at = -math.inf
        self._redis_cpu: tuple[int, float] | None = None  # time of the last look, and what was used by then

    async def look(self) -> View:
        """Return the present view.

        Fields: `model`, `time_ms` (Redis's clock), `redis`, `queue`, `shards` (each with `led`, `stats`, `iterations`
        and `replicas`), `workers`, `gateways`, `schedulers`, `events` and `dead` (the newest first), `dead_rows`;
        `awake` where a placer lives: whether it wants the model to have workers.
        """
        if time.monotonic() - self._discovered_at > (DISCOVER_S if self._shards else 1.0):
            await self._discover()
        keys, shards, alive = self._keys, sorted(self._shards), sorted(self._alive)
        pipe = self._redis.pipeline(transaction=False)
        pipe.time()
        pipe.info("memory")
        pipe.info("cpu")
        pipe.hgetall(keys.queue)
        pipe.xrevrange(keys.events, count=EVENTS)
        pipe.xrevrange(keys.dead, count=DEAD)
        pipe.xlen(keys.dead)
        pipe.zrange(keys.workers, 0, -1, withscores=True)
        pipe.exists(PLACER_KEYS.lease(PLACER))
        pipe.hget(PLACER_KEYS.placements, keys.model)
        for shard in shards:
            pipe.exists(keys.lease(shard))
            pipe.hgetall(keys.stats(shard))
            pipe.hgetall(keys.iterations(shard))
            pipe.hgetall(keys.replicas(shard))
        for role, member in alive:
            pipe.get(keys.alive(role, member))
        (seconds, micros), memory, cpu, queue, events, dead, dead_rows, members, *rest = await pipe.execute()
        is_placed, placement, *rest = rest
        own_placement = read_placements({b"": placement}).get("") if is_placed and placement else None
        per_shard, beats = rest[: 4 * len(shards)], rest[4 * len(shards) :]
        rows = list(zip(shards, *(per_shard[at::4] for at in range(4)), strict=True))
        self._shards = {shard for shard, lease, stats, *_ in rows if lease or stats}
        heartbeats = {each: beat for each, beat in zip(alive, beats, strict=True) if beat is not None}
        now_ms = seconds * 1000 + micros // 1000
        return {
            "model": keys.model,
            "time_ms": now_ms,
            "redis": {
                "used_bytes": int(memory["used_memory"]),
                "most_bytes": int(memory.get("maxmemory", 0)),
                "rss_bytes": int(memory.get("used_memory_rss", 0)),
                "cpu_pct": self._redis_cpu_pct(float(cpu["used_cpu_sys"]) + float(cpu["used_cpu_user"]), now_ms),
            },
            "queue": _values(queue),
            "shards": {
                shard: {
                    "led": bool(lease),
                    "stats": _values(stats),
                    "iterations": _columns(columns),
                    "replicas": self._replicas(shard, replicas),
                }
                for shard, lease, stats, columns, replicas in rows
                if lease or stats
            },
            "workers": await self._workers(members, heartbeats, now_ms),
            "gateways": [
                {"id": name, "active": _value(b)} for (role, name), b in heartbeats.items() if role == "gateway"
            ],
            "schedulers": [
                {"id": name, "last_step": _value(b)} for (role, name), b in heartbeats.items() if role == "scheduler"
            ],
            "events": [{"id": _text(entry), **_values(fields)} for entry, fields in events],
            "dead": [{"id": _text(entry), **_values(fields)} for entry, fields in dead],
            "dead_rows": dead_rows,
            **({"awake": own_placement.awake} if own_placement is not None else {}),
        }

    def _redis_cpu_pct(self, cpu_s: float, now_ms: int) -> float:
        """Return the share of one core that Redis used since the last look; 0 at the first."""
        before, self._redis_cpu = self._redis_cpu, (now_ms, cpu_s)
        if before is None or now_ms <= before[0]:
            return 0.0
        return round(max(0.0, 100_000 * (cpu_s - before[1]) / (now_ms - before[0])), 1)

    async def histories(self, seconds: int, points: int) -> dict[str, dict[str, list[float]]]:
        """Return the columns HISTORY of every shard for the last `seconds`, thinned to about `points` rows."""
        await self._discover()
        now_s, _ = await self._redis.time()
        histories = {shard: await self.history(shard, 1000 * (int(now_s) - seconds)) for shard in sorted(self._shards)}
        for columns in histories.values():
            every = max(1, len(columns["time_ms"]) // points)
            for name, column in columns.items():
                columns[name] = column[::-every][::-1]  # the newest row stays
        return histories

    def _replicas(self, shard: str, rows: Mapping[bytes, bytes]) -> dict[str, Any]:
        """Return the figures of each replica; without those that cannot be read."""
        key = self._keys.replicas(shard)
        replicas = ((_text(name), self._letters.read(key, row, _figures)) for name, row in sorted(rows.items()))
        return {name: figures for name, figures in replicas if figures is not None}

    async def history(self, shard: str, since_ms: int) -> dict[str, list[float]]:
        """Return the columns HISTORY of one shard since a time of Redis's clock."""
        columns: dict[str, list[float]] = {name: [] for name in HISTORY}
        first = str(since_ms)
        while True:
            rows: Any = await self._redis.xrange(self._keys.stats_history(shard), min=first, count=HISTORY_ROWS)
            for _, fields in rows:
                for name, column in columns.items():
                    value = _value(fields.get(name.encode(), b"0"))
                    column.append(value if isinstance(value, int | float) else 0)
            if len(rows) < HISTORY_ROWS:
                return columns
            first = "(" + _text(rows[-1][0])

    async def _workers(self, members: Sequence[Any], heartbeats: Mapping[Any, bytes], now_ms: int) -> list[View]:
        """Return the workers of the last minute; `alive` is whether a worker still renews its record."""
        names = [(_text(name), float(score)) for name, score in members]
        pipe = self._redis.pipeline(transaction=False)
        for name, _ in names:
            pipe.hgetall(self._keys.worker(name))
        replies = await pipe.execute(raise_on_error=False) if names else []
        records = [
            self._letters.read(self._keys.worker(name), reply, _values) or {}
            for (name, _), reply in zip(names, replies, strict=True)
        ]
        return [
            {
                **record,
                "id": name,
                "alive": bool(record),
                "seen_s": max(0.0, round((now_ms - at) / 1000, 1)),
                "last_step": _value(heartbeats.get(("worker", name), b"0")),
            }
            for (name, at), record in zip(names, records, strict=True)
        ]

    async def _discover(self) -> None:
        """Find new shards and processes by SCAN; rarely, because it walks over all keys."""
        stats, alive = self._keys.stats(""), self._keys.alive("", "").removesuffix(":")
        self._alive = set()
        for start in (stats, alive):
            async for raw in self._redis.scan_iter(match=_literal(start) + "*", count=1000):
                rest = _text(raw).removeprefix(start)
                if start == stats and ":" not in rest:
                    self._shards.add(rest)
                elif start == alive and rest.partition(":")[0] in ROLES:
                    role, _, member = rest.partition(":")
                    self._alive.add((role, member))
        self._discovered_at = time.monotonic()


def _literal(pattern: str) -> str:
    return "".join(f"\\{char}" if char in "[]?*\\" else char for char in pattern)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _value(raw: bytes) -> float | int | str:
    """Return a finite number as such, anything else as text."""
    text = _text(raw)
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number) or text.strip() != text:
        return text
    return int(text) if text.lstrip("-").isdecimal() else number


def _figures(row: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError or TypeError for another text."""
    figures = json.loads(row)
    if not isinstance(figures, dict):
        raise TypeError("not a JSON object")
    return figures


def _values(record: Mapping[bytes, bytes]) -> dict[str, Any]:
    return {_text(name): _value(value) for name, value in record.items()}


def _columns(record: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return `last`, and the packed columns as lists."""
    return {
        _text(name): _value(raw) if name == b"last" else unpack(raw[: len(raw) // 4 * 4]).tolist()
        for name, raw in record.items()
    }

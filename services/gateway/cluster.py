"""Read the state of the stack from Redis once a second, oftener for a while without a led worker: leases,
workers, stats, memory.

One task with one connection; a request only reads attributes of the last snapshot, which holds limits and
forecasts computed when it was made. The task also writes the gateway's heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.gateway.progress import Observation, Progress
from services.gateway.request import Limits
from shared.dead_letters import ROWS, DeadLetters
from shared.keys import CLASSES, PLACER, PLACER_KEYS, Keys
from shared.placement import Placement
from shared.redis_client import Unreachable, connect
from shared.settings import GatewaySettings

log = logging.getLogger("orcinus.gateway")

EVERY_S = 1.0
UNSERVED_EVERY_S = 0.1
"""While no scheduler leads a worker: a request that comes before one is seen is refused."""
UNSERVED_S = 30.0
"""A stack that is unserved for longer is looked at as seldom as any other."""
DISCOVER_S = 10.0
DISCOVER_FIRST_S = 5.0
"""While no worker was found; `stats` shows sooner that there are some, and their limits."""
HEARTBEAT_MS = 5000
MAX_MEMORY_SHARE = 0.75
STALE_S = 5.0
"""A snapshot older than this is not used."""
CLOSE_S = 1.0
"""That a gateway which ends waits for Redis to delete its heartbeat."""
FIRST_LOAD_S = 120.0
"""A model that was woken may load for so long while its load has not been measured."""
PLACER_S = 15.0
"""A placer that was killed is started again within this time; until then its word counts."""
MAX_WORKERS = 256
"""Of one model, that are looked for by their names."""
MAX_SHARDS = 64
"""That are looked at also without a lease and statistics: they come back, as where Redis was emptied."""
MAX_EXACT = float(1 << 53)


@dataclass(slots=True)
class Snapshot:
    """One look at Redis. Hashes are as they were stored, decoded."""

    at: float
    leases: frozenset[str]
    workers: dict[str, dict[str, str]]
    stats: dict[str, dict[str, str]]
    memory_used: int = 0
    memory_most: int = 0
    queue: dict[str, str] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)  # key of a heartbeat -> the last step that it names
    renewal_times: dict[str, float] = field(default_factory=dict)  # shard -> when its stats were last seen to change
    placement: Placement | None = None  # what a placer that lives wants of the model; None where there is none
    placed_at: float = 0.0  # when the placement was first seen to be awake, or asleep, as it is
    memory_share: float = field(init=False)
    drain_tok_s: float = field(init=False)  # prompt tokens that leave the queue a second; 0 before it was measured
    forecasts: dict[str, Forecast] = field(init=False)  # by class; none for a class of which nothing is predicted

    def __post_init__(self) -> None:
        self.memory_share = self.memory_used / self.memory_most if self.memory_most else 0.0
        self.drain_tok_s = sum(self._drain_tok_s(stats) for stats in self.led_shards)
        forecasts = {priority: self._when_awake(self._forecast(priority), priority) for priority in CLASSES}
        self.forecasts = {priority: forecast for priority, forecast in forecasts.items() if forecast is not None}

    @property
    def is_served(self) -> bool:
        """Whether a scheduler leads a worker that has a record and does not seem to hang."""
        # The record of a process that is stopped runs out, and a worker with a step that hangs is overdue, before the
        # scheduler gives it up.
        return bool(self.workers) and any(
            number(stats.get("workers")) > number(stats.get("workers_overdue")) for stats in self.led_shards
        )

    @property
    def has_to_wait(self) -> bool:
        """Whether the model has no worker because of others: it sleeps, or was woken so lately that it may load."""
        if self.placement is None or self.is_served:
            return False
        load_s = self.placement.load_ms / 1000 or FIRST_LOAD_S
        return not self.placement.awake or self.at - self.placed_at <= load_s

    @property
    def observation(self) -> Observation:
        """Return what shows whether work moves; nothing while the model has no worker because of others."""
        if self.has_to_wait:
            return Observation()
        names = ("epoch", "last_step", "running", "waiting", "in_flight", "parked", "stranded")
        stats = {shard: {name: number(fields.get(name)) for name in names} for shard, fields in self.stats.items()}
        return Observation(self.leases, stats, self.steps, number(self.queue.get("requests")))

    def total(self, name: str) -> float:
        """Return the sum of one field of `stats` over all shards."""
        return sum(number(stats.get(name)) for stats in self.stats.values())

    @property
    def led_shards(self) -> list[dict[str, str]]:
        """Return the statistics of the shards with a lease and a scheduler that writes statistics."""
        return [stats for shard, stats in self.stats.items() if shard in self.leases and not self._is_silent(shard)]

    def _is_silent(self, shard: str) -> bool:
        """Whether a shard has written no statistics for STALE_S. Its lease may then be a foreign value."""
        return self.at - self.renewal_times.get(shard, self.at) > STALE_S

    def limits(self, fallback: Limits) -> Limits:
        """Return the limits that the schedulers' workers meet, by their statistics; those of `fallback`, the model's,
        without a worker.
        """

        def least(name: str) -> int:
            return min(
                (value for record in self.stats.values() if (value := int(number(record.get(name)))) > 0), default=0
            )

        context = least("max_model_len") or fallback.max_model_len
        return Limits(
            max_model_len=min(context, fallback.max_model_len),
            max_input_tokens=least("max_input_tokens"),
            max_output_tokens=least("max_output_tokens"),
            max_choices=fallback.max_choices,
        )

    def _drain_tok_s(self, stats: dict[str, str]) -> float:
        """Return prompt tokens of a shard that leave the queue a second: as fast as prompts run, or as sequences get
        slots and memory.
        """
        prefill, starts_s = number(stats.get("prefill_tok_s")), number(stats.get("starts_s"))
        tokens, requests = number(self.queue.get("tokens")), number(self.queue.get("requests"))
        return min(prefill, starts_s * tokens / requests) if starts_s > 0 and min(tokens, requests) > 0 else prefill

    def _when_awake(self, forecast: Forecast | None, priority: str) -> Forecast | None:
        """Return a forecast with the time that the placer names for a model without a worker."""
        if self.placement is None or self.is_served:
            return forecast
        wake_ms = self.placement.wake_ms[CLASSES.index(priority)]
        is_called = number(self.queue.get("requests")) > 0 or self.total("waiting") > 0
        stays_asleep = not self.placement.awake and not is_called
        forecast = forecast or Forecast(0.0, 0, 0.0)
        return replace(forecast, wake_ms=wake_ms, stays_asleep=stays_asleep) if wake_ms else forecast

    def _forecast(self, priority: str) -> Forecast | None:
        """Return the lowest wait that a led shard predicts for a request of that class. Return None, and so refuse no
        request, when one of the shards has nothing to run before it, has not measured its prefill rate, or has been
        silent.
        """
        forecasts = []
        for shard in self.leases & self.stats.keys():
            stats = self.stats[shard]
            queued_tokens = int(number(stats.get(f"queued_tokens_{priority}")))
            rate = number(stats.get("prefill_tok_s"))
            if not queued_tokens or not rate or self._is_silent(shard):
                return None
            predicted_ms = number(stats.get(f"predicted_ttft_ms_{priority}"))
            behind, starts_s = int(number(stats.get(f"behind_{priority}"))), number(stats.get("starts_s"))
            token_ms = number(stats.get("tbt_ms_p50"))
            forecasts.append(Forecast(predicted_ms, queued_tokens, rate, behind, starts_s, token_ms))
        return min(forecasts, key=lambda each: each.ttft_ms, default=None)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted wait of a request that comes now, by its class, at the best shard."""

    ttft_ms: float
    queued_tokens: int  # that have to run first
    prefill_tok_s: float
    behind: int = 0  # sequences that wait for slots or memory before it, where that is what takes longest
    starts_s: float = 0.0
    token_ms: float = 0.0  # between two tokens of a sequence
    wake_ms: float = 0.0  # until the model is awake, which is not counted in ttft_ms
    stays_asleep: bool = False  # the model sleeps, and no request waits that would wake it

    def behind_more(self, tokens: int, sequences: int) -> Forecast:
        """Return the forecast with so much more before it: at the pace of prompts or, where slots or memory are what is
        missing, of starts.
        """
        if self.behind and self.starts_s > 0:
            more_ms = 1000 * sequences / self.starts_s
        else:
            more_ms = 1000 * tokens / self.prefill_tok_s if self.prefill_tok_s else 0.0
        return replace(
            self,
            ttft_ms=self.ttft_ms + more_ms,
            queued_tokens=self.queued_tokens + tokens,
            behind=self.behind and self.behind + sequences,
        )

    @property
    def reason(self) -> str:
        """Return the reason for the wait."""
        if self.wake_ms:
            return f"the model is awake in {self.wake_ms:.0f} ms, and {self.queued_tokens} prompt tokens are before it"
        if self.behind:
            return f"{self.behind} sequences wait for slots or memory before it, {self.starts_s:.3g} start a second"
        return f"{self.queued_tokens} prompt tokens are before it, at {self.prefill_tok_s:.0f} a second"


class Cluster:
    """The last snapshot and what follows from it."""

    def __init__(
        self, settings: GatewaySettings, gateway_id: str, fallback: Limits, letters: DeadLetters | None = None
    ) -> None:
        self._letters = letters or DeadLetters()
        self._settings = settings
        self._keys: Keys = settings.keys
        self._fallback = fallback
        self._gateway_id = gateway_id
        self._redis: Redis = connect(settings, connections=1)
        self._shards = {settings.shard}
        self._worker_keys: set[str] = set()
        self._discovered_at = -DISCOVER_S
        self._beats: set[str] = set()
        self._progress = Progress(time.monotonic())
        self._placer = PlacerSeen()
        self.snapshot: Snapshot | None = None
        self.limits = fallback  # that every worker meets, as of the last look
        self.redis_error = "Redis has not answered yet"
        self.write_error = ""
        self.active = 0  # requests that this gateway delivers
        self.unfinished_count = 0  # those of them that have not ended
        self.has_looked = asyncio.Event()
        """Set behind the first look, also one that failed."""
        self.drain_asked = asyncio.Event()
        """Set when an operator drains this gateway."""

    async def run(self) -> None:
        """Look once a second, oftener for a while without a led worker, until cancelled."""
        heard = True  # so that the first failure is logged
        served_at = time.monotonic()
        while True:
            started_at = time.monotonic()
            try:
                self.snapshot = await self.look()
                self.limits = self.snapshot.limits(self._fallback)
                if self.redis_error:
                    log.info("Redis answers")
                self.redis_error, heard = "", True
                unfinished = 0 if self.snapshot.has_to_wait else self.unfinished_count
                self._progress.look(self.snapshot.observation, unfinished, time.monotonic())
            except (*Unreachable, RedisError) as error:
                if heard:
                    log.warning("waiting for Redis: %s", error)
                heard = False
                self.redis_error = str(error) or type(error).__name__
                self._progress.look(None, self.unfinished_count, time.monotonic())
            self.has_looked.set()
            if not heard or not self.reason_unserved():
                served_at = started_at  # a leader takes over behind an outage of Redis, too
            if heard:
                is_settled = served_at == started_at or started_at - served_at > UNSERVED_S
                pause = EVERY_S if is_settled else UNSERVED_EVERY_S
            else:  # Jitter: behind a restart of Redis not every gateway comes back in the same moment.
                pause = EVERY_S * random.uniform(0.5, 1.0)  # noqa: S311
            await asyncio.sleep(max(0.05, pause - (time.monotonic() - started_at)))

    async def close(self) -> None:
        """Delete the heartbeat, for which a silent Redis has a second, and close the connection."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._redis.delete(self._keys.alive("gateway", self._gateway_id))
        except (TimeoutError, *Unreachable, RedisError) as error:
            log.warning("heartbeat not deleted: %s", error)
        await self._redis.aclose()

    def note_unreachable(self, error: str) -> None:
        """Refuse new work until the next look at Redis succeeds; called by a task that saw Redis fail."""
        self.redis_error = error

    def reason_not_ready(self) -> str:
        """Return an empty text when new work would be served."""
        return self.reason_of_redis() or self.reason_unserved()

    def reason_of_redis(self) -> str:
        """Return an empty text when Redis takes new work, whatever the model."""
        if self.redis_error:
            return f"Redis does not answer: {self.redis_error}"
        if self.snapshot is None or time.monotonic() - self.snapshot.at > STALE_S:
            return "nothing has been heard from Redis"
        if self.write_error:  # before what follows from it: leases and records run out
            return f"Redis refuses to write: {self.write_error}"
        if self.snapshot.memory_share > MAX_MEMORY_SHARE:
            return f"Redis uses {self.snapshot.memory_share:.0%} of its memory"
        return ""

    def reason_unserved(self) -> str:
        """Return an empty text when a scheduler leads a worker of the model, as of the last look."""
        if self.snapshot is None or not self.snapshot.leases:
            return "no scheduler is alive"
        if self.snapshot.placement is not None or self.snapshot.is_served:
            return ""  # a placed model has its turn
        if not self.snapshot.workers:
            return "no worker is registered"
        has_linked = any(number(stats.get("workers")) for stats in self.snapshot.led_shards)
        return "no linked worker answers its steps" if has_linked else "no worker is linked to a scheduler"

    @property
    def is_silent(self) -> bool:
        """Whether Redis has not answered lately, so that the snapshot says nothing of now."""
        return bool(self.redis_error) or self.snapshot is None or time.monotonic() - self.snapshot.at > STALE_S

    def stalled_s(self) -> float:
        """Return the seconds in which work was there and no step was answered; 0 when all is well."""
        return self._progress.find_stall(time.monotonic())[0]

    def reason_stalled(self) -> str:
        """Return an empty text while work, if there is any, has moved within `progress_timeout_s`."""
        seconds, place = self._progress.find_stall(time.monotonic())
        if seconds <= self._settings.progress_timeout_s:
            return ""
        return f"{place} has work, and no step was answered for {seconds:.0f} s"

    async def look(self) -> Snapshot:
        pause = DISCOVER_S if self._worker_keys else DISCOVER_FIRST_S
        if time.monotonic() - self._discovered_at >= pause:
            await self._discover()
        shards, workers = sorted(self._shards), sorted(self._worker_keys)
        pipe = self._redis.pipeline(transaction=False)
        beat, beats = self._keys.alive("gateway", self._gateway_id), sorted(self._beats)
        pipe.set(beat, self.active, px=HEARTBEAT_MS)
        pipe.pexpire(beat, HEARTBEAT_MS)  # this one a Redis without memory takes as well
        pipe.exists(self._keys.drain("gateway", self._gateway_id))
        pipe.mget([beat, *beats])
        pipe.info("memory")
        pipe.hgetall(self._keys.queue)
        pipe.zrange(self._keys.workers, 0, MAX_WORKERS - 1)
        ask_placement(pipe, self._keys.model)
        for shard in shards:
            pipe.exists(self._keys.lease(shard))
            pipe.hgetall(self._keys.stats(shard))
        for key in workers:
            pipe.hgetall(key)
        replies = await pipe.execute(raise_on_error=False)
        # A Redis without memory left, or that may not write, refuses the heartbeat; the rest can still be read.
        self.write_error = str(replies[0]) if isinstance(replies[0], Exception) else ""
        for reply in replies[2:5]:
            if isinstance(reply, Exception):
                raise reply
        _, drain, heartbeats, memory, queue, members, is_placed, placement, *rest = replies[1:]
        if drain:
            self.drain_asked.set()
        per_shard, per_worker = rest[: 2 * len(shards)], rest[2 * len(shards) :]
        records = (
            (key, self._letters.read(key, record, _text)) for key, record in zip(workers, per_worker, strict=True)
        )
        worker_records = {key: record for key, record in records if record}
        new = [] if isinstance(members, Exception) else members  # of another type: SCAN finds the workers
        self._worker_keys = set(worker_records) | {self._keys.worker(each.decode("utf-8", "replace")) for each in new}
        fields_of = (
            (shard, self._letters.read(self._keys.stats(shard), fields, _text))
            for shard, fields in zip(shards, per_shard[1::2], strict=True)
        )
        stats = {shard: fields for shard, fields in fields_of if fields}
        leases = frozenset(shard for shard, held in zip(shards, per_shard[::2], strict=True) if held)
        if len(shards) > MAX_SHARDS:  # SCAN finds those that come back
            self._shards = {self._settings.shard, *leases, *stats}
        await self._bury()
        now = time.monotonic()
        turn = placement_of(self._placer.lives(is_placed, now), placement)
        return Snapshot(
            at=now,
            leases=leases,
            workers=worker_records,
            stats=stats,
            memory_used=int(memory.get("used_memory", 0)),
            memory_most=int(memory.get("maxmemory", 0)),
            queue=self._letters.read(self._keys.queue, queue, _text) or {},
            steps={
                key: step.decode("utf-8", "replace")
                for key, step in zip(beats, heartbeats[1:], strict=True)
                if step is not None
            },
            renewal_times=renewed_at(stats, self.snapshot, now),
            placement=turn,
            placed_at=placed_at(turn, self.snapshot, now),
        )

    async def _bury(self) -> None:
        """Append records that could not be read to `dead`."""
        if rows := self._letters.take():
            now_ms = int(time.time() * 1000)
            pipe = self._redis.pipeline(transaction=False)
            for row in rows:
                pipe.xadd(self._keys.dead, dict[Any, Any]({"time_ms": now_ms, **row}), maxlen=ROWS, approximate=True)
            for reply in await pipe.execute(raise_on_error=False):
                if isinstance(reply, Exception):
                    log.warning("row of %s not written: %s", self._keys.dead, reply)

    async def _discover(self) -> None:
        """Find shards, workers and heartbeats by SCAN; rarely, because it walks the keys."""
        lease, worker = self._keys.lease(""), self._keys.worker("")
        beats = tuple(self._keys.alive(role, "") for role in ("scheduler", "worker"))
        names = set()
        async for raw in self._redis.scan_iter(match=_literal(self._keys.prefix) + "[law]*", count=1000):
            key = raw.decode("utf-8", "replace")
            if key.startswith(lease):
                self._shards.add(key.removeprefix(lease))
            elif key.startswith(worker):
                self._worker_keys.add(key)
            elif key.startswith(beats):
                names.add(key)
        self._beats = names
        self._discovered_at = time.monotonic()


def ask_placement(pipe: Any, model: str) -> None:
    """Ask in a pipeline for what `placement_of` takes."""
    pipe.exists(PLACER_KEYS.lease(PLACER))
    pipe.hget(PLACER_KEYS.placements, model)


class PlacerSeen:
    """When the placer was last seen to live, by this process's clock."""

    def __init__(self) -> None:
        self._at = -PLACER_S

    def lives(self, is_placed: Any, now: float) -> bool:
        """Return whether it lives, or did just now and is about to be there again.

        is_placed: the reply to `ask_placement`.
        """
        if is_placed == 1:
            self._at = now
        return now - self._at < PLACER_S


def placed_at(placement: Placement | None, before: Snapshot | None, now: float) -> float:
    """Return when the last change of `awake` was first seen, by this process's clock: Redis may have another."""
    if placement is None or before is None or before.placement is None:
        return now
    return before.placed_at if before.placement.since_ms == placement.since_ms else now


def placement_of(is_placed: bool, raw: Any) -> Placement | None:
    """Return what the placer wants of a model; None without a placer that lives, and for a reply that is no record."""
    if not is_placed or not isinstance(raw, bytes):
        return None
    try:
        return Placement.decode(raw)
    except (ValueError, TypeError):
        return None


def renewed_at(stats: dict[str, dict[str, str]], before: Snapshot | None, now: float) -> dict[str, float]:
    """Return when each shard's stats were last seen to change, by this process's clock: a shard may have another.

    When the last look is older than STALE_S, count from now: Redis was away, so no shard could write.
    """
    past = before if before is not None and now - before.at <= STALE_S else None
    return {
        shard: past.renewal_times[shard]
        if past and shard in past.renewal_times and past.stats[shard].get("time_ms") == fields.get("time_ms")
        else now
        for shard, fields in stats.items()
    }


def _literal(pattern: str) -> str:
    return "".join(f"\\{char}" if char in "[]?*\\" else char for char in pattern)


def _text(record: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in record.items()}


def number(value: str | None) -> float:
    """Return a finite number below 2^53 in text; 0 for any other text."""
    try:
        result = float(value or 0)
    except ValueError:
        return 0.0
    return result if abs(result) < MAX_EXACT else 0.0  # nan is not

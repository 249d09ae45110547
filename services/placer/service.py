"""The placer's process: look at Redis four times a second, decide, write what each model is to do.

Only the holder of the lease writes. Its decisions are in Redis, so a placer that is started after a crash continues
from them. Each Redis has one placer. A second one waits if it is for the same models, else it ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from redis.asyncio import Redis

from services.placer.decide import Demand, choose, wake_ms
from shared.dead_letters import DeadLetters, printable, remove_foreign
from shared.errors import ConfigurationError, LeaseLostError
from shared.keys import CLASSES, PLACER, PLACER_KEYS, Keys
from shared.lease import Lease
from shared.messages import hide_password
from shared.models.models_file import read_models
from shared.placement import MAX_FAILED, MAX_MS, Placement, read_placements
from shared.processes.begun import has_begun
from shared.redis_client import WRONG_TYPE, Scripts, Unavailable, Value, connect, persist, temporary
from shared.settings import PlacerSettings
from shared.tasks import end, first_of, within
from shared.telemetry import logs

log = logging.getLogger("orcinus.placer")

LOOK_S = 0.25
LEASE_MS = 2000
WRITE_S = 1.0
"""Interval at which wake times are written; a decision is written at once."""
STOP_S = 2.0
GROWTH = 4
"""A load counts as at most so many times the one before."""
LEAVE_MS = 10_000
"""A worker that serves so long after its model woke again is not about to end."""


def run(settings: PlacerSettings) -> int:
    """Run until stopped; return 0 after SIGTERM or SIGINT, 1 when another placer has the lease.

    Raise ConfigurationError for a file in which all models stay awake, and at a Redis with a placer for other models.
    """
    logs.setup("placer", settings.log_level, settings.log_json)
    file = read_models(settings.models)
    if not file.awake:
        raise ConfigurationError(
            f"{settings.models}: all models stay awake; write `awake: 1` to let them take turns, or run no placer"
        )
    return asyncio.run(Placer(settings, [entry.name for entry in file.models], file.awake).run())


class Placer:
    """Decides for these models, at most so many of them awake."""

    def __init__(self, settings: PlacerSettings, models: Iterable[str], most: int) -> None:
        self._redis: Redis = connect(settings, connections=2)
        self._address = hide_password(settings.redis_url)
        self._lease = Lease(Scripts(self._redis), PLACER_KEYS, PLACER, LEASE_MS)
        self._models = {name: Keys(name) for name in models}
        self._shard = settings.shard
        self._max_slots = most
        self._placements: dict[str, Placement] = {}
        self._watches = {name: _Watch() for name in self._models}
        self._written_at = 0.0  # monotonic s
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Return the exit status. Raise ConfigurationError while a placer for other models lives."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        try:
            await first_of(self._acquire(), self._stop.wait())
            if self._stop.is_set():
                return 0
            keep = asyncio.create_task(self._lease.keep())
            try:
                await first_of(keep, self._place(), self._stop.wait())
            finally:
                await end(keep)
            return 0 if self._stop.is_set() else 1
        except LeaseLostError as error:
            log.error("%s; stopping", error)
            return 1
        finally:
            if self._lease.epoch:
                await within(STOP_S, self._lease.release())
            await within(STOP_S, self._redis.aclose())

    async def _acquire(self) -> None:
        await first_of(self._lease.acquire(self._stop.is_set), self._look_for_another())
        has_begun()

    async def _look_for_another(self) -> None:
        """Raise ConfigurationError once a placer for other models is seen to live: it has renewed its lease.

        Delete keys of other types meanwhile: with them no placer begins.
        """
        holder = None
        while True:
            await persist("look for keys of other types", self._repair, log)
            lease = await persist("look for another placer", lambda: self._redis.get(self._lease.key), log)
            has_begun()
            if lease is not None and lease == holder:
                names = read_placements(await persist("read the placements", self._read_placements, log)).keys()
                if names and names != self._models.keys():
                    others = printable(", ".join(sorted(names)))
                    raise ConfigurationError(
                        f"Redis at {self._address}: has a placer for other models, {others}; "
                        "stop its stack, or unset ORCINUS_REDIS_URL to let this one start its own Redis"
                    )
            holder = lease
            await asyncio.sleep(1.5 * LEASE_MS / 1000)

    async def _read_placements(self) -> Any:
        return await self._redis.hgetall(PLACER_KEYS.placements)

    async def _repair(self) -> None:
        """Delete keys of the placer that have another type than it gives them."""
        strings = [PLACER_KEYS.lease(PLACER), PLACER_KEYS.epoch, PLACER_KEYS.shard_epoch(PLACER)]
        types = dict.fromkeys(strings, "string") | {PLACER_KEYS.placements: "hash"}
        await remove_foreign(self._redis, DeadLetters(PLACER), types)

    async def _place(self) -> None:
        await persist("read the placements", self._begin, log, self._stop.is_set)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stop.wait()
            try:
                now_ms, demands = await self._look()
                await self._decide(now_ms, demands)
            except Unavailable as error:
                if not temporary(error):
                    raise
                log.warning("models not looked at: %s; retrying", error)
                if WRONG_TYPE in str(error):
                    await persist("look for keys of other types", self._repair, log, self._stop.is_set)

    async def _begin(self) -> None:
        await self._repair()
        await self._restore()

    async def _restore(self) -> None:
        """Go on with what the placer before wanted; at first the first models of the file are awake."""
        raw_records = await self._read_placements()
        placements = read_placements(raw_records)
        self._placements = {name: placements[name] for name in self._models if name in placements}
        awake = [name for name, placement in self._placements.items() if placement.awake][: self._max_slots]
        now_ms = await self._now_ms()
        for name in self._models:
            before = self._placements.get(name, Placement(False, since_ms=now_ms))
            is_awake = name in (awake or list(self._models)[: self._max_slots])
            has_changed = before.awake != is_awake
            since_ms = now_ms if has_changed else min(before.since_ms, now_ms)
            self._placements[name] = replace(before, awake=is_awake, since_ms=since_ms)
            self._watches[name] = _Watch(has_changed and is_awake, now_ms - since_ms)
        await self._write(raw_records.keys() - {name.encode() for name in self._models})
        log.info("awake: %s", ", ".join(self._awake()))

    def _awake(self) -> list[str]:
        return [name for name, placement in self._placements.items() if placement.awake]

    async def _now_ms(self) -> int:
        seconds, micros = await self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def _look(self) -> tuple[int, list[Demand]]:
        """Return Redis's clock and what each model has to do."""
        pipe: Any = self._redis.pipeline(transaction=False)
        pipe.time()
        for keys in self._models.values():
            pipe.exists(keys.lease(self._shard))
            pipe.hmget(
                keys.stats(self._shard), "workers", "resuming", "parked", "suspects", "stranded", "waiting", "running"
            )
            pipe.hmget(keys.queue, "requests")
            for stream in keys.request_streams():
                pipe.xrange(stream, count=1)
        clock, *replies = await pipe.execute(raise_on_error=False)
        if isinstance(clock, Exception):
            raise clock
        now_ms, answers = clock[0] * 1000 + clock[1] // 1000, iter(replies)
        demands = []
        for name in self._models:
            is_led = next(answers) == 1
            workers, resuming_tokens, parked_count, *work = _counts(next(answers), 7) + _counts(next(answers), 1)
            ages = {
                priority: now_ms - _entry_ms(rows[0][0])
                for priority in CLASSES
                if isinstance(rows := next(answers), list) and rows
            }
            if parked_count and not any(work):  # these wait for a client, not for a worker
                ages = {}
            demands.append(self._demand(name, is_led and workers > 0, resuming_tokens > 0, ages))
        return now_ms, demands

    def _demand(self, name: str, is_ready: bool, resumes: bool, ages_ms: dict[str, int]) -> Demand:
        placement, watch = self._placements[name], self._watches[name]
        watch.look(placement.awake, is_ready, resumes, bool(ages_ms))
        if watch.has_loaded:
            load_ms = max(1, min(MAX_MS, watch.ms("decided"), GROWTH * placement.load_ms or MAX_MS))
            log.info("%s serves, %.1f s after the decision", name, load_ms / 1000)
            self._placements[name] = placement = replace(placement, load_ms=load_ms)
        if watch.ms("ready") and placement.failed:
            self._placements[name] = placement = replace(placement, failed=0)
        # The id of an entry is of the future behind a foreign one, and after Redis's clock was set back.
        ages_ms = {priority: age if age >= 0 else watch.ms("busy") for priority, age in ages_ms.items()}
        if not placement.awake:  # before, it was its turn
            ages_ms = {priority: min(age, watch.ms("decided")) for priority, age in ages_ms.items()}
        times = watch.ms("ready"), watch.resuming_ms, watch.ms("loading"), watch.ms("idle")
        return Demand(name, placement.awake, *times, placement.load_ms, placement.failed, ages_ms)

    async def _decide(self, now_ms: int, demands: list[Demand]) -> None:
        awake = choose(demands, self._max_slots)
        changes = [each for each in demands if each.is_awake != (each.name in awake)]
        for each in changes:
            is_awake = not each.is_awake
            failed_loads = each.failed_loads + int(each.is_awake and not each.ready_ms)
            self._placements[each.name] = replace(
                self._placements[each.name], awake=is_awake, since_ms=now_ms, failed=min(MAX_FAILED, failed_loads)
            )
            self._watches[each.name] = _Watch(is_awake)
            log.info("%s: %s", each.name, f"wakes, waited for {each.waiting_ms} ms" if is_awake else "sleeps")
            if failed_loads > each.failed_loads:
                passed_s = each.loading_ms / 1000
                log.warning("%s: no worker served in %.0f s; the load counts as failed", each.name, passed_s)
        if not changes and time.monotonic() - self._written_at < WRITE_S:
            return
        if changes:
            marks = {each.name: each.name in awake for each in changes}
            demands = [
                replace(each, is_awake=marks[each.name], ready_ms=0, resuming_ms=0, loading_ms=0)
                if each.name in marks
                else each
                for each in demands
            ]
        for each in demands:
            waits = tuple(min(MAX_MS, wait) for wait in wake_ms(each, demands, self._max_slots))
            self._placements[each.name] = replace(self._placements[each.name], wake_ms=waits)
        await self._write(())

    async def _write(self, old_fields: Iterable[bytes]) -> None:
        """Write all placements, and delete the fields that are gone. Raise LeaseLostError, Unavailable."""
        key = PLACER_KEYS.placements
        words = [word for name, placement in self._placements.items() for word in (name, placement.encode())]
        deleted: list[list[Value]] = [["HDEL", key, name] for name in old_fields]
        await self._lease.write(["HSET", key, *words], *deleted)
        self._written_at = time.monotonic()


class _Watch:
    """For how long something is true of one model, in ms: `ms("ready")`.

    By the clock of this process: that of Redis may be set.
    """

    def __init__(self, is_woken: bool = False, decided_ms: int = 0) -> None:
        """is_woken: whether this placer has just woken it, and so measures its load; decided_ms: since the decision."""
        self._is_measured = is_woken
        self._is_begun = False  # no worker has served since, such as one of the time before that had not ended yet
        self._has_resumed = False
        self._now = time.monotonic()
        self._since = {"decided": self._now - decided_ms / 1000}  # fact -> monotonic s
        self.has_loaded = False
        """Whether the last look was the first at which it served."""
        self.resuming_ms = 0
        """How long it recomputed lost KV, from when it began to serve."""

    def look(self, is_awake: bool, is_ready: bool, resumes: bool, has_work: bool) -> None:
        self._now = now = time.monotonic()
        is_ready &= is_awake  # a worker that is about to go does not count
        is_loading = is_awake and not is_ready
        facts = {"decided": True, "ready": is_ready, "loading": is_loading, "idle": not has_work, "busy": has_work}
        self._since = {fact: self._since.get(fact, now) for fact, is_true in facts.items() if is_true}
        self._is_begun |= not is_ready
        if not is_ready:
            self.resuming_ms, self._has_resumed = 0, False
        elif resumes and not self._has_resumed:
            self.resuming_ms = self.ms("ready")
        else:
            self._has_resumed = True
        self.has_loaded = self._is_measured and self._is_begun and is_ready
        self._is_measured &= not self.has_loaded and self.ms("ready") < LEAVE_MS

    def ms(self, fact: Literal["decided", "ready", "loading", "idle", "busy"]) -> int:
        """Return for how long it was true at the last look, at least 1; 0 if it was not."""
        since = self._since.get(fact)
        return 0 if since is None else max(1, int(1000 * (self._now - since)))


def _counts(reply: Any, count: int) -> list[int]:
    """Return whole numbers of a hash; 0 for another text, or a key of another type."""
    texts = reply if isinstance(reply, list) else [None] * count
    return [int(raw) if raw is not None and raw.isdigit() and len(raw) < 16 else 0 for raw in texts]


def _entry_ms(entry: bytes) -> int:
    """Return the time at which an entry of a stream was added."""
    return int(entry.partition(b"-")[0])

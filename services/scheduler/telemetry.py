"""What the scheduler reports about itself: statistics once a second, heartbeat, events, dead requests.

Window, StartRate, Iterations and Stats are pure: the service feeds them and calls `snapshot`. Reports writes to Redis
beside the hot path; a report that is lost affects no request. Fields: docs/operations.md#stats.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from redis.asyncio import Redis

from services.scheduler.core.stats import FirstTokens
from services.scheduler.core.types import NewRequest, Outcome
from services.scheduler.metrics import Metrics
from services.scheduler.tracing import RequestTimes
from shared import dead_letters
from shared.errors import LeaseLostError
from shared.keys import CLASSES, Keys
from shared.lease import Lease
from shared.processes.begun import has_begun
from shared.redis_client import KEPT_TTL_MS, LIVE_TTL_MS, Unavailable, Value
from shared.tasks import end
from shared.telemetry.process_usage import ProcessUsage
from shared.wire.columns import pack

log = logging.getLogger("orcinus.scheduler")

ROWS = 200
COLUMNS = ("idle_us", "step_us", "decode", "prefill", "replica")
"""Time the device waited before the step, duration of the step, tokens of decodes and of prompts, replica."""

_INT32_MAX = np.iinfo(np.int32).max


class Iterations:
    """A ring of the last ROWS answered steps, for the live page and `orcinus top`."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, ...]] = deque(maxlen=ROWS)
        self._count = 0

    def add(self, idle_ns: int, step_ns: int, decode: int, prefill: int, replica: int) -> None:
        """Add a step that was answered."""
        self._rows.append((idle_ns // 1000, step_ns // 1000, decode, prefill, replica))
        self._count += 1

    def fields(self) -> dict[str, int | bytes]:
        """Return the hash: `last`, the number of steps answered so far, and each column as int32, oldest first."""
        rows = np.minimum(np.array(self._rows, np.int64).reshape(-1, len(COLUMNS)), _INT32_MAX)
        return {"last": self._count, **{name: pack(rows[:, at]) for at, name in enumerate(COLUMNS)}}


HISTORY_ROWS = 3600
EVENTS_ROWS = 10_000
DEAD_ROWS = dead_letters.ROWS
HEARTBEAT_MS = 5_000


class Reports:
    """Writes reports to Redis; each stream is bounded and each key has a TTL."""

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
        """Write the heartbeat of this process with its last applied step, until cancelled."""
        while True:
            try:
                await self._redis.set(self._alive, self.last_step, px=HEARTBEAT_MS)
                has_begun()
            except Unavailable as error:
                log.warning("heartbeat not written: %s; retrying", error)
            await asyncio.sleep(HEARTBEAT_MS / 5000)

    async def close(self) -> None:
        """Write the pending records, then delete the heartbeat: a clean stop."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._redis.delete(self._alive)
        except Unavailable as error:
            log.warning("heartbeat not deleted: %s; it expires", error)
        finally:
            await end(*self._tasks)

    async def stats(
        self,
        fields: Mapping[str, float | int | str],
        iterations: Mapping[str, int | bytes],
        replicas: Mapping[str, Mapping[str, float | int | str]],
    ) -> None:
        """Rewrite `stats:{shard}`, `stats:{shard}:iterations` and `stats:{shard}:replicas` (by worker id), and append
        the first to its history. Raises LeaseLostError.
        """
        key, history = self._keys.stats(self._shard), self._keys.stats_history(self._shard)
        last, each = self._keys.iterations(self._shard), self._keys.replicas(self._shard)
        rows: list[Value] = [word for name, figures in replicas.items() for word in (name, json.dumps(figures))]
        row: list[Value] = [word for item in fields.items() for word in item]
        iteration_row: list[Value] = [word for item in iterations.items() for word in item]
        replica_commands: list[list[Value]] = [["HSET", each, *rows], ["PEXPIRE", each, KEPT_TTL_MS]] if rows else []
        await self._lease.write(
            ["HSET", key, *row],
            ["PEXPIRE", key, KEPT_TTL_MS],
            ["XADD", history, "MAXLEN", "~", HISTORY_ROWS, "*", *row],
            ["PEXPIRE", history, LIVE_TTL_MS],
            ["HSET", last, *iteration_row],
            ["PEXPIRE", last, KEPT_TTL_MS],
            ["DEL", each],  # forget replicas that are lost
            *replica_commands,
        )

    async def gateways_alive(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that have a heartbeat."""
        wanted = list(names)
        beats = await self._redis.mget([self._keys.alive("gateway", name) for name in wanted]) if wanted else []
        return {name for name, beat in zip(wanted, beats, strict=True) if beat is not None}

    def event(self, kind: str, text: str, first: Sequence[Value] = (), **ids: str) -> None:
        """Append to `events` in the background. first: a write command that is carried out together with it."""
        self._later(self._append(self._keys.events, EVENTS_ROWS, {"kind": kind, "text": text, **ids}, first))

    def dead(self, request_id: str, text: str) -> None:
        """Record a request that kept failing."""
        self.event("dead", text, request=request_id)
        self._later(self._append(self._keys.dead, DEAD_ROWS, {"request": request_id, "text": text}))

    async def letters(self, rows: Sequence[Mapping[str, Value]]) -> None:
        """Append records that could not be read to `dead`. Raises LeaseLostError."""
        now_ms = int(time.time() * 1000)
        if rows:
            await self._lease.write(
                *(dead_letters.append(self._keys.dead, {"shard": self._shard, **row}, now_ms) for row in rows)
            )

    async def _append(self, key: str, rows: int, fields: dict[str, str], first: Sequence[Value] = ()) -> None:
        row = {"time_ms": str(int(time.time() * 1000)), "shard": self._shard, **fields}
        words = [word for item in row.items() for word in item]
        append: Sequence[Value] = ["XADD", key, "MAXLEN", "~", rows, "*", *words]
        try:
            await self._lease.write(*([first] if first else []), append)
        except (*Unavailable, LeaseLostError) as error:
            log.warning("record not written: %s: %s", fields, error)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


VERSION = 1
WINDOW_NS = 60_000_000_000
WINDOW_SAMPLES = 1 << 15
FORECAST_SAMPLES = 1 << 11  # of one class

OVERHEAD_SAMPLES = 32  # of the latest first tokens
OVERHEAD_MS, OVERHEAD_STEPS = 250.0, 4
"""Bound of the learnt overhead: so long, and so many steps."""

RATE_FADE_S = 30.0
"""Time constant of the rate of first tokens while sequences wait."""
MIN_STARTS = 2  # and at least as many as run: every slot was taken anew once


EMPTY_NS = np.zeros(0, np.int64)
COUNTED_AT_ONCE = 16
"""Outcomes of steady decode that are counted in one go. Reports miss none: each counts all before."""


class Window:
    """The samples of the last minute, at most 32,768 of them: a ring of (time, value)."""

    def __init__(self, samples: int = WINDOW_SAMPLES) -> None:
        self._at = np.zeros(samples, np.int64)
        self._values = np.zeros(samples, np.float64)
        self._next_index = 0
        self._size = 0

    def add(self, values: npt.NDArray[Any], now_ns: int) -> None:
        """Append values; the oldest are overwritten."""
        values = values[-self._at.size :]
        rows = np.arange(self._next_index, self._next_index + values.size) % self._at.size
        self._at[rows] = now_ns
        self._values[rows] = values
        self._next_index = int((self._next_index + values.size) % self._at.size)
        self._size = min(self._at.size, self._size + values.size)

    def percentiles(self, now_ns: int, *points: float) -> list[float]:
        """Return percentiles of the last minute; zeros when it is empty."""
        recent = self._values[: self._size][self._at[: self._size] > now_ns - WINDOW_NS]
        return [float(value) for value in np.percentile(recent, points)] if recent.size else [0.0] * len(points)


class StartRate:
    """The rate at which sequences start while other sequences wait for slots or memory.

    Starts come in bursts, as sequences that start together end together. So time is counted from start to start and
    never up to the moment of a report, which may be just before a burst or just after it.
    """

    def __init__(self, now_ns: int) -> None:
        self._looked_ns = self._last_ns = now_ns
        self._since_ns = -1  # no sequence waited at that time; -1: none waits
        self._starts = self._seconds = 0.0  # both fade with RATE_FADE_S
        self._count = 0

    def count_starts(self, starts: int, now_ns: int) -> None:
        """Count sequences that got their first tokens."""
        if not starts:
            return
        if self._since_ns >= 0:
            seconds = max(0, now_ns - max(self._last_ns, self._since_ns)) / 1e9
            keep = math.exp(-seconds / RATE_FADE_S)
            self._starts = keep * self._starts + starts
            self._seconds = keep * self._seconds + seconds
            self._count += starts
        self._last_ns = now_ns

    def look(self, waiting: int, now_ns: int) -> None:
        """Take the number of waiting sequences; 0 resets the rate."""
        if not waiting:
            self._since_ns, self._starts, self._seconds, self._count = -1, 0.0, 0.0, 0
        elif self._since_ns < 0:
            self._since_ns = self._looked_ns
        self._looked_ns = now_ns

    def rate(self, running: int, now_ns: int) -> float:
        """Return starts per second with `running` running sequences; 0 until enough starts were seen.

        Without starts for long the rate falls, as if the running sequences were the next burst.
        """
        if self._count < max(running, MIN_STARTS) or not self._seconds:
            return 0.0
        silent = max(0, now_ns - max(self._last_ns, self._since_ns)) / 1e9
        return min(self._starts / self._seconds, (self._starts + running) / (self._seconds + silent))


class Overhead:
    """The median of what the latest first tokens took beyond what the core's queues and steps explain."""

    def __init__(self, least_ms: float) -> None:
        """least_ms: the smallest value that is learnt."""
        self._least_ms = least_ms
        self._samples_ms: deque[float] = deque(maxlen=OVERHEAD_SAMPLES)

    def add(self, excess_ms: float) -> None:
        """Take one first token."""
        self._samples_ms.append(excess_ms)

    def value_ms(self, step_ms: float) -> float | None:
        """Return the median; None if no first token was measured yet.

        step_ms: of the mean step. More than a few steps is no overhead but a queue, which the core has to predict: the
        bound keeps an overload that is over from refusing requests.
        """
        if not self._samples_ms:
            return None
        median = float(np.median(self._samples_ms))
        return min(max(median, self._least_ms), OVERHEAD_MS + OVERHEAD_STEPS * step_ms)


@dataclass(slots=True)
class Promise:
    """What was predicted for a request, in ms: without an overhead, and with it; None before any was learnt."""

    reported_ms: float  # by the last report before the request came, which the gateway had to go by
    own_ms: float  # by the scheduler as it took the request
    predicted_ms: float | None


class Forecasts:
    """Predicts the time to first token of each request as it comes, and compares that with the measured one.

    Medians are by class, of the last minute. The core knows queues, steps and prompts; what else takes time is learnt
    as an overhead: for these predictions, and apart from that for those of the reports, which know no prompt.
    """

    def __init__(self) -> None:
        self._reported_ms = [0.0] * len(CLASSES)
        self.starts_s = 0.0  # of the last report
        self._own_overhead_ms: float | None = None
        self._promises: dict[str, Promise] = {}
        self._report_overhead = Overhead(least_ms=0.0)
        self._own_overhead = Overhead(least_ms=-OVERHEAD_MS)
        self._predicted_ms, self._measured_ms, self._error = (
            [Window(FORECAST_SAMPLES) for _ in CLASSES] for _ in range(3)
        )
        self._all_predicted, self._all_error = Window(), Window()

    def __len__(self) -> int:
        """Return how many requests have no first token yet."""
        return len(self._promises)

    def overhead_ms(self, step_ms: float) -> float | None:
        """Return the overhead of the reports' predictions; None if it is not known yet. step_ms: of the mean step."""
        return self._report_overhead.value_ms(step_ms)

    def on_report(self, core_ms: Sequence[float], starts_s: float, step_ms: float) -> None:
        """Take what was reported: it holds for requests that come from now on.

        core_ms: by class, without the overhead. starts_s: sequences that start a second while others wait, or 0.
        step_ms: of the mean step.
        """
        self._reported_ms, self.starts_s = list(core_ms), starts_s
        self._own_overhead_ms = self._own_overhead.value_ms(step_ms)

    def on_arrival(self, request_id: str, priority: int, waited_ms: float, wait_ms: float) -> None:
        """Keep what is predicted for a request that the scheduler takes.

        waited_ms: since its arrival. wait_ms: until its first token as the core sees it, 0 if it has seen no step.
        """
        own_ms = waited_ms + (wait_ms or self._reported_ms[priority])
        overhead_ms = self._own_overhead_ms
        predicted_ms = None if overhead_ms is None else max(own_ms + overhead_ms, 0.0)
        self._promises[request_id] = Promise(self._reported_ms[priority], own_ms, predicted_ms)

    def forget(self, request_id: str) -> None:
        """Forget a request that may have had no token."""
        self._promises.pop(request_id, None)

    def on_start(self, request_id: str, priority: int, measured_ms: float, now_ns: int) -> None:
        """Take the first token of a request; those of its other choices do not count."""
        promise = self._promises.pop(request_id, None)
        if promise is None:
            return
        self._report_overhead.add(measured_ms - promise.reported_ms)
        self._own_overhead.add(measured_ms - promise.own_ms)
        if promise.predicted_ms is None:
            return  # the first ones of a scheduler: a prediction without the overhead tells nothing
        predicted, error = np.array([promise.predicted_ms]), np.array([abs(measured_ms - promise.predicted_ms)])
        self._measured_ms[priority].add(np.array([measured_ms]), now_ns)
        for window, values in (
            (self._predicted_ms[priority], predicted),
            (self._all_predicted, predicted),
            (self._error[priority], error),
            (self._all_error, error),
        ):
            window.add(values, now_ns)

    def fields(self, now_ns: int) -> dict[str, float]:
        """Return medians of the last minute, in ms; 0 without a sample."""
        named = {"ttft_predicted_ms_p50": self._all_predicted, "ttft_error_ms_p50": self._all_error}
        for number, name in enumerate(CLASSES):
            named |= {
                f"ttft_predicted_ms_p50_{name}": self._predicted_ms[number],
                f"ttft_ms_p50_{name}": self._measured_ms[number],
                f"ttft_error_ms_p50_{name}": self._error[number],
            }
        return {field: round(window.percentiles(now_ns, 50)[0], 3) for field, window in named.items()}


class Stats:
    """Collects figures from steps and outcomes, and makes the fields of `stats:{shard}` from them."""

    def __init__(self, started_ns: int, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._request_times = RequestTimes(self._metrics.observe_end)
        self.iterations = Iterations()
        self._ttft_ms = Window()
        self._tbt_ms = Window()
        self._violations = [0] * len(CLASSES)
        self._since_ns = started_ns
        self._tokens = self._prefill = self._prefill_ns = 0
        self._rate = 0.0
        self._tokens_total = 0
        self._start_rate = StartRate(started_ns)
        self.forecasts = Forecasts()
        self._usage = ProcessUsage()
        self._step_ns = self._idle_ns = self._schedule_ns = self._steps = 0
        self._step_tokens = self._step_decode = self._step_prefill = 0
        self._mean_step_ms = 0.0  # of the last interval with a step
        self._uncounted_outcomes: list[tuple[Outcome, int]] = []  # with the times of `outcome`

    def arrives(self, request: NewRequest, first_tokens: FirstTokens, now_ns: int) -> None:
        """Predict the first token of a request that is added to the core next."""
        waited_ns = max(0, now_ns - request.arrived_ns) if request.arrived_ns else 0
        wait_ns = first_tokens.wait_ns(request, now_ns, waited_ns, self.forecasts.starts_s)
        self.forecasts.on_arrival(request.id, request.priority, waited_ns / 1e6, wait_ns / 1e6)

    def outcome(self, outcome: Outcome | None, now_ns: int) -> None:
        """Take one outcome: waits and SLO violations of its rows, starts and ends of requests.

        Outcomes of steady decode, without a start, a first token or an end, are counted COUNTED_AT_ONCE at a time and
        before each snapshot: one at a time out of cold caches takes ten times as long.
        """
        if outcome is None:
            return
        self._uncounted_outcomes.append((outcome, now_ns))
        is_steady = outcome.first_indices.all() and not (outcome.started_ids or outcome.ended_requests)
        if not is_steady or len(self._uncounted_outcomes) >= COUNTED_AT_ONCE:
            self._count_all()

    def _count_all(self) -> None:
        uncounted, self._uncounted_outcomes = self._uncounted_outcomes, []
        for outcome, now_ns in uncounted:
            self._count(outcome, now_ns)

    def _count(self, outcome: Outcome, now_ns: int) -> None:
        self._request_times.record(outcome, now_ns)
        waits_ns = outcome.waits_ns
        has = waits_ns >= 0
        first_ns, between_ns = EMPTY_NS, waits_ns if has.all() else waits_ns[has]
        begins = outcome.first_indices == 0
        if begins.any():  # seldom: once in a sequence's life
            starts = has & begins
            first_ns, between_ns = waits_ns[starts], waits_ns[has & ~starts]
            self._start(outcome, np.flatnonzero(starts), now_ns)
            self._ttft_ms.add(first_ns / 1e6, now_ns)
            self._start_rate.count_starts(first_ns.size, now_ns)
        for ended in outcome.ended_requests:
            self.forecasts.forget(ended.request.id)
        if not waits_ns.size:
            return
        self._tbt_ms.add(between_ns / 1e6, now_ns)
        self._metrics.waits(first_ns, between_ns)
        produced = int(outcome.counts.sum())
        self._tokens += produced
        self._tokens_total += produced

    def _start(self, outcome: Outcome, rows: npt.NDArray[np.intp], now_ns: int) -> None:
        """Compare the first token of each of `rows` with the request's limit and with what was predicted."""
        for row in rows:
            request, wait_ns = outcome.requests[row], int(outcome.waits_ns[row])
            if request.ttft_slo_ns and wait_ns > request.ttft_slo_ns:
                self._violations[request.priority] += 1
            self.forecasts.on_start(request.id, request.priority, wait_ns / 1e6, now_ns)

    def step(self, decode: int, prefill: int, spent_ns: int = 0) -> None:
        """Take a step that was sent; planning it took `spent_ns`."""
        self._step_tokens, self._step_decode, self._step_prefill = decode + prefill, decode, prefill
        self.add_time(spent_ns)

    def result(
        self, step_ns: int, idle_ns: int, prefill: int, decode: int = 0, replica: int = 0, spent_ns: int = 0
    ) -> None:
        """Take an answered step of `prefill` prompt tokens and `decode` output tokens; applying it took `spent_ns`."""
        self.add_time(spent_ns)
        self.iterations.add(idle_ns, step_ns, decode, prefill, replica)
        self._metrics.step(step_ns, decode, prefill)
        if prefill:
            self._prefill += prefill
            self._prefill_ns += step_ns
        self._step_ns += step_ns
        self._idle_ns += idle_ns
        self._steps += 1

    def add_time(self, spent_ns: int) -> None:
        """Add time of the scheduler in plan or apply."""
        self._schedule_ns += spent_ns
        self._metrics.observe_plan(spent_ns)

    def call(self, script: str, seconds: float) -> None:
        """Observe the duration of a Redis script."""
        self._metrics.call(script, seconds)

    def unreadable(self, kind: str) -> None:
        """Count a record that could not be read. kind: of its key."""
        self._metrics.unreadable.labels(kind).inc()

    def replicas(self, rows: Mapping[str, Mapping[str, float | int | str]]) -> None:
        """Take the figures of each replica, by worker id, for the metrics."""
        self._metrics.replicas(rows)

    def snapshot(
        self,
        core: dict[str, Any],
        now_ns: int,
        time_ms: int,
        epoch: int,
        policy: str,
        workers: int,
        predicted_ns: Sequence[int] = (0, 0, 0, 0),
        unclaimed_ms: Sequence[int] = (0, 0, 0, 0),
    ) -> dict[str, float | int | str]:
        """Return every field of `stats:{shard}`, and start the next interval.

        predicted_ns: the core's predicted time to first token by class; 0 while no step was timed. unclaimed_ms: age of
        the oldest request that no shard has claimed, by class.
        """
        self._count_all()
        seconds = max(1e-9, (now_ns - self._since_ns) / 1e9)
        steps = max(1, self._steps)
        self._learn_rate(workers)
        if self._steps:
            self._mean_step_ms = self._step_ns / self._steps / 1e6
        overhead_ms = self.forecasts.overhead_ms(self._mean_step_ms)
        ttft = self._ttft_ms.percentiles(now_ns, 50, 99)
        tbt = self._tbt_ms.percentiles(now_ns, 50, 99)
        fields: dict[str, float | int | str] = {
            **{name: value for name, value in core.items() if not name.startswith("oldest_ns_")},
            "v": VERSION,
            "time_ms": time_ms,
            "epoch": epoch,
            "policy": policy,
            "workers": workers,
            "step_tokens": self._step_tokens,
            "step_decode": self._step_decode,
            "step_prefill": self._step_prefill,
            "step_ms": round(self._step_ns / steps / 1e6, 3),
            "schedule_us": round(self._schedule_ns / steps / 1e3, 1),
            "device_idle_pct": round(100 * self._idle_ns / max(1, self._idle_ns + self._step_ns), 2),
            "tokens_total": self._tokens_total,
            "tok_s": round(self._tokens / seconds, 1),
            "ttft_ms_p50": round(ttft[0], 3),
            "ttft_ms_p99": round(ttft[1], 3),
            "tbt_ms_p50": round(tbt[0], 3),
            "tbt_ms_p99": round(tbt[1], 3),
            "prefill_tok_s": round(self._rate, 1),
            **self._predict(core, predicted_ns, overhead_ms or 0.0, now_ns),
            **self.forecasts.fields(now_ns),
            **_ages(core, unclaimed_ms, now_ns),
            **self._usage.fields(),
            **{f"slo_violations_{name}": count for name, count in zip(CLASSES, self._violations, strict=True)},
        }
        self._since_ns = now_ns
        self._tokens = 0
        self._step_ns = self._idle_ns = self._schedule_ns = self._steps = 0
        reported = [float(fields[f"predicted_ttft_ms_{name}"]) - (overhead_ms or 0.0) for name in CLASSES]
        self.forecasts.on_report(reported, float(fields["starts_s"]), self._mean_step_ms)
        self._metrics.report(fields)
        return fields

    def _predict(
        self, core: dict[str, Any], predicted_ns: Sequence[int], overhead_ms: float, now_ns: int
    ) -> dict[str, float | int]:
        """Return the predicted time to first token of a request that arrives now, by class.

        A prompt waits for computation (the core's prediction, or queued tokens at the measured rate) or for slots and
        memory (the requests before it, at the rate of starts). The longer time counts, and the overhead.
        """
        # A sequence that waits to be decoded elsewhere takes no slot from prompts, so only behind_low counts.
        self._start_rate.look(int(core.get(f"behind_{CLASSES[-1]}", core.get("waiting", 0))), now_ns)
        starts_s = self._start_rate.rate(int(core.get("running", 0)), now_ns)
        fields: dict[str, float | int] = {"starts_s": round(starts_s, 3)}
        for name, core_ns in zip(CLASSES, predicted_ns, strict=True):
            computing_ms = core_ns / 1e6
            if not core_ns and self._rate:
                computing_ms = 1e3 * int(core.get(f"queued_tokens_{name}", 0)) / self._rate
            behind = int(core.get(f"behind_{name}", 0))
            starts_ms = 1e3 * behind / starts_s if starts_s else 0.0
            fields[f"behind_{name}"] = behind if starts_ms > computing_ms else 0
            fields[f"predicted_ttft_ms_{name}"] = round(max(computing_ms, starts_ms) + overhead_ms, 1)
        return fields | {"predicted_ttft_ms": fields[f"predicted_ttft_ms_{CLASSES[-1]}"]}

    def _learn_rate(self, workers: int) -> None:
        """Update the rate of prompt tokens: that of steps with prompt tokens, times the workers.

        The average takes a third of each new interval and keeps its value while no prompt runs.
        """
        if self._prefill_ns:
            now = max(workers, 1) * self._prefill / (self._prefill_ns / 1e9)
            self._rate = now if not self._rate else self._rate + (now - self._rate) / 3
        self._prefill = self._prefill_ns = 0


def _ages(core: dict[str, Any], unclaimed_ms: Sequence[int], now_ns: int) -> dict[str, int]:
    """Return the age of the oldest request that never ran, by class, in ms; 0 if none waits.

    unclaimed_ms: the ages of requests that no shard has claimed.
    """
    ages = {}
    for name, outside_ms in zip(CLASSES, unclaimed_ms, strict=True):
        arrived_ns = int(core.get(f"oldest_ns_{name}", 0))
        held_ms = max(0, now_ns - arrived_ns) // 1_000_000 if arrived_ns else 0
        ages[f"queue_age_ms_{name}"] = max(held_ms, outside_ms)
    return ages

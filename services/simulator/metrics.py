"""Figures of a simulated run as its clients see it: columns per request, and all times between tokens in a histogram.

engine.py passes every Outcome. Memory holds a few columns per request and one row of waits per running request, and no
object per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.types import CLASS_NAMES, Finish, FinishedRequest, Outcome
from services.simulator.workload.workload import Int64, Workload

GOOD_TTFT_NS = 2_000_000_000  # the limits of goodput: docs/simulate.md#json
GOOD_GAP_NS = 100_000_000
PERCENTILES = (50, 90, 99)
PASSED = "the deadline passed"
TAIL_GAPS = 100  # up to this number of gaps the largest counts as a request's P99


class Histogram:
    """Counts of times in ns. A bin is a float32 without its last 11 bits, so a percentile is exact to 0.02 %."""

    _DROP = 11
    _BINS = 1 << (31 - _DROP)
    _PENDING = 1 << 18
    _FEW = 1 << 15  # below this number it is cheaper not to touch every bin

    def __init__(self) -> None:
        self.counts: Int64 = np.zeros(self._BINS, np.int64)
        self._pending: npt.NDArray[np.float32] = np.zeros(self._PENDING, np.float32)
        self._used = 0

    def add(self, times_ns: Int64) -> None:
        """Count times: [n] in ns, 0 or more."""
        end = self._used + times_ns.size
        if end > self._PENDING:
            self._flush()
            end = times_ns.size
            if end > self._PENDING:
                for part in np.array_split(times_ns, -(-end // self._PENDING)):
                    self.add(part)
                return
        self._pending[self._used : end] = times_ns
        self._used = end

    def add_equal(self, time_ns: float, count: int) -> None:
        self.counts[self._bins(np.array([time_ns], np.float32))] += count

    def _bins(self, times: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
        return times.view(np.uint32) >> np.uint32(self._DROP)

    def _flush(self) -> None:
        bins = self._bins(self._pending[: self._used])
        if bins.size < self._FEW:
            np.add.at(self.counts, bins, 1)
        else:
            self.counts += np.bincount(bins, minlength=self._BINS)
        self._used = 0

    def distribution(self) -> tuple[npt.NDArray[np.float64], Int64]:
        """Return the middle of each filled bin in ns, and its count."""
        self._flush()
        filled = np.flatnonzero(self.counts)
        half = np.uint32(1 << (self._DROP - 1))
        bits = (filled.astype(np.uint32) << np.uint32(self._DROP)) + half
        return bits.view(np.float32).astype(np.float64), self.counts[filled]

    def percentiles(self, shares: tuple[float, ...]) -> list[float]:
        """Return percentiles in ns, linear between order statistics as numpy.percentile; NaN if there are no times."""
        times, counts = self.distribution()
        if not times.size:
            return [float("nan")] * len(shares)
        upto = np.cumsum(counts)
        values = []
        for share in shares:
            rank = share / 100 * (upto[-1] - 1)
            low, high = times[np.searchsorted(upto, [int(rank), np.ceil(rank)], side="right")]
            values.append(float(low + (high - low) * (rank - int(rank))))
        return values


class Recorder:
    """Collects the figures of one run, in columns [requests]: ttft_ns, e2e_ns, worst_ns (P99 gap), tokens, finish.

    at_end: tokens are delivered when their batch ends, see flush(). The time to first token remains that of the first
    computed token, so that TTFT + gaps = end to end.
    """

    def __init__(self, workload: Workload, start_ns: int, rows: int, at_end: bool) -> None:
        n = len(workload)
        self.ttft_ns: Int64 = np.full(n, -1, np.int64)
        self.second_ns: Int64 = np.full(n, -1, np.int64)  # wait for the second token; -1: none
        self.e2e_ns: Int64 = np.full(n, -1, np.int64)
        self.worst_ns: Int64 = np.zeros(n, np.int64)
        self.tokens: Int64 = np.zeros(n, np.int64)
        self.finish: npt.NDArray[np.uint8] = np.zeros(n, np.uint8)
        self.replica: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.gaps = Histogram()
        self.ended = 0
        self.end_ns = start_ns
        self.errors: dict[str, int] = {}
        self._arrived_ns: Int64 = workload.arrived_ns + start_ns
        self._width = int(workload.output.max()) if n else 1
        self._waits: Int64 = np.zeros(rows * self._width, np.int64)  # [row, output]: ns since the previous token
        self._cell = [-1] * n  # start of the request's row in _waits
        self._free = list(range(rows))[::-1]
        self._at_end = at_end
        self._held: list[list[int]] = []  # per replica: finished, not delivered yet

    def cell(self, index: int) -> int:
        """Return the start of a request's row of waits; the request keeps it from its first slot to its end."""
        cell = self._cell[index]
        if cell >= 0:
            return cell
        if not self._free:
            rows = self._waits.size // self._width
            self._waits = np.concatenate([self._waits, np.zeros_like(self._waits)])
            self._free = list(range(2 * rows - 1, rows - 1, -1))
        self._cell[index] = cell = self._free.pop() * self._width
        return cell

    def take(self, outcome: Outcome, now_ns: int, cells: Int64 | None) -> None:
        """Record every token and every end of one Outcome.

        cells: [rows] int64, the cells of the outcome's rows if the caller has them.
        """
        if cells is not None and cells.size == outcome.first_indices.size == outcome.tokens.size:
            self._waits[cells + outcome.first_indices] = outcome.waits_ns
        elif outcome.requests:
            self._look_up(outcome)
        for done in outcome.ended_requests:
            self._end(done, now_ns)

    def _look_up(self, outcome: Outcome) -> None:
        """Record the tokens of an Outcome row by row: some rows only report an end, or come in another order."""
        rows = zip(outcome.requests, outcome.first_indices.tolist(), outcome.waits_ns.tolist(), strict=True)
        for (request, first, wait), count in zip(rows, outcome.counts.tolist(), strict=True):
            if count:
                at = self._cell[request.payload] + first
                self._waits[at] = wait
                self._waits[at + 1 : at + count] = 0  # with drafts: they came together

    def _end(self, done: FinishedRequest, now_ns: int) -> None:
        index: int = done.request.payload
        cell, count = self._cell[index], done.outputs[0].size
        self.ended += 1
        self.end_ns = max(self.end_ns, now_ns)
        self.finish[index], self.tokens[index] = done.finish[0], count
        if error := done.error or (PASSED if done.finish[0] is Finish.DEADLINE else ""):
            self.errors[error] = self.errors.get(error, 0) + 1
        if cell < 0:
            return
        self._free.append(cell // self._width)
        if done.finish[0] not in (Finish.STOP, Finish.LENGTH):
            return
        self.ttft_ns[index] = self._waits[cell]
        if count > 1:
            self.second_ns[index] = self._waits[cell + 1]
        if self._at_end:
            self._hold(index)
            return
        self.e2e_ns[index] = now_ns - self._arrived_ns[index]
        if count > 1:
            gaps = self._waits[cell + 1 : cell + count]
            self.gaps.add(gaps)
            self.worst_ns[index] = _tail(gaps) if count > TAIL_GAPS else gaps.max()

    def _hold(self, index: int) -> None:
        replica = int(self.replica[index])
        while len(self._held) <= replica:
            self._held.append([])
        self._held[replica].append(index)

    def flush(self, replica: int, now_ns: int) -> None:
        """Deliver all tokens of a batch that has ended, as if they had come at equal distances."""
        if replica >= len(self._held):
            return
        for index in self._held[replica]:
            self.e2e_ns[index] = now_ns - self._arrived_ns[index]
            if (gaps := int(self.tokens[index]) - 1) > 0:
                gap = float(self.e2e_ns[index] - self.ttft_ns[index]) / gaps
                self.worst_ns[index] = round(gap)
                self.gaps.add_equal(gap, gaps)
        self._held[replica].clear()
        self.end_ns = max(self.end_ns, now_ns)


def _tail(gaps: Int64) -> int:
    """Return the P99 of [n] gaps, linear between order statistics: numpy.percentile at a tenth of its cost."""
    ordered = gaps.copy()
    ordered.sort()
    rank = 0.99 * (gaps.size - 1)
    low = int(rank)
    below = int(ordered[low])
    return below if low + 1 == gaps.size else round(below + (int(ordered[low + 1]) - below) * (rank - low))


def figures(workload: Workload, seen: Recorder, start_ns: int) -> dict[str, Any]:
    """Return the figures of a run, named and defined as in docs/simulate.md#json.

    Rates divide by the time from the first arrival to the last delivery. A request is finished if it ended by stop or
    length; others count in no latency. tbt_ms: all gaps of all finished requests. worst_gap_ms: the P99 of the gaps of
    each request, which goodput uses. slo_violations: share of the requests that did not finish or missed their limits
    (2 s and 100 ms by default). classes: the same per class, if there are several.
    """
    first_ns = start_ns + (int(workload.arrived_ns[0]) if len(workload) else 0)
    seconds = max(seen.end_ns - first_ns, 1) / 1e9
    kept = kept_slos(workload, seen)
    tbt = seen.gaps.percentiles(PERCENTILES)
    classes = np.unique(workload.priority).tolist()
    total = _of(np.ones(len(workload), np.bool_), workload, seen, kept, seconds)
    total["tbt_ms"] = {f"p{q}": _shown(t / 1e6) for q, t in zip(PERCENTILES, tbt, strict=True)}
    return {
        **total,
        "duration_s": round(seconds, 6),
        "arrivals_s": round((int(workload.arrived_ns[-1]) - int(workload.arrived_ns[0])) / 1e9, 6),
        "errors": dict(sorted(seen.errors.items())),
        "classes": {CLASS_NAMES[c]: _of(workload.priority == c, workload, seen, kept, seconds) for c in classes}
        if len(classes) > 1
        else {},
    }


def _of(
    chosen: npt.NDArray[np.bool_], workload: Workload, seen: Recorder, kept: npt.NDArray[np.bool_], seconds: float
) -> dict[str, Any]:
    """Return the figures of the requests in `chosen`; `chosen` and `kept` (within their limits) are [requests] bool."""
    done = np.flatnonzero(chosen & (seen.e2e_ns >= 0))
    ttft, e2e, worst, tokens = seen.ttft_ns[done], seen.e2e_ns[done], seen.worst_ns[done], seen.tokens[done]
    output, prompt = int(tokens.sum()), int(workload.prompt[done].sum())
    good = int(np.count_nonzero((ttft <= GOOD_TTFT_NS) & (worst <= GOOD_GAP_NS)))
    count = int(np.count_nonzero(chosen))
    return {
        "requests": count,
        "finished": int(done.size),
        "throughput_tok_s": round((output + prompt) / seconds, 3),
        "output_tok_s": round(output / seconds, 3),
        "request_rps": round(done.size / seconds, 4),
        "goodput_rps": round(good / seconds, 4),
        "ttft_ms": _milliseconds(ttft),
        "normalized_latency_ms": _milliseconds(e2e / np.maximum(tokens, 1)),
        "e2e_ms": {"mean": round(float(e2e.mean()) / 1e6, 4) if e2e.size else None} | _milliseconds(e2e),
        "worst_gap_ms": _milliseconds(worst),
        "slo_violations": round(1 - int(np.count_nonzero(kept & chosen)) / max(count, 1), 5),
    }


def kept_slos(workload: Workload, seen: Recorder) -> npt.NDArray[np.bool_]:
    """Return [requests] bool: finished within the request's limits, or the defaults if it has none."""
    ttft = np.where(workload.ttft_slo_ns > 0, workload.ttft_slo_ns, GOOD_TTFT_NS)
    gap = np.where(workload.tbt_slo_ns > 0, workload.tbt_slo_ns, GOOD_GAP_NS)
    kept: npt.NDArray[np.bool_] = (seen.e2e_ns >= 0) & (seen.ttft_ns <= ttft) & (seen.worst_ns <= gap)
    return kept


def _milliseconds(times_ns: npt.NDArray[Any]) -> dict[str, float | None]:
    if not times_ns.size:
        return {f"p{q}": None for q in PERCENTILES}
    values = np.percentile(times_ns, PERCENTILES) / 1e6
    return {f"p{q}": _shown(float(v)) for q, v in zip(PERCENTILES, values, strict=True)}


def _shown(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 4)

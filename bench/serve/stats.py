"""The measurements of a load run: one record per request, and the figures computed from them.

Pure: no clock, no socket. Times are seconds of one monotonic clock. The load generator fills the records;
the names of the figures are those of every bench of this project, the definitions stand at `summarise`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits of a good request: TTFT, and the P99 of its gaps (below 100 gaps the largest)."""

    ttft_s: float = 2.0
    gap_s: float = 0.100


@dataclass(slots=True)
class Record:
    """One request, from the moment it was due to the end of its stream. Times are absolute seconds."""

    index: int
    prompt_tokens: int
    asked_tokens: int
    scheduled_s: float
    sent_s: float = math.nan
    end_s: float = math.nan
    event_s: list[float] = field(default_factory=list)  # arrival of each event that carried tokens
    event_tokens: list[int] = field(default_factory=list)  # how many it carried; 1 where the server does not say
    reported_tokens: int = 0  # the server's own count of output tokens; 0: none was given
    finish: str = ""
    error: str = ""  # "" only when the stream ended as it should
    detail: str = ""

    @property
    def finished(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        return max(self.reported_tokens, sum(self.event_tokens))

    def ttft_s(self) -> float:
        """Return the time from the request's due time, so that a late sender hides nothing."""
        return self.event_s[0] - self.scheduled_s

    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    def gaps_s(self) -> Float64:
        """Return the `output_tokens - 1` times between tokens as delivered; tokens of one event are 0 apart."""
        between = np.diff(np.asarray(self.event_s, dtype=np.float64))
        return np.concatenate([between, np.zeros(max(0, self.output_tokens - 1 - len(between)))])

    def tpot_s(self) -> float:
        """Return the mean time per output token after the first; nan below two tokens."""
        if self.output_tokens < 2:
            return math.nan
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    def is_good(self, slo: Slo) -> bool:
        """Return whether the request finished within both limits."""
        if not self.finished or self.ttft_s() > slo.ttft_s:
            return False
        gaps = self.gaps_s()
        if not len(gaps):
            return True
        worst = np.percentile(gaps, 99) if len(gaps) >= 100 else gaps.max()
        return bool(worst <= slo.gap_s)


@dataclass(slots=True)
class Run:
    """One load: its figures (`summarise` and what stood around it) and its records."""

    result: dict[str, Any]
    records: list[Record]


DEFAULT_SLO = Slo()


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float | None]:
    """Return `{"p50", "p90", "p99"}` in ms with linear interpolation; None without values."""
    values = np.asarray([value for value in seconds if not math.isnan(value)], dtype=np.float64)
    if not len(values):
        return {f"p{q}": None for q in PERCENTILES}
    return {f"p{q}": round(float(np.percentile(values, q)) * 1000, 3) for q in PERCENTILES}


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the interval of the median with at least 95 % confidence, of any distribution: two of `values`.

    All of them together where fewer than six do not allow that.
    """
    ordered, count = sorted(values), len(values)
    # The median lies below the (i + 1)-th value where at most i of them are below it: a binomial with p = 1/2.
    below = np.cumsum([math.comb(count, i) for i in range(count)]) / 2**count
    skipped = max(int(np.searchsorted(below, 0.025, side="right")) - 1, 0)
    return ordered[skipped], ordered[count - 1 - skipped]


def summarise(records: Sequence[Record], slo: Slo = DEFAULT_SLO) -> dict[str, Any]:
    """Return the figures of a run.

    - `wall_s`: from the first due time to the end of the last stream, failed ones too; every rate divides by it.
    - `throughput_tok_s`: prompt and output tokens, `output_tok_s`: output tokens, of finished requests.
    - `goodput_rps`: requests a second for which `Record.is_good` holds.
    - `ttft_ms`, `e2e_ms` count from the due time; `tbt_ms` holds every gap of every finished request;
      `normalized_latency_ms` is end-to-end time / output tokens (Orca, section 6); `tpot_ms` has no first token.
    - `late_ms`: how far the sender was behind its own schedule.
    Only finished requests enter the latencies; `errors` counts the others by kind.
    """
    done = [record for record in records if record.finished]
    ends = [record.end_s for record in records if not math.isnan(record.end_s)]
    wall_s = max(ends) - min(record.scheduled_s for record in records) if ends else 0.0
    output = sum(record.output_tokens for record in done)
    prompt = sum(record.prompt_tokens for record in done)

    def rate(amount: float) -> float | None:
        return round(amount / wall_s, 3) if wall_s > 0 else None

    gaps = np.concatenate([record.gaps_s() for record in done]) if done else np.zeros(0)
    return {
        "requests": len(records),
        "finished": len(done),
        "failed": len(records) - len(done),
        "short": sum(record.output_tokens < record.asked_tokens for record in done),
        "errors": dict(sorted(Counter(record.error for record in records if record.error).items())),
        "finish_reasons": dict(sorted(Counter(record.finish for record in done).items())),
        "wall_s": round(wall_s, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "throughput_tok_s": rate(prompt + output),
        "output_tok_s": rate(output),
        "request_rps": rate(len(done)),
        "slo_ms": {"ttft": round(slo.ttft_s * 1000, 3), "gap": round(slo.gap_s * 1000, 3)},
        "goodput_rps": rate(sum(record.is_good(slo) for record in done)),
        "ttft_ms": percentiles_ms(record.ttft_s() for record in done),
        "tbt_ms": percentiles_ms(gaps),
        "tpot_ms": percentiles_ms(record.tpot_s() for record in done),
        "normalized_latency_ms": percentiles_ms(record.e2e_s() / record.output_tokens for record in done),
        "e2e_ms": percentiles_ms(record.e2e_s() for record in done),
        "late_ms": percentiles_ms(record.sent_s - record.scheduled_s for record in records),
    }

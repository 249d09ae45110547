"""Does a quantity of a soak grow? What counts as growth was fixed before the first run, and is the same for all.

The samples behind the warm-up become medians of a minute each. Their slope is Theil and Sen's (Sen 1968), the median
of the slopes of all pairs; whether there is a trend at all says the test of Mann (1945) and Kendall. A quantity grows
when both hold: slope times duration is more than BOUND of the level and more than the floor of its kind, and the test
is surer than SURE. Below LEAST_MINUTES nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

BOUND = 0.02
SURE = 2.58
"""Standard deviations: 0.5 % of series without a trend would be taken for growing, if the size alone did not matter."""
LEAST_MINUTES = 10
FLOORS: Mapping[str, float] = {
    "rss_mib": 2.0, "fds": 3.0, "threads": 2.0, "memory_mib": 1.0, "keys": 100.0, "entries": 3.0, "pending": 3.0,
    "queued": 3.0, "tokens": 200.0, "control": 3.0, "blocks": 20.0, "sequences": 3.0,
}  # fmt: skip
"""In units of the quantity. The load itself is random: how much runs at a time differs from minute to minute."""


@dataclass(frozen=True, slots=True)
class Trend:
    """level: the median; growth: over the time that was looked at; sure: standard deviations of Mann and Kendall."""

    level: float
    growth: float
    bound: float
    sure: float

    @property
    def grows(self) -> bool:
        return self.growth > self.bound and self.sure > SURE


def by_minute(at_s: Sequence[float], values: Sequence[float], warm_up_s: float) -> list[float]:
    """Medians of the whole minutes behind the warm-up. Raises ValueError when there is a minute without a sample."""
    at, found = np.asarray(at_s) - warm_up_s, np.asarray(values, dtype=np.float64)
    minutes = int(at[-1] // 60) if len(at) else 0
    parts = [found[(at >= 60 * minute) & (at < 60 * (minute + 1))] for minute in range(minutes)]
    if any(not len(part) for part in parts):
        raise ValueError("a minute without a sample")
    return [float(np.median(part)) for part in parts]


def trend(kind: str, minutes: Sequence[float]) -> Trend | None:
    """Of medians of a minute each; None where they are too few. kind: of FLOORS."""
    count = len(minutes)
    if count < LEAST_MINUTES:
        return None
    values = np.asarray(minutes)
    first, second = np.triu_indices(count, 1)
    rises = values[second] - values[first]
    level = float(np.median(values))
    growth = float(np.median(rises / (second - first))) * count
    return Trend(level, growth, max(BOUND * abs(level), FLOORS[kind]), _mann_kendall(values, rises))


def _mann_kendall(
    values: np.ndarray[tuple[int], np.dtype[np.float64]], rises: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> float:
    """The test's z, with its corrections for ties and for continuity."""
    count, score = len(values), float(np.sign(rises).sum())
    ties = np.unique(values, return_counts=True)[1]
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    return 0.0 if variance <= 0 or not score else (score - math.copysign(1.0, score)) / math.sqrt(variance)

"""With how many threads a step runs: all, or all but one, whichever was faster of late for steps of its size.

On a machine that also runs the gateway, the scheduler and Redis, a step with a thread on every core is interrupted
all the time, and the other threads wait for the one that lost its core in the middle of a piece. Where memory bounds
a step, as it bounds small ones, a thread less costs little and leaves a core to the rest (measured with two cores,
one request at a time over the whole stack: 266 tokens a second with one thread, 203 with two). Results do not depend
on it (src/ops.h).
"""

from __future__ import annotations

from statistics import median

SMALL_ROWS = 64  # above that steps are bound by multiplying: every thread counts
TRIED_EVERY = 32  # steps of a size: how often the other number is tried
SELDOM = 512  # where it was much slower
MUCH = 1.5
KEPT = 9  # latest times that a number is judged by
CLEARLY = 0.97


class _Size:
    """Steps of one size: latest times and their median by number of threads, in ns a row."""

    __slots__ = ("count", "current", "medians", "times")

    def __init__(self, current: int) -> None:
        self.current = current
        self.count = 0
        self.times: dict[int, list[float]] = {}
        self.medians: dict[int, float] = {}


class ThreadChoice:
    """Choose from measured times; pure."""

    def __init__(self, threads: int) -> None:
        self._all = threads
        self._sizes: dict[int, _Size] = {}

    def pick(self, rows: int) -> int:
        """Return the threads for the next step, which has so many rows."""
        if self._all == 1 or rows > SMALL_ROWS:
            return self._all
        size = self._sizes.setdefault(rows.bit_length(), _Size(self._all))
        other = self._other(size.current)
        size.count += 1
        known = size.times.get(other)
        if known is None or len(known) < KEPT:
            every = 2 if size.count > KEPT else 0
        else:
            every = SELDOM if size.medians[other] > MUCH * size.medians[size.current] else TRIED_EVERY
        return other if every and size.count % every == 0 else size.current

    def took(self, rows: int, threads: int, ns: int) -> None:
        """Record the time of a step with that number of rows."""
        size = self._sizes.get(rows.bit_length())
        if size is None:
            return
        times = size.times.setdefault(threads, [])
        times.append(ns / max(rows, 1))
        del times[:-KEPT]
        size.medians[threads] = median(times)
        other = self._other(size.current)
        mine, others = size.times.get(size.current, []), size.times.get(other, [])
        if len(mine) == len(others) == KEPT and size.medians[other] < CLEARLY * size.medians[size.current]:
            size.current = other

    def _other(self, threads: int) -> int:
        return self._all - 1 if threads == self._all else self._all

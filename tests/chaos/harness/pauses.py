"""How long streams stood still for a fault: by kind, without the time in which the worker computed prompts anew.

A gap between two tokens of a stream counts for the fault that fell into it. `longest_pause_s` is measured from the
last token before the fault; `after_ready_s` from when what was hurt answered again (of a scheduler: from its end, as
another stands by). From both is taken what the worker spent, in the gap, on steps with tokens of prompts: its step log
says when each ended and how long it ran.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from tests.chaos.harness.history import History, Injected

SEVERAL = "several"
NOTABLE_S = 0.05
"""Shorter gaps are not kept."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of a stream, with the faults that fell into it. Times are those of time.monotonic()."""

    begin_s: float
    end_s: float
    faults: tuple[Injected, ...]

    @property
    def kind(self) -> str:
        return self.faults[0].kind if len(self.faults) == 1 else SEVERAL

    def waited_s(self) -> float | None:
        """From when what was hurt answered again; None where that was not within the gap."""
        ready_s = self.faults[0].ready_s
        if len(self.faults) > 1 or not ready_s or ready_s >= self.end_s:
            return None
        return self.end_s - max(self.begin_s, ready_s)


class Refills:
    """When the worker computed tokens of prompts."""

    def __init__(self, steps: Iterable[tuple[float, float]]) -> None:
        """steps: when each ended, ascending, and how long it ran, in seconds."""
        rows = list(steps)
        self._ends = [end for end, _ in rows]
        self._sums = [0.0, *accumulate(seconds for _, seconds in rows)]

    def between_s(self, begin_s: float, end_s: float) -> float:
        first, last = bisect.bisect_right(self._ends, begin_s), bisect.bisect_right(self._ends, end_s)
        return self._sums[max(first, last)] - self._sums[first]


def read_refills(step_log: Path) -> Refills:
    """Read a log of this machine. Its clock is the wall's; warm-ups are no prompts."""
    shift_s = time.monotonic() - time.time()
    with step_log.open() as lines:
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    steps = [
        (row["time_ms"] / 1000 + shift_s, (row["forward_us"] + row["sample_us"]) / 1e6)
        for row in rows
        if row["epoch"] and row["prefill_context"]
    ]
    return Refills(sorted(steps))


def gaps(history: History, faults: Sequence[Injected]) -> list[Gap]:
    """Return the gaps of a stream, none for a slow client. A fault that is not over lasts."""
    if history.plan == "slow":
        return []
    found = []
    times = [event.at_s for event in history.events() if event.token_ids and event.position is not None]
    for begin, end in pairwise(times):
        hit = [fault for fault in faults if end > fault.at_s and (not fault.over_s or begin < fault.over_s)]
        if hit and end - begin >= NOTABLE_S:
            found.append(Gap(begin, end, tuple(hit)))
    return found


def longest(found: Iterable[Gap], refills: Refills) -> dict[str, dict[str, float]]:
    """`longest_pause_s`, `after_ready_s`, and `refill_s` of the longest pause, each by kind of fault."""
    pauses: dict[str, tuple[float, float]] = {}
    waits: dict[str, float] = {}
    for gap in found:
        refill_s = refills.between_s(gap.begin_s, gap.end_s)
        pauses[gap.kind] = max(pauses.get(gap.kind, (0.0, 0.0)), (gap.end_s - gap.begin_s - refill_s, refill_s))
        if (waited_s := gap.waited_s()) is not None:
            spent_s = refills.between_s(gap.end_s - waited_s, gap.end_s)
            waits[gap.kind] = max(waits.get(gap.kind, 0.0), waited_s - spent_s)
    return {
        "longest_pause_s": {kind: round(pause, 3) for kind, (pause, _) in sorted(pauses.items())},
        "after_ready_s": {kind: round(wait, 3) for kind, wait in sorted(waits.items())},
        "refill_s": {kind: round(refill, 3) for kind, (_, refill) in sorted(pauses.items())},
    }

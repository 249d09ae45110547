"""Virtual token counters: who has been served how much, so that nobody saves up credit while away.

Source: "Fairness in Serving Large Language Models" (VTC, OSDI '24), algorithm 2, with prompt and output tokens of equal
weight. Kept by the order `fair` for each tenant, by `class-slack` for each tenant in each class.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.scheduler.core.table import Int64
from services.scheduler.core.types import Int32

ABSENT = 16  # steps without anything waiting or served after which somebody has been away


class Counters:
    """By small integers, `waiting()` being those of whom something waits. One that was away is lifted (or lowered) to
    the least counter of those who were not; what was counted for the absent is forgotten by that."""

    def __init__(self, waiting: Callable[[], list[int]]) -> None:
        self.counter: Int64 = np.zeros(16, np.int64)
        self._seen: Int64 = np.full(16, -ABSENT - 1, np.int64)  # step of the last service
        self._step = 0
        self._waiting = waiting

    def served(self, who: Int32 | Int64, tokens: Int32) -> None:
        """A step gave so many tokens [n] to these [n], each of whom may appear several times."""
        self._step += 1
        if who.size:
            self.reach(int(who.max()))
            np.add.at(self.counter, who, tokens)
            self._seen[who] = self._step

    def comes(self, who: int) -> None:
        """Something of `who` waits, and nothing did before."""
        self.reach(who)
        if self._step - self._seen[who] > ABSENT:
            here = self._step - self._seen <= ABSENT
            here[self._waiting()] = True
            here[who] = False
            self.counter[who] = self.counter[here].min() if here.any() else 0
        self._seen[who] = self._step

    def goes(self, who: int) -> None:
        """Something of `who` waits no more."""
        self._seen[who] = self._step

    def reach(self, who: int) -> None:
        """Has a counter for `who`."""
        while who >= self.counter.size:
            self._seen = np.append(self._seen, np.full(self._seen.size, -ABSENT - 1))
            self.counter = np.append(self.counter, np.zeros_like(self.counter))

"""Deadlines that a busy machine does not break: their seconds are those in which the machine keeps up.

Whatever a chaos run waits for is computed on the machine's cores; where more processes want to run than there are
cores, the same work takes as much longer. So a second counts less by that factor, measured while one waits.
"""

from __future__ import annotations

import os
import time


def slowdown() -> float:
    """Processes that want to run for each core, over the last minute, and at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Deadline:
    """So many seconds of a machine that keeps up."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._at_s = time.monotonic()

    def passed(self) -> bool:
        """Counts what has gone by since the last call: to be asked again and again while one waits."""
        now = time.monotonic()
        self._left_s -= (now - self._at_s) / slowdown()
        self._at_s = now
        return self._left_s < 0

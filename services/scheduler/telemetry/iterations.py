"""The last iterations, one row each: what batching looks like, for the page and `orcinus top`. Pure.

Stats adds a row for each answered step; once a second the rows are packed into `stats:{shard}:iterations`.
"""

from __future__ import annotations

import numpy as np

from shared.columns import pack

ROWS = 200
COLUMNS = ("idle_us", "step_us", "decode", "prefill", "replica")
"""How long the device waited before the step; how long it ran; tokens of decodes and of prompts; which worker."""

_MOST = np.iinfo(np.int32).max


class Iterations:
    """A ring of the last ROWS answered steps."""

    def __init__(self) -> None:
        self._rows = np.zeros((ROWS, len(COLUMNS)), np.int32)
        self._count = 0

    def add(self, idle_ns: int, step_ns: int, decode: int, prefill: int, replica: int) -> None:
        """One step was answered."""
        idle_us, step_us = min(idle_ns // 1000, _MOST), min(step_ns // 1000, _MOST)
        self._rows[self._count % ROWS] = idle_us, step_us, decode, prefill, replica
        self._count += 1

    def fields(self) -> dict[str, int | bytes]:
        """The hash: `last`, how many were answered so far, and each column as int32, oldest first."""
        rows = np.roll(self._rows, -(self._count % ROWS), axis=0)[max(0, ROWS - self._count) :]
        return {"last": self._count, **{name: pack(rows[:, at]) for at, name in enumerate(COLUMNS)}}

"""The most blocks that sequences will hold at once: LightLLM's estimate, exactly and in blocks.

Used by the parts of memory.py and expected.py. l tokens are held, s steps are to come, and everybody gets one token a
step until his own last one: with s descending, max_i sum_{j<=i} ceil((l_j + s_i) / B).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.core.policy import Entrants, Pace
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import Int32

NONE: Int64 = np.zeros(0, np.int64)


class Peak:
    """The running, sorted by their ends, with prefix sums; and whether newcomers fit beside them.

    While all run at each step, l_j + s_i never changes: then everything is kept, and only the clock `_drift` moves.
    With l = a*B + r, 1 <= r <= B, and s = b*B + q the term ceil((l_j + s_i) / B) is a_j + b_i + 1 + [r_j > B - q_i], so
    all sums are prefix sums: O(n*B) after a change, O(log n) for the running at a newcomer's end.
    """

    def __init__(self) -> None:
        self._held, self._steps = NONE, NONE  # as told, when the sums were made
        self._drift = 0  # steps since then
        self._block_size = 0
        self._ends = NONE  # -s, ascending
        self._blocks = NONE  # [m + 1] sum of a over the first
        self._above: npt.NDArray[np.int32] = np.zeros((1, 1), np.int32)  # [B + 1, m + 1] how many of them have r > x
        self._peaks = NONE  # [m] all that live when the i-th ends
        self._spared = 0

    def run(self, held: Int64, steps: Int64, block_size: int, spared: int = 0) -> None:
        """Those that run now: [m] tokens held and steps to come. `spared`: blocks that several hold and all count."""
        self._spared = spared
        if held.size and held.size == self._held.size and block_size == self._block_size:
            drift = int(held[0] - self._held[0])
            if (held - drift == self._held).all() and (steps + drift == self._steps).all():
                self._drift = drift
                return
        self._held, self._steps, self._drift, self._block_size = held, steps, 0, block_size
        order = np.argsort(-steps, kind="stable")
        l, s = held[order], steps[order]  # noqa: E741
        a, r = np.divmod(l - 1, block_size)
        r += 1
        b, q = np.divmod(s, block_size)
        count = held.size
        self._ends = -s
        self._blocks = np.zeros(count + 1, np.int64)
        np.cumsum(a, out=self._blocks[1:])
        self._above = np.zeros((block_size + 1, count + 1), np.int32)
        np.cumsum(r > np.arange(block_size + 1)[:, None], axis=1, out=self._above[:, 1:])
        n = np.arange(1, count + 1)
        self._peaks = self._blocks[1:] + n * (b + 1) + self._above[block_size - q, n]

    @property
    def blocks(self) -> int:
        """The peak of those that run."""
        return int(self._living().max()) if self._peaks.size else 0

    def fitting(self, held: Int64, steps: Int64, shared: Int64, room: int) -> int:
        """How many of the first of [n] newcomers can enter together without the peak passing `room` blocks.

        shared: [n] blocks of each that the running hold as well; they are not counted again.
        """
        peaks, size = self._living(), self._block_size
        most = int(peaks.max()) if peaks.size else 0
        if most > room:
            return 0
        full = np.cumsum(-(-(held + steps) // size) - shared)
        if most + int(full[-1]) <= room:
            return held.size
        held, steps = held - self._drift, steps + self._drift
        # The peaks at the ends of the running: only where the newcomers could push one over the room.
        near = peaks + int(full[-1]) > room
        ends = -self._ends[near]
        more = -(-(held[:, None] + ends) // size) - shared[:, None]
        more[steps[:, None] < ends] = 0
        over = (np.cumsum(more, axis=0) + peaks[near] > room).any(axis=1)
        # The same at the ends of the newcomers themselves, of all of them: a moment like any other to those before.
        own = -(-(held[:, None] + steps) // size) - shared[:, None]
        own[steps[:, None] < steps] = 0
        sums = np.cumsum(own, axis=0) + self._at(steps)
        over |= (sums > room).any(axis=1)
        return int(np.argmax(over)) if over.any() else held.size

    def _living(self) -> Int64:
        """[m] all that live when the i-th ends, blocks that are shared counted once: in proportion to the living."""
        count = self._peaks.size
        if not self._spared or count < 2:
            return self._peaks
        return self._peaks - self._spared * np.arange(count) // (count - 1)

    def _at(self, steps: Int64) -> Int64:
        """[n] blocks of the running so many steps after the sums were made."""
        living = np.searchsorted(self._ends, -steps, side="right")
        b, q = np.divmod(steps, self._block_size)
        blocks = self._blocks[living] + living * (b + 1) + self._above[self._block_size - q, living]
        if self._spared and self._peaks.size > 1:
            blocks -= self._spared * np.maximum(living - 1, 0) // (self._peaks.size - 1)
        return np.asarray(blocks, dtype=np.int64)


def ahead(known: Int64, rest: Int64, end: Int64, pace: Pace) -> tuple[Int64, Int64]:
    """Tokens held and steps to come for [n] sequences that end with `end` tokens in KV and have `rest` to compute.

    The blocks of a prompt are promised when it enters, so they count at once; its steps are those of its chunks.
    """
    held = np.minimum(known, end)
    return held, end - held + np.maximum(rest - 1, 0) // pace.most + pace.lookahead


def free_to_yield(table: SlotTable) -> Int32:
    """The rows whose growth is estimated: what a pinned one will hold is set aside for it already."""
    return np.flatnonzero(table.active[: table.high] & ~table.pinned[: table.high]).astype(np.int32)


def set_aside(table: SlotTable) -> int:
    """Blocks promised to pinned rows."""
    return int(table.promised[: table.high][table.pinned[: table.high]].sum())


def of_entrants(entrants: Entrants, end: Int64, pace: Pace) -> tuple[Int64, Int64]:
    """As ahead(), for [n] who may enter. In their first step the running have had their tokens already, so that they
    count with one more."""
    return ahead(entrants.known + 1, entrants.known - entrants.cached, end, pace)

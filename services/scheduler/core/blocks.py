"""One owner of the KV blocks of one tier: who is free, who is referenced and how often, who drains.

Called by Replica and the passes with whole columns of blocks. Every block is in exactly one state:
free + cached + referenced + draining == total.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.core.types import Int32


class BlockPool:
    """Reference counts over a ring of free blocks: the one that was freed longest ago is taken first (LRU), so that
    a freed block keeps its content as long as possible and the ring can become the prefix cache.

    `cached` counts those free blocks whose content a prefix index knows; there is no index yet, so it is 0.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.free = blocks
        self.cached = 0
        self.draining = 0
        self.refs: Int32 = np.zeros(blocks, np.int32)
        self._ring: Int32 = np.arange(blocks, dtype=np.int32)
        self._head = 0
        self._drains: npt.NDArray[np.bool_] = np.zeros(blocks, np.bool_)

    @property
    def referenced(self) -> int:
        return self.total - self.free - self.cached - self.draining

    def take(self, count: int) -> Int32:
        """[count] int32 blocks, each with one reference. Raises ValueError when fewer are free."""
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        end = self._head + count
        if end <= self.total:
            blocks = self._ring[self._head : end].copy()
        else:
            blocks = np.concatenate([self._ring[self._head :], self._ring[: end - self.total]])
        self._head = end % self.total if self.total else 0
        self.free -= count
        self.refs[blocks] = 1
        return blocks

    def share(self, blocks: Int32) -> None:
        """One more reference to each of `blocks` (a block may stand there twice). Raises ValueError if one has none."""
        if (self.refs[blocks] <= 0).any():
            raise ValueError("a block without a reference cannot be shared")
        np.add.at(self.refs, blocks, 1)

    def give(self, blocks: Int32) -> None:
        """One reference less to each of `blocks`; those without any become free, in the given order."""
        self._append(self._release(blocks))

    def drain(self, blocks: Int32) -> None:
        """As give(), but the copy engine still reads them: not free before drained()."""
        gone = self._release(blocks)
        self._drains[gone] = True
        self.draining += gone.size

    def drained(self, blocks: Int32) -> None:
        """The copies of `blocks` are acknowledged: they are free. Raises ValueError if one did not drain."""
        if not self._drains[blocks].all():
            raise ValueError("acknowledged a block that did not drain")
        self._drains[blocks] = False
        self.draining -= blocks.size
        self._append(blocks)

    def check(self, held: Int32 | None = None) -> None:
        """Raises RuntimeError on a broken invariant. `held`: every block of every table, once per table."""
        free = self._ring[(self._head + np.arange(self.free)) % max(self.total, 1)]
        states = np.zeros(self.total, np.int32)
        np.add.at(states, free, 1)
        states += self.refs > 0
        states += self._drains
        if (self.refs < 0).any() or (states != 1).any():
            raise RuntimeError(f"blocks in no state or in two: {np.flatnonzero(states != 1)[:8].tolist()}")
        if int((self.refs > 0).sum()) != self.referenced or int(self._drains.sum()) != self.draining:
            raise RuntimeError(
                f"free {self.free} + cached {self.cached} + referenced {int((self.refs > 0).sum())} "
                f"+ draining {self.draining} is not {self.total}"
            )
        if held is not None:
            counts = np.bincount(held, minlength=self.total)
            if not np.array_equal(counts, self.refs):
                raise RuntimeError(f"blocks {np.flatnonzero(counts != self.refs)[:8].tolist()} are counted wrongly")

    def _release(self, blocks: Int32) -> Int32:
        """Drops references; returns the blocks that have none now, each once, in the given order."""
        np.subtract.at(self.refs, blocks, 1)
        refs = self.refs[blocks]
        if (refs < 0).any():
            np.add.at(self.refs, blocks, 1)
            raise ValueError("a block without a reference was given back")
        gone: Int32 = blocks[refs == 0]
        unique, first = np.unique(gone, return_index=True)
        if unique.size < gone.size:
            gone = gone[np.sort(first)]
        return gone

    def _append(self, blocks: Int32) -> None:
        if not blocks.size:
            return
        tail = (self._head + self.free) % self.total
        end = tail + blocks.size
        if end <= self.total:
            self._ring[tail:end] = blocks
        else:
            cut = self.total - tail
            self._ring[tail:] = blocks[:cut]
            self._ring[: end - self.total] = blocks[cut:]
        self.free += blocks.size

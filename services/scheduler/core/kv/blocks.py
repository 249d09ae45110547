"""Own the KV blocks of one tier: free, cached, referenced or draining.

Called by Replica and the planner with whole columns of blocks. Every block is in exactly one state:
free + cached + referenced + draining == total.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.scheduler.core.kv.prefix_index import Index, Keys, Mask
from services.scheduler.core.types import EMPTY, Int32

ONE = np.int32(1)  # with the type of the counts and indices as wide as addresses, numpy's ufunc.at is 20 times faster


EVICTED_SHARE = 512  # a pool evicts a 512th of its blocks at once


class BlockPool:
    """Reference counts; a ring of free blocks, of which the one that was freed longest ago is taken first; and a
    prefix index: a block that is registered there keeps its content when it has no reference left (`cached`) until it
    is among the least recently used and a block is wanted while none is free.
    """

    def __init__(self, blocks: int, indexed: bool = False) -> None:
        """indexed: whether blocks are ever registered."""
        self.total = blocks
        self.free = blocks
        self.cached = 0
        self.draining = 0
        self.refs: Int32 = np.zeros(blocks, np.int32)
        self._ring: Int32 = np.arange(blocks, dtype=np.int32)
        self._head = 0
        self._drains: Mask = np.zeros(blocks, np.bool_)
        self._reused: Mask = np.zeros(blocks, np.bool_)
        self._cold = _Cold(blocks if indexed else 0)
        self._index = Index(blocks if indexed else 0)

    @property
    def referenced(self) -> int:
        return self.total - self.free - self.cached - self.draining

    @property
    def available(self) -> int:
        """Blocks that take() can give."""
        return self.free + self.cached

    def take(self, count: int) -> Int32:
        """Return [count] blocks, each with one reference: free ones, then the least recently used cached ones, which
        are evicted. Raises ValueError when fewer are available.
        """
        if count > self.free + self.cached:
            raise ValueError(f"{count} blocks wanted, {self.free} free, {self.cached} cached")
        if count > self.free:
            self._evict(count - self.free)
        blocks = self._pop(count)
        self.refs[blocks] = 1
        self._reused[blocks] = False
        return blocks

    def share(self, blocks: Int32) -> None:
        """Add a reference to each of `blocks` (a block may stand there twice), referenced or cached ones. Raises
        ValueError if one is neither.
        """
        cold = blocks[self.refs.take(blocks) <= 0]
        if cold.size:
            if not self.cached or not self._cold.holds(cold):
                raise ValueError("a block that is neither referenced nor cached cannot be shared")
            self.cached -= self._cold.remove(cold)
        self._reused[blocks] = True
        np.add.at(self.refs, blocks.astype(np.intp), ONE)

    def give(self, blocks: Int32) -> None:
        """Take one reference from each of `blocks`, distinct ones in table order. Those without any become cached if
        registered, to be evicted last block first, as a block is useless without those before it; the others free, in
        the given order.
        """
        self._put(self._release(blocks))

    def drain(self, blocks: Int32) -> None:
        """Take references as give() does, but of blocks that are still read: not free or cached before drained()."""
        gone = self._release(blocks)
        self._drains[gone] = True
        self.draining += gone.size

    def drained(self, blocks: Int32) -> None:
        """Let `blocks`, the copies of which are acknowledged, be as after give().

        Raises ValueError if one did not drain.
        """
        if not self._drains[blocks].all():
            raise ValueError("acknowledged a block that did not drain")
        self._drains[blocks] = False
        self.draining -= blocks.size
        self._put(blocks)

    def match(self, keys: Keys) -> Int32:
        """Return [m] the blocks of the longest registered prefix of a chain of keys; take no reference."""
        return self._index.match(keys, self._drains if self.draining else None)

    def match_length(self, keys: Keys) -> int:
        """Return about how many of the first keys of a chain are registered: blocks that drain count as well."""
        return self._index.match_length(keys)

    def register(self, blocks: Int32, keys: Iterable[int]) -> None:
        """Let full blocks whose KV is there be found, [n] distinct referenced ones, under [n] keys (0: not this one).

        A block whose key is registered already is not registered itself. Raises ValueError if a block has no reference
        or is registered.
        """
        if blocks.size and self.refs.take(blocks).min() <= 0:
            raise ValueError("a block without a reference cannot be registered")
        self._index.register(blocks, keys)

    def keys_of(self, blocks: Int32) -> list[int]:
        """Return the keys of [n] blocks, 0 for each that is not registered."""
        return self._index.keys_of(blocks)

    def forget(self, blocks: Int32) -> None:
        """Let referenced blocks not be found any more; their references stay."""
        self._index.forget(blocks)

    def reused(self, blocks: Int32) -> Mask:
        """Return [n] bool: the block was shared since it was taken."""
        found: Mask = self._reused[blocks]
        return found

    def drains(self, blocks: Int32) -> Mask:
        """Return [n] bool: the copy of the block is not acknowledged yet."""
        found: Mask = self._drains[blocks]
        return found

    def coldest(self, count: int) -> Int32:
        """Return [<= count] the least recently used cached blocks, coldest first; they stay cached."""
        return self._cold.coldest(min(count, self.cached))

    def check(self, held: Int32 | None = None) -> None:
        """Raise RuntimeError on a broken invariant. held: every block of every table, once per table."""
        free = self._ring[(self._head + np.arange(self.free)) % max(self.total, 1)]
        cold = self._cold.blocks()
        states = np.zeros(self.total, np.int32)
        np.add.at(states, free, 1)
        np.add.at(states, cold, 1)
        states += self.refs > 0
        states += self._drains
        if (self.refs < 0).any() or (states != 1).any():
            raise RuntimeError(f"blocks in no state or in two: {np.flatnonzero(states != 1)[:8].tolist()}")
        counted = (cold.size, int((self.refs > 0).sum()), int(self._drains.sum()))
        if counted != (self.cached, self.referenced, self.draining):
            raise RuntimeError(
                f"free {self.free} + cached {cold.size} + referenced {counted[1]} + draining {counted[2]} "
                f"is not {self.total}"
            )
        indexed = self._index.indexed
        if indexed.size and (indexed[free].any() or not indexed[cold].all()):
            raise RuntimeError("a free block is registered or a cached one is not")
        self._index.check()
        if held is not None:
            counts = np.bincount(held, minlength=self.total)
            if not np.array_equal(counts, self.refs):
                raise RuntimeError(f"blocks {np.flatnonzero(counts != self.refs)[:8].tolist()} are counted wrongly")

    def _release(self, blocks: Int32) -> Int32:
        """Drop a reference to each of distinct blocks; return those that have none now, in the given order."""
        refs = self.refs.take(blocks)
        refs -= 1
        if refs.size and refs.min() < 0:
            raise ValueError("a block without a reference was given back")
        self.refs[blocks] = refs
        gone: Int32 = blocks[refs == 0]
        return gone

    def _evict(self, count: int) -> None:
        """Free at least `count` of the coldest blocks; in a large pool some more, so that it is seldom done."""
        cold = self._cold.pop(max(count, min(self.total // EVICTED_SHARE, self.cached)))
        self._index.forget(cold)
        self.cached -= cold.size
        self._append(cold)

    def _put(self, blocks: Int32) -> None:
        """Make distinct blocks without references, in table order, cached or free."""
        if len(self._index):
            registered = self._index.indexed.take(blocks)
            cold = blocks[registered]
            if cold.size:
                self._cold.add(cold[::-1])
                self.cached += cold.size
                blocks = blocks[~registered] if cold.size < blocks.size else EMPTY
        self._append(blocks)

    def _pop(self, count: int) -> Int32:
        end = self._head + count
        if end <= self.total:
            blocks = self._ring[self._head : end].copy()
        else:
            blocks = np.concatenate([self._ring[self._head :], self._ring[: end - self.total]])
        self._head = end % self.total if self.total else 0
        self.free -= count
        return blocks

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


class _Cold:
    """The cached blocks, least recently used first: a log of additions. An entry counts only if the block's `place`
    points at it, so that removal writes no log; dead entries go when they are met at the head, and all of them when
    the log is full, which needs as many additions as there are blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._log: Int32 = np.zeros(2 * blocks, np.int32)
        self._place: Int32 = np.full(blocks, -1, np.int32)
        self._numbers: Int32 = np.arange(2 * blocks, dtype=np.int32)
        self._head = 0
        self._tail = 0

    def holds(self, blocks: Int32) -> bool:
        return bool((self._place.take(blocks) >= 0).all())

    def add(self, blocks: Int32) -> None:
        """Add distinct blocks that are not in it, the first to go first."""
        if self._tail + blocks.size > self._log.size:
            alive = self.blocks()
            self._head, self._tail = 0, alive.size
            self._log[: alive.size] = alive
            self._place[alive] = np.arange(alive.size)
        end = self._tail + blocks.size
        self._log[self._tail : end] = blocks
        self._place[blocks] = self._numbers[self._tail : end]
        self._tail = end

    def remove(self, blocks: Int32) -> int:
        """Remove blocks that are in it, perhaps twice in the column; return how many different ones."""
        order = np.arange(blocks.size, dtype=np.int32)
        self._place[blocks] = order
        different = int((self._place.take(blocks) == order).sum())
        self._place[blocks] = -1
        return different

    def coldest(self, count: int) -> Int32:
        """Return [count] the first to go; there must be as many."""
        if not count:
            return EMPTY
        width = count + 32
        alive = self._alive(width)
        while alive.size < count:
            width *= 2
            alive = self._alive(width)
        end = min(self._head + width, self._tail)
        start = end - alive.size
        if start > self._head:  # squeeze out the dead ones
            self._log[start:end] = alive
            self._place[alive] = np.arange(start, end)
            self._head = start
        return alive[:count]

    def pop(self, count: int) -> Int32:
        """Remove and return coldest()."""
        blocks = self.coldest(count)
        self._place[blocks] = -1
        self._head += blocks.size
        return blocks

    def blocks(self) -> Int32:
        """Return all, the first to go first."""
        return self._alive(self._tail - self._head)

    def _alive(self, width: int) -> Int32:
        end = min(self._head + width, self._tail)
        entries = self._log[self._head : end]
        alive: Int32 = entries[self._place.take(entries) == np.arange(self._head, end)]
        return alive

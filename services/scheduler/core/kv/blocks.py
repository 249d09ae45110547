"""Manage the KV blocks of one tier. A block is free, cached, referenced or draining.

Called by Replica and the planner with whole columns of blocks. Every block is in exactly one state:
free + cached + referenced + draining == total.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.kv.prefix_index import Index, Keys, Mask, Numbers
from services.scheduler.core.types import Int32

ONE = np.int32(1)  # with the dtype of the counts, and np.intp indices, numpy's ufunc.at is 20 times faster


EVICTED_SHARE = 512  # one eviction frees at least 1 / EVICTED_SHARE of the pool, as far as that much is cached


class BlockPool:
    """Reference counts, a ring of free blocks and a prefix index.

    The free block that was freed first is taken first. A block that is registered in the index is cached when its last
    reference is gone: it keeps its content until it is evicted. The least recently used cached blocks are evicted when
    no free block is left.
    """

    def __init__(self, blocks: int, indexed: bool = False) -> None:
        """indexed: whether blocks are ever registered."""
        self.total = blocks
        self.free = blocks
        self.cached = 0
        self.draining = 0
        self.refs: Int32 = np.zeros(blocks, np.int32)
        self._ring: Numbers = np.arange(blocks)
        self._head = 0
        self._drains: Mask = np.zeros(blocks, np.bool_)
        self._is_reused: Mask = np.zeros(blocks, np.bool_)
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
        """Return [count] blocks, each with one reference. Raise ValueError when fewer are available.

        Free blocks are taken first. Then the least recently used cached ones are evicted.
        """
        if count > self.free + self.cached:
            raise ValueError(f"{count} blocks wanted, {self.free} free, {self.cached} cached")
        if count > self.free:
            self._evict(count - self.free)
        blocks = self._pop(count)
        self.refs[blocks] = 1
        self._is_reused[blocks] = False
        return blocks.astype(np.int32)

    def share(self, blocks: Int32) -> None:
        """Add a reference to each of `blocks`, which may contain a block twice.

        Raise ValueError if a block is neither referenced nor cached.
        """
        numbers = blocks.astype(np.intp)
        cold = numbers[self.refs[numbers] <= 0]
        if cold.size:
            if not self.cached or not self._cold.holds(cold):
                raise ValueError("a block that is neither referenced nor cached cannot be shared")
            self.cached -= self._cold.remove(cold)
        self._is_reused[numbers] = True
        np.add.at(self.refs, numbers, ONE)

    def give(self, blocks: Int32) -> None:
        """Drop one reference of each of `blocks`, which are distinct and in table order.

        A block without a reference becomes cached if it is registered, else free, in the given order. The last cached
        block of a table is evicted first, because a block is useless without the blocks before it.
        """
        self._put(self._release(blocks))

    def drain(self, blocks: Int32) -> None:
        """Drop references as give() does, of blocks that are still read; only drained() makes them free or cached."""
        gone = self._release(blocks)
        self._drains[gone] = True
        self.draining += gone.size

    def end_drain(self, blocks: Int32) -> None:
        """Make `blocks` free or cached: their copies are acknowledged. Raise ValueError if one was not draining."""
        if not self._drains[blocks].all():
            raise ValueError("acknowledged a block that did not drain")
        self._drains[blocks] = False
        self.draining -= blocks.size
        self._put(blocks.astype(np.intp))

    def match(self, keys: Keys) -> Int32:
        """Return [m] the blocks of the longest registered prefix of a chain of keys; take no reference."""
        return self._index.match(keys, self._drains if self.draining else None)

    def match_length(self, keys: Keys) -> int:
        """Return how many of the first keys of a chain are registered. Draining blocks count, unlike in match()."""
        return self._index.match_length(keys)

    def register(self, blocks: Int32, keys: Keys) -> None:
        """Register [n] distinct, referenced, full blocks with computed KV under [n] keys, so that match() finds them.

        A block without a key, or with a key that is registered already, is left out. Raise ValueError if a block has no
        reference or is registered.
        """
        numbers = blocks.astype(np.intp)
        if np.count_nonzero(self.refs[numbers] <= 0):
            raise ValueError("a block without a reference cannot be registered")
        self._index.register(numbers, keys)

    def keys_of(self, blocks: Int32) -> Keys:
        """Return the keys of [n] blocks, NO_KEY for each that is not registered."""
        return self._index.keys_of(blocks.astype(np.intp))

    def forget(self, blocks: Int32) -> None:
        """Remove referenced blocks from the index; their references stay."""
        self._index.forget(blocks.astype(np.intp))

    def is_reused(self, blocks: Int32) -> Mask:
        """Return [n] bool: whether the block was shared since it was taken."""
        found: Mask = self._is_reused[blocks]
        return found

    def drains(self, blocks: Int32) -> Mask:
        """Return [n] bool: whether the block is draining, as its copy is not acknowledged yet."""
        found: Mask = self._drains[blocks]
        return found

    def coldest(self, count: int) -> Int32:
        """Return [<= count] the least recently used cached blocks, coldest first; they stay cached."""
        return self._cold.coldest(min(count, self.cached)).astype(np.int32)

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
        indexed = self._index.is_indexed
        if indexed.size and (indexed[free].any() or not indexed[cold].all()):
            raise RuntimeError("a free block is registered or a cached one is not")
        self._index.check()
        if held is not None:
            counts = np.bincount(held, minlength=self.total)
            if not np.array_equal(counts, self.refs):
                raise RuntimeError(f"blocks {np.flatnonzero(counts != self.refs)[:8].tolist()} are counted wrongly")

    def _release(self, blocks: Int32) -> Numbers:
        """Drop a reference of each of distinct blocks; return those that have none left, in the given order."""
        numbers = blocks.astype(np.intp)
        refs = self.refs[numbers]
        refs -= 1
        if np.count_nonzero(refs < 0):
            raise ValueError("a block without a reference was given back")
        self.refs[numbers] = refs
        gone: Numbers = numbers[refs == 0]
        return gone

    def _evict(self, count: int) -> None:
        """Free at least `count` of the coldest blocks; in a large pool more, so that evictions are rare."""
        cold = self._cold.pop(max(count, min(self.total // EVICTED_SHARE, self.cached)))
        self._index.forget(cold)
        self.cached -= cold.size
        self._append(cold)

    def _put(self, blocks: Numbers) -> None:
        """Make distinct blocks without references, in table order, cached or free."""
        if len(self._index):
            registered = self._index.is_indexed[blocks]
            cold = blocks[registered]
            if cold.size:
                self._cold.add(cold[::-1])
                self.cached += cold.size
                blocks = blocks[~registered]
        self._append(blocks)

    def _pop(self, count: int) -> Numbers:
        end = self._head + count
        if end <= self.total:
            blocks = self._ring[self._head : end].copy()
        else:
            blocks = np.concatenate([self._ring[self._head :], self._ring[: end - self.total]])
        self._head = end % self.total if self.total else 0
        self.free -= count
        return blocks

    def _append(self, blocks: Numbers) -> None:
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
    """The cached blocks, least recently used first, as a log of additions.

    An entry is live only if the block's `place` points at it, so a removal writes nothing to the log. Dead entries are
    dropped when they reach the head. All of them are dropped when the log is full, which takes at least as many
    additions as there are blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._log: Numbers = np.zeros(2 * blocks, np.intp)
        self._place: Int32 = np.full(blocks, -1, np.int32)
        self._numbers: Int32 = np.arange(2 * blocks, dtype=np.int32)
        self._head = 0
        self._tail = 0

    def holds(self, blocks: Numbers) -> bool:
        return bool((self._place[blocks] >= 0).all())

    def add(self, blocks: Numbers) -> None:
        """Add distinct blocks that are not in it, in the order in which they are to be evicted."""
        if self._tail + blocks.size > self._log.size:
            alive = self.blocks()
            self._head, self._tail = 0, alive.size
            self._log[: alive.size] = alive
            self._place[alive] = np.arange(alive.size)
        end = self._tail + blocks.size
        self._log[self._tail : end] = blocks
        self._place[blocks] = self._numbers[self._tail : end]
        self._tail = end

    def remove(self, blocks: Numbers) -> int:
        """Remove blocks that are in it; return how many different ones. `blocks` may contain a block twice."""
        order = np.arange(blocks.size, dtype=np.int32)
        self._place[blocks] = order
        different = int((self._place[blocks] == order).sum())
        self._place[blocks] = -1
        return different

    def coldest(self, count: int) -> Numbers:
        """Return the first [count] blocks to evict; there must be as many."""
        if not count:
            return self._log[:0]
        width = count + 32
        alive = self._alive(width)
        while alive.size < count:
            width *= 2
            alive = self._alive(width)
        end = min(self._head + width, self._tail)
        start = end - alive.size
        if start > self._head:  # drop the dead entries
            self._log[start:end] = alive
            self._place[alive] = np.arange(start, end)
            self._head = start
        return alive[:count]

    def pop(self, count: int) -> Numbers:
        """Remove and return the first [count] blocks to evict."""
        blocks = self.coldest(count)
        self._place[blocks] = -1
        self._head += blocks.size
        return blocks

    def blocks(self) -> Numbers:
        """Return all blocks, in the order of eviction."""
        return self._alive(self._tail - self._head)

    def _alive(self, width: int) -> Numbers:
        end = min(self._head + width, self._tail)
        entries = self._log[self._head : end]
        alive: Numbers = entries[self._place[entries] == self._numbers[self._head : end]]
        return alive

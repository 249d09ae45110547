"""One owner of the KV blocks of one tier: who is free, who is cached, who is referenced and how often, who drains.

Called by Replica and the passes with whole columns of blocks. Every block is in exactly one state:
free + cached + referenced + draining == total.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.kv.prefix_index import Contents, Index, Int64, Mask, Prompt, UInt64
from services.scheduler.core.types import EMPTY, Int32

ONE = np.int32(1)  # with the type of the counts and indices as wide as addresses, numpy's ufunc.at is 20 times faster


EVICTED_SHARE = 512  # a pool evicts a 512th of its blocks at once


class BlockPool:
    """Reference counts; a ring of free blocks, of which the one that was freed longest ago is taken first; and, with
    a block size, a prefix index: a block that is registered there keeps its content when it has no reference left
    (`cached`) until it is among the least recently used and a block is wanted while none is free.
    """

    def __init__(self, blocks: int, block_size: int = 0, contents: Contents | None = None) -> None:
        """block_size: tokens a block holds; 0: no prefix index. contents: shared with the replica's other tier."""
        self.total = blocks
        self.free = blocks
        self.cached = 0
        self.draining = 0
        self.refs: Int32 = np.zeros(blocks, np.int32)
        self._ring: Int32 = np.arange(blocks, dtype=np.int32)
        self._head = 0
        self._drains: Mask = np.zeros(blocks, np.bool_)
        self._reused: Mask = np.zeros(blocks, np.bool_)
        self._cold = _Cold(blocks if block_size else 0)
        self._index = Index(blocks if block_size else 0, block_size, contents or Contents())

    @property
    def referenced(self) -> int:
        return self.total - self.free - self.cached - self.draining

    @property
    def available(self) -> int:
        """Blocks that take() can give."""
        return self.free + self.cached

    @property
    def contents(self) -> Contents:
        return self._index.contents

    @property
    def content(self) -> Int64:
        """[total] the content id of each indexed block, 0 of the others; empty without an index. Not to be written."""
        return self._index.content

    def take(self, count: int) -> Int32:
        """[count] int32 blocks, each with one reference: free ones, then the least recently used cached ones, which
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
        """One more reference to each of `blocks` (a block may stand there twice), referenced or cached ones. Raises
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
        """One reference less to each of `blocks`, in table order. Those without any become cached if registered, to be
        evicted last block first, as a block is useless without those before it; the others free, in the given order.
        """
        self._put(self._release(blocks))

    def drain(self, blocks: Int32) -> None:
        """As give(), but the copy engine still reads them: not free, cached or found before drained()."""
        gone = self._release(blocks)
        self._drains[gone] = True
        self.draining += gone.size

    def drained(self, blocks: Int32) -> None:
        """The copies of `blocks` are acknowledged: they are as after give(). Raises ValueError if one did not drain."""
        if not self._drains[blocks].all():
            raise ValueError("acknowledged a block that did not drain")
        self._drains[blocks] = False
        self.draining -= blocks.size
        self._put(blocks)

    def find(self, keys: UInt64, tokens: Int32, root: int) -> Int32:
        """[m] int32: the blocks of the longest indexed prefix; takes no reference.

        keys: [n] of the prompt's full blocks; tokens: [>= n * block_size]; root: Contents.root() of its salt, or the
        content id of the block before, when the beginning was found elsewhere.
        """
        return self._index.find(keys, tokens, root, self._drains if self.draining else None)

    def find_many(self, prompts: list[Prompt]) -> list[Int32]:
        """find() of many prompts, (keys, tokens, root) each, in one go."""
        return self._index.find_many(prompts, self._drains if self.draining else None)

    def leading(self, keys: UInt64) -> int:
        """How many of the first keys of a chain are indexed; whether the blocks hold that prefix is not looked at."""
        return self._index.leading(keys)

    def register(self, blocks: Int32, keys: UInt64, tokens: Int32, first: Mask, parents: Int64) -> Int64:
        """Makes full, applied blocks known; returns [n] content ids, with which the chains can go on later, also
        after these blocks were evicted.

        blocks: [n] referenced, unregistered, distinct; chains one after another; keys: [n]; tokens: [n, block_size];
        first: [n] does a chain's part begin here? parents: [chains] the content id or root before it. A block whose
        content is indexed already gets the same content id and is not indexed itself; one that the other tier has
        gets its content id there. Where the key holds something
        else, that block and all behind it in its chain are not registered: their id is 0, and so is that of all blocks
        registered later behind 0. One exception: an entry with the same tokens behind another parent gives way when
        the new one's parent is indexed; it is the same prefix whose beginning was evicted and came again.
        Raises ValueError if a block has no reference or is registered.
        """
        if (self.refs.take(blocks) <= 0).any():
            raise ValueError("a block without a reference cannot be registered")
        contents, displaced = self._index.register(blocks, keys, tokens, first, parents)
        if displaced.size:
            self._uncache(displaced)
        return contents

    def forget(self, blocks: Int32) -> None:
        """Referenced blocks are not found any more; their references stay. Those not indexed stay as they are."""
        self._index.forget(blocks[self._index.content.take(blocks) != 0])

    def reused(self, blocks: Int32) -> Mask:
        """[n] bool: has anybody shared it since it was taken?"""
        found: Mask = self._reused[blocks]
        return found

    def drains(self, blocks: Int32) -> Mask:
        """[n] bool: whose copies are not acknowledged yet?"""
        found: Mask = self._drains[blocks]
        return found

    def coldest(self, count: int) -> Int32:
        """[<= count] int32: the least recently used cached blocks, coldest first; they stay what they are."""
        return self._cold.coldest(min(count, self.cached))

    def describe(self, blocks: Int32) -> tuple[UInt64, Int32, Int64, Int64]:
        """What registered blocks hold: keys [n], tokens [n, block_size], contents [n] (0: not registered), parents
        [n], as adopt() of the other tier takes them.
        """
        return self._index.describe(blocks)

    def adopt(self, blocks: Int32, keys: UInt64, tokens: Int32, contents: Int64, parents: Int64) -> None:
        """Registers referenced blocks that got copies of the other tier's, under the same content ids. A key that is
        indexed here already stays with its block; content 0 is skipped. Raises ValueError as register().
        """
        if (self.refs.take(blocks) <= 0).any():
            raise ValueError("a block without a reference cannot be registered")
        self._index.adopt(blocks, keys, tokens, contents, parents)

    def check(self, held: Int32 | None = None) -> None:
        """Raises RuntimeError on a broken invariant. `held`: every block of every table, once per table."""
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
        if self.content.size and (self.content[free].any() or not self.content[cold].all()):
            raise RuntimeError("a free block is registered or a cached one is not")
        self._index.check()
        if held is not None:
            counts = np.bincount(held, minlength=self.total)
            if not np.array_equal(counts, self.refs):
                raise RuntimeError(f"blocks {np.flatnonzero(counts != self.refs)[:8].tolist()} are counted wrongly")

    def _release(self, blocks: Int32) -> Int32:
        """Drops references; returns the blocks that have none now, each once, in the given order."""
        before = self.refs.take(blocks)
        wide = blocks.astype(np.intp)
        np.subtract.at(self.refs, wide, ONE)
        refs = self.refs.take(blocks)
        if (refs < 0).any():
            np.add.at(self.refs, wide, ONE)
            raise ValueError("a block without a reference was given back")
        gone: Int32 = blocks[refs == 0]
        if (before - refs > 1).any():  # some stand there twice
            gone = gone[np.sort(np.unique(gone, return_index=True)[1])]
        return gone

    def _evict(self, count: int) -> None:
        """At least `count` of the coldest blocks become free; in a large pool some more, so that it is seldom done."""
        cold = self._cold.pop(max(count, min(self.total // EVICTED_SHARE, self.cached)))
        self._index.forget(cold)
        self.cached -= cold.size
        self._append(cold)

    def _put(self, blocks: Int32) -> None:
        """Distinct blocks without references, in table order, become cached or free."""
        if len(self._index):
            registered = self.content.take(blocks) != 0
            cold = blocks[registered]
            if cold.size:
                self._cold.add(cold[::-1])
                self.cached += cold.size
                blocks = blocks[~registered]
        self._append(blocks)

    def _uncache(self, blocks: Int32) -> None:
        """Blocks that were registered and are no more: the cached ones of them are free."""
        cold = blocks[(self.refs.take(blocks) == 0) & ~self._drains.take(blocks)]
        self.cached -= self._cold.remove(cold)
        self._append(cold)

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
        self._head = 0
        self._tail = 0

    def holds(self, blocks: Int32) -> bool:
        return bool((self._place.take(blocks) >= 0).all())

    def add(self, blocks: Int32) -> None:
        """Distinct blocks that are not in it, the first to go first."""
        if self._tail + blocks.size > self._log.size:
            alive = self.blocks()
            self._head, self._tail = 0, alive.size
            self._log[: alive.size] = alive
            self._place[alive] = np.arange(alive.size)
        end = self._tail + blocks.size
        self._log[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end)
        self._tail = end

    def remove(self, blocks: Int32) -> int:
        """Blocks that are in it, perhaps twice in the column; returns how many different ones."""
        order = np.arange(blocks.size, dtype=np.int32)
        self._place[blocks] = order
        different = int((self._place.take(blocks) == order).sum())
        self._place[blocks] = -1
        return different

    def coldest(self, count: int) -> Int32:
        """[count] the first to go; there must be as many."""
        if not count:
            return EMPTY
        width = count + 32
        alive = self._alive(width)
        while alive.size < count:
            width *= 2
            alive = self._alive(width)
        end = min(self._head + width, self._tail)
        start = end - alive.size
        if start > self._head:  # squeeze out the dead ones, so that nobody meets them again
            self._log[start:end] = alive
            self._place[alive] = np.arange(start, end)
            self._head = start
        return alive[:count]

    def pop(self, count: int) -> Int32:
        """coldest(), taken out."""
        blocks = self.coldest(count)
        self._place[blocks] = -1
        self._head += blocks.size
        return blocks

    def blocks(self) -> Int32:
        """All, the first to go first."""
        return self._alive(self._tail - self._head)

    def _alive(self, width: int) -> Int32:
        end = min(self._head + width, self._tail)
        entries = self._log[self._head : end]
        alive: Int32 = entries[self._place.take(entries) == np.arange(self._head, end)]
        return alive

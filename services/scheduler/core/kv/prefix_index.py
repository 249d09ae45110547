"""The prefix index of one tier of blocks: which block holds the KV of which token prefix.

Called by BlockPool, which owns the blocks; the Hasher also at intake, outside the iteration.
The hash finds, the tokens confirm: a block is found only if its own token ids and its parent's content id are those of
the prompt, so that a collision of the hash can never serve another prompt's KV.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.core.types import EMPTY, Int32

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Prompt = tuple[UInt64, Int32, int]  # keys [n], tokens [>= n * block_size], root

UNKNOWN = 0  # the content id of a block that no index knows; nothing is registered behind it
UNSALTED = -1  # the root of prompts without a salt
IDLE_SALTS = 4096  # salts remembered though no block of theirs is registered
WORD = (1 << 64) - 1
SHIFT = 29


class Contents:
    """Names for token prefixes that end at a full block: positive, counted up, never used again; and for salts,
    negative. One for all tiers of a replica, so that a copy in the other tier has the same name.

    A salt's name lasts while a first block with that salt is registered in any tier, and after that until IDLE_SALTS
    others were asked for: ask for it when it is needed, do not keep it. A name that was forgotten can no longer be
    found under its salt, which costs a cache hit and nothing else.
    """

    def __init__(self) -> None:
        self.tiers: list[Index] = []
        self._next = 1
        self._next_root = UNSALTED - 1
        self._root_of: dict[bytes, int] = {}
        self._salt_of: dict[int, bytes] = {}
        self._holds: dict[int, int] = {}  # root -> registered first blocks
        self._idle: dict[int, None] = {}  # roots without one, longest unused first

    def new(self, count: int) -> int:
        """The first of `count` consecutive new content ids."""
        first = self._next
        self._next += count
        return first

    def root(self, salt: bytes) -> int:
        """The parent of a first block with this salt, < 0."""
        if not salt:
            return UNSALTED
        root = self._root_of.get(salt, 0)
        if root in self._holds:
            return root
        if root:
            del self._idle[root]
        else:
            root = self._next_root
            self._next_root -= 1
            self._root_of[salt] = root
            self._salt_of[root] = salt
        self._rest(root)
        return root

    def hold(self, root: int) -> None:
        """One more first block is registered under `root`."""
        if root in self._salt_of:
            self._holds[root] = self._holds.get(root, 0) + 1
            self._idle.pop(root, None)

    def drop(self, root: int) -> None:
        """One first block less is registered under `root`."""
        if root not in self._holds:
            return
        self._holds[root] -= 1
        if not self._holds[root]:
            del self._holds[root]
            self._rest(root)

    def _rest(self, root: int) -> None:
        self._idle[root] = None
        if len(self._idle) > IDLE_SALTS:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._root_of[self._salt_of.pop(oldest)]


class Hasher:
    """Chain hash over full blocks: key = mix(previous key, digest of the block's tokens).

    The digest is multilinear, sum(coefficient[j] * token[j]) mod 2^64 with secret coefficients, so that all blocks of
    a prompt are one matrix product. Source: Lemire and Kaser, "Strongly universal string hashing is fast", 2014.
    """

    def __init__(self, block_size: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.block_size = block_size
        self._coefficients: UInt64 = random.integers(0, WORD, block_size, np.uint64, endpoint=True)
        self._factor = int(random.integers(0, WORD, dtype=np.uint64)) | 1  # odd: no key is lost in the product
        self._seed = int(random.integers(0, WORD, dtype=np.uint64))

    def keys(self, tokens: Int32, salt: bytes = b"", start_key: int = 0) -> UInt64:
        """[tokens.size // block_size] keys of the full blocks. With `start_key`, the key of the block before them,
        the chain goes on from there and the salt does not matter.
        """
        full = tokens.size // self.block_size
        if not full:
            return np.zeros(0, np.uint64)
        digests = self._digests(tokens[: full * self.block_size].reshape(full, self.block_size))
        return np.array(self._chain(digests.tolist(), start_key or self._start(salt)), np.uint64)

    def _start(self, salt: bytes) -> int:
        words = [int.from_bytes(salt[i : i + 8], "little") for i in range(0, len(salt), 8)]
        return self._chain([*words, len(salt)], self._seed)[-1]

    def _digests(self, tokens: Int32) -> UInt64:
        digests: UInt64 = tokens.astype(np.uint64) @ self._coefficients
        return digests

    def _chain(self, digests: list[int], key: int) -> list[int]:
        """A loop, because each key needs the one before; in whole numbers it is as fast as a product of arrays, and
        the shift between the factors keeps equal blocks in another order apart, which a polynomial mod 2^64 does not.
        """
        factor, keys = self._factor, []
        for digest in digests:
            key = (key ^ digest) * factor & WORD
            key ^= key >> SHIFT
            keys.append(key)
        return keys


class Index:
    """Key -> block, and for each block what it holds. At most one block per key; `content` is UNKNOWN where a block
    is not indexed.
    """

    def __init__(self, blocks: int, block_size: int, contents: Contents) -> None:
        self.block_size = block_size
        self.contents = contents
        if len(contents.tiers) == 2:
            raise ValueError("two tiers share their contents; a replica that begins anew makes new ones")
        contents.tiers.append(self)
        self.content: Int64 = np.zeros(blocks, np.int64)
        self._key: UInt64 = np.zeros(blocks, np.uint64)
        self._parent: Int64 = np.zeros(blocks, np.int64)
        self._tokens: Int32 = np.zeros((blocks, block_size), np.int32)
        self._block_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, keys: UInt64, tokens: Int32, root: int, hidden: Mask | None = None) -> Int32:
        """[m] int32: the blocks of the longest indexed prefix of one prompt. hidden: [blocks] those not to be found."""
        found = self._candidates(keys)
        if not found:
            return EMPTY
        blocks = np.array(found, np.int32)
        before = np.empty(blocks.size, np.int64)
        before[1:] = self.content.take(blocks[:-1])
        before[0] = root
        good = self._confirmed(blocks, before, tokens[: blocks.size * self.block_size], hidden)
        return blocks if good.all() else blocks[: good.argmin()]

    def find_many(self, prompts: list[Prompt], hidden: Mask | None = None) -> list[Int32]:
        """find() of many prompts, (keys, tokens, root) each, with one comparison."""
        size = self.block_size
        found: list[int] = []
        ends: list[int] = []
        for keys, _, _ in prompts:
            found += self._candidates(keys)
            ends.append(len(found))
        if not found:
            return [EMPTY] * len(prompts)
        starts = [0, *ends[:-1]]
        blocks = np.array(found, np.int32)
        before = np.empty(blocks.size, np.int64)
        before[1:] = self.content.take(blocks[:-1])
        flat: list[Int32] = []
        for start, end, (_, tokens, root) in zip(starts, ends, prompts, strict=True):
            if start < end:
                before[start] = root
                flat.append(tokens[: (end - start) * size])
        good = self._confirmed(blocks, before, np.concatenate(flat), hidden)
        if good.all():
            return [blocks[start:end] for start, end in zip(starts, ends, strict=True)]
        wrong = np.append(np.flatnonzero(~good), blocks.size)
        cuts = np.minimum(wrong[np.searchsorted(wrong, starts)], ends).tolist()
        return [blocks[start:cut] for start, cut in zip(starts, cuts, strict=True)]

    def leading(self, keys: UInt64) -> int:
        """How many of the first keys are indexed."""
        return len(self._candidates(keys))

    def register(self, blocks: Int32, keys: UInt64, tokens: Int32, first: Mask, parents: Int64) -> tuple[Int64, Int32]:
        """See BlockPool.register(). Also returns the blocks that are indexed no more, as others took their place."""
        starts = np.flatnonzero(first)
        if starts.size != parents.size or (blocks.size and not first[0]):
            raise ValueError(f"{starts.size} chains begin, {parents.size} parents are given")
        if not parents.all():
            known = parents[np.cumsum(first) - 1] != UNKNOWN
            contents: Int64 = np.zeros(blocks.size, np.int64)
            contents[known], displaced = self.register(
                blocks[known], keys[known], tokens[known], first[known], parents[parents != UNKNOWN]
            )
            return contents, displaced
        if not blocks.size:
            return np.zeros(0, np.int64), EMPTY
        if self.content.take(blocks).any():
            raise ValueError("a block is registered already")
        mine = blocks.tolist()
        holders = list(map(self._block_of.setdefault, keys.tolist(), mine))
        if holders == mine:
            contents = self._names(keys, tokens, starts, parents)
            before = np.empty(blocks.size, np.int64)
            before[1:] = contents[:-1]
            before[starts] = parents
            self._write(blocks, keys, tokens, contents, before)
            return contents, EMPTY
        return self._register_known(blocks, keys, tokens, first, parents, np.array(holders, np.int32))

    def adopt(self, blocks: Int32, keys: UInt64, tokens: Int32, contents: Int64, parents: Int64) -> None:
        """Registers copies under content ids that exist. Skips UNKNOWN ones and keys that are taken."""
        if self.content.take(blocks).any():
            raise ValueError("a block is registered already")
        known = contents != UNKNOWN
        blocks, keys, tokens, contents, parents = (
            column[known] for column in (blocks, keys, tokens, contents, parents)
        )
        holders = np.array(list(map(self._block_of.setdefault, keys.tolist(), blocks.tolist())), np.int32)
        new = holders == blocks
        self._write(blocks[new], keys[new], tokens[new], contents[new], parents[new])

    def describe(self, blocks: Int32) -> tuple[UInt64, Int32, Int64, Int64]:
        """keys [n], tokens [n, block_size], contents [n], parents [n], as adopt() takes them."""
        return self._key[blocks], self._tokens[blocks], self.content[blocks], self._parent[blocks]

    def forget(self, blocks: Int32) -> None:
        """Indexed blocks are indexed no more."""
        if not blocks.size:
            return
        block_of = self._block_of
        for key in self._key.take(blocks).tolist():
            del block_of[key]
        self.content[blocks] = UNKNOWN
        parents = self._parent.take(blocks)
        for root in parents[parents < UNSALTED].tolist():
            self.contents.drop(root)

    def check(self) -> None:
        """Raises RuntimeError where the index and the arrays differ."""
        indexed = np.flatnonzero(self.content)
        if len(self._block_of) != indexed.size:
            raise RuntimeError(f"{len(self._block_of)} keys are indexed, {indexed.size} blocks have a content")
        holders = [self._block_of.get(key) for key in self._key[indexed].tolist()]
        if holders != indexed.tolist():
            raise RuntimeError("a key does not lead to its block")
        if np.unique(self.content[indexed]).size != indexed.size or (self.content[indexed] < 0).any():
            raise RuntimeError("two blocks are indexed for one content")
        if (self._parent[indexed] == UNKNOWN).any() or (self._parent[indexed] >= self.content[indexed]).any():
            raise RuntimeError("a content is not younger than its parent")

    def _candidates(self, keys: UInt64) -> list[int]:
        """The blocks of the leading keys that are indexed."""
        found: list[int] = []
        if not keys.size or int(keys[0]) not in self._block_of:
            return found
        try:
            found.extend(map(self._block_of.__getitem__, keys.tolist()))
        except KeyError:
            return found  # extend() keeps what came before the key that is not there
        return found

    def _confirmed(self, blocks: Int32, before: Int64, tokens: Int32, hidden: Mask | None) -> Mask:
        """[n] bool: does the block hold these tokens behind that content?"""
        good: Mask = self._parent.take(blocks) == before
        good &= (self._tokens.take(blocks, 0) == tokens.reshape(blocks.size, self.block_size)).all(1)
        if hidden is not None:
            good &= ~hidden.take(blocks)
        return good

    def _names(self, keys: UInt64, tokens: Int32, starts: npt.NDArray[np.intp], parents: Int64) -> Int64:
        """Content ids for blocks that are new here: those of the other tier as far as it has them, else new ones."""
        begin = self.contents.new(keys.size)
        contents = np.arange(begin, begin + keys.size)
        other = next((tier for tier in self.contents.tiers if tier is not self and len(tier)), None)
        if other is not None:
            begins = starts.tolist()
            spans = zip(begins, [*begins[1:], keys.size], parents.tolist(), strict=True)
            found = other.find_many([(keys[a:b], tokens[a:b].reshape(-1), parent) for a, b, parent in spans])
            for start, blocks in zip(begins, found, strict=True):
                contents[start : start + blocks.size] = other.content[blocks]
        return contents

    def _write(self, blocks: Int32, keys: UInt64, tokens: Int32, contents: Int64, parents: Int64) -> None:
        self._key[blocks] = keys
        self._tokens[blocks] = tokens
        self.content[blocks] = contents
        self._parent[blocks] = parents
        for root in parents[parents < UNSALTED].tolist():
            self.contents.hold(root)

    def _register_known(
        self, blocks: Int32, keys: UInt64, tokens: Int32, first: Mask, parents: Int64, holders: Int32
    ) -> tuple[Int64, Int32]:
        """Some keys were there already, or twice in this call: their contents must prove equal."""
        new: Mask = holders == blocks
        count = int(new.sum())
        begin = self.contents.new(count)
        fresh = blocks[new]
        self.content[fresh] = np.arange(begin, begin + count)
        contents: Int64 = self.content.take(holders)
        before = np.empty(blocks.size, np.int64)
        before[1:] = contents[:-1]
        before[first] = parents
        self._write(fresh, keys[new], tokens[new], contents[new], before[new])
        old = ~new
        if self._confirmed(holders[old], before[old], tokens[old], None).all():
            return contents, EMPTY
        self.forget(fresh)
        return self._register_singly(blocks, keys, tokens, first, parents)

    def _register_singly(
        self, blocks: Int32, keys: UInt64, tokens: Int32, first: Mask, parents: Int64
    ) -> tuple[Int64, Int32]:
        """One after another, for the rare call with a key that holds something else: what that means for one chain
        can depend on what became of the one before.
        """
        contents: Int64 = np.zeros(blocks.size, np.int64)
        displaced: list[int] = []
        chains = iter(parents.tolist())
        before, linked = UNKNOWN, False  # the content before block i; is it known to be indexed?
        for i, key in enumerate(keys.tolist()):
            if first[i]:
                before, linked = next(chains), False
            if before == UNKNOWN:
                continue
            holder = self._block_of.get(key, -1)
            if holder >= 0:
                same = np.array_equal(self._tokens[holder], tokens[i])
                if same and self._parent[holder] == before:
                    contents[i] = before = int(self.content[holder])
                    linked = True
                    continue
                linked = linked or before < 0 or bool((self.content == before).any())
                if not (same and linked):
                    before = UNKNOWN
                    continue
                # Most likely the same prefix under an older name, whose beginning was evicted: it cannot be found.
                displaced.append(holder)
                self.forget(np.array([holder], np.int32))
            one = slice(i, i + 1)
            self._block_of[key] = int(blocks[i])
            contents[i] = self.contents.new(1)
            self._write(blocks[one], keys[one], tokens[one], contents[one], np.array([before]))
            before, linked = int(contents[i]), linked or before < 0
        return contents, np.array(displaced, np.int32)

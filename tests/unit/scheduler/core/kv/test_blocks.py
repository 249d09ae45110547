"""Blocks of a pool and the prefixes that they hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.kv.prefix_index import KEY_BYTES, NO_KEY, Hasher, Keys


def enter(pool: BlockPool, keys: Keys) -> np.ndarray:
    """Take blocks for one prompt and register them."""
    blocks = pool.take(len(keys))
    pool.register(blocks, keys)
    return blocks


def test_check_sees_a_block_that_is_counted_wrongly() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.check(blocks)
    with pytest.raises(RuntimeError, match="counted wrongly"):
        pool.check(blocks[:1])
    pool.free += 1
    with pytest.raises(RuntimeError):
        pool.check()


@pytest.mark.parametrize("references", [1, -1])
def test_check_sees_a_free_block_with_references(references: int) -> None:
    pool = BlockPool(4)
    (taken,) = pool.take(1)
    free = (taken + 1) % 4
    pool.refs[free] = references
    with pytest.raises(RuntimeError, match="in no state or in two"):
        pool.check()


def test_log_of_cached_blocks_stays_ordered_and_bounded() -> None:
    random = np.random.default_rng(3)
    pool = BlockPool(40, indexed=True)
    blocks = enter(pool, [b"%d" % number for number in range(40)])
    order = blocks.tolist()[::-1]
    pool.give(blocks)
    for _ in range(300):
        some = random.permutation(40)[: random.integers(1, 30)].astype(np.int32)
        pool.share(np.concatenate([some, some]))
        pool.give(some)
        pool.give(some)
        order = [b for b in order if b not in set(some.tolist())] + some.tolist()[::-1]
        count = int(random.integers(0, 41))
        assert pool.coldest(count).tolist() == order[:count]
    pool.check()


def test_wrong_registrations_are_refused() -> None:
    pool = BlockPool(4, indexed=True)
    blocks = enter(pool, [b"1"])
    with pytest.raises(ValueError, match="registered already"):
        pool.register(blocks, [b"2"])
    with pytest.raises(ValueError, match="without a reference"):
        pool.register(np.array([3], np.int32), [b"2"])
    pool.check()


def test_a_refused_registration_changes_nothing() -> None:
    pool = BlockPool(4, indexed=True)
    registered, fresh = enter(pool, [b"1"]), pool.take(1)
    with pytest.raises(ValueError, match="registered already"):
        pool.register(np.concatenate([fresh, registered]), [b"2", b"3"])
    for keys in ([b"2"], [b"2", b"3", b"4"]):
        with pytest.raises(ValueError, match="keys for 2 blocks"):
            pool.register(np.concatenate([fresh, pool.take(1)]), keys)
    assert pool.keys_of(fresh) == [NO_KEY]
    pool.check()


def test_one_block_is_registered_for_equal_keys() -> None:
    pool = BlockPool(4, indexed=True)
    assert pool.keys_of(enter(pool, [b"5", b"6", b"5"])) == [b"5", b"6", NO_KEY]
    assert pool.keys_of(enter(pool, [b"6"])) == [NO_KEY]
    pool.check()


def test_a_block_without_a_key_is_not_registered() -> None:
    pool = BlockPool(4, indexed=True)
    blocks = enter(pool, [b"5", NO_KEY])
    assert pool.keys_of(blocks) == [b"5", NO_KEY]
    pool.give(blocks)
    assert (pool.free, pool.cached) == (3, 1)


SIZE = 2
SALTS = [b"", b"one", b"two"]
Prefix = tuple[bytes, tuple[int, ...]]
"""Salt and all tokens up to the end of a block: what a block really holds."""


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def keys_of(salt: bytes, tokens: list[int]) -> Keys:
    return Hasher(SIZE).keys(column(tokens), salt)


def prefixes(salt: bytes, tokens: list[int]) -> list[Prefix]:
    return [(salt, tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]


@dataclass(eq=False)
class Row:
    """A running chain: all its tokens, and the blocks of the first of them."""

    salt: bytes
    tokens: list[int]
    blocks: list[int]


class IndexTwin(RuleBasedStateMachine):
    """Few tokens and few salts: everything meets everything."""

    @initialize(blocks=st.integers(0, 20), indexed=st.sampled_from([True, True, True, False]))
    def start(self, blocks: int, indexed: bool) -> None:
        self.pool = BlockPool(blocks, indexed)
        self.indexed = indexed
        self.host = BlockPool(6, indexed=True)
        self.free = list(range(blocks))
        self.cached: list[int] = []  # coldest first
        self.refs: dict[int, int] = {}
        self.draining: list[int] = []
        self.index: dict[Prefix, int] = {}
        self.entries: dict[int, Prefix] = {}  # registered block -> what it holds
        self.copied: dict[int, Prefix] = {}  # block of the other tier -> what it holds
        self.tables: list[Row] = []

    def model_match(self, salt: bytes, tokens: list[int]) -> list[int]:
        found: list[int] = []
        for prefix in prefixes(salt, tokens):
            block = self.index.get(prefix)
            if block is None or block in self.draining:
                break
            found.append(block)
        return found

    def model_take(self, count: int) -> list[int]:
        taken = self.free[:count]
        del self.free[:count]
        evicted = self.cached[: count - len(taken)]
        del self.cached[: len(evicted)]
        for block in evicted:
            del self.index[self.entries.pop(block)]
        self.refs.update(dict.fromkeys(taken + evicted, 1))
        return taken + evicted

    def model_put(self, gone: list[int]) -> None:
        self.cached += [b for b in reversed(gone) if b in self.entries]
        self.free += [b for b in gone if b not in self.entries]

    @rule(salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def enter_row(self, salt: bytes, tokens: list[int]) -> None:
        """A prompt finds its prefix, shares it, takes the rest and registers it."""
        matched = self.pool.match(keys_of(salt, tokens))
        blocks = matched.tolist()
        assert blocks == self.model_match(salt, tokens)
        need = len(tokens) // SIZE - len(blocks)
        unused = [b for b in self.cached if b not in blocks]
        if need > len(self.free) + len(unused):
            return
        for block, prefix in zip(blocks, prefixes(salt, tokens), strict=False):
            assert self.entries[block] == prefix, "another prompt's block was found"
            self.refs[block] = self.refs.get(block, 0) + 1
        self.cached = unused
        self.pool.share(matched)
        taken = self.pool.take(need).tolist()
        assert taken == self.model_take(need)
        row = Row(salt, list(tokens), blocks + taken)
        self.tables.append(row)
        self.register(row, len(blocks))

    @precondition(lambda self: self.tables and (self.free or self.cached))
    @rule(data=st.data())
    def extend_row(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.tables))
        start = len(row.blocks)
        del row.tokens[start * SIZE :]
        row.tokens += data.draw(st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
        taken = self.pool.take(1).tolist()
        assert taken == self.model_take(1)
        row.blocks += taken
        self.register(row, start)

    def register(self, row: Row, start: int) -> None:
        if not self.indexed:
            return
        end = len(row.blocks)
        self.pool.register(column(row.blocks[start:]), keys_of(row.salt, row.tokens)[start:end])
        for block, prefix in list(zip(row.blocks, prefixes(row.salt, row.tokens), strict=False))[start:]:
            if prefix not in self.index:
                self.index[prefix] = block
                self.entries[block] = prefix

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), drain=st.booleans())
    def leave(self, data: st.DataObject, drain: bool) -> None:
        given_back = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))).blocks
        (self.pool.drain if drain else self.pool.give)(column(given_back))
        for block in given_back:
            self.refs[block] -= 1
        gone = [b for b in given_back if not self.refs[b]]
        for block in gone:
            del self.refs[block]
        if drain:
            self.draining += gone
        else:
            self.model_put(gone)

    @rule(more=st.integers(1, 5))
    def take_too_many(self, more: int) -> None:
        with pytest.raises(ValueError, match="free"):
            self.pool.take(self.pool.available + more)

    @precondition(lambda self: self.free)
    @rule()
    def give_what_is_free(self) -> None:
        for wrong in (self.pool.give, self.pool.share, self.pool.end_drain):
            with pytest.raises(ValueError):
                wrong(column(self.free[:1]))

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(self.draining), unique=True))
        self.pool.end_drain(column(done))
        self.draining = [b for b in self.draining if b not in done]
        self.model_put(done)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def write_back(self, data: st.DataObject) -> None:
        """Copy the coldest to the other tier, where only the same prompts find them."""
        cold = self.pool.coldest(data.draw(st.integers(0, len(self.cached) + 1)))
        assert cold.tolist() == self.cached[: cold.size]
        cold = cold[: self.host.available]
        copies = self.host.take(cold.size)
        self.host.register(copies, self.pool.keys_of(cold))
        self.host.give(copies)
        for copy, block in zip(copies.tolist(), cold.tolist(), strict=True):
            self.copied[copy] = self.entries[block]

    @rule(salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 1), max_size=9))
    def look(self, salt: bytes, tokens: list[int]) -> None:
        keys = keys_of(salt, tokens)
        found = self.pool.match(keys).tolist()
        assert found == self.model_match(salt, tokens)
        assert len(found) <= self.pool.match_length(keys)
        found = self.host.match(keys).tolist()
        assert [self.copied[b] for b in found] == prefixes(salt, tokens)[: len(found)]

    @invariant()
    def states_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check(column([b for row in self.tables for b in row.blocks]))
        self.host.check()
        states = (len(self.free), len(self.cached), len([b for b in self.refs if self.refs[b]]), len(self.draining))
        assert (pool.free, pool.cached, pool.referenced, pool.draining) == states
        assert pool.coldest(pool.total).tolist() == self.cached
        assert pool.free + pool.cached + pool.referenced + pool.draining == pool.total
        assert pool.available == pool.free + pool.cached
        assert not self.indexed or all(
            bool(pool.keys_of(column([b]))[0]) == (b in self.entries) for b in range(pool.total)
        )


IndexTwin.TestCase.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
TestIndexTwin = IndexTwin.TestCase


@given(
    prompts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=40), max_size=5),
    size=st.sampled_from([1, 2, 16]),
    cut=st.integers(0, 40),
)
def test_keys_are_equal_in_one_go_and_in_parts(prompts: list[list[int]], size: int, cut: int) -> None:
    hasher = Hasher(size)
    for i, prompt in enumerate(prompts):
        whole = hasher.keys(column(prompt), b"s" * (i % 2))
        assert len(whole) == len(prompt) // size
        start = min(cut, len(whole))
        if start:
            rest = hasher.keys(column(prompt[start * size :]), before=whole[start - 1])
            assert rest == whole[start:]


def test_keys_differ_with_salt_tokens_and_order() -> None:
    random = np.random.default_rng(1)
    hasher = Hasher(16)
    blocks = random.integers(0, 2, (400, 16)).astype(np.int32)
    pairs = [np.concatenate([blocks[i], blocks[j]]) for i in range(0, 400, 7) for j in range(0, 400, 9)]
    assert len({hasher.keys(p)[-1] for p in pairs}) == len({p.tobytes() for p in pairs})
    zeros = np.zeros(160, np.int32)
    assert len({*hasher.keys(zeros), *hasher.keys(zeros, b"x")}) == 20
    assert len({hasher.keys(zeros[:16], salt)[0] for salt in (b"", b"\0", b"\0" * 8, b"a" * 9, b"a" * 10)}) == 5
    assert all(len(key) == KEY_BYTES for key in hasher.keys(zeros))

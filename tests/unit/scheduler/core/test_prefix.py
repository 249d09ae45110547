"""The prefix index against a twin that registers and finds block by block; hashes made to collide; the chain hash."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.kv.prefix_index import UNSALTED, Contents, Hasher

SIZE = 2
SALTS = [b"", b"one", b"two"]


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def rows(tokens: list[int]) -> np.ndarray:
    return column(tokens).reshape(-1, SIZE)


def enter(pool: BlockPool, tokens: list[int], keys: list[int], parent: int) -> tuple[np.ndarray, np.ndarray]:
    """Takes blocks for one chain and registers them; blocks and content ids."""
    blocks = pool.take(len(keys))
    first = np.zeros(len(keys), np.bool_)
    first[:1] = True
    return blocks, pool.register(blocks, np.array(keys, np.uint64), rows(tokens), first, np.array([parent]))


def find(pool: BlockPool, tokens: list[int], keys: list[int], root: int) -> list[int]:
    found = pool.find(np.array(keys, np.uint64), column(tokens), root)
    many = pool.find_many([(np.zeros(0, np.uint64), column([]), -1), (np.array(keys, np.uint64), column(tokens), root)])
    assert many[0].size == 0
    assert many[1].tolist() == found.tolist()
    return found.tolist()


@dataclass(eq=False)
class Entry:
    """What the twin knows of one content: `prefix` is the truth, salt and all tokens up to the block's end."""

    id: int
    parent: int
    prefix: tuple[bytes, tuple[int, ...]]

    @property
    def block(self) -> tuple[int, ...]:
        return self.prefix[1][-SIZE:]


@dataclass(eq=False)
class Row:
    """A running chain: all its tokens, the blocks of the first `done`, and its content ids so far."""

    salt: bytes
    tokens: list[int]
    keys: list[int]
    blocks: list[int]
    last: int


class IndexTwin(RuleBasedStateMachine):
    """Few tokens, few salts, few keys: everything meets everything, and keys collide all the time."""

    @initialize(blocks=st.integers(1, 20), spread=st.sampled_from([1, 3, 50, 1 << 62]))
    def start(self, blocks: int, spread: int) -> None:
        self.spread = spread  # of the keys: 1 means that all collide
        self.contents = Contents()
        self.pool = BlockPool(blocks, SIZE, self.contents)
        self.host = BlockPool(6, SIZE, self.contents)
        self.free = list(range(blocks))
        self.cached: list[int] = []  # coldest first
        self.refs: dict[int, int] = {}
        self.draining: list[int] = []
        self.index: dict[int, int] = {}  # key -> block
        self.entries: dict[int, Entry] = {}  # indexed block -> what it holds
        self.key_of: dict[int, int] = {}
        self.copied: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block of the other tier -> what it holds
        self.prefix_of: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # every content id there ever was
        self.tables: list[Row] = []

    def key(self, salt: bytes, tokens: list[int]) -> int:
        digest = hashlib.blake2b(salt + bytes(tokens), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.spread

    def chain(self, salt: bytes, tokens: list[int]) -> list[int]:
        return [self.key(salt, tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]

    def model_find(self, salt: bytes, tokens: list[int]) -> list[int]:
        found: list[int] = []
        before = self.contents.root(salt)
        for i, key in enumerate(self.chain(salt, tokens)):
            block = self.index.get(key)
            entry = self.entries.get(block) if block is not None else None
            if entry is None or block in self.draining or entry.parent != before:
                break
            if entry.block != tuple(tokens[i * SIZE : i * SIZE + SIZE]):
                break
            found.append(block)
            before = entry.id
        return found

    def model_take(self, count: int) -> list[int]:
        taken = self.free[:count]
        del self.free[:count]
        evicted = self.cached[: count - len(taken)]
        del self.cached[: len(evicted)]
        for block in evicted:
            self.model_forget(block)
        self.refs.update(dict.fromkeys(taken + evicted, 1))
        return taken + evicted

    def model_forget(self, block: int) -> None:
        del self.entries[block]
        del self.index[self.key_of.pop(block)]

    def model_register(self, row: Row, block: int, key: int, tokens: list[int], got: int) -> None:
        """One block behind row.last; `got` is the id that the pool gave it."""
        before, row.last = row.last, got
        if before == 0:
            assert got == 0, "nothing is registered behind a broken chain"
            return
        if key in self.index:
            holder = self.index[key]
            entry = self.entries[holder]
            if entry.block == tuple(tokens[-SIZE:]) and entry.parent == before:
                assert got == entry.id, "an equal content has the same id"
                return
            linked = before < 0 or before in {e.id for e in self.entries.values()}
            if entry.block != tuple(tokens[-SIZE:]) or not linked:
                assert got == 0, "a collision is not registered"
                return
            self.model_forget(holder)
            if holder in self.cached:
                self.cached.remove(holder)
                self.free.append(holder)
        prefix = (row.salt, tuple(tokens))
        assert got and self.prefix_of.setdefault(got, prefix) == prefix, "a content id is one prefix for ever"
        self.index[key] = block
        self.key_of[block] = key
        self.entries[block] = Entry(got, before, prefix)

    def model_put(self, gone: list[int]) -> None:
        self.cached += [b for b in reversed(gone) if b in self.entries]
        self.free += [b for b in gone if b not in self.entries]

    @rule(data=st.data())
    def enter_rows(self, data: st.DataObject) -> None:
        """Some prompts find their prefixes, share them, take the rest and register it, in one call for all."""
        prompts = data.draw(
            st.lists(
                st.tuples(st.sampled_from(SALTS), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
                min_size=1,
                max_size=3,
            )
        )
        asked = [
            (np.array(self.chain(salt, tokens), np.uint64), column(tokens), self.contents.root(salt))
            for salt, tokens in prompts
        ]
        entered: list[tuple[Row, int]] = []
        finds = self.pool.find_many(asked)
        assert [found.tolist() for found in finds] == [self.model_find(salt, tokens) for salt, tokens in prompts]
        for (salt, tokens), found in zip(prompts, finds, strict=True):
            blocks = found.tolist()
            need = len(tokens) // SIZE - len(blocks)
            unused = [b for b in self.cached if b not in blocks]
            if need > len(self.free) + len(unused) or self.model_find(salt, tokens) != blocks:
                continue  # no room, or the prompt before it evicted what it had found
            for i, block in enumerate(blocks):
                truth = (salt, tuple(tokens[: i * SIZE + SIZE]))
                assert self.entries[block].prefix == truth, "another prompt's block was found"
                self.refs[block] = self.refs.get(block, 0) + 1
            self.cached = unused
            self.pool.share(found)
            last = self.entries[blocks[-1]].id if blocks else self.contents.root(salt)
            taken = self.pool.take(need).tolist()
            assert taken == self.model_take(need)
            row = Row(salt, tokens, self.chain(salt, tokens), blocks + taken, last)
            self.tables.append(row)
            entered.append((row, len(blocks)))
        self.register(entered)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def extend_rows(self, data: st.DataObject) -> None:
        """Some rows get one block more each, behind whatever became of the ones before."""
        count = min(len(self.tables), len(self.free) + len(self.cached))
        extended: list[tuple[Row, int]] = []
        for row in data.draw(st.permutations(self.tables))[: data.draw(st.integers(0, min(count, 4)))]:
            del row.tokens[len(row.blocks) * SIZE :]
            row.tokens += data.draw(st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
            row.keys = self.chain(row.salt, row.tokens)
            extended.append((row, len(row.blocks)))
            taken = self.pool.take(1).tolist()
            assert taken == self.model_take(1)
            row.blocks += taken
        self.register(extended)

    def register(self, parts: list[tuple[Row, int]]) -> None:
        parts = [(row, start) for row, start in parts if len(row.blocks) > start]
        blocks = [b for row, start in parts for b in row.blocks[start:]]
        keys = [k for row, start in parts for k in row.keys[start:]]
        tokens = [t for row, start in parts for t in row.tokens[start * SIZE : len(row.blocks) * SIZE]]
        first = [i == start for row, start in parts for i in range(start, len(row.blocks))]
        got = self.pool.register(
            column(blocks),
            np.array(keys, np.uint64),
            rows(tokens),
            np.array(first, np.bool_),
            np.array([row.last for row, _ in parts], np.int64),
        ).tolist()
        for row, start in parts:
            for i in range(start, len(row.blocks)):
                self.model_register(row, row.blocks[i], row.keys[i], row.tokens[: i * SIZE + SIZE], got.pop(0))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), drain=st.booleans())
    def leave(self, data: st.DataObject, drain: bool) -> None:
        given_back: list[int] = []
        for _ in range(data.draw(st.integers(1, min(3, len(self.tables))))):
            given_back += self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))).blocks
        (self.pool.drain if drain else self.pool.give)(column(given_back))
        for block in given_back:
            self.refs[block] -= 1
        gone = [b for b in dict.fromkeys(given_back) if not self.refs[b]]
        for block in gone:
            del self.refs[block]
        if drain:
            self.draining += gone
        else:
            self.model_put(gone)

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(self.draining), unique=True))
        self.pool.drained(column(done))
        self.draining = [b for b in self.draining if b not in done]
        self.model_put(done)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def write_back(self, data: st.DataObject) -> None:
        """Copies of the coldest go to the other tier, where only the same prompts find them."""
        cold = self.pool.coldest(data.draw(st.integers(0, len(self.cached) + 1)))
        assert cold.tolist() == self.cached[: cold.size]
        cold = cold[: self.host.available]
        copies = self.host.take(cold.size)
        self.host.adopt(copies, *self.pool.describe(cold))
        self.host.give(copies)
        for copy, block in zip(copies.tolist(), cold.tolist(), strict=True):
            self.copied[copy] = self.entries[block].prefix

    @rule(salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 1), max_size=9))
    def look(self, salt: bytes, tokens: list[int]) -> None:
        keys = np.array(self.chain(salt, tokens), np.uint64)
        found = self.pool.find(keys, column(tokens), self.contents.root(salt)).tolist()
        assert found == self.model_find(salt, tokens)
        assert [self.entries[b].prefix for b in found] == [
            (salt, tuple(tokens[: i * SIZE + SIZE])) for i in range(len(found))
        ]
        found = self.host.find(keys, column(tokens), self.contents.root(salt)).tolist()
        assert [self.copied[b] for b in found] == [(salt, tuple(tokens[: i * SIZE + SIZE])) for i in range(len(found))]

    @invariant()
    def states_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check(column([b for row in self.tables for b in row.blocks]))
        self.host.check()
        assert (pool.free, pool.cached, pool.draining) == (len(self.free), len(self.cached), len(self.draining))
        assert pool.coldest(pool.total).tolist() == self.cached
        assert pool.free + pool.cached + pool.referenced + pool.draining == pool.total
        assert pool.available == pool.free + pool.cached
        assert {b: e.id for b, e in self.entries.items()} == {
            b: int(pool.content[b]) for b in np.flatnonzero(pool.content).tolist()
        }


IndexTwin.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestIndexTwin = IndexTwin.TestCase


def test_a_first_block_with_the_same_hash_is_not_served() -> None:
    pool = BlockPool(8, SIZE)
    enter(pool, [1, 2], [7], UNSALTED)
    assert find(pool, [1, 2], [7], UNSALTED) == [0]
    assert find(pool, [1, 3], [7], UNSALTED) == []
    assert find(pool, [1, 2], [7], pool.contents.root(b"other")) == []


def test_a_later_block_with_the_same_hash_is_not_served() -> None:
    """Keys 5, 6 and tokens 3 4 are the same for both prompts; the prompts differ in the block before."""
    pool = BlockPool(8, SIZE)
    enter(pool, [1, 2, 3, 4], [5, 6], UNSALTED)
    _, contents = enter(pool, [9, 9, 3, 4], [8, 7], UNSALTED)
    assert find(pool, [9, 9, 3, 4], [8, 6], UNSALTED) == [2]
    assert find(pool, [1, 2, 3, 4], [5, 6], UNSALTED) == [0, 1]
    assert find(pool, [1, 2, 3, 5], [5, 6], UNSALTED) == [0]
    assert (contents > 0).all()


def test_nothing_is_registered_at_and_behind_a_collision() -> None:
    pool = BlockPool(8, SIZE)
    enter(pool, [1, 2], [5], UNSALTED)
    blocks, contents = enter(pool, [3, 3, 4, 4, 6, 6], [8, 5, 9], UNSALTED)
    assert contents[0] > 0
    assert contents[1:].tolist() == [0, 0]
    later, contents = enter(pool, [7, 7], [10], int(contents[2]))
    assert contents.tolist() == [0]
    pool.give(np.concatenate([blocks, later]))
    assert pool.cached == 1
    pool.check()


def test_other_chains_of_the_call_do_not_suffer_from_a_collision() -> None:
    pool = BlockPool(8, SIZE)
    enter(pool, [1, 2], [5], UNSALTED)
    blocks = pool.take(4)
    first, parents = np.array([True, False, True, False]), np.array([UNSALTED, UNSALTED])
    keys = np.array([5, 6, 7, 8], np.uint64)
    contents = pool.register(blocks, keys, rows([9, 9, 9, 9, 3, 3, 3, 4]), first, parents)
    assert contents[:2].tolist() == [0, 0]
    assert find(pool, [3, 3, 3, 4], [7, 8], UNSALTED) == blocks[2:].tolist()


def test_a_second_copy_has_the_same_content_and_is_free_when_given() -> None:
    pool = BlockPool(8, SIZE)
    one, first = enter(pool, [1, 2, 3, 4], [5, 6], UNSALTED)
    two, second = enter(pool, [1, 2, 3, 4], [5, 6], UNSALTED)
    assert first.tolist() == second.tolist()
    pool.give(two)
    assert (pool.free, pool.cached) == (6, 0)
    pool.give(one)
    assert (pool.free, pool.cached) == (6, 2)


def test_a_chain_goes_on_after_its_blocks_were_evicted_and_a_newer_one_takes_its_place() -> None:
    pool = BlockPool(4, SIZE)
    one, _ = enter(pool, [1, 1], [5], UNSALTED)
    _, contents = enter(pool, [1, 1], [5], UNSALTED)
    pool.give(one)
    pool.take(3)
    assert find(pool, [1, 1], [5], UNSALTED) == []
    pool.give(column([2]))
    _, behind = enter(pool, [2, 2], [6], int(contents[0]))
    assert behind[0] > contents[0]
    pool.give(column([0, 3]))
    three, again = enter(pool, [1, 1, 2, 2], [5, 6], UNSALTED)
    assert find(pool, [1, 1, 2, 2], [5, 6], UNSALTED) == three.tolist()
    assert (again > behind[0]).all()
    pool.give(column([2]))
    assert pool.cached == 0, "the orphan is free, not cached"
    pool.check()


@given(
    prompts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=40), max_size=5),
    size=st.sampled_from([1, 2, 16]),
    cut=st.integers(0, 40),
)
def test_keys_are_equal_in_one_go_and_in_parts(prompts: list[list[int]], size: int, cut: int) -> None:
    hasher = Hasher(size, 5)
    for i, prompt in enumerate(prompts):
        whole = hasher.keys(column(prompt), b"s" * (i % 2))
        assert whole.dtype == np.uint64
        assert whole.size == len(prompt) // size
        start = min(cut, whole.size)
        if start:
            rest = hasher.keys(column(prompt[start * size :]), start_key=int(whole[start - 1]))
            assert rest.tolist() == whole[start:].tolist()


def test_keys_differ_with_salt_seed_tokens_and_order() -> None:
    random = np.random.default_rng(1)
    hasher = Hasher(16, 1)
    blocks = random.integers(0, 2, (400, 16)).astype(np.int32)
    pairs = [np.concatenate([blocks[i], blocks[j]]) for i in range(0, 400, 7) for j in range(0, 400, 9)]
    assert len({int(hasher.keys(p)[-1]) for p in pairs}) == len({p.tobytes() for p in pairs})
    zeros = np.zeros(160, np.int32)
    assert len({*hasher.keys(zeros).tolist(), *hasher.keys(zeros, b"x").tolist()}) == 20
    assert len({int(hasher.keys(zeros[:16], salt)[0]) for salt in (b"", b"\0", b"\0" * 8, b"a" * 9, b"a" * 10)}) == 5
    assert Hasher(16, 2).keys(zeros).tolist() != hasher.keys(zeros).tolist()

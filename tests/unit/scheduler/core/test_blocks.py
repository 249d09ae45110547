"""BlockPool against a twin made of a list, a dict and a set; what is evicted when; the exact peak by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.kv.prefix_index import IDLE_SALTS, UNSALTED, Contents
from services.scheduler.core.policy.memory import Peak


def peak_blocks(held: np.ndarray, steps: np.ndarray, size: int) -> int:
    peak = Peak()
    peak.run(held, steps, size)
    return peak.blocks


def column(values: list[int] | list[list[int]]) -> np.ndarray:
    return np.array(values, np.int32)


def enter(pool: BlockPool, tokens: list[int], keys: list[int], root: int = UNSALTED) -> np.ndarray:
    """Takes blocks of two tokens for one prompt and registers them."""
    blocks = pool.take(len(keys))
    first = np.arange(len(keys)) == 0
    pool.register(blocks, np.array(keys, np.uint64), column(tokens).reshape(-1, 2), first, np.array([root]))
    return blocks


def find(pool: BlockPool, tokens: list[int], keys: list[int], root: int = UNSALTED) -> list[int]:
    return pool.find(np.array(keys, np.uint64), column(tokens), root).tolist()


class PoolTwin(RuleBasedStateMachine):
    """Tables of blocks taken, shared and given back in any order; the twin holds the same in plain Python."""

    @initialize(blocks=st.integers(0, 24))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.free = list(range(blocks))  # oldest first
        self.refs: dict[int, int] = {}
        self.draining: set[int] = set()
        self.tables: list[list[int]] = []

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.take(count).tolist() == expected, "the block that was freed longest ago is taken first"
        self.refs.update(dict.fromkeys(expected, 1))
        self.tables.append(expected)

    @rule(more=st.integers(1, 5))
    def take_too_many(self, more: int) -> None:
        with pytest.raises(ValueError, match="free"):
            self.pool.take(len(self.free) + more)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(column(prefix))
        for block in prefix:
            self.refs[block] += 1
        self.tables.append(prefix)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), drain=st.booleans())
    def give(self, data: st.DataObject, drain: bool) -> None:
        """One or two tables at once, so that a block may stand twice in the column."""
        given_back: list[int] = []
        for _ in range(data.draw(st.integers(1, min(2, len(self.tables))))):
            given_back += self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        (self.pool.drain if drain else self.pool.give)(column(given_back))
        for block in given_back:
            self.refs[block] -= 1
        gone = [b for b in dict.fromkeys(given_back) if not self.refs[b]]
        for block in gone:
            del self.refs[block]
        if drain:
            self.draining |= set(gone)
        else:
            self.free += gone

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(sorted(self.draining)), unique=True))
        self.pool.drained(column(done))
        self.draining -= set(done)
        self.free += done

    @precondition(lambda self: self.free)
    @rule()
    def give_what_is_free(self) -> None:
        for wrong in (self.pool.give, self.pool.share, self.pool.drained):
            with pytest.raises(ValueError):
                wrong(column(self.free[:1]))

    @invariant()
    def states_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(column([b for table in self.tables for b in table]))
        assert self.pool.free == len(self.free)
        assert self.pool.referenced == len(self.refs)
        assert self.pool.draining == len(self.draining)
        assert self.pool.free + self.pool.cached + self.pool.referenced + self.pool.draining == self.pool.total


PoolTwin.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolTwin = PoolTwin.TestCase


def test_check_sees_a_block_that_is_counted_wrongly() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.check(blocks)
    with pytest.raises(RuntimeError, match="counted wrongly"):
        pool.check(blocks[:1])
    pool.free += 1
    with pytest.raises(RuntimeError):
        pool.check()


def test_evicted_are_the_least_recently_used_and_of_one_table_its_tail_before_its_head() -> None:
    pool = BlockPool(6, 2)
    a = enter(pool, [1, 1, 1, 2, 1, 3], [1, 2, 3])
    b = enter(pool, [2, 1, 2, 2, 2, 3], [4, 5, 6])
    pool.give(a)
    pool.give(b)
    pool.share(a[:2])
    pool.give(a[:2])
    assert pool.coldest(6).tolist() == [a[2], b[2], b[1], b[0], a[1], a[0]]
    assert pool.take(4).tolist() == [a[2], b[2], b[1], b[0]]
    assert find(pool, [1, 1, 1, 2, 1, 3], [1, 2, 3]) == a[:2].tolist()


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 2)
    blocks = enter(pool, [1, 1], [1])
    pool.give(blocks)
    assert pool.take(2).tolist() == [1, 2]
    assert find(pool, [1, 1], [1]) == [0]
    assert pool.take(1).tolist() == [0]
    assert find(pool, [1, 1], [1]) == []
    with pytest.raises(ValueError, match="1 blocks wanted"):
        pool.take(1)


def test_the_log_of_cached_blocks_stays_in_order_and_bounded_over_many_rounds() -> None:
    random = np.random.default_rng(3)
    pool = BlockPool(40, 2)
    blocks = enter(pool, random.integers(0, 9, 80).tolist(), list(range(40)))
    order = blocks.tolist()[::-1]
    pool.give(blocks)
    for _ in range(300):
        some = random.permutation(40)[: random.integers(1, 30)].astype(np.int32)
        pool.share(np.concatenate([some, some]))
        pool.give(np.concatenate([some, some]))
        order = [b for b in order if b not in set(some.tolist())] + some.tolist()[::-1]
        count = int(random.integers(0, 41))
        assert pool.coldest(count).tolist() == order[:count]
    pool.check()


def test_the_other_tier_finds_copies_under_the_same_names_also_behind_blocks_of_this_one() -> None:
    pool = BlockPool(4, 2)
    host = BlockPool(4, 2, pool.contents)
    blocks = enter(pool, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    copies = host.take(3)
    host.adopt(copies, *pool.describe(blocks))
    host.give(copies)
    assert host.content[copies].tolist() == pool.content[blocks].tolist()
    assert find(host, [1, 2, 3, 4, 5, 6], [7, 8, 9]) == copies.tolist()
    assert find(host, [3, 4, 5, 6], [8, 9], int(pool.content[blocks[0]])) == copies[1:].tolist()
    again = host.take(1)
    host.adopt(again, *pool.describe(blocks[:1]))
    host.give(again)
    assert (host.free, host.cached) == (1, 3)
    host.check()
    names = host.content[copies].tolist()
    pool.give(blocks)
    pool.give(pool.take(4))
    anew = enter(pool, [1, 2, 3, 4, 6, 6], [7, 8, 10])
    assert pool.content[anew[:2]].tolist() == names[:2], "computed anew, the same content has the name it has there"
    assert pool.content[anew[2]] > max(names)
    with pytest.raises(ValueError, match="two tiers"):
        BlockPool(4, 2, pool.contents)


def test_draining_block_is_not_found_until_its_copy_is_acknowledged() -> None:
    pool = BlockPool(3, 2)
    blocks = enter(pool, [1, 1], [1])
    pool.give(blocks)
    pool.share(blocks)
    assert find(pool, [1, 1], [1]) == [0]
    pool.drain(blocks)
    assert find(pool, [1, 1], [1]) == []
    pool.drained(blocks)
    assert find(pool, [1, 1], [1]) == [0]


def test_wrong_registrations_and_shares_are_refused() -> None:
    pool = BlockPool(4, 2)
    blocks = enter(pool, [1, 1], [1])
    again = (np.array([2], np.uint64), column([[1, 1]]), np.array([True]), np.array([UNSALTED]))
    with pytest.raises(ValueError, match="registered already"):
        pool.register(blocks, *again)
    with pytest.raises(ValueError, match="without a reference"):
        pool.register(column([3]), *again)
    with pytest.raises(ValueError, match="without a reference"):
        pool.adopt(column([3]), *pool.describe(blocks))
    with pytest.raises(ValueError, match="parents"):
        pool.register(pool.take(1), again[0], again[1], again[2], np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="neither"):
        pool.share(column([3]))
    pool.check()


def test_salts_are_remembered_while_in_use_and_a_bounded_number_beyond() -> None:
    contents = Contents()
    pools = [BlockPool(2, 2, contents), BlockPool(2, 2, contents)]
    root = contents.root(b"kept")
    blocks = enter(pools[0], [1, 1], [1], root)
    copies = pools[1].take(1)
    pools[1].adopt(copies, *pools[0].describe(blocks))
    fleeting = contents.root(b"fleeting")
    for i in range(3 * IDLE_SALTS):
        contents.root(b"%d" % i)
        contents.root(b"asked for")
    assert contents.root(b"kept") == root
    assert contents.root(b"fleeting") < fleeting, "forgotten, and its name is not used again"
    asked = contents.root(b"asked for")
    for i in range(IDLE_SALTS - 1):
        contents.root(b"more %d" % i)
    assert contents.root(b"asked for") == asked
    for pool, mine in zip(pools, (blocks, copies), strict=True):
        assert contents.root(b"kept") == root
        pool.give(mine)
        pool.take(2)
    for i in range(IDLE_SALTS):
        contents.root(b"and more %d" % i)
    assert contents.root(b"kept") < root


@given(
    rows=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), max_size=12),
    size=st.sampled_from([1, 2, 4, 16]),
)
@settings(max_examples=300)
def test_the_peak_is_the_most_blocks_that_a_step_by_step_run_holds(rows: list[tuple[int, int]], size: int) -> None:
    held = np.array([h for h, _ in rows], np.int64)
    steps = np.array([s for _, s in rows], np.int64)
    last = max([s for _, s in rows], default=-1)
    brute = max(
        (sum(-(-(h + t) // size) for h, s in rows if s >= t) for t in range(last + 1)),
        default=0,
    )
    assert peak_blocks(held, steps, size) == brute


def test_tokens_divided_by_the_block_size_would_be_too_low() -> None:
    """LightLLM's token formula on blocks: two sequences of 17 tokens hold four blocks of 16, not ceil(34 / 16)."""
    assert peak_blocks(np.array([17, 17]), np.array([0, 0]), 16) == 4

"""BlockPool against a twin made of a list, a dict and a set; what is evicted when; the exact peak by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.policy.memory import Peak


def peak_blocks(held: np.ndarray, steps: np.ndarray, size: int) -> int:
    peak = Peak()
    peak.run(held, steps, size)
    return peak.blocks


def column(values: list[int] | list[list[int]]) -> np.ndarray:
    return np.array(values, np.int32)


def enter(pool: BlockPool, keys: list[int]) -> np.ndarray:
    """Take blocks for one prompt and register them."""
    blocks = pool.take(len(keys))
    pool.register(blocks, keys)
    return blocks


def match(pool: BlockPool, keys: list[int]) -> list[int]:
    return pool.match(np.array(keys, np.object_)).tolist()


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
        given_back = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        (self.pool.drain if drain else self.pool.give)(column(given_back))
        for block in given_back:
            self.refs[block] -= 1
        gone = [b for b in given_back if not self.refs[b]]
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


def test_log_of_cached_blocks_stays_ordered_and_bounded() -> None:
    random = np.random.default_rng(3)
    pool = BlockPool(40, indexed=True)
    blocks = enter(pool, list(range(1, 41)))
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


def test_other_tier_finds_copies_also_behind_blocks_of_this_one() -> None:
    pool, host = BlockPool(4, indexed=True), BlockPool(4, indexed=True)
    blocks = enter(pool, [7, 8, 9])
    copies = host.take(3)
    host.register(copies, pool.keys_of(blocks))
    host.give(copies)
    assert match(host, [7, 8, 9]) == copies.tolist()
    assert match(host, [8, 9]) == copies[1:].tolist()
    again = host.take(1)
    host.register(again, pool.keys_of(blocks[:1]))
    host.give(again)
    assert (host.free, host.cached) == (1, 3)
    host.check()


def test_wrong_registrations_and_shares_are_refused() -> None:
    pool = BlockPool(4, indexed=True)
    blocks = enter(pool, [1])
    with pytest.raises(ValueError, match="registered already"):
        pool.register(blocks, [2])
    with pytest.raises(ValueError, match="without a reference"):
        pool.register(column([3]), [2])
    with pytest.raises(ValueError, match="neither"):
        pool.share(column([3]))
    pool.check()


def test_a_block_without_a_key_is_not_registered() -> None:
    pool = BlockPool(4, indexed=True)
    blocks = enter(pool, [5, 0])
    assert pool.keys_of(blocks) == [5, 0]
    pool.give(blocks)
    assert (pool.free, pool.cached) == (3, 1)


@given(
    rows=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), max_size=12),
    size=st.sampled_from([1, 2, 4, 16]),
)
@settings(max_examples=300)
def test_peak_is_most_blocks_that_step_by_step_run_holds(rows: list[tuple[int, int]], size: int) -> None:
    held = np.array([h for h, _ in rows], np.int64)
    steps = np.array([s for _, s in rows], np.int64)
    last = max([s for _, s in rows], default=-1)
    brute = max(
        (sum(-(-(h + t) // size) for h, s in rows if s >= t) for t in range(last + 1)),
        default=0,
    )
    assert peak_blocks(held, steps, size) == brute

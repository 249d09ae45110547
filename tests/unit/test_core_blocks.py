"""BlockPool against a twin made of a list, a dict and a set; the exact peak against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.parts.memory import peak_blocks


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


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

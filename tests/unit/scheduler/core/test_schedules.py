"""Schedules computed by hand: what each preset plans, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.core.policy.base import Policy
from services.scheduler.core.policy.batching import Chunked
from services.scheduler.core.policy.budget import Fixed
from services.scheduler.core.policy.memory import Watermark
from services.scheduler.core.policy.order import ClassThenArrival
from services.scheduler.core.policy.preemption import LeastLost
from services.scheduler.core.policy.presets import PRESETS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import PINNED_AFTER
from services.scheduler.core.types import Finish, Limits
from tests.unit.scheduler.core.named import Named, house
from tests.unit.scheduler.core.twin import House, request

# -- orca


def test_orca_keeps_three_batches_of_two_in_flight() -> None:
    """Orca, figure 8: three batches of two in flight; AB is selected again when it returns; G takes A's place."""
    h = house("orca", max_seqs=6, microbatches=3)
    for name in "abcdefg":
        h.add(request(name, 3, 2 if name == "a" else 9, seed=1))
    assert [set(h.plan_named()) for _ in range(3)] == [{"a", "b"}, {"c", "d"}, {"e", "f"}]
    assert h.plan() is None, "n_scheduled = n_workers: it waits for a batch to return"
    h.answer()
    assert h.plan_named() == {"a": (3, 1), "b": (3, 1)}
    assert h.plan() is None
    h.answer()
    assert h.plan_named() == {"c": (3, 1), "d": (3, 1)}
    h.answer()
    assert h.plan_named() == {"e": (3, 1), "f": (3, 1)}
    h.answer()  # a has its two tokens
    assert h.ended["a"] == [Finish.LENGTH]
    assert h.plan_named() == {"b": (4, 1), "g": (0, 3)}
    h.finish()


def test_orca_selects_by_arrival_and_not_by_slot() -> None:
    """Two batches of one. c takes the slot that a left, before b's, and is still selected after it."""
    h = house("orca", max_seqs=2, microbatches=2)
    h.add_all(("a", 3, 1), ("b", 3, 6), seed=1)
    assert [set(h.plan_named()) for _ in range(2)] == [{"a"}, {"b"}]
    h.answer()
    h.answer()
    h.add(request("c", 3, 6, seed=1))
    for _ in range(3):
        assert [set(h.plan_named()) for _ in range(2)] == [{"b"}, {"c"}]
        h.answer()
        h.answer()
    assert h.names == {0: "c", 1: "b"}
    h.finish()


def test_orca_runs_prompts_whole_unless_no_step_holds_them() -> None:
    """12 tokens a step: b (6) waits for a step with room for all of it; c (30) runs as 12, 12, 6 alone."""
    h = house("orca", step_max=12)
    h.add_all(("a", 10, 3), ("b", 6, 2), seed=1)
    assert h.step() == {"a": (0, 10)}
    assert h.step() == {"a": (10, 1), "b": (0, 6)}
    assert h.step() == {"a": (11, 1), "b": (6, 1)}
    h.add_all(("c", 30, 2), ("d", 4, 2), seed=1)
    assert h.step() == {"c": (0, 12)}
    assert h.step() == {"c": (12, 12)}
    assert h.step() == {"c": (24, 6), "d": (0, 4)}
    assert h.step() == {"c": (30, 1), "d": (4, 1)}
    h.finish()


# -- sarathi


def test_sarathi_fills_the_budget_with_decodes_first_then_chunks() -> None:
    """Budget 8: B = n_decode + n_prefill at every step while the long prompt lasts."""
    h = house("sarathi", step_tokens=8)
    h.add_all(("a", 4, 6), ("b", 20, 3), seed=1)
    assert h.step() == {"a": (0, 4), "b": (0, 4)}
    assert h.step() == {"a": (4, 1), "b": (4, 7)}
    assert h.step() == {"a": (5, 1), "b": (11, 7)}
    assert h.step() == {"a": (6, 1), "b": (18, 2)}
    assert h.step() == {"a": (7, 1), "b": (20, 1)}
    assert h.step() == {"a": (8, 1), "b": (21, 1)}
    assert h.core.idle


def test_sarathi_continues_a_started_prompt_before_it_admits_another() -> None:
    h = house("sarathi", step_tokens=8)
    h.add_all(("a", 12, 2), ("b", 6, 2), seed=1)
    assert h.step() == {"a": (0, 8)}
    assert h.step() == {"a": (8, 4), "b": (0, 4)}
    assert h.step() == {"a": (12, 1), "b": (4, 2)}
    h.finish()


def test_sarathi_preempts_the_newest_and_it_keeps_its_place() -> None:
    """8 blocks of 2. At position 8 both need a fifth block and none is left: b yields its four.

    Back in, b needs ceil(9 / 2) = 5 of them, so it waits until a has ended, and computes its 9 tokens in one chunk.
    """
    h = house("sarathi", blocks=8, block_size=2, context=32)
    h.add_all(("a", 4, 10, 1), ("b", 4, 10, 2))
    assert h.step() == {"a": (0, 4), "b": (0, 4)}
    for at in range(4, 8):
        assert h.step() == {"a": (at, 1), "b": (at, 1)}
    h.add(request("c", 1, 1, seed=3))
    assert h.step() == {"a": (8, 1)}
    assert h.core.stats()["preemptions"] == 1
    for at in range(9, 13):
        assert h.step() == {"a": (at, 1)}, "b stands before c and does not fit yet: c may not pass it"
    assert h.step() == {"b": (0, 9), "c": (0, 1)}
    assert h.core.stats()["recomputed_tokens"] == 8
    h.finish()


# -- orcinus


def test_orcinus_serves_classes_in_order_and_arrival_within_a_class() -> None:
    h = house("orcinus", slots=1)
    for name, priority in (("low", 3), ("normal-1", 2), ("normal-2", 2), ("realtime", 0), ("high", 1)):
        h.add(request(name, 2, 1, seed=1, priority=priority))
    assert [*(next(iter(h.step())) for _ in range(5))] == ["realtime", "high", "normal-1", "normal-2", "low"]


# -- rules that hold for every policy


@pytest.mark.parametrize(("max_seqs", "most"), [(0, 4), (3, 3), (9, 4)])
def test_as_many_run_as_max_seqs_and_the_slots_allow(max_seqs: int, most: int) -> None:
    h = house("orcinus", slots=4, max_seqs=max_seqs)
    h.add_many(8, 3, 6)
    assert len(h.step()) == most
    assert h.core.stats()["running"] == most
    h.finish()


def test_no_sequence_enters_in_an_iteration_that_preempted() -> None:
    """8 blocks of 2 as above; b is low and yields at position 8. c is high and would fit at once: it waits a step."""
    parts = (ClassThenArrival(), Watermark(0.0), Fixed(64), Chunked(), LeastLost())
    h = Named(Scheduler(Policy("eager", *parts), lookahead=0), Limits(8, 8, 2, 32, 64))
    h.add(request("a", 4, 10, seed=1))
    h.add(request("b", 4, 10, seed=2, priority=3))
    for _ in range(5):
        assert set(h.step()) == {"a", "b"}
    h.add(request("c", 1, 1, seed=3, priority=1))
    assert h.step() == {"a": (8, 1)}
    assert h.core.stats()["preemptions"] == 1
    assert h.step() == {"a": (9, 1), "c": (0, 1)}
    h.finish()


@pytest.mark.parametrize("seed", range(3))
def test_sequence_preempted_three_times_is_pinned_with_all_blocks(seed: int) -> None:
    """Seen from inside: a pinned row has its whole remainder reserved from its first step on."""
    h = House(Scheduler("sarathi", lookahead=1), Limits(10, 26, 2, 60, 64))
    for i in range(40):
        h.add(request(f"r{i}", 3 + i % 5, 30, seed=100 * seed + i))
    pinned = 0
    for _ in range(3000):
        if h.core.idle:
            break
        h.step_once()
        table = h.core.replicas[0].table
        for slot in np.flatnonzero(table.pinned):
            pinned += 1
            assert table.sequence[slot].preemptions == PINNED_AFTER
            assert table.reserved[slot] == -(-(table.limit[slot] - 1) // 2)
    h.finish()
    assert pinned, "the load is not hard enough for this test"


def test_older_yields_where_the_newer_is_past_its_last_preemption() -> None:
    """10 blocks of 2. b has 7 of them reserved, so a, though it came first, yields when it needs a fourth."""
    h = house("sarathi", blocks=10, block_size=2, context=32)
    h.add_all(("a", 4, 10, 1), ("b", 4, 10, 2))
    h.core.records["b"].sequences[0].preemptions = PINNED_AFTER
    assert h.step() == {"a": (0, 4), "b": (0, 4)}
    for at in (4, 5):
        assert h.step() == {"a": (at, 1), "b": (at, 1)}
    for at in range(6, 13):
        assert h.step() == {"b": (at, 1)}
    assert h.core.stats()["preemptions"] == 1
    assert h.step() == {"a": (0, 7)}
    h.finish()


def test_no_over_run_token_costs_a_sequence_its_memory() -> None:
    """Lookahead 1, no block left: one with an unanswered step sits out: the answer may end it; b is not preempted.

    8 blocks of 2; both ask for a fifth block at position 8, when a's ninth token is not known yet.
    """
    h = house("sarathi", blocks=8, block_size=2, context=32, lookahead=1)
    h.add_all(("a", 4, 10, 1), ("b", 4, 10, 2))
    assert h.plan_named() == {"a": (0, 4), "b": (0, 4)}
    for at in range(4, 8):
        assert h.plan_named() == {"a": (at, 1), "b": (at, 1)}
        h.answer()
    assert h.plan() is None and h.core.stats()["preemptions"] == 0
    h.answer()  # now both have nothing in flight
    assert h.plan_named() == {"a": (8, 1)} and h.core.stats()["preemptions"] == 1
    h.finish()


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_nothing_past_the_last_token_is_planned(policy: str) -> None:
    """prompt + max_tokens - 1 tokens are computed in all, whatever the lookahead."""
    h = house(policy, lookahead=2)
    h.add(request("a", 5, 6, seed=1))
    computed = 0
    while not h.core.idle:
        while (step := h.plan()) is not None:
            computed += int(step.chunk_lengths.sum())
        h.answer()
        h.now += 10_000_000  # `request` waits for more to come
    assert computed == 5 + 6 - 1


def test_sequence_is_planned_again_within_the_lookahead() -> None:
    for lookahead in (0, 1, 2):
        h = house("orcinus", lookahead=lookahead)
        h.add(request("a", 5, 9, seed=1))
        for _ in range(lookahead + 1):
            assert h.plan() is not None
        assert h.plan() is None
        assert len(h.core.replicas[0].inflight) == lookahead + 1
        h.finish()


def test_microbatches_share_what_runs() -> None:
    h = house("orcinus", microbatches=2, lookahead=1)
    for name in "abcd":
        h.add(request(name, 2, 12, seed=1))
    seen = [frozenset(h.plan_named()) for _ in range(4)]
    assert seen[0] == seen[2] and seen[1] == seen[3] and not seen[0] & seen[1]
    assert len(seen[0]) == len(seen[1]) == 2
    assert h.plan() is None
    h.finish()


def test_sequences_that_wait_for_memory_do_not_unbalance_the_microbatches() -> None:
    """Four sequences of 11 blocks fit 46, ten wait: the four, entered together, are split two and two at once."""
    h = house("sarathi", blocks=46, microbatches=2)
    h.add_many(14, 40, 4)
    assert [set(h.plan_named()), h.plan()] == [{"r0", "r1", "r2", "r3"}, None]
    h.answer()
    assert [set(h.plan_named()) for _ in range(2)] == [{"r0", "r1"}, {"r2", "r3"}]
    h.finish()

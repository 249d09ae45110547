"""KV that outlives a worker: swapped out before it leaves, loaded by the next one or computed again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import EMPTY, Limits
from tests.unit.scheduler.core.twin import House, request

LIMITS = Limits(
    8, 60, 4, 100, 64, host_blocks=60, host_tier="folder/", kv_format="f", numerics="n", keeps=True, max_drafts=8
)

ODDS = (0.2, 0.35, 0.12, 0.15, 0.05, 0.04, 0.05, 0.04)


def house(limits: Limits = LIMITS, lag: int = 0, count: int = 6, **settings: int) -> House:
    """Return a house in which requests have run for some steps."""
    h = House(Scheduler("orcinus", **settings), limits, lag)
    h.add_many(count, 10, 20)
    h.steps(6)
    assert h.core.replicas[0].table.count == count
    return h


def recomputed(h: House) -> int:
    return int(h.core.stats()["recomputed_tokens"])


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_sequences_go_on_with_their_kv_at_the_next_worker(lag: int, lookahead: int) -> None:
    h = house(lag=lag, lookahead=lookahead)
    step = h.leave()
    assert step is not None and step.swap_out_gpu.size == step.keep.size >= 6 * 3
    h.steps(3)
    stats = h.core.stats()
    assert stats["swapped"] == stats["resuming"] == 6
    (tier,) = h.core.kept_tiers
    number = h.join(LIMITS)
    assert number == 1, "the number of the one that left names its host tier"
    first = h.plan(number)
    assert first is not None and [peer.host_tier for peer in first.peers] == [tier] and not first.enters
    gone = [peer for _, step in h.run_out() for peer in step.peers if not peer.host_tier]
    assert [peer.number for peer in gone] == [0] and not h.core.kept_tiers
    assert recomputed(h) == 0 and h.core.stats()["resuming"] == 0
    assert len(h.ended) == 6
    assert h.join(LIMITS) == 0, "its number is free again"


def test_prompts_that_were_not_whole_go_on_from_where_they_were() -> None:
    h = House(Scheduler("orcinus", step_tokens=8), LIMITS)
    h.add_many(2, 40, 5)
    h.steps(4)
    h.leave()
    h.join(LIMITS)
    h.finish()
    assert recomputed(h) == 0


def test_host_tier_takes_the_best_classes_and_the_rest_is_recomputed() -> None:
    limits = replace(LIMITS, host_blocks=9)
    h = House(Scheduler("orcinus"), limits)
    h.add_many(3, 10, 20, name="low", priority=3)
    h.add_many(2, 10, 20, name="high", priority=1)
    h.steps(4)
    h.leave()
    swapped = [s.record.request.id for record in h.core.records.values() for s in record.sequences if s.is_swapped]
    assert sorted(swapped) == ["high0", "high1"]
    h.join(limits)
    assert h.core.stats()["resuming"] == 5
    h.finish()
    assert recomputed(h) > 0


def test_only_what_the_worker_acknowledges_counts_as_kept() -> None:
    h = house()
    h.workers[0].keeps_most = 10
    h.leave()
    swapped = int(h.core.stats()["swapped"])
    assert 0 < swapped < 6
    h.join(LIMITS)
    h.finish()
    assert recomputed(h) > 0


def test_worker_that_keeps_few_blocks_keeps_those_of_the_best_class() -> None:
    h = House(Scheduler("orcinus"), LIMITS)
    h.add_many(3, 10, 20, name="low", priority=3)
    h.add_many(1, 10, 20, name="high", priority=1)
    h.steps(4)
    h.workers[0].keeps_most = 4
    step = h.leave()
    assert step is not None and step.keep.size > 4
    assert [s.record.request.id for record in h.core.records.values() for s in record.sequences if s.is_swapped] == [
        "high0"
    ]
    h.join(LIMITS)
    h.finish()


@pytest.mark.parametrize(
    "other",
    [
        replace(LIMITS, kv_format="g"),
        replace(LIMITS, numerics="m"),
        replace(LIMITS, host_tier="elsewhere/"),
        replace(LIMITS, host_tier="", host_blocks=0),
        replace(LIMITS, block_size=8),
    ],
)
def test_worker_that_could_not_read_it_computes_all_again(other: Limits) -> None:
    h = house()
    h.leave()
    h.join(other)
    h.finish()
    assert recomputed(h) > 0 and not h.core.kept_tiers


def test_file_that_cannot_be_mapped_is_computed_again() -> None:
    h = house()
    h.leave()
    number = h.join(LIMITS)
    h.workers[number].unmappable = set(h.tiers)
    h.finish()
    assert recomputed(h) > 0 and not h.core.kept_tiers


def test_file_of_another_run_is_computed_again() -> None:
    h = house()
    worker = h.workers[0]
    h.leave()
    worker.spoil()
    h.join(LIMITS)
    h.finish()
    assert recomputed(h) > 0


def test_worker_without_the_step_or_without_host_tier_leaves_as_ever() -> None:
    for limits in (replace(LIMITS, keeps=False), replace(LIMITS, host_blocks=0)):
        h = house(limits)
        assert h.leave() is None and not h.core.kept_tiers
        h.join(limits)
        h.finish()


def test_worker_that_is_lost_before_its_answer_has_kept_nothing() -> None:
    h = house()
    while h.workers[0].queue:
        h.answer()
    step, outcome = h.core.keep_kv(0, h.now)
    h.take(outcome)
    assert step is not None and step.keep.size
    h.lose()
    assert not h.core.kept_tiers and h.core.stats()["swapped"] == 0
    h.join(LIMITS)
    h.finish()


def test_kept_blocks_without_all_their_copies_are_refused() -> None:
    h = house()
    while h.workers[0].queue:
        h.answer()
    step, outcome = h.core.keep_kv(0, h.now)
    h.take(outcome)
    assert step is not None
    h.workers[0].queue.append(step)
    result = h.workers[0].run()
    assert result.kept_blocks > 3
    result.swap_out_acks = result.swap_out_acks[:3]
    with pytest.raises(ValueError, match=f"{step.swap_out_gpu.size - 3} copies are not acknowledged"):
        h.core.apply(result, h.now)
    h.lose()
    assert not h.core.kept_tiers and h.core.stats()["swapped"] == 0
    h.join(LIMITS)
    h.finish()
    assert recomputed(h) > 0


@pytest.mark.parametrize("answered", [0, 1])
def test_worker_that_is_lost_while_it_loads_leaves_it_to_the_next(answered: int) -> None:
    h = house()
    h.leave()
    number = h.join(LIMITS)
    for step in range(answered + 1):
        assert h.plan(number) is not None
        if step < answered:
            h.answer(number)
    h.lose(number)
    h.core.check()
    assert h.join(LIMITS) == number
    h.finish()
    assert recomputed(h) == 0


def test_ended_requests_free_what_was_kept_for_them() -> None:
    h = house()
    h.leave()
    for name in list(h.requests):
        h.take(h.core.cancel(name, h.now))
    _, outcome = h.core.plan(h.now)
    assert outcome is None and not h.core.kept_tiers
    assert h.join(LIMITS) == 0
    h.finish()


def test_other_worker_reads_what_one_left_and_then_lets_it_go() -> None:
    h = house(count=6)
    number = h.join(LIMITS)
    h.steps(2)
    h.leave(0)
    assert h.core.kept_tiers
    h.finish()
    assert recomputed(h) == 0 and not h.core.kept_tiers and number in h.workers


def test_nothing_is_kept_while_another_worker_loads_from_the_tier() -> None:
    limits = replace(LIMITS, blocks=26, host_blocks=60)
    h = House(Scheduler("orcinus:relief=newest-swap", lookahead=0), limits)
    h.join(replace(limits, blocks=200))
    h.add_many(30, 10, 40)
    tier = h.core.replicas[0].host
    for _ in range(200):
        while h.plan(1) is not None:
            pass
        if h.core.replicas[1].transfers.held_of(tier):
            break
        h.step_once()
    assert h.core.replicas[1].transfers.held_of(tier)
    assert h.leave(0) is None
    h.finish()


def test_other_worker_waits_while_one_is_asked_to_keep_its_kv() -> None:
    h = house(lookahead=0)
    number = h.join(LIMITS)
    h.steps(2)
    while h.workers[0].queue:
        h.answer(0)
    step, outcome = h.core.keep_kv(0, h.now)
    h.take(outcome)
    assert step is not None
    h.workers[0].queue.append(step)
    assert h.plan(number) is None and h.core.stats()["swapped"] == 6
    h.workers[0].keeps_most = 12
    h.answer(0)
    assert h.plan(number) is None, "what it reads may be what is gone"
    h.core.lose(0, h.now)
    del h.workers[0]
    h.finish()
    assert recomputed(h) > 0


def test_two_leave_one_after_another_and_one_comes_back() -> None:
    limits = replace(LIMITS, blocks=200)
    h = house(limits, count=8)
    h.join(limits)
    h.add_many(6, 10, 20, name="more", seed=50)
    h.steps(4)
    h.leave(0)
    h.leave(1)
    assert len(h.core.kept_tiers) == 2
    h.steps(2)
    h.join(limits)
    h.finish()
    assert recomputed(h) == 0


def test_sequence_swapped_out_before_is_kept_too() -> None:
    limits = replace(LIMITS, blocks=26, host_blocks=60)
    h = House(Scheduler("orcinus:relief=newest-swap"), limits)
    h.add_many(6, 10, 20)
    for _ in range(40):
        h.step_once()
        if h.core.stats()["swapped"]:
            break
    before = recomputed(h)
    assert h.core.stats()["swapped"]
    h.leave()
    h.join(limits)
    h.add(request("new", 10, 4, seed=99))
    h.finish()
    assert recomputed(h) == before


def test_row_that_still_loads_its_kv_is_not_swapped_out() -> None:
    limits = replace(LIMITS, blocks=26, host_blocks=60)
    h = House(Scheduler("orcinus:relief=newest-swap", lookahead=0), limits)
    h.add_many(6, 10, 20)
    worker = h.workers[0]
    while (step := h.plan()) is not None and not step.swap_in_host.size:
        h.answer()
    assert step is not None
    loading = h.core.replicas[0].transfers.slots()
    result = worker.run()
    late, result.swap_in_acks = result.swap_in_acks, EMPTY
    h.take(h.core.apply(result, h.now))
    running = h.core.replicas[0].table.count
    last, outcome = h.core.keep_kv(0, h.now)
    h.take(outcome)
    assert last is not None and loading and running > len(loading)
    worker.queue.append(last)
    result = worker.run()
    result.swap_in_acks = late
    h.take(h.core.apply(result, h.now))
    h.core.check()
    waiting = [s for record in h.core.records.values() for s in record.sequences]
    assert sum(not s.is_swapped for s in waiting) == len(loading), "their KV was on its way"
    h.core.lose(0, h.now)
    h.core.check()
    del h.workers[0]
    h.join(limits)
    h.finish()
    assert recomputed(h) > 0


@pytest.mark.parametrize("seed", range(12))
def test_no_token_differs_whatever_leaves_and_comes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    relief, lookahead = ("newest-swap", "newest-recompute")[seed % 2], seed // 2 % 2
    limits = replace(LIMITS, slots=6, blocks=40, host_blocks=(12, 40)[seed // 4 % 2])
    h = House(Scheduler(f"orcinus:relief={relief}", lookahead=lookahead), limits, lag=seed % 3)
    for number in range(60):
        names, workers = sorted(h.core.records), sorted(h.workers)
        match rng.choice(["add", "step", "leave", "join", "lose", "cancel", "park", "unreadable"], p=ODDS):
            case "add":
                size, tokens = int(rng.integers(1, 40)), int(rng.integers(1, 30))
                h.add(request(f"r{number}", size, tokens, seed=number, priority=int(rng.integers(4))))
            case "step":
                h.steps(int(rng.integers(1, 6)))
            case "leave" if workers:
                h.workers[chosen := int(rng.choice(workers))].keeps_most = int(rng.integers(0, 60))
                h.leave(chosen)
            case "join" if len(workers) < 3:
                h.join(replace(limits, numerics=str(rng.choice(["n", "m"], p=[0.9, 0.1]))))
            case "lose" if workers:
                h.lose(int(rng.choice(workers)))
            case "cancel" if names:
                h.take(h.core.cancel(str(rng.choice(names)), h.now))
            case "park" if names:
                h.core.park(name := str(rng.choice(names)))
                h.steps(1)
                h.core.resume(name, h.now)
            case "unreadable" if workers:
                h.workers[int(rng.choice(workers))].unmappable = set(h.tiers)
        h.core.check()
    if not h.workers:
        h.join(limits)
    h.finish()
    h.core.plan(h.now)
    assert not h.core.kept_tiers

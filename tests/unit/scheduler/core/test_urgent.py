"""What urgent requests get from lower ones that run, and moments at which KV or blocks could go astray, by hand."""

from __future__ import annotations

import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits
from tests.unit.scheduler.core.named import house
from tests.unit.scheduler.core.twin import MS, House, request


def steps_until_first_token(h: House, name: str, most: int) -> int:
    for step in range(most):
        if h.published[name, 0]:
            return step
        h.step_once()
    raise AssertionError(f"{name} has no token after {most} steps")


def test_aged_victim_does_not_return_before_its_preemptor() -> None:
    h = house("orcinus", slots=1, blocks=200)
    h.add(request("low", 40, 300, seed=1, priority=3))
    h.steps(6)
    h.now += 31_000 * MS  # by age it is as urgent as any
    h.add(request("urgent", 8, 4, seed=2, priority=0))
    assert steps_until_first_token(h, "urgent", 4) <= 3
    assert h.core.stats()["preemptions"] == 1
    h.finish()


def test_urgent_prompt_goes_before_the_rest_of_a_lower_one() -> None:
    h = house("orcinus", blocks=4000, context=8000, step_tokens=64)
    h.add(request("low", 4000, 4, seed=1, priority=3))
    assert h.step() == {"low": (0, 64)}
    h.add(request("urgent", 8, 4, seed=2, priority=0))
    assert h.step() == {"urgent": (0, 8), "low": (64, 56)}
    h.finish()


def test_what_yields_its_blocks_to_urgent_one_loses_its_kv() -> None:
    """The blocks must be there at once, so they are not copied to the host tier first."""
    policy = "orcinus:relief=least-lost-swap+takes,memory=fits"
    h = House(Scheduler(policy, lookahead=0), Limits(8, 12, 4, 64, 64, host_blocks=40))
    h.add_many(2, 16, 30, name="low", priority=3)
    h.steps(3)
    h.add(request("urgent", 20, 4, seed=9, priority=0))
    h.steps(2)
    stats = h.core.stats()
    assert "urgent" in h.started and (stats["preemptions"], stats["swapped_blocks"]) == (1, 0)
    h.finish()


def test_urgent_request_with_free_blocks_enters_despite_the_forecast() -> None:
    h = House(Scheduler("orcinus", lookahead=0), Limits(16, 100, 4, 400, 2048))
    h.add_many(3, 20, 100, name="low", priority=3)
    h.steps(6)
    h.add(request("urgent", 80, 200, seed=9, priority=0))
    assert steps_until_first_token(h, "urgent", 4) <= 2
    h.finish()


def test_none_yields_while_another_policy_is_about_to_take_over() -> None:
    h = house("orcinus", slots=1)
    h.add(request("low", 8, 20, seed=1, priority=3))
    h.step_once()
    h.add(request("urgent", 8, 4, seed=2, priority=0))
    h.plan()
    h.core.switch("sarathi")
    h.steps(6)
    assert h.core.stats()["preemptions"] == 0, "what runs goes to its end"
    h.finish()
    assert h.core.policy.name == "sarathi"


def test_none_yields_to_choice_that_waits_for_its_siblings_prompt() -> None:
    h = house("orcinus", slots=2, blocks=400, step_tokens=32)
    h.add_many(2, 8, 60, name="low", priority=3)
    h.steps(3)
    h.add(request("urgent", 120, 4, seed=9, n=2, priority=0))
    h.steps(4)
    assert h.core.stats()["preemptions"] == 1, "the second choice needs no slot before the prompt is there"
    h.finish()


def test_none_yields_on_a_replica_that_the_head_cannot_enter() -> None:
    """A swapped urgent sequence belongs to replica 1; replica 0 keeps its low ones and serves those behind."""
    limits = Limits(1, 12, 4, 64, 64, host_blocks=12)
    core = Scheduler("orcinus:relief=least-lost-swap+takes,memory=fits", lookahead=0)
    h = House(core, limits)
    h.join(limits)
    h.add(request("low0", 8, 40, seed=1, priority=3))
    h.plan(0)
    h.answer(0)
    h.add(request("high", 8, 30, seed=2, priority=1))
    h.plan(1)
    h.answer(1)
    h.add(request("first", 8, 4, seed=3, priority=0))
    while not core.stats()["swapped"]:
        h.plan(1)
        h.answer(1)
        h.core.check()
        if "first" in h.started:
            break
    before = core.stats()["preemptions"]
    for _ in range(3):
        h.plan(0)
        h.answer(0)
    assert core.stats()["preemptions"] == before
    h.finish()


def test_one_that_fits_only_lost_replica_holds_no_other_up() -> None:
    h = House(Scheduler("orcinus", lookahead=0), Limits(2, 20, 4, 80, 64))
    h.join(Limits(2, 4, 4, 80, 64))
    h.add(request("big", 40, 4, seed=1))
    h.lose(0)
    h.add(request("small", 4, 4, seed=2))
    h.steps(10)
    assert h.ended["small"] == [Finish.LENGTH]
    h.join(Limits(2, 20, 4, 80, 64))
    h.finish()


def test_a_prefix_is_waited_for_once_and_then_computed_again() -> None:
    h = house("orcinus", block_size=4, step_tokens=16, microbatches=2)
    h.add_all(("a", 60, 3), ("b", 60, 3), seed=1)
    assert h.plan_named() == {"a": (0, 16)}
    assert h.plan() is None, "b waits for a"
    h.now += 10_000 * MS
    assert h.plan_named() == {"b": (0, 16)}
    while h.answer():
        pass
    h.finish()


def test_the_kv_of_a_chunk_that_failed_is_never_shared() -> None:
    h = House(Scheduler("orcinus", lookahead=0), Limits(8, 100, 4, 100, 64))
    h.add(request("a", 20, 3, seed=1))
    h.plan()
    h.workers[0].fail_next = {0}
    h.answer()
    assert h.core.stats()["blocks_cached"] == 0
    h.add(request("b", 20, 3, seed=1))
    h.finish()


@pytest.mark.parametrize("lost", [True, False])
def test_parked_and_swapped_sequence_goes_on_wherever_its_worker_is(lost: bool) -> None:
    limits = Limits(8, 8, 2, 32, 64, host_blocks=8)
    h = House(Scheduler("sarathi:relief=newest-swap", lookahead=1), limits)
    for seed, name in enumerate("ab"):
        h.add(request(name, 4, 9, seed=seed))
    while not h.core.stats()["swapped"]:
        h.plan()  # with a step unanswered: its token comes while b is parked
        if not h.core.stats()["swapped"]:
            h.answer()
    h.core.park("b")
    while h.answer():
        h.core.check()
    if lost:
        h.lose()
        h.join(limits)
    h.core.resume("b", h.now)
    h.finish()


@pytest.mark.parametrize("lag", [1, 3])
def test_cancel_during_load_does_not_free_blocks_under_the_copy(lag: int) -> None:
    """b is cancelled while its KV comes back; its blocks may be taken only when the copy is acknowledged."""
    limits = Limits(8, 10, 2, 40, 64, host_blocks=16)
    h = House(Scheduler("sarathi:relief=newest-swap", lookahead=1), limits, lag)
    for seed, name in enumerate("abc"):
        h.add(request(name, 4, 14, seed=seed))
    for _ in range(200):
        h.plan()
        loading = h.core.replicas[0].transfers.slots()
        if loading:
            sequence = h.core.replicas[0].table.sequence[loading[0]]
            h.take(h.core.cancel(sequence.record.request.id, h.now))
            h.core.check()
            assert h.core.stats()["blocks_draining"] > 0
            break
        h.answer()
        h.now += 10 * MS
    else:
        raise AssertionError("nothing was loaded")
    h.add_many(4, 9, 6, name="d", seed=20)
    h.finish()


def test_sharer_of_swapped_blocks_may_end_during_the_copy() -> None:
    limits = Limits(8, 12, 2, 40, 64, host_blocks=32)
    h = House(Scheduler("sarathi:relief=newest-swap", lookahead=0, prefix_cache=True), limits, 3)
    h.add(request("a", 12, 12, seed=5))
    h.step_once()
    h.step_once()
    h.add(request("b", 12, 12, seed=5))  # shares six blocks of a
    while not h.core.stats()["swapped"]:
        h.step_once()
        assert not h.core.idle, "none was swapped out"
    h.take(h.core.cancel("a", h.now))
    for i in range(4):  # these take whatever is free, while the copy is under way
        h.add(request(f"d{i}", 10, 4, seed=30 + i))
    h.finish()

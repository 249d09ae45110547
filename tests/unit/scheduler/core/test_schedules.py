"""Schedules computed by hand: what each preset plans, step by step."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from services.scheduler import policy_switch
from services.scheduler.core.policy.presets import PRESETS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import PINNED_AFTER
from services.scheduler.core.types import Finish, Limits
from shared.settings import SchedulerSettings
from tests.unit.scheduler.core.twin import MS, House, house, request

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


# -- orcinus: what urgent requests take from lower ones that run


def test_aged_victim_does_not_return_before_its_preemptor() -> None:
    h = house("orcinus", slots=1, blocks=200)
    h.add(request("low", 40, 300, seed=1, priority=3))
    h.steps(6)
    h.now += 31_000 * MS  # by age it is as urgent as any
    h.add(request("urgent", 8, 4, seed=2, priority=0))
    h.steps(3)
    assert h.published["urgent", 0]
    assert h.core.stats()["preemptions"] == 1
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


# -- rules that hold for every policy


@pytest.mark.parametrize(("max_seqs", "most"), [(0, 4), (3, 3), (9, 4)])
def test_as_many_run_as_max_seqs_and_the_slots_allow(max_seqs: int, most: int) -> None:
    h = house("orcinus", slots=4, max_seqs=max_seqs)
    h.add_many(8, 3, 6)
    assert len(h.step()) == most
    assert h.core.stats()["running"] == most
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
        for slot in np.flatnonzero(table.is_pinned):
            pinned += 1
            assert table.sequence[slot].preemptions == PINNED_AFTER
            assert table.reserved_blocks[slot] == -(-(table.limit[slot] - 1) // 2)
    h.finish()
    assert pinned, "the load is not hard enough for this test"


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


# -- steps that are over before an answer has come back


def planned(h: House) -> int:
    """Plan until no further step may be in flight; return how many are."""
    while h.plan() is not None:
        pass
    return len(h.workers[0].queue)


def test_short_steps_are_planned_further_ahead() -> None:
    """The prompt takes 10 ms, a decode 5.05: of decodes two take less than 12 ms together, of prompts one."""
    h = House(Scheduler("orcinus", lookahead=1, ahead_ns=12 * MS), Limits(1, 64, 16, 256, 128))
    h.add_all(("a", 100, 40))
    assert planned(h) == 2, "nothing was timed"
    h.answer()
    assert planned(h) == 2, "it may take as long as the prompt did"
    h.answer()
    assert planned(h) == 3
    h.core.check()
    h.add_all(("b", 100, 3))
    h.answer()
    assert planned(h) == 2, "a sequence waits"
    h.finish()


@pytest.mark.parametrize(("lookahead", "steps"), [(0, 1), (1, 4), (4, 5)])
def test_steps_ahead_are_bounded(lookahead: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_switch, "AHEAD_NS", 1_000_000 * MS)
    core = policy_switch.make_scheduler(SchedulerSettings(lookahead=lookahead))
    h = House(core, Limits(4, 64, 16, 256, 128))
    h.add_all(("a", 100, 40))
    for _ in range(3):
        planned(h)
        h.answer()
    assert planned(h) == steps
    h.core.check()
    h.finish()


# -- orcinus: one order for running and waiting prompts


def test_a_short_prompt_passes_the_rest_of_a_long_one() -> None:
    h = House(Scheduler("orcinus", lookahead=0, step_tokens=16), Limits(8, 600, 4, 800, 16))
    h.add_all(("long", 640, 2))
    assert h.step() == {"long": (0, 16)}
    h.add_all(("short", 4, 2), seed=1)
    h.add_all(("equal", 640, 2), seed=2)
    assert h.step() == {"short": (0, 4), "long": (16, 12)}, "one that is no shorter waits behind it"


def test_no_prompt_passes_one_that_ageing_lifted() -> None:
    """The key of the long one is 60 s late by its limit, so without ageing short ones could pass it for a minute."""
    h = House(Scheduler("orcinus", lookahead=0, step_tokens=16), Limits(8, 600, 4, 800, 16))
    h.add_all(("long", 640, 2), ttft_slo_ns=60_000 * MS)
    h.step()
    h.now += 9_000 * MS
    h.add_all(("early", 4, 1), seed=1)
    assert h.step() == {"early": (0, 4), "long": (16, 12)}
    h.now += 1_000 * MS
    h.add_all(("later", 4, 1), seed=2)
    assert h.step() == {"long": (28, 16)}


def test_a_prompt_with_a_cached_prefix_takes_as_few_steps_as_one_without() -> None:
    """The budget is made again when the depth is known; the prompt has left the queue by then."""
    h = House(Scheduler("orcinus", lookahead=0), Limits(8, 600, 4, 800, 800))
    h.add_all(("first", 65, 1, 1), ("large", 300, 1, 2))
    h.step()
    h.add_all(("a", 4, 200), ("b", 4, 200))
    for _ in range(100):
        h.step()
    h.add_all(("hit", 264, 2), seed=1)
    assert h.step()["hit"] == (64, 200)


def test_a_running_prompt_goes_first_without_an_order_that_says_else() -> None:
    h = House(Scheduler("sarathi", lookahead=0, step_tokens=16), Limits(8, 600, 4, 800, 16))
    h.add_all(("long", 640, 2))
    h.step()
    h.add_all(("short", 4, 2), seed=1)
    assert h.step() == {"long": (16, 16)}


STEP, SLOTS = 100, 6
LIMITS = Limits(
    slots=SLOTS, blocks=SLOTS, block_size=STEP + 1, max_model_len=STEP + 1, max_step_tokens=STEP, whole_prompts=True
)


@pytest.mark.parametrize(("policy", "step_tokens"), zip(PRESETS, cycle([0, 7]), strict=False))
def test_every_prompt_is_one_chunk_of_a_step_that_holds_it(policy: str, step_tokens: int) -> None:
    house = House(Scheduler(policy, lookahead=1, step_tokens=step_tokens, prefix_cache=True), LIMITS)
    sizes = {f"r{index}": int(size) for index, size in enumerate(np.random.default_rng(5).integers(1, STEP + 1, 40))}
    for seed, (name, size) in enumerate(sizes.items()):
        house.add_all((name, size, 1), seed=seed % 3, priority=seed % 4)  # some begin alike
    computed: dict[str, tuple[int, int]] = {}
    for _ in range(200):
        if len(computed) == len(sizes):
            break
        if (step := house.plan()) is None:
            house.now += 10_000_000
        else:
            chunks = house.chunks(step)
            assert sum(length for _, length in chunks.values()) <= STEP
            assert not computed.keys() & chunks.keys(), "each once"
            computed |= chunks
            house.answer()
        house.core.check()
    assert computed == {name: (0, size) for name, size in sizes.items()}
    assert house.core.stats()["prefix_hit_tokens"] == 0


def test_prompts_that_fit_share_a_step() -> None:
    house = House(Scheduler("orca", lookahead=0), LIMITS)
    house.add_all(("a", 60, 1), ("b", 50, 1), ("c", 30, 1))
    assert house.step() == {"a": (0, 60)}, "b does not fit beside it"
    assert house.step() == {"b": (0, 50), "c": (0, 30)}

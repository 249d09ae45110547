"""The core against brute force: a worker that notices every wrong block, and outputs known in advance.

Whatever the policy, budgets, microbatches, lookahead, preemptions, losses and cancels, every token must be the one
that the sequence alone would get, published once and in order, and everything must end.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.policy.presets import PARTS, PRESETS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import EMPTY, Finish, Limits
from tests.unit.scheduler.core.twin import MS, VOCAB, House, answer, request

# Parts with no thought for the next token, so that they preempt most.
EAGER = "orcinus:order=class,memory=fits,tokens=fixed-16,relief=least-lost"
SWAPS = "orcinus:order=class,memory=fits,tokens=fixed-16,relief=least-lost-swap+takes+slo"
STALLS = "orcinus:order=fair,memory=fits,tokens=ema,batch=shrinking-4,relief=last-started-swap+stalls"
POLICIES = (*PRESETS, EAGER, SWAPS, STALLS)
TESTED = ("orca", "sarathi", "orcinus", "sglang", EAGER, SWAPS, STALLS)
NUMBERS = dict(fixed="-16", capped="-4", skip="-4", shrinking="-8", slots="-3", static="-2", request="-2")
WAYS = ("recompute", "swap", "cheaper", "groups")
ANY_PARTS = st.builds(
    lambda order, memory, tokens, batch, victim, way, options: (
        f"orcinus:order={order},memory={memory},tokens={tokens}{NUMBERS.get(tokens, '')},"
        f"batch={batch}{NUMBERS.get(batch, '')},relief={victim}-{way}{''.join(f'+{o}' for o in sorted(options))}"
    ),
    *(st.sampled_from(sorted(PARTS[part])) for part in ("order", "memory", "tokens", "batch", "relief")),
    st.sampled_from(WAYS),
    st.sets(st.sampled_from(["stalls", "takes", "slo"])),
)
ANY_POLICY = st.one_of(st.sampled_from(POLICIES), ANY_PARTS)
ENDS = (Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR)


@pytest.fixture(autouse=True)
def drafts_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.speculation.drafts.MIN_GAIN", 0.0)
    monkeypatch.setattr("services.scheduler.core.speculation.drafts.min_chance", lambda *_: 0.02)


class CoreTwin(RuleBasedStateMachine):
    """Everything that can happen to a core, in any order, on one to three replicas that are too small for it."""

    @initialize(
        policy=ANY_POLICY,
        microbatches=st.integers(1, 3),
        lookahead=st.integers(0, 2),
        ahead_ns=st.sampled_from([0, 18 * MS, 1000 * MS]),
        slots=st.integers(1, 6),
        blocks=st.integers(6, 20),
        block_size=st.sampled_from([1, 2, 4]),
        context=st.integers(8, 30),
        step_max=st.integers(1, 24),
        step_tokens=st.sampled_from([0, 1, 7]),
        max_seqs=st.sampled_from([0, 0, 2]),
        host_blocks=st.sampled_from([0, 4, 30]),
        prefix_cache=st.sampled_from([None, True]),
        max_drafts=st.sampled_from([0, 8, 8]),
        lag=st.integers(0, 2),
    )
    def start(
        self, slots: int, blocks: int, block_size: int, context: int, step_max: int, lag: int, **core: Any
    ) -> None:
        host_blocks, drafts = core.pop("host_blocks"), core.pop("max_drafts")
        self.limits = Limits(slots, blocks, block_size, context, step_max, host_blocks, max_drafts=drafts)
        self.house = House(Scheduler(checkpoint_tokens=3, **core), self.limits, lag)
        self.count = 0

    @rule(
        prompt=st.integers(1, 12),
        prompts=st.integers(1, 2),
        n=st.integers(1, 2),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        priority=st.integers(0, 3),
        gateway=st.sampled_from("abc"),
        deadline=st.sampled_from([0, 0, 0, 150]),
        resumed=st.integers(0, 4),
        tbt_slo_ms=st.sampled_from([0, 0, 20]),
        tenant=st.sampled_from("xy"),
        seed=st.integers(0, 6),
        foretold=st.integers(0, 4),
    )
    def add(
        self,
        prompt: int,
        prompts: int,
        n: int,
        deadline: int,
        resumed: int,
        tbt_slo_ms: int,
        foretold: int,
        **more: Any,
    ) -> None:
        more |= {"deadline_ns": self.house.now + deadline * MS if deadline else 0, "tbt_slo_ns": tbt_slo_ms * MS}
        salt = more["tenant"].encode()
        new = request(f"r{self.count}", (prompt,) * prompts, stop_ids=(0, 5), n=n, salt=salt, **more)
        if resumed and prompt < self.limits.max_model_len:  # some outputs are known from before a restart
            answers = [answer(new, c, self.limits.max_model_len)[0] for c in range(prompts * n)]
            new.outputs = [np.array(a[: min(resumed, len(a) - 1)], np.int32) for a in answers]
        if foretold:  # the first choice's output, every few tokens another one
            output = np.array(answer(new, 0, self.limits.max_model_len)[0], np.int32)
            output[foretold::foretold] = (output[foretold::foretold] + (foretold < 4)) % VOCAB
            new.prediction = np.concatenate([new.prompts[0], output])
        self.count += 1
        self.house.add(new)

    @rule(times=st.integers(1, 4), replica=st.integers(0, 2))
    def plan(self, times: int, replica: int) -> None:
        for _ in range(times):
            if replica in self.house.workers:
                self.house.plan(replica)

    @rule(times=st.integers(1, 4), replica=st.integers(0, 2))
    def answer(self, times: int, replica: int) -> None:
        for _ in range(times):
            self.house.answer(replica)

    @rule(rounds=st.integers(1, 6))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.house.step_once()

    @precondition(lambda self: getattr(self, "count", 0))
    @rule(data=st.data(), finish=st.sampled_from(ENDS))
    def cancel(self, data: st.DataObject, finish: Finish) -> None:
        chosen = f"r{data.draw(st.integers(0, self.count))}"  # perhaps unknown, perhaps over
        self.house.take(
            self.house.core.cancel(chosen, self.house.now, finish, "poison" if finish is Finish.ERROR else "")
        )

    @precondition(lambda self: getattr(self, "count", 0))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        chosen = f"r{data.draw(st.integers(0, self.count - 1))}"
        published = self.house.published.get((chosen, 0))
        if published:
            self.house.stop(chosen, 0, data.draw(st.integers(0, len(published))))

    @precondition(lambda self: getattr(self, "count", 0))
    @rule(data=st.data(), gateway=st.sampled_from("abcd"))
    def adopt(self, data: st.DataObject, gateway: str) -> None:
        self.house.core.adopt(f"r{data.draw(st.integers(0, self.count))}", gateway)

    @precondition(lambda self: any(worker.queue for worker in self.house.workers.values()))
    @rule(position=st.integers(0, 3))
    def a_sequence_fails(self, position: int) -> None:
        busy = next(number for number, worker in self.house.workers.items() if worker.queue)
        self.house.workers[busy].fail_next = {position}
        self.house.answer(busy)

    @precondition(lambda self: any(worker.queue for worker in self.house.workers.values()))
    @rule(positions=st.sets(st.integers(0, 3), min_size=1))
    def masks_are_late(self, positions: set[int]) -> None:
        busy = next(number for number, worker in self.house.workers.items() if worker.queue)
        self.house.workers[busy].late_next = positions
        self.house.answer(busy)

    @precondition(lambda self: self.house.workers)
    @rule(which=st.integers(0, 2))
    def lose(self, which: int) -> None:
        alive = sorted(self.house.workers)
        self.house.lose(alive[which % len(alive)])

    @precondition(lambda self: len(self.house.workers) < 3)
    @rule(slots=st.integers(1, 6), blocks=st.integers(6, 20), host_blocks=st.sampled_from([0, 4]))
    def join(self, slots: int, blocks: int, host_blocks: int) -> None:
        lowest = min({0, 1, 2} - set(self.house.workers))
        of_another_size = replace(self.limits, slots=slots, blocks=blocks, host_blocks=host_blocks)
        assert self.house.join(of_another_size) == lowest

    @precondition(lambda self: getattr(self, "count", 0))
    @rule(data=st.data(), most=st.integers(0, 2), at_once=st.booleans())
    def confine(self, data: st.DataObject, most: int, at_once: bool) -> None:
        self.house.core.confine({f"r{data.draw(st.integers(0, self.count - 1))}" for _ in range(most)})
        if at_once:
            self.house.core.assign_dock(self.house.now)

    @rule(policy=ANY_POLICY)
    def switch(self, policy: str) -> None:
        self.house.core.switch(policy)

    @precondition(lambda self: getattr(self, "count", 0))
    @rule(data=st.data(), resume=st.booleans())
    def park(self, data: st.DataObject, resume: bool) -> None:
        chosen = f"r{data.draw(st.integers(0, self.count - 1))}"
        if resume:
            self.house.core.resume(chosen, self.house.now)
        else:
            self.house.core.park(chosen)

    @rule(ms=st.integers(1, 400))
    def wait(self, ms: int) -> None:
        self.house.now += ms * MS

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "house"):
            self.house.core.check()

    def teardown(self) -> None:
        if hasattr(self, "house"):
            core = self.house.core  # what fits only a replica that is gone waits until one joins, and is judged then
            fits = [any(not s.misfit(replica.limits) for replica in core.alive) for s in core.waiting]
            if not all(fits) or not self.house.workers:
                self.house.join(self.limits)
            self.house.core.confine(())
            for number in range(self.count):
                self.house.core.resume(f"r{number}", self.house.now)
            self.house.finish(bound=4000)
            stats = self.house.core.stats()
            assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
            assert stats["swapped"] == stats["blocks_draining"] == 0
            assert stats["host_blocks_free"] == stats["host_blocks_total"]
            assert stats["running"] == stats["queued_tokens"] == 0


CoreTwin.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestCoreTwin = CoreTwin.TestCase


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize(("seed", "policy"), enumerate(TESTED))
def test_guesses_right_or_wrong_change_no_token(seed: int, policy: str, forces: bool) -> None:
    """Requests with predictions, some tokens wrong, that are late, preempted, stopped, parked, cancelled and lost.

    forces: the guesses come from the worker in place of the predictions.
    """
    rng = random.Random(f"{policy} {seed}")
    limits = Limits(8, rng.randint(30, 60), rng.choice([1, 2, 4]), 64, 64, host_blocks=40, max_drafts=24)
    core = Scheduler(
        policy,
        microbatches=rng.randint(1, 3),
        lookahead=rng.randint(0, 2),
        ahead_ns=18 * MS,
        checkpoint_tokens=5,
        prefix_cache=True,
    )
    house = House(core, limits, lag=rng.randint(0, 2))
    house.workers[0].forces = forces
    for i in range(40):
        new = request(f"r{i}", rng.randint(3, 12), rng.randint(8, 40), seed=i % 30, stop_ids=(3,), priority=i % 4)
        output = np.array(answer(new, 0, limits.max_model_len)[0], np.int32)
        wrong = np.random.default_rng(i).random(output.size) < rng.choice([0.0, 0.1, 0.3])
        if not forces:
            new.prediction = np.concatenate([new.prompts[0], np.where(wrong, (output + 1) % VOCAB, output)])
        house.add(new)
        for _ in range(rng.randint(0, 5)):
            house.step_once()
        chosen, event = f"r{rng.randint(max(i - 8, 0), i)}", rng.random()
        house.plan()  # so that some guesses are unanswered
        if event < 0.1:
            house.stop(chosen, 0, rng.randint(0, len(house.published[chosen, 0])))
        elif event < 0.3:
            core.park(chosen)
            house.step_once()
            core.resume(chosen, house.now)
        elif event < 0.35:
            house.take(core.cancel(chosen, house.now))
        elif event < 0.4:
            house.lose()
            house.join(limits)
            house.workers[max(house.workers)].forces = forces
        elif event < 0.7:
            house.workers[max(house.workers)].late_next = {at for at in range(8) if rng.random() < 0.5}
        core.check()
    for i in range(40):
        core.resume(f"r{i}", house.now)
    house.finish()
    stats = core.stats()
    assert 20 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.parametrize("seed", range(7))
def test_rows_with_late_masks_get_their_tokens_and_end(seed: int) -> None:
    """Three of ten chunks that sample are late, on a pool in which sequences are preempted."""
    rng = random.Random(seed)
    limits = Limits(6, rng.choice([28, 32]), rng.choice([1, 2, 4]), 40, 16, host_blocks=30)
    config = {
        "microbatches": rng.randint(1, 3),
        "lookahead": rng.randint(0, 2),
        "ahead_ns": 18 * MS,
        "prefix_cache": rng.choice([None, True]),
    }
    house = House(Scheduler(TESTED[seed % len(TESTED)], checkpoint_tokens=3, **config), limits, rng.randint(0, 2))
    for i in range(20):
        house.add(request(f"r{i}", rng.randint(1, 12), rng.randint(1, 16), seed=i % 6, stop_ids=(0,), priority=i % 4))
    rounds = 0
    while not house.core.idle and (rounds := rounds + 1) < 2000:
        house.workers[0].late_next = {at for at in range(6) if rng.random() < 0.3}
        house.step_once()
    assert len(house.ended) == 20 and all(finish[0] in (Finish.STOP, Finish.LENGTH) for finish in house.ended.values())


@pytest.mark.parametrize("late", [[9999], [1], [0, 0]], ids=["no slot", "answered", "twice"])
def test_result_with_a_wrong_late_slot_is_refused(late: list[int]) -> None:
    house = House(Scheduler("sarathi"), Limits(4, 20, 4, 40, 16))
    house.add_many(2, 3, 4)
    assert house.plan() is not None
    house.workers[0].late_next = {0}
    result = house.workers[0].run()
    result.late = np.array(late, np.int32)
    with pytest.raises(ValueError, match="late slot"):
        house.core.apply(result, house.now)


def late_in_first_of_two_steps(policy: str = "sarathi", **more: Any) -> House:
    """A sequence, "low", with five known tokens: it was late in one step, and one more is unanswered."""
    core = Scheduler(policy, lookahead=1, **more)
    house = House(core, Limits(1, 40, 1, 40, 16, host_blocks=30))
    house.add(request("low", 4, 10, priority=3))
    house.plan()
    house.answer()
    house.plan()
    house.plan()
    house.workers[0].late_next = {0}
    house.answer()
    return house


def test_token_of_a_step_behind_a_late_one_is_refused() -> None:
    house = late_in_first_of_two_steps()
    result = house.workers[0].run()
    assert result.late.tolist() == [0]
    result.late, result.slots, result.tokens = EMPTY, np.array([0], np.int32), np.array([7], np.int32)
    with pytest.raises(ValueError, match="has a token of a slot that was late in an earlier step"):
        house.core.apply(result, house.now)


@pytest.mark.parametrize(("mode", "copied", "again"), [("recompute", 0, 4), ("swap", 4, 0)])
def test_late_sequence_keeps_only_kv_of_known_tokens_when_preempted(mode: str, copied: int, again: int) -> None:
    parts = f"orcinus:order=class,memory=fits,tokens=fixed-16,relief=least-lost-{mode}+takes"
    house = late_in_first_of_two_steps(parts, prefix_cache=False)
    house.add(request("urgent", 4, 1, seed=2, priority=0))
    assert house.plan() is None, "it is refused first"
    step = house.plan()
    assert step is not None and step.free_slots.tolist() == [0] and step.swap_out_gpu.size == copied
    house.finish()
    assert house.core.stats()["recomputed_tokens"] == again


@pytest.mark.parametrize("way", ["parked", "cancelled", "stopped", "failed"])
def test_late_sequence_that_leaves_its_row_is_late_no_more(way: str) -> None:
    house = late_in_first_of_two_steps()
    if way == "parked":
        house.core.park("low")
    elif way == "cancelled":
        house.take(house.core.cancel("low", house.now))
    elif way == "stopped":
        house.stop("low", 0, 1)
    else:
        house.workers[0].fail_next = {0}
        house.answer()
    house.core.check()
    house.add(request("next", 4, 3, seed=1))
    house.core.resume("low", house.now)
    house.finish()
    house.core.check()

"""The core against brute force with several replicas of any role that read each other's host tiers.

The twin workers' host tiers hold real content and that of a lost worker becomes garbage, so a load that begins before
its copy is there, or host blocks that are free too early, give other tokens than the sequence alone would get.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits
from tests.unit.scheduler.core.test_twin import ANY_POLICY, SWAPS, CoreTwin, drafts_whatever_they_cost
from tests.unit.scheduler.core.twin import VOCAB, House, answer, request

ROLES = st.sampled_from(["prefill", "decode", "prefill", "decode", ""])
TIERS = st.sampled_from(["a/", "a/", "a/", "a/", "b/", ""])
HOST = st.sampled_from([0, 3, 12, 60])
MAX_WORKERS = 4

__all__ = ["drafts_whatever_they_cost"]  # a fixture of all tests here


class RolesTwin(CoreTwin):
    """As CoreTwin, on up to four replicas that share one or two folders."""

    @initialize(
        policy=st.one_of(st.just("orcinus"), st.just(SWAPS), ANY_POLICY),
        microbatches=st.integers(1, 2),
        lookahead=st.integers(0, 2),
        block_size=st.sampled_from([1, 2, 4]),
        context=st.integers(12, 30),
        step_max=st.integers(2, 24),
        prefix_cache=st.sampled_from([None, True]),
        max_drafts=st.sampled_from([0, 8, 8]),
        lag=st.integers(0, 2),
        sizes=st.lists(
            st.tuples(st.integers(1, 6), st.integers(6, 20), HOST, ROLES, TIERS), min_size=1, max_size=MAX_WORKERS
        ),
    )
    def start(
        self, block_size: int, context: int, step_max: int, max_drafts: int, lag: int, sizes: list[Any], **core: Any
    ) -> None:
        several = [
            Limits(
                slots, blocks, block_size, context, step_max, host, role=role, host_tier=tier, kv_format="f",
                max_drafts=max_drafts,
            )
            for slots, blocks, host, role, tier in sizes
        ]  # fmt: skip
        self.limits = several[0]
        self.house = House(Scheduler(checkpoint_tokens=3, **core), several[0], lag)
        self.count = 0
        for limits in several[1:]:
            self.house.join(limits)

    @precondition(lambda self: len(self.house.workers) < MAX_WORKERS)
    @rule(slots=st.integers(1, 6), blocks=st.integers(6, 20), host_blocks=HOST, role=ROLES, tier=TIERS)
    def join(self, slots: int, blocks: int, host_blocks: int, role: str, tier: str) -> None:
        lowest = min(set(range(MAX_WORKERS)) - set(self.house.workers))
        another = replace(self.limits, slots=slots, blocks=blocks, host_blocks=host_blocks, role=role, host_tier=tier)
        assert self.house.join(another) == lowest

    @rule(which=st.integers(0, MAX_WORKERS - 1))
    def cannot_map(self, which: int) -> None:
        """What joins from now on cannot be read by this one."""
        if which in self.house.workers:
            names = {f"{folder}/{number}" for folder in "ab" for number in range(60)}
            self.house.workers[which].unmappable = names - set(self.house.tiers)

    @precondition(lambda self: self.house.workers)
    @rule(which=st.integers(0, MAX_WORKERS - 1))
    def take_over(self, which: int) -> None:
        alive = sorted(self.house.workers)
        self.house.take_over(alive[which % len(alive)])

    @rule(replica=st.just(MAX_WORKERS - 1))
    def plan_the_last(self, replica: int) -> None:
        if replica in self.house.workers:
            self.house.plan(replica)

    @rule(replica=st.just(MAX_WORKERS - 1))
    def answer_the_last(self, replica: int) -> None:
        self.house.answer(replica)

    def teardown(self) -> None:
        if hasattr(self, "house"):
            for number, worker in list(self.house.workers.items()):
                if worker.taken_over:
                    self.house.lose(number)
        super().teardown()


@pytest.mark.parametrize("seed", range(6))
def test_handed_over_and_swapped_sequences_have_drafts(seed: int) -> None:
    """The KV of drafts that were unanswered when a sequence left its row is computed where it goes on."""
    rng = random.Random(seed)
    prefill = Limits(
        6, 60, rng.choice([1, 2, 4]), 64, 64, rng.choice([12, 60]), role="prefill", host_tier="a/", kv_format="f",
        max_drafts=24,
    )  # fmt: skip
    decode = replace(prefill, slots=2, blocks=40, host_blocks=rng.choice([0, 30]), role="decode")
    policy, ahead = rng.choice(["orcinus", "sarathi", SWAPS]), rng.randint(0, 2)
    core = Scheduler(policy, microbatches=rng.randint(1, 3), lookahead=ahead, checkpoint_tokens=5, prefix_cache=True)
    house = House(core, prefill, rng.randint(0, 2))
    for _ in range(rng.randint(1, 2)):
        house.join(decode)
    for i in range(24):
        new = request(f"r{i}", rng.randint(3, 12), rng.randint(8, 40), seed=i, stop_ids=(3,), priority=i % 4)
        output = np.array(answer(new, 0, prefill.max_model_len)[0], np.int32)
        wrong = np.random.default_rng(i).random(output.size) < rng.choice([0.0, 0.1, 0.3])
        new.prediction = np.concatenate([new.prompts[0], np.where(wrong, (output + 1) % VOCAB, output)])
        house.add(new)
        for _ in range(rng.randint(0, 5)):
            house.step_once()
        for number in list(house.workers):
            house.plan(number)  # so that some drafts are unanswered
        if rng.random() < 0.2:
            core.park(f"r{rng.randint(max(i - 8, 0), i)}")
        core.check()
    for i in range(24):
        core.resume(f"r{i}", house.now)
    house.finish(bound=4000)
    stats = core.stats()
    assert stats["accepted_tokens"] > 0 and stats["handed_over"] > 0


RolesTwin.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestRolesTwin = RolesTwin.TestCase
del CoreTwin  # else it would run here again

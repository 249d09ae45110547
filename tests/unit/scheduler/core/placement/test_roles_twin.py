"""The core against brute force with several replicas of any role that read each other's host tiers.

The twin workers' host tiers hold real content and that of a lost worker becomes garbage, so a load that begins before
its copy is there, or host blocks that are free too early, give other tokens than the sequence alone would get.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits
from tests.unit.scheduler.core.test_twin import ANY_POLICY, SWAPS, CoreTwin
from tests.unit.scheduler.core.twin import House

ROLES = st.sampled_from(["prefill", "decode", "prefill", "decode", ""])
TIERS = st.sampled_from(["a/", "a/", "a/", "a/", "b/", ""])
HOST = st.sampled_from([0, 3, 12, 60])
MOST = 4


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
        lag=st.integers(0, 2),
        sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(6, 20), HOST, ROLES, TIERS), min_size=1, max_size=MOST),
    )
    def start(self, block_size: int, context: int, step_max: int, lag: int, sizes: list[Any], **core: Any) -> None:
        several = [
            Limits(slots, blocks, block_size, context, step_max, host, role=role, host_tier=tier, kv_format="f")
            for slots, blocks, host, role, tier in sizes
        ]
        self.limits = several[0]
        self.house = House(Scheduler(checkpoint_tokens=3, **core), several[0], lag)
        self.count = 0
        for limits in several[1:]:
            self.house.join(limits)

    @precondition(lambda self: len(self.house.workers) < MOST)
    @rule(slots=st.integers(1, 6), blocks=st.integers(6, 20), host_blocks=HOST, role=ROLES, tier=TIERS)
    def join(self, slots: int, blocks: int, host_blocks: int, role: str, tier: str) -> None:
        lowest = min(set(range(MOST)) - set(self.house.workers))
        another = replace(self.limits, slots=slots, blocks=blocks, host_blocks=host_blocks, role=role, host_tier=tier)
        assert self.house.join(another) == lowest

    @rule(which=st.integers(0, MOST - 1))
    def cannot_map(self, which: int) -> None:
        """What joins from now on cannot be read by this one."""
        if which in self.house.workers:
            names = {f"{folder}/{number}" for folder in "ab" for number in range(60)}
            self.house.workers[which].unmappable = names - set(self.house.tiers)

    @precondition(lambda self: self.house.workers)
    @rule(which=st.integers(0, MOST - 1))
    def take_over(self, which: int) -> None:
        alive = sorted(self.house.workers)
        self.house.take_over(alive[which % len(alive)])

    @rule(replica=st.just(MOST - 1))
    def plan_the_last(self, replica: int) -> None:
        if replica in self.house.workers:
            self.house.plan(replica)

    @rule(replica=st.just(MOST - 1))
    def answer_the_last(self, replica: int) -> None:
        self.house.answer(replica)

    def teardown(self) -> None:
        if hasattr(self, "house"):
            for number, worker in list(self.house.workers.items()):
                if worker.taken_over:
                    self.house.lose(number)
        super().teardown()


RolesTwin.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestRolesTwin = RolesTwin.TestCase
del CoreTwin  # else it would run here again

"""Constraints of a step, by one that only these tests know: at most so many distinct tags run on a replica.

That is the shape of a limit on adapters: a class of a few lines, appended to the list of each replica.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from services.scheduler.core.placement.base import MAX_PASSED, Constraint, Verdict
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.types import Limits, StepPlan
from tests.unit.scheduler.core.twin import House, request

LIMITS = Limits(slots=32, blocks=400, block_size=4, max_model_len=160, max_step_tokens=256)
POLICIES = ["orcinus", "vllm", "sglang", "orca", "sarathi:order=fair"]


def tag(sequence: Sequence) -> str:
    return sequence.record.request.id.partition("-")[0]


@dataclass
class MaxTags(Constraint[StepBuilder]):
    limit: int

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        table = step.replica.table
        tags = {tag(other) for other in [*table.sequence[table.active], *step.admitted_sequences]}
        return Verdict.OK if len(tags | {tag(sequence)}) <= self.limit else Verdict.SKIP


class Tagged(House):
    """A house in which each replica runs at most `limit` tags, and every step is looked at."""

    def __init__(self, replicas: int, limit: int, policy: str = "orcinus", **settings: Any) -> None:
        super().__init__(Scheduler(policy, **({"lookahead": 0} | settings)), LIMITS)
        self.limit = limit
        for _ in range(replicas - 1):
            self.join(LIMITS)
        for replica in self.core.replicas:
            replica.constraints.append(MaxTags(limit))

    def plan(self, replica: int = 0) -> StepPlan | None:
        step = super().plan(replica)
        if step is not None:
            rows = self.core.replicas[replica].table.sequence[step.chunk_slots]
            assert len({tag(sequence) for sequence in rows.tolist()}) <= self.limit
        return step

    def add_all(self, names: Iterable[str], max_tokens: int = 6) -> None:
        for name in names:
            self.add(request(name, 6, max_tokens, seed=len(self.requests)))


@pytest.mark.parametrize(("policy", "replicas"), zip(POLICIES, (2, 1, 2, 1, 1), strict=True))
def test_skipped_sequences_keep_their_order_and_do_not_starve(policy: str, replicas: int) -> None:
    h = Tagged(replicas, limit=1, policy=policy)
    tags = [f"tag{i}" for i in range(replicas)]
    h.add_all([f"{each}-first" for each in tags], max_tokens=30)
    h.step_once()
    others = ["other-0", "another-0", "further-0"]
    h.add_all(others)
    for turn in range(200):
        if "other-0" in h.started:
            break
        h.add_all([f"{each}-{turn}" for each in tags], max_tokens=30)
        h.step_once()
    before = h.started.index("other-0") - replicas
    assert 1 <= before <= MAX_PASSED + replicas, "at most one look of each other replica lies between"
    h.finish()
    assert [name for name in h.started if name in others] == others


def test_a_constraint_that_stops_lets_no_sequence_enter() -> None:
    class Closed(Constraint[StepBuilder]):
        def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
            return Verdict.STOP if tag(sequence) == "red" else Verdict.OK

    h = Tagged(1, limit=9)
    h.core.replicas[0].constraints.append(Closed())
    h.add_all(["blue-0", "red-0", "blue-1"])
    h.step_once()
    h.step_once()
    assert h.started == ["blue-0"]
    h.core.replicas[0].constraints.pop()
    h.finish()

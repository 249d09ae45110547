"""One column of tokens a step: schedule, speculate, commit and take back."""

from __future__ import annotations

import numpy as np
import pytest

from protos import worker_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation.drafts import Drafts
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.types import Limits, Rows, StepPlan, StepResult
from services.scheduler.workers.wire import result_from_wire
from shared.wire.columns import pack
from tests.unit.scheduler.core.twin import House, house, request

ROW: Rows = np.array([0])


def decoding(block_size: int, policy: str = "sarathi") -> House:
    h = house(policy, block_size=block_size)
    h.add(request("a", 7, 40, seed=1))
    for _ in range(2):
        h.step()
    return h


def decode_step(h: House, drafts: int) -> StepPlan:
    """A step of the row with so many guesses, all of them 1."""
    builder = StepBuilder(h.core.replicas[0], 0, 8, 8, 64, h.now)
    mask = h.core.replicas[0].table.mask(ROW)
    builder.decode(mask, ROW, *builder.missing_blocks(mask))
    if drafts:
        builder.speculate(Drafts(ROW, np.array([drafts], np.int32), np.ones(drafts, np.int32)))
    return builder.commit()


@pytest.mark.parametrize("policy", ["sarathi", "orcinus"])  # the second has a prefix cache
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("drafts", [1, 5])
def test_refused_drafts_leave_a_row_as_if_they_were_never_planned(drafts: int, block_size: int, policy: str) -> None:
    facts = []
    for count in (0, drafts):
        h = decoding(block_size, policy)
        replica, table = h.core.replicas[0], h.core.replicas[0].table
        plan = decode_step(h, count)
        assert plan.chunk_lengths.tolist() == [1 + count]
        assert plan.chunk_drafts.tolist() == [count] * (count > 0)
        counts = np.array([1], np.int32) if count else None
        h.take(h.core.apply(StepResult(plan.id, 0, np.zeros(1, np.int32), np.array([9], np.int32), counts), h.now))
        h.core.check()
        columns = (
            table.planned_tokens,
            table.known_tokens,
            table.applied_tokens,
            table.held_blocks,
            table.capacity,
            table.phase,
        )
        free = replica.pool.free + replica.pool.cached  # blocks for drafts may have been cached ones
        facts.append(([int(column[0]) for column in columns], free, replica.available))
        step, _ = h.core.plan(h.now)
        assert step is not None and step.chunk_starts.tolist() == [9] and step.chunk_lengths.tolist() == [1]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    ("drafts", "counts", "tokens"),
    [(2, None, 1), (2, [0], 0), (2, [4], 4), (2, [1, 1], 2), (2, [2], 1), (0, [1], 1)],
)
def test_counts_that_a_step_cannot_give_are_refused(drafts: int, counts: list[int] | None, tokens: int) -> None:
    h = decoding(4)
    plan = decode_step(h, drafts)
    column = None if counts is None else np.array(counts, np.int32)
    with pytest.raises(ValueError, match=f"the result of step {plan.id} has"):
        h.core.apply(StepResult(plan.id, 0, np.zeros(1, np.int32), np.full(tokens, 9, np.int32), column), h.now)
    h.core.check()


def test_rollback_refuses_applied_tokens() -> None:
    h = decoding(4)
    with pytest.raises(ValueError, match="placeholders"):
        h.core.replicas[0].rollback(ROW, np.array([1], np.int32))


def test_a_row_is_scheduled_once_a_step() -> None:
    h = decoding(4)
    builder = StepBuilder(h.core.replicas[0], 0, 8, 8, 64, h.now)
    builder.schedule(ROW, np.array([1]))
    with pytest.raises(ValueError, match="already in step"):
        builder.schedule(ROW, np.array([1]))


def test_failed_sequence_with_drafts_fails_alone() -> None:
    """On the wire a result without a token has no column of counts."""
    h = decoding(4)
    plan = decode_step(h, 2)
    message = worker_pb2.Result(id=plan.id, errors=[worker_pb2.SequenceError(slot=0, code="nan_logits", message="x")])
    h.take(h.core.apply(result_from_wire(message), h.now))
    h.core.check()
    assert h.errors == {"a": "nan_logits: x"}


@pytest.mark.parametrize(("counts", "tokens"), [([2], [5]), ([0], []), ([1, 1], [5, 5]), ([-1, 3], [5, 5])])
def test_forced_columns_of_wrong_lengths_are_refused(counts: list[int], tokens: list[int]) -> None:
    message = worker_pb2.Result(id=1, forced_slots=pack([0]), forced_counts=pack(counts), forced_tokens=pack(tokens))
    with pytest.raises(ValueError, match="forced_tokens: columns of 1, "):
        result_from_wire(message)


@pytest.mark.parametrize("slot", [1, -1, 9999])
def test_forced_tokens_of_a_slot_without_a_token_are_left_out(slot: int) -> None:
    core = Scheduler("sarathi", lookahead=0)
    h = House(core, Limits(8, 1000, 4, 400, 2048, max_drafts=24))
    for name in "ab":
        h.add(request(name, 7, 40, seed=1))
    for _ in range(2):
        h.step()
    plan = decode_step(h, 2)
    forced = {"forced_slots": pack([slot, 0]), "forced_counts": pack([1, 1]), "forced_tokens": pack([3, 4])}
    message = worker_pb2.Result(id=plan.id, slots=pack([0]), tokens=pack([5]), token_counts=pack([1]), **forced)
    h.take(h.core.apply(result_from_wire(message), h.now))
    h.core.check()
    assert not h.errors
    following, _ = h.core.plan(h.now)
    assert following is not None and following.chunk_slots.tolist() == [0, 1]
    assert following.chunk_drafts.tolist() == [1, 0] and following.drafts.tolist() == [4]

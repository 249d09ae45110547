"""What the core makes of lost workers, restarts and requests that go back to the queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits, StepResult
from tests.unit.scheduler.core.test_requests import LIMITS, house
from tests.unit.scheduler.core.twin import answer, request

# -- workers that come and go


def test_the_answer_of_a_lost_or_unknown_step_changes_nothing() -> None:
    h = house()
    h.add(request("a", 4, 9, seed=1))
    step = h.plan()
    assert step is not None
    failed = StepResult(step.id, 0, np.zeros(0, np.int32), np.zeros(0, np.int32), error="out of memory")
    assert not h.core.apply(failed, h.now).requests and len(h.core.replicas[0].inflight) == 1
    result = h.workers[0].run()
    h.lose()
    assert not h.core.apply(result, h.now).requests
    assert h.core.waiting_count == 1 and h.core.plan(h.now) == (None, None)
    h.join(LIMITS)
    h.finish()


def test_requests_of_the_scheduler_before_resume_until_they_are_computed_again() -> None:
    h = house(limits=replace(LIMITS, max_step_tokens=4))
    begun = request("a", 10, 20, seed=1)
    h.add(replace(begun, outputs=[np.array(answer(begun, 0, LIMITS.max_model_len)[0][:5], np.int32)]))
    h.add(request("new", 4, 5, seed=2))
    assert h.core.stats()["resuming"] == 1
    while h.core.stats()["resuming"]:
        assert "a" in h.core.records and len(h.published["a", 0]) == 5
        h.step()
    h.finish()


def test_sequences_resume_until_they_have_computed_again_what_a_lost_worker_had() -> None:
    limits = replace(LIMITS, max_step_tokens=4)
    h = house(limits=limits)
    for name in ("decodes", "prefills", "leaves", "waits"):
        h.add(request(name, 10, 20, seed=1))
    while h.core.replicas[0].table.count < 3:
        h.step()
    h.lose()
    lost = [s.lost_tokens for record in h.core.records.values() for s in record.sequences]
    assert h.core.stats()["resuming"] == sum(map(bool, lost)) == 3
    h.core.cancel("leaves", h.now)
    assert h.core.stats()["resuming"] == 2
    h.join(limits)
    left = []
    while h.core.stats()["resuming"]:
        h.step()
        table = h.core.replicas[0].table
        computed = {
            table.sequence[s].record.request.id: int(table.planned_tokens[s]) for s in np.flatnonzero(table.active)
        }
        left.append(sum(computed.get(name, 0) < lost[at] for at, name in enumerate(("decodes", "prefills"))))
        assert h.core.stats()["resuming"] == left[-1]
    assert sorted({2, *left}, reverse=True) == [2, 1, 0]
    h.core.lose(0, h.now)
    h.core.cancel("decodes", h.now)
    h.core.park("prefills")
    h.core.cancel("waits", h.now)
    assert not h.core.stats()["resuming"], "a request without a client resumes nothing"


def test_request_goes_on_from_the_outputs_of_before_a_restart() -> None:
    new = request("a", 5, 10, seed=1, n=2)
    both = [answer(new, c, 64)[0] for c in range(2)]
    new.outputs = [np.array(both[0][:4], np.int32), np.array(both[1][:2], np.int32)]
    new.finishes = [Finish.RUNNING, Finish.STOP]
    h = house()
    h.add(new)
    h.finish()
    assert h.ended["a"] == [Finish.LENGTH, Finish.STOP]
    assert h.published["a", 0] == both[0] and h.published["a", 1] == both[1][:2]


def test_outputs_without_a_checkpoint_are_in_the_first_after_restart() -> None:
    new = request("a", 5, 10, seed=1, n=3)
    whole = [answer(new, choice, 64)[0] for choice in range(3)]
    new.outputs = [np.array(tokens[:count], np.int32) for tokens, count in zip(whole, (7, 4, 10), strict=True)]
    new.checkpointed_tokens = [3, 4, 9]
    outcome = Scheduler(checkpoint_tokens=32).add(new, 0)
    carried = [(choice, first, tokens.tolist()) for _, choice, first, tokens in outcome.checkpoints]
    assert carried == [(0, 3, whole[0][3:7]), (2, 9, whole[2][9:10])]


# -- back to the queue


def test_request_that_never_ran_is_released_silently() -> None:
    h = house(limits=Limits(slots=1, blocks=64, block_size=4, max_model_len=64, max_step_tokens=128))
    h.add(request("runs", 4, 8, seed=1))
    h.steps(2)
    waits = request("waits", 4, 8, seed=2)
    assert not h.core.add(waits, h.now).requests
    assert not h.core.release("runs")
    assert not h.core.release("unknown")
    assert h.core.release("waits")
    h.core.check()
    assert h.core.unfinished_count == 1
    h.finish()  # no row of "waits": the house would not know it
    assert not h.core.add(waits, h.now).errors  # the same id may come again


def test_request_that_ran_is_released_with_a_checkpoint() -> None:
    h, other = house(), house()
    h.add_all(("goes", 4, 20, 1), ("stays", 4, 20, 2))
    h.steps(6)
    assert h.core.release("goes", begun=True)
    assert not h.core.release("goes", begun=True)
    h.core.check()
    h.take(h.core.checkpoint())
    told = h.published["goes", 0]
    assert told and h.records["goes", 0] == told
    again = request("goes", 4, 20, seed=1)
    again.outputs = [np.array(told, np.int32)]
    other.add(again)
    other.finish()
    assert other.published["goes", 0][: len(told)] == told
    del h.requests["goes"]
    h.finish()  # answers to steps that it was in are dropped: no row of it any more
    assert h.published["goes", 0] == told


@pytest.mark.parametrize(
    "before", [{"outputs": [np.array([5], np.int32)]}, {"has_begun": True}], ids=["a token", "none"]
)
def test_restarted_request_is_released_only_as_begun(before: dict[str, Any]) -> None:
    core = Scheduler()
    core.add(request("r", 4, 8, seed=1, **before), 1)
    assert not core.release("r")
    assert core.release("r", begun=True)


# -- set aside


def test_parked_request_gets_no_step_until_resumed_in_place() -> None:
    h = house(limits=Limits(slots=1, blocks=64, block_size=4, max_model_len=64, max_step_tokens=128))
    for index, name in enumerate("abc"):
        h.add(request(name, 4, 8, seed=index))
    h.core.park("a")
    h.core.check()
    assert h.core.stats()["parked"] == 1
    h.steps(3)
    assert h.started == ["b"]
    h.core.resume("a", h.now)
    assert h.core.stats()["parked"] == 0
    h.finish()
    assert h.started == ["b", "a", "c"]


def test_request_that_was_complete_before_a_restart_ends_at_once() -> None:
    new = request("a", 5, 4, seed=1)
    new.outputs = [np.array(answer(new, 0, 64)[0], np.int32)]
    h = house()
    h.add(new)
    assert h.ended["a"] == [Finish.LENGTH] and h.core.idle

"""Log-probabilities of prompts in the core: published once, in order, and refused where they cannot be right."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, NewRequest, Outcome, PromptLogprobs, StepPlan, StepResult

PROMPT = np.arange(40, 80, dtype=np.int32)
SIZE = 8


def records(first: int, count: int) -> bytes:
    return b"".join(place.to_bytes(SIZE, "little") for place in range(first, first + count))


def scheduler(prefix_cache: bool = False, step_tokens: int = 16) -> Scheduler:
    core = Scheduler("orcinus", lookahead=1, step_tokens=step_tokens, prefix_cache=prefix_cache)
    core.join(Limits(slots=4, blocks=64, block_size=4, max_model_len=128, max_step_tokens=128))
    return core


def request(name: str, scored: list[int] | None, **fields: int) -> NewRequest:
    return NewRequest(name, [PROMPT], 4, scored_tokens=scored, gateway="g", **fields)


def plan(core: Scheduler, now: int) -> StepPlan:
    step, _ = core.plan(now)
    assert step is not None
    return step


def answer(core: Scheduler, step: StepPlan, *told: PromptLogprobs) -> Outcome:
    slots = step.chunk_slots[step.samples]
    result = StepResult(step.id, 0, slots, np.full(slots.size, 7, np.int32), prompt_logprobs=list(told), step_ns=1000)
    return core.apply(result, step.id)


def test_each_token_is_published_once_and_in_order() -> None:
    core = scheduler()
    core.add(request("a", [1]), 1)
    steps = [plan(core, 1), plan(core, 2)]
    assert [enter.scored_tokens for step in steps for enter in step.enters] == [1]
    slot = int(steps[0].chunk_slots[0])
    told = answer(core, steps[0], PromptLogprobs(slot, 1, 16, records(1, 16))).prompt_logprobs
    assert told == [("a", 0, 1, 16, records(1, 16))]
    again = answer(core, steps[1], PromptLogprobs(slot, 15, 18, records(15, 18))).prompt_logprobs
    assert again == [("a", 0, 17, 16, records(17, 16))], "what came before is left out"


def test_results_of_preempted_prompts_count_and_the_rest_is_asked_for() -> None:
    core = scheduler()
    core.add(request("a", [1]), 1)
    step = plan(core, 1)
    slot = int(step.chunk_slots[0])
    core.park("a")
    outcome = answer(core, step, PromptLogprobs(slot, 1, 16, records(1, 16)))
    assert outcome.prompt_logprobs == [("a", 0, 1, 16, records(1, 16))]
    core.resume("a", 3)
    (enter,) = plan(core, 4).enters
    assert (enter.scored_tokens, enter.computed_tokens) == (17, 0)


def test_last_records_count_where_the_sequence_has_left_its_slot_and_ends() -> None:
    core = scheduler(step_tokens=64)
    core.add(NewRequest("a", [PROMPT], 1, scored_tokens=[1], gateway="g"), 1)
    step = plan(core, 1)
    core.park("a")
    outcome = answer(core, step, PromptLogprobs(int(step.chunk_slots[0]), 1, 39, records(1, 39)))
    assert outcome.prompt_logprobs == [("a", 0, 1, 39, records(1, 39))]
    assert [end.request.id for end in outcome.ended_requests] == ["a"]


def test_wrong_record_of_one_sequence_leaves_the_others_as_they_were() -> None:
    core = scheduler(step_tokens=128)
    core.add(request("a", [1]), 1)
    core.add(request("b", [1]), 1)
    step = plan(core, 1)
    first, second = step.chunk_slots.tolist()
    with pytest.raises(ValueError, match="scores tokens 5 to 7"):
        answer(core, step, PromptLogprobs(first, 1, 39, records(1, 39)), PromptLogprobs(second, 5, 3, records(5, 3)))
    with pytest.raises(ValueError, match="twice"):
        answer(core, step, *[PromptLogprobs(first, 1, 39, records(1, 39))] * 2)
    outcome = answer(
        core, step, PromptLogprobs(first, 1, 39, records(1, 39)), PromptLogprobs(second, 1, 39, records(1, 39))
    )
    assert [record[:4] for record in outcome.prompt_logprobs] == [("a", 0, 1, 39), ("b", 0, 1, 39)]


def test_a_prompt_reads_the_prefix_cache_only_before_its_first_token_to_tell() -> None:
    core = scheduler(prefix_cache=True, step_tokens=64)
    core.add(request("a", None), 1)
    answer(core, plan(core, 1))
    core.cancel("a", 2)
    computed = {}
    for name, scored in (("new", [1]), ("halfway", [22]), ("whole", [PROMPT.size]), ("none", None)):
        core.add(request(name, scored), 3)
        step = plan(core, 4)
        computed[name] = step.enters[0].computed_tokens
        answer(core, step)
        core.cancel(name, 5)
    assert computed == {"new": 0, "halfway": 20, "whole": 36, "none": 36}


def test_only_the_first_choice_of_a_prompt_tells() -> None:
    core = scheduler(step_tokens=128)
    core.add(request("a", [1], n=3), 1)
    assert {enter.choice: enter.scored_tokens for enter in plan(core, 1).enters} == {0: 1, 1: 0, 2: 0}


@pytest.mark.parametrize(
    ("first", "count", "slot", "problem", "scored"),
    [
        (2, 3, 0, "scores tokens 2 to 4 of slot", [1]),
        (0, 3, 0, "scores tokens 0 to 2 of slot", [1]),
        (1, 40, 0, "which has 40", [1]),
        (1, 3, 2, "slot 2, which has no chunk", [1]),
        (1, 3, 0, "scores tokens", None),
    ],
)
def test_records_that_the_step_cannot_give_are_refused(
    first: int, count: int, slot: int, problem: str, scored: list[int] | None
) -> None:
    core = scheduler()
    core.add(request("a", scored), 1)
    step = plan(core, 1)
    told = PromptLogprobs(int(step.chunk_slots[0]) + slot, first, count, records(first, count))
    with pytest.raises(ValueError, match=problem):
        answer(core, step, told)

"""The tables of the literature: the transcribed reference scheduler by hand, and each figure that can be worked out."""

from __future__ import annotations

import pytest

from bench.simulator import reference_scheduler
from bench.simulator.reference_scheduler import HIGH, Counts, Request


def test_the_first_steps_of_table_six_are_those_worked_out_by_hand() -> None:
    """Highs first, by number. Step 1: 0: 128 (all), 5: 128 of 178, 10: 192 of 228, 15 to 40: 256 each, 45: 64.

    Step 2: one decode; last chunks of 50, 36 and 22; 20 and 25: 64, 30: 128, 35: 192, 40 to 60: 256, 65: 192, and the
    19 tokens left are no chunk for 70. Step 3: 4 decodes; last chunks of 8, 58, 44, 30 and 16; 45 to 75: 256, 80: 64.
    """
    steps = reference_scheduler.run(reference_scheduler.table_six())
    assert steps[0] == Counts(0, 2048, 0, 100)
    assert steps[1] == Counts(1, 50 + 36 + 22 + 64 + 64 + 128 + 192 + 5 * 256 + 192, 0, 100)
    assert steps[2] == Counts(4, 8 + 58 + 44 + 30 + 16 + 7 * 256 + 64, 0, 100)
    assert sum(step.prefill for step in steps) == sum(128 + 10 * i for i in range(100))
    assert sum(step.decode for step in steps) == 100 * 255
    assert steps[-1].running == steps[-1].decode


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    """Blocks 10: the first takes 4 of them, the second wants 8, the third's 2 would fit but come later."""
    requests = [Request(0, 60, 4), Request(1, 120, 8), Request(2, 20, 12)]
    steps = reference_scheduler.run(requests, blocks=10)
    assert steps[:5] == [Counts(0, 60, 2, 1), *[Counts(1, 0, 2, 1)] * 3, Counts(0, 64 + 20, 0, 2)]
    # 120 is 64 and then 56
    assert steps[5] == Counts(1, 56, 0, 2)


def test_the_chunks_of_a_step_end_with_the_first_request_that_gets_none() -> None:
    """64 of 100 tokens to the first; 36 are no chunk of the second; the 30 of the third would fit but come later."""
    steps = reference_scheduler.run([Request(0, 100, 1), Request(1, 128, 1), Request(2, 30, 1)], max_batch_tokens=100)
    assert steps == [Counts(0, 64, 0, 3), Counts(0, 36 + 64, 0, 3), Counts(0, 64 + 30, 0, 2)]


def test_a_higher_class_is_admitted_before_those_that_came_earlier() -> None:
    requests = [Request(0, 64, 4), Request(1, 64, 2), Request(2, 64, 2, HIGH, arrival_ms=1.0)]
    steps = reference_scheduler.run(requests, max_batch_requests=1)
    # the high one arrives in the first step and enters before number 1
    assert [step.waiting for step in steps] == [1, 2, 2, 2, 1, 1, 0, 0]
    assert requests[2].last_token_ms < requests[1].last_token_ms


def test_a_high_class_at_risk_preempts_until_all_are_safe_and_the_preempted_come_back() -> None:
    """10 + 10 x tokens ms, a limit of 60: with three others 10 ms of slack, which is under 15; with two 20, with one
    30, which is not over 30; alone 40."""
    requests = [Request(0, 10, 9, HIGH, tbt_ms=60.0), *(Request(i, 10, 9) for i in (1, 2, 3))]
    steps = reference_scheduler.run(requests, time_ms=lambda tokens: 10.0 + 10.0 * min(tokens, 4))
    assert steps[:3] == [Counts(0, 40, 0, 4), Counts(1, 0, 3, 1), Counts(1, 33, 0, 4)]
    swapping = [Request(0, 10, 9, HIGH, tbt_ms=60.0), *(Request(i, 10, 9) for i in (1, 2, 3))]
    steps = reference_scheduler.run(swapping, host_blocks=2, time_ms=lambda tokens: 10.0 + 10.0 * min(tokens, 4))
    # two keep their KV and decode when they return; the third computes its 11 tokens again
    assert steps[:3] == [Counts(0, 40, 0, 4), Counts(1, 0, 3, 1), Counts(3, 11, 0, 4)]


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 20 blocks of 10"):
        reference_scheduler.run([Request(0, 300, 20)], blocks=10)

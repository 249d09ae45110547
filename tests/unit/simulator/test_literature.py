"""The tables of the literature: the transcribed reference scheduler by hand, and each figure that can be worked out."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from services.simulator.literature import chunks as literature_chunks
from services.simulator.literature import load as literature_load
from services.simulator.literature import main as literature
from services.simulator.literature import reference_scheduler
from services.simulator.literature import static as literature_static
from services.simulator.literature.priorities import classes, core_steps
from services.simulator.literature.reference_scheduler import HIGH, Counts, Request
from services.simulator.literature.table import Table, monotone


def test_the_first_steps_of_table_six_are_those_worked_out_by_hand() -> None:
    """Highs first, by number. Step 1: 0: 128 (all), 5: 128 of 178, 10: 192 of 228, 15 to 40: 256 each, 45: 64.

    Step 2: one decode; last chunks of 50, 36 and 22; 20 and 25: 64, 30: 128, 35: 192, 40 to 60: 256, 65: 192, and the
    19 tokens left are no chunk for 70. Step 3: 4 decodes; last chunks of 8, 58, 44, 30 and 16; 45 to 75: 256, 80: 64.
    """
    steps = reference_scheduler.run(reference_scheduler.table_six())
    assert steps[0] == Counts(0, 2048, 90, 10)
    assert steps[1] == Counts(1, 50 + 36 + 22 + 64 + 64 + 128 + 192 + 5 * 256 + 192, 86, 14)
    assert steps[2] == Counts(4, 8 + 58 + 44 + 30 + 16 + 7 * 256 + 64, 83, 17)
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
    assert steps == [Counts(0, 64, 2, 1), Counts(0, 36 + 64, 1, 2), Counts(0, 64 + 30, 0, 2)]


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


def test_table_six_is_alike_in_every_step() -> None:
    assert [claim for claim, holds, _ in classes().claims if not holds] == []


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
def test_the_core_keeps_to_the_rules_for_any_hundred_at_once(seed: int) -> None:
    """Random lengths, classes and pools. Sums of prompt and output are even, since the core's reservation leaves out
    the last token, whose KV is never computed: that makes a difference only where one token is over a block."""
    rng = np.random.default_rng(seed)
    columns = [2 * rng.integers(1, 450, 100), 2 * rng.integers(1, 30, 100), rng.integers(0, 4, 100)]
    requests = [Request(i, *row) for i, row in enumerate(np.stack(columns, axis=1).tolist())]
    blocks = int(rng.integers(64, 900))
    ours = core_steps([dataclasses.replace(request) for request in requests], blocks)
    assert ours == reference_scheduler.run(requests, blocks=blocks)


def test_table_one_is_exact() -> None:
    table = literature_static.slots_in_use()
    assert table.reproduced
    assert table.rows[4] == ["utilisation %", 50.2, 50.2]


def test_stretches_of_equal_counts_end_where_the_count_changes() -> None:
    assert literature_static.stretches([4, 4, 3, 3, 3, 1]) == [(2, 4), (5, 3), (6, 1)]


def test_padding_is_what_the_longest_of_each_batch_adds() -> None:
    lengths = np.array([1, 9, 2, 8, 3])
    # by arrival in pairs: 9, 9, 8, 8, 3; grouped: 1 2 | 3 8 | 9
    assert literature_static.padding(lengths, 2) == pytest.approx(1 - 23 / (18 + 16 + 3))
    assert literature_static.padding(lengths, 2, grouped=True) == pytest.approx(1 - 23 / (4 + 16 + 9))
    assert literature_static.padding(lengths, 1) == 0


def test_decodes_pad_to_the_next_captured_size() -> None:
    clock = literature_static.GraphClock()
    clock.sizes, clock.tokens = Counter({1: 5, 3: 2, 9: 1, 256: 1}), 1000
    added = 0 * 5 + 1 * 2 + 7 * 1
    assert clock.padding() == pytest.approx(added / (1000 + added))


def test_monotone_allows_equal_neighbours() -> None:
    assert monotone([0, 0, 1]) and not monotone([0, 1, 0.5])
    assert monotone([3, 3, 1], rising=False) and not monotone([1, 2], rising=False)


def test_only_required_claims_decide() -> None:
    table = Table("T0", "", "", ())
    table.claim("informs", False, required=False)
    assert table.reproduced
    table.claim("decides", False)
    assert not table.reproduced


def test_the_verdict_counts_the_ratios_missed_beside_what_is_required() -> None:
    table, informs = Table("T5", "", "", ()), Table("T5, chat trace", "", "informs", ())
    assert literature.verdict([table]) == "all in their sense"
    table.claim("order", True)
    for holds in (True, False, False):
        table.claim("a ratio", holds, required=False)
        informs.claim("a ratio", holds, required=False)
    assert literature.verdict([table, informs]) == "all in their sense; T5: 2 of 3 ratios missed"
    table.claim("another order", False)
    assert literature.verdict([table]) == "not in their sense: T5; T5: 2 of 3 ratios missed"


def test_table_four_follows_from_its_formula() -> None:
    assert literature_chunks.gemm_ms(1) == pytest.approx(0.34)
    assert literature_chunks.iteration_ms(32, 8) == pytest.approx(10.88 + 8 + 2.1)
    assert literature_chunks.iteration_parts().reproduced


@pytest.mark.slow
def test_table_five_has_its_order_and_keeps_the_law_of_time() -> None:
    table = literature_chunks.chunk_sizes()
    assert table.reproduced
    ours = {row[0].removesuffix(": ours"): row[1:] for row in table.rows if row[0].endswith("ours")}
    for size in (128, 256, 512):
        # the budget is the chunk and all slots, so a step has at least the chunk and at most that
        assert 45 + 0.078 * size <= ours[f"chunk {size}"][2] <= 45 + 0.078 * (size + literature_chunks.SLOTS)
    assert ours["orca"][2] == pytest.approx(45 + 0.078 * 4800, rel=0.02)


def test_loads_of_table_three_differ_in_time_alone() -> None:
    slow, fast = literature_load.workload(10), literature_load.workload(50)
    assert (slow.prompt == fast.prompt).all() and (slow.output == fast.output).all()
    assert slow.arrived_ns == pytest.approx(5 * fast.arrived_ns, abs=5)
    assert slow.arrived_ns[-1] / 1e9 == pytest.approx(literature_load.REQUESTS / 10, rel=0.1)


@pytest.mark.parametrize("holds", [True, False])
def test_one_json_object_says_what_is_reproduced_and_the_exit_code_too(
    holds: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def made() -> Table:
        table = Table("T1", "a title", "exact", ("what", "sheet", "ours"), [["steps", 3, 3.0], ["rest", None, "-"]])
        table.claim("as it should be", holds)
        return table

    monkeypatch.setattr(literature, "TABLES", (made, made))
    assert literature.reproduce(True) == (0 if holds else 1)
    printed = json.loads(capsys.readouterr().out)
    assert [table["reproduced"] for table in printed["tables"]] == [holds, holds]
    assert literature.reproduce(False) == (0 if holds else 1)
    assert ("MISSED" in capsys.readouterr().out) is not holds

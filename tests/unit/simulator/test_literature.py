"""The tables of the literature: each figure that can be worked out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from services.simulator.device.roofline import Roofline
from services.simulator.jobs import Report
from services.simulator.literature import batching as literature_batching
from services.simulator.literature import chunks as literature_chunks
from services.simulator.literature import granularity as literature_granularity
from services.simulator.literature import load as literature_load
from services.simulator.literature import main as literature
from services.simulator.literature import static as literature_static
from services.simulator.literature.load import slo_under_load
from services.simulator.literature.priorities import classes
from services.simulator.literature.static import padded_batches, slots_in_use
from services.simulator.literature.table import Cell, Table, monotone


def counted(table: Callable[[Report], Table]) -> Table:
    """Return a table that counts the requests that it simulates."""
    reports: list[tuple[int, int]] = []
    made = table(lambda done, total: reports.append((done, total)))
    (total,) = {total for _, total in reports}
    done = [done for done, _ in reports]
    assert len(done) > 3 and done == sorted(done) and total / 2 < done[-1] <= total
    return made


@pytest.mark.slow
def test_table_six_is_alike_in_every_step() -> None:
    assert [claim for claim, holds, _ in counted(classes).claims if not holds] == []


@pytest.mark.slow
def test_table_one_is_exact() -> None:
    table = counted(slots_in_use)
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


def test_time_lines_have_the_chunks_of_the_sheet_at_the_sum_of_their_steps() -> None:
    rows = literature_granularity.timeline("sarathi", 256 + literature_granularity.DECODES)
    assert [at for at, *_ in rows] == [0, 30, 60, *range(95, 341, 35)]
    assert [doing for _, doing, _ in rows] == ["", "", *(f"{at}-{at + 255}" for at in range(0, 2048, 256)), "decode"]
    assert {decodes for *_, decodes in rows} == {literature_granularity.DECODES}
    assert literature_granularity.timelines().reproduced


def numbers(row: Sequence[Cell]) -> list[float]:
    return [float(cell) for cell in row if isinstance(cell, int | float)]


def test_decisions_at_iterations_use_more_slots_with_shorter_gaps() -> None:
    table = literature_granularity.by_request_and_iteration()
    assert table.reproduced
    _, used, gaps, _ = map(numbers, table.rows)
    assert 60 <= used[0] <= 75, "as reserved: 64 slots x 14 blocks and a long prompt, of 24 to 25 blocks each"
    assert used[2] == pytest.approx(used[1] - used[0], abs=0.15)
    # a chunk of 256, all decodes and at most that: 45 ms + 0.078 ms a prompt token; a whole prompt has 4,800
    assert 45 <= gaps[1] <= 45 + 0.078 * (256 + literature_chunks.SLOTS)
    assert gaps[0] >= 45 + 0.078 * literature_chunks.LONG


def test_slots_in_use_are_weighted_by_the_time_of_their_steps() -> None:
    steps = [400_000_000, 600_000_000, 1_000_000_000, 1_000_000], [32, 16, 8, 32]
    mean, peak = literature_batching.slots_in_use(*steps)
    assert mean == pytest.approx(100 * (0.4 * 32 + 0.6 * 16 + 1.0 * 8 + 0.001 * 32) / 2.001 / 32)
    assert peak == pytest.approx(100 * (0.4 * 32 + 0.6 * 16) / 32)


def test_parts_of_an_iteration_add_up_to_it() -> None:
    rows = literature_batching.parts_of_an_iteration().rows
    ours = {str(row[0]): numbers(row)[1] for row in rows}
    total_ms = ours.pop("iteration, ms")
    assert sum(ours.values()) == pytest.approx(100, abs=0.2)
    assert total_ms == pytest.approx(Roofline("gpt2-xl", "a100").step_ns(32, 3_200, 0) / 1e6, rel=0.005)
    cache_bytes = 2 * 48 * 1600 * 2 * 3_200  # K and V of 48 layers, 16 bits each
    assert ours["KV cache"] == pytest.approx(100 * cache_bytes / (2.039e12 * 0.85) * 1e3 / total_ms, abs=0.1)


@pytest.mark.slow
def test_iteration_level_batching_adds_most_and_serves_most() -> None:
    assert literature_batching.batching_systems().reproduced
    assert literature_batching.parts_of_the_gain().reproduced


@pytest.mark.slow
def test_table_five_has_its_order_and_keeps_the_law_of_time() -> None:
    reports: list[tuple[int, int]] = []
    table = literature_chunks.chunk_sizes(lambda done, total: reports.append((done, total)))
    assert reports == sorted(reports) and 0.9 < reports[-1][0] / reports[-1][1] <= 1
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


@pytest.mark.parametrize("table", [padded_batches, slo_under_load])
def test_table_counts_the_requests_that_it_simulates(
    table: Callable[[Report], Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(literature_static, "REQUESTS", 100)
    monkeypatch.setattr(literature_load, "REQUESTS", 20)
    counted(table)


@pytest.mark.parametrize("holds", [True, False])
def test_one_json_object_says_what_is_reproduced_and_the_exit_code_too(
    holds: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def made(report: Report) -> Table:
        report(30, 60)
        table = Table("T1", "a title", "exact", ("what", "sheet", "ours"), [["steps", 3, 3.0], ["rest", None, "-"]])
        table.claim("as it should be", holds)
        return table

    monkeypatch.setattr(literature, "TABLES", (made, made))
    assert literature.reproduce(True) == (0 if holds else 1)
    printed = json.loads(capsys.readouterr().out)
    assert [table["reproduced"] for table in printed["tables"]] == [holds, holds]
    assert literature.reproduce(False) == (0 if holds else 1)
    assert ("MISSED" in capsys.readouterr().out) is not holds

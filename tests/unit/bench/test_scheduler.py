"""The scheduler bench: the JSON that other programs rely on and that every part of it runs."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from bench.scheduler.cases import Churn, with_hole
from bench.scheduler.drive import Drive, Setup, figure
from bench.scheduler.main import main
from services.scheduler.core.types import Limits

COSTS = ("plan_us", "apply_us", "total_us")


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def hold_figures(line: dict[str, Any], *names: str) -> None:
    for name in names:
        assert 0 < line[name]["lowest"] <= line[name]["p50"] <= line[name]["p99"]
        assert line[name]["lowest_p99"] <= line[name]["p99"]


def test_json_has_plan_apply_and_total_for_each_count(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--parts", "decode", "--running", "3,40", "--steps", "6")
    assert [line["running"] for line in found["results"]] == [3, 40]
    for line in found["results"]:
        assert line["steps"] == 6
        hold_figures(line, *COSTS, "wire_us")
        assert line["p99_over_p50"] >= 1
        assert line["goal_p99_over_p50"] == 4
        assert line["gc"]["enabled"]
        assert line["switches"] >= 0
    assert {"machine", "date", "command", "commit"} <= set(found)
    assert "admission" not in found
    assert "curves" not in found


@pytest.mark.slow
def test_admission_and_wire_are_measured_in_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Admissions with half of the prompts cached, with none, and into a full cache."""
    found = printed(capsys, "--quick", "--parts", "admission,wire")
    half, none, full = found["admission"]
    assert [line["evicts"] for line in (half, none, full)] == [False, False, True]
    for line in (half, none, full):
        assert (line["entering"], line["prompt_tokens"], line["goal_us"], line["iterations"]) == (16, 1000, 400, 5)
        hold_figures(line, *COSTS)
    assert half["cached_tokens"] == full["cached_tokens"] == 500 // 16 * 16  # whole blocks only
    assert none["cached_tokens"] == 0
    steady, entering = found["wire"]
    assert (steady["case"], steady["goal_us"], entering["case"]) == ("decode", 300, "admission")
    for line in (steady, entering):
        hold_figures(line, *COSTS, "encode_us", "parse_us", "stats_us", "batch_us", "resp_us")


@pytest.mark.slow
def test_cases_are_ratios_to_the_floor_with_their_goals(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--parts", "cases", "--running", "8,256", "--steps", "10", "--rounds", "2")["cases"]
    for line in lines:
        assert 0 < line["total_us"]["p50"] <= line["total_us"]["p90"]
        assert line["met"] == (line["ratio"] <= line["goal_ratio"]) if "goal_ratio" in line else True
    named = {(line["case"], line["running"]): line for line in lines if line["case"] != "floor"}
    goals = {(case, size): line.get("goal_ratio") for (case, size), line in named.items()}
    assert [goals["steady", 8], goals["churn", 8], goals["steady", 256], goals["churn", 256]] == [1.25, None, 1.25, 2.2]
    assert named["hole", 8]["goal_ratio_to_steady"] == named["hole", 256]["goal_ratio_to_steady"] == 1.1
    spans = named["spans", 256]
    assert spans["goal_ratio_to_steady"] == 1.3
    assert spans["drafts_per_row"] > 0.5 and spans["tokens_per_row"] > 1.5 and 0 < spans["refused"] < 0.6
    admissions = [line for (case, _), line in named.items() if case.startswith("admission")]
    assert [(line["running"], line["goal_ratio"], line["iterations"]) for line in admissions] == [(256, 7, 2)] * 3
    assert [line["ratio"] for line in lines if line["case"] == "floor"] == [1.0] * 3


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_churn_enters_one_and_ends_one_each_step(lookahead: int) -> None:
    churn = Churn(6, Setup(lookahead=lookahead))
    assert len(list(islice(churn.steps(), 60))) == 60  # it raises where that is not so
    assert len(churn.adding_ns) == 60


def test_drive_has_a_hole_between_slots_and_answers_after_the_lookahead() -> None:
    (done,) = with_hole(8, Setup()).steps(1)
    assert sorted(done.result.slots.tolist()) == [0, 1, 2, 3, 5, 6, 7, 8]
    drive = Drive(Limits(2, 64, 16, 256, 256), Setup(lookahead=1))
    drive.add(drive.prompt(20), 100)
    assert drive.step() is None
    first = drive.step()
    assert first is not None and len(first.plan.enters) == first.outcome.tokens.size == 1


def test_a_cache_that_was_filled_leaves_hardly_a_block_free() -> None:
    drive = Drive(Limits(6, 400, 16, 1024, 2048), Setup())
    drive.run([drive.prompt(20)], 500)
    assert drive.core.stats()["blocks_free"] > 390
    drive.fill(320, 4)
    assert drive.core.stats()["blocks_cached"] > 350
    assert drive.core.stats()["blocks_free"] < 40
    assert drive.running == 1


def test_figures_are_medians_over_rounds_with_best_round_beside_them() -> None:
    rounds = [[1000, 2000, 3000], [5000, 5000, 5000], [2000, 4000, 9000]]
    taken = [value for each in rounds for value in each]
    assert figure(taken, 3) == {"p50": 4.0, "p99": 5.0, "lowest": 2.0, "lowest_p99": 3.0}
    assert figure(taken[:2], 5)["p50"] == 1.5  # no round is empty


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--running", "32,0"], "0 sequences; give 1 to 65536"),
        (["--policy", "sarathi:order=none"], "none"),
        (["--parts", "decode", "--plots", "anywhere"], "--parts must have one of them"),
        (["--plots", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_wrong_use_ends_with_2_before_anything_is_measured(
    wrong: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.scheduler.main.measure", lambda *_: pytest.fail("measured"))
    assert main(wrong) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_policy_that_runs_fewer_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parts", "decode", "--policy", "lmdeploy", "--running", "200", "--steps", "1"]) == 1
    assert "lmdeploy" in capsys.readouterr().err

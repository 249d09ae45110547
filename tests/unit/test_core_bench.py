"""The scheduler bench: the JSON that other programs rely on (DESIGN.md, section 7)."""

from __future__ import annotations

import json

import pytest

from bench.scheduler import main


def test_json_has_plan_apply_and_total_for_each_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--running", "3,40", "--steps", "6"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [line["running"] for line in printed["results"]] == [3, 40]
    for line in printed["results"]:
        assert line["steps"] == 6
        for name in ("plan_us", "apply_us", "total_us", "wire_us"):
            assert 0 < line[name]["p50"] <= line[name]["p99"]
    assert {"machine", "date", "command", "commit"} <= set(printed)


@pytest.mark.parametrize("wrong", [["--running", "x"], ["--running", "0"], ["--steps", "0"], ["--policy", "fifo"]])
def test_wrong_use_ends_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == 2
    assert capsys.readouterr().err

"""What is found by many runs, against rates and budgets that can be worked out; and the pictures."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from services.simulator.command.main import main
from services.simulator.command.speed import measure


def step_file(folder: Path, **coefficients: float) -> str:
    file = folder / "step.json"
    file.write_text(json.dumps(coefficients))
    return str(file)


def test_capacity_is_the_rate_from_which_the_device_falls_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 ms a token, 10 of prompt, one of output: a device that can do 100 requests a second, evenly spaced."""
    trace = tmp_path / "even.csv"
    rows = "".join(f"{i / 10},10,1\n" for i in range(200))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    command = ["--find", "capacity", "--trace", str(trace), "--step-time", step_file(tmp_path, c0=1, c1=1e6)]
    limits = ["--ttft-slo-ms", "100", "--host-us", "0", "--max-step-tokens", "10", "--lookahead", "0"]
    assert main([*command, *limits, "--policy", "orca", "--json", "--jobs", "1"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    # Request i has its token at 10 (i + 1) ms, and all up to i = 197 must within 100 ms of i / rate.
    highest = 197 / (1.98 - 0.1)
    assert highest / 1.02 <= found["arrival_rps"] <= highest * 1.0001
    assert found["rate_scale"] == pytest.approx(found["arrival_rps"] / 10, rel=1e-3)
    scales = [run["rate_scale"] for run in found["runs"]]
    assert scales == sorted(scales) and found["bounded_by"] == "limits"


@pytest.mark.parametrize(
    ("requests", "bounded"), [(8, "requests"), pytest.param(400, "limits", marks=pytest.mark.slow)]
)
def test_a_burst_that_fits_into_the_limit_is_no_capacity(
    requests: int, bounded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 ms a request and a limit of 100 ms: eight at any rate are within it. They are served at 100 a second, so the
    rate that a run keeps up with to a tenth is 110, from the first of eight arrivals to the last."""
    work = ["--prompt-tokens", "10", "--output-tokens", "1", "--rate", "10", "--cv", "0.001"]
    command = ["--find", "capacity", "--policy", "orca", "--step-time", step_file(tmp_path, c0=1, c1=1e6), *work]
    limits = ["--ttft-slo-ms", "100", "--host-us", "0", "--max-step-tokens", "10", "--lookahead", "0", "--jobs", "1"]
    assert main([*command, *limits, "--requests", str(requests), "--json"]) == (1 if bounded == "requests" else 0)
    printed = capsys.readouterr()
    (found,) = json.loads(printed.out)["results"]
    assert found["bounded_by"] == bounded and found["arrival_rps"] < 110
    assert ("give more --requests" in printed.err) is (bounded == "requests")
    assert main([*command, *limits, "--requests", str(requests)]) == (1 if bounded == "requests" else 0)
    assert "99 % within their limits up to" in capsys.readouterr().out


def test_capacity_that_no_load_keeps_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--find", "capacity", "--requests", "5", "--step-time", step_file(tmp_path, c0=3e9), "--jobs", "1"]
    assert main([*command, "--prompt-tokens", "10", "--output-tokens", "2", "--rate", "10"]) == 1
    assert "no rate keeps 99 % within their limits" in capsys.readouterr().out


@pytest.mark.slow
def test_knee_is_smallest_budget_that_keeps_up_within_the_slos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 ms and 0.1 ms a token: a gap of 40 ms allows 300 tokens a step. Steps of 192 tokens are worth 3.19 requests of
    2,060 tokens a second, of 256 tokens 3.49; 3.4 arrive."""
    file = step_file(tmp_path, c0=10e6, c1=0.1e6)
    work = ["--prompt-tokens", "2000", "--output-tokens", "60", "--rate", "3.4", "--cv", "0.05", "--requests", "200"]
    limits = ["--tbt-slo-ms", "40", "--ttft-slo-ms", "1500", "--host-us", "0", "--max-step-tokens", "512"]
    assert (
        main(["--find", "knee", "--policy", "sarathi", "--step-time", file, *work, *limits, "--json", "--jobs", "2"])
        == 0
    )
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["step_tokens"] == 256
    missed = {run["step_tokens"]: run["slo_violations"] for run in found["runs"]}
    assert missed[256] == 0 and missed[192] > 0.3 and missed[384] > 0.3


def test_speed_counts_iterations_with_all_slots_taken() -> None:
    line = measure("orca", 4, requests=8)
    assert line["iterations"] >= 128
    assert line["iterations_per_minute"] == pytest.approx(60e6 / line["us_per_iteration"], rel=0.05)
    assert line["iterations_per_cpu_minute"] == pytest.approx(60e6 / line["cpu_us_per_iteration"], rel=0.05)


def test_speed_measures_orca_and_orcinus_against_the_goal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = functools.partial(measure, requests=4)
    monkeypatch.setattr("services.simulator.command.speed.measure", small)
    monkeypatch.setattr("services.simulator.command.speed.GOALS", {32: 1, 64: 10**12, 256: 1})
    assert main(["--speed", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "orca, 32 running ..." and len(err.splitlines()) == 6
    printed = json.loads(out)
    assert [(r["policy"], r["running"]) for r in printed["results"]] == [
        (policy, running) for policy in ("orca", "orcinus") for running in (32, 64, 256)
    ]
    assert [r["met"] for r in printed["results"]] == [True, False, True] * 2
    assert all("missed at 64 running" in verdict for verdict in printed["verdicts"])
    assert main(["--speed", "--policy", "orca"]) == 0
    assert "orca: goal missed at 64 running" in capsys.readouterr().out

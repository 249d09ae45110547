"""`orcinus simulate` as other programs call it: the names of its JSON, its exit codes, what it says to bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.simulator import jobs as simulator_jobs
from services.simulator.command.main import main
from services.simulator.command.options import parser
from services.simulator.command.speed import measure
from services.simulator.device.clock import fit_step_log
from services.simulator.workload.arrivals import Lengths, Spec, build

ROOT = Path(__file__).resolve().parents[3]
CONTRACT = {
    "policy", "requests", "finished", "throughput_tok_s", "output_tok_s", "goodput_rps", "ttft_ms", "tbt_ms",
    "normalized_latency_ms", "preemptions", "recomputed_tokens", "swapped_blocks", "padding", "iterations", "wall_s",
}  # fmt: skip

SAID_OTHERWISE = {"running"}  # in words


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code = main([*argv, "--json", "--jobs", "1"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)["results"]


def test_json_has_agreed_names_and_is_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("--policy", "orca,orcinus", "--requests", "20", "--rate-scale", "4", "--seed", "3")
    results = ask(capsys, *command)
    assert [r["policy"] for r in results] == ["orca", "orcinus"]
    for result in results:
        assert set(result) >= CONTRACT
        assert result["finished"] == result["requests"] == 20
        for name in ("ttft_ms", "tbt_ms", "normalized_latency_ms"):
            assert 0 < result[name]["p50"] <= result[name]["p99"]
    again = ask(capsys, *command)
    assert [{**r, "wall_s": 0} for r in again] == [{**r, "wall_s": 0} for r in results]


def test_progress_goes_to_stderr_in_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator_jobs, "LINE_S", 0.0)
    assert main(["--policy", "orca", "--requests", "40", "--json", "--jobs", "1"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["results"]
    assert re.search(r"^simulated \d+ of 40 requests, \d+%, \d+ s left$", printed.err, re.MULTILINE), printed.err


def test_every_option_and_every_field_stands_in_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "simulate.md").read_text()
    words = re.findall(r"`([^`]+)`", page)
    options = set(re.findall(r"--[a-z-]+", parser().format_help())) - {"--help"}
    assert {"--policy", "--jobs"} <= options
    assert not options - set(re.findall(r"--[a-z-]+", " ".join(words)))
    (result,) = ask(capsys, "--requests", "5")
    assert not [name for name in result if name not in words]
    assert not [name for name in measure("orca", 4, requests=4) if name not in words and name not in SAID_OTHERWISE]


def test_processes_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--policy", "orca,sarathi", "--requests", "8", "--json", "--jobs"]
    lines = []
    for jobs in ("1", "2"):
        assert main([*command, jobs]) == 0
        lines.append([{**r, "wall_s": 0} for r in json.loads(capsys.readouterr().out)["results"]])
    assert lines[0] == lines[1]


def test_tbt_limit_that_no_step_comes_near_delays_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--trace", str(ROOT / "assets/traces/azure_code_2023.csv"), "--rate", "7", "--requests", "80"]
    (free,) = ask(capsys, *command)
    (limited,) = ask(capsys, *command, "--tbt-slo-ms", "100")
    assert limited["worst_gap_ms"]["p99"] < 50
    assert limited["ttft_ms"]["p99"] < 1.2 * free["ttft_ms"]["p99"]


def test_the_table_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policy", "orca,sarathi", "--requests", "20", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "orca" in printed and "sarathi" in printed and "goodput" in printed


def test_coefficients_from_a_file_rule_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    file.write_text('{"c0": 20000000}')
    (result,) = ask(
        capsys, "--step-time", str(file), "--prompt-tokens", "8", "--output-tokens", "5", "--at-once", "--requests", "3"
    )
    assert result["tbt_ms"]["p50"] == pytest.approx(20, rel=2e-4)
    assert result["ttft_ms"]["p99"] == pytest.approx(20.3, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--policy", "fifo"], "there are"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--rate-scale", "0"], "above 0"),
        (["--requests", "-1"], "negative"),
        (["--requests", "x"], "not an integer"),
        (["--model-shape", "llama-9b"], "llama-8b"),
        (["--device", "abacus"], "h100"),
        (["--model-shape", "llama-70b", "--device", "l4"], "--kv-blocks"),
        (["--cv", "2"], "--rate"),
        (["--at-once", "--rate", "3"], "exclude"),
        (["--classes", "urgent:1"], "realtime"),
        (["--prompt-tokens", "9:3"], "LOW"),
        (["--output-tokens", "lognormal:0:1", "--prompt-tokens", "4"], "lognormal:MEAN:SIGMA"),
        (["--prompt-tokens", "4", "--output-tokens", "4"], "--rate"),
        (["--routing", "nearest"], "least-tokens"),
        (["--step-time", "nowhere.json"], "nowhere.json"),
        (["--trace", str(ROOT / "assets/demo-model/model.safetensors")], "not text"),
        (["--rate-scale", "1e-300"], "1e-300 is too small"),
        (["--ttft-slo-ms", "high:"], "high:NUMBER"),
        (["--plots", str(ROOT / "README.md")], "README.md"),
        (["--plots", "/proc"], "/proc"),
        (["--fit", str(ROOT / "assets/demo-model/model.safetensors")], "model.safetensors: not text"),
        (["--bogus"], "--bogus"),
        (["--reproduce", "--find", "knee"], "--reproduce: runs fixed workloads and ignores --find"),
        (["--speed", "--find", "capacity", "--plots", "x"], "ignores --find, --plots"),
        (["--speed", "--seed=0"], "ignores --seed"),
        (["--reproduce", "--speed"], "--speed"),
        (["--rate-scale", "1,2", "--at-once"], "--rate-scale"),
        (["--prefix-tokens", "64"], "--prefix-groups N"),
        (["--routing", "random"], "--replicas 2"),
        (["--find", "knee", "--step-tokens", "64"], "--step-tokens"),
        (["--find", "capacity", "--at-once"], "--at-once"),
        (["--step-time", "a", "--fit", "b"], "exclude"),
        (["--trace", "x", "--prompt-tokens", "4", "--output-tokens", "4", "--rate", "1", "--requests", "4"], "drop it"),
        (["--classes", "realtime:1,realtime:2"], "gives realtime twice"),
        (["--ttft-slo-ms", "realtime:1,realtime:2"], "gives realtime twice"),
        (["--classes", "realtime:0"], "add up"),
        (["--tenants", "1"], "2 to 1000 tenants"),
        (["--tenants", "0,0"], "add up"),
        (["--tenants", "3,-1"], "-1"),
        (["--rate-scale", "1,1"], "twice"),
        (["--policy", "orca,orca"], "orca is given twice"),
        (["--model-shape", "demo", "--device", "h100x4", "--block-size", "1"], "--kv-blocks"),
        (["--replicas", "1000", "--kv-blocks", "9999999"], "smaller --kv-blocks"),
        (["--replicas", "1000", "--max-seqs", "8000"], "smaller --max-seqs"),
        (["--rate", "1e-6", "--requests", "5000"], "raise --rate"),
        (["--find", "knee", "--plots", "x"], "drop --plots"),
        (["--find", "knee", "--rate-scale", "1,2"], "drop --plots"),
        (["--cases", "x"], "--steps or --check"),
        (["--cases", "x", "--steps", "--check"], "--steps or --check"),
        (["--check"], "add --cases"),
        (["--cases", "nowhere.json", "--check"], "nowhere.json: No such file"),
        (["--cases", "x", "--check", "--requests", "3"], "ignores --requests"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_to_do(
    wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrong) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and says in line and not printed.out


HUGE = "99999999999999999999"


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--max-tokens", HUGE, "1 to 1,000,000"),
        ("--max-tokens", "9999999999", "1 to 1,000,000"),
        ("--prompt-tokens", "9999999999", "<= 1,000,000"),
        ("--prompt-tokens", HUGE, "<= 1,000,000"),
        ("--output-tokens", "lognormal:1e300:1", "1,000,000"),
        ("--prefix-tokens", HUGE, "1 to 1,000,000"),
        ("--prefix-groups", HUGE, "0 to 1,000,000"),
        ("--block-size", "99999999999", "1 to 256"),
        ("--kv-blocks", "99999999999", "0 to 10,000,000"),
        ("--host-blocks", "99999999999", "0 to 10,000,000"),
        ("--max-seqs", "99999999", "1 to 8,192"),
        ("--requests", "9999999999", "0 to 1,000,000"),
        ("--step-tokens", HUGE, "0 to 1,000,000"),
        ("--max-step-tokens", HUGE, "1 to 1,000,000"),
        ("--replicas", "100000", "1 to 1,000"),
        ("--microbatches", "1000", "1 to 16"),
        ("--lookahead", HUGE, "0 to 4"),
        ("--seed", HUGE, "4,294,967,295"),
        ("--jobs", HUGE, "1 to 64"),
        ("--rate", "1e300", "1e+06"),
        ("--rate-scale", "1,1e300", "1e+06"),
        ("--cv", "1e300", "100"),
        ("--ttft-slo-ms", "1e300", "1e+09"),
        ("--tbt-slo-ms", "high:1e300", "1e+09"),
        ("--ttft-slo-ms", "1e-300", "0.001"),
        ("--host-us", "1e30", "1e+08"),
        ("--host-us", "nan", "1e+08"),
        ("--classes", "high:1e300", "1e+06"),
        ("--requests", "9" * 5000, "1,000,000"),
    ],
)
def test_every_number_has_bounds_that_the_message_names(
    option: str, value: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([option, value]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    given = value.rpartition(",")[2].rpartition(":")[2] if "lognormal" not in value else value
    assert option in line and given[:40] in line and remedy in line and len(line) < 300 and not printed.out


@pytest.mark.parametrize("failure", [MemoryError(), OverflowError("Python int too large to convert to C long")])
def test_impossible_size_ends_with_2_and_names_the_options(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("services.simulator.jobs.simulate", fail)
    monkeypatch.setattr("services.simulator.command.main.run_all", fail)
    assert main(["--requests", "5", "--max-seqs", "7"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--requests 5 --max-seqs 7" in line


def test_times_beyond_64_bits_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    file.write_text('{"c0": 1e12, "c1": 1e12, "c2": 1e12, "c3": 1e12}')
    assert main(["--requests", "50", "--step-time", str(file), "--jobs", "1"]) == 2
    assert "too large" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["[1]", '{"c1": 3}', '{"c0": -1}', '{"c0": "fast"}', '{"c0": 1, "c9": 2}', "{", '{"c0": 1e300}']
)
def test_coefficients_that_make_no_sense_are_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    file.write_text(content)
    assert main(["--step-time", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_requests_that_cannot_finish_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "5", "--kv-blocks", "10", "--json", "--jobs", "1"]) == 1
    assert "did not finish" in capsys.readouterr().err


def test_fit_finds_coefficients_behind_a_step_log_and_overlooks_outliers(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    log = tmp_path / "steps.jsonl"
    lines = []
    for i in range(300):
        tokens, decode, prefill = int(rng.integers(1, 500)), int(rng.integers(0, 9000)), int(rng.integers(0, 90000))
        us = 2000 + 12 * tokens + 0.5 * decode + 0.02 * prefill + float(rng.normal(0, 5))
        us *= 30 if i % 50 == 7 else 1
        line = {"tokens": tokens, "forward_us": us - 100, "sample_us": 100}
        lines.append(json.dumps({**line, "decode_context": decode, "prefill_context": prefill}))
    log.write_text("\n".join(lines))
    fit = fit_step_log(log)
    assert [fit.c0, fit.c1, fit.c2, fit.c3] == pytest.approx([2e6, 12e3, 500, 20], rel=0.02)


def test_step_log_without_contexts_gives_base_and_price_per_token(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join(f'{{"tokens": {n}, "forward_us": {500 + 3 * n}, "sample_us": 0}}' for n in range(1, 40)))
    fit = fit_step_log(log)
    assert [fit.c0, fit.c1, fit.c2, fit.c3] == pytest.approx([500e3, 3e3, 0, 0])
    log.write_text('{"tokens": 3, "forward_us": 1e300, "sample_us": 0}\n')
    with pytest.raises(ValueError, match="line 1"):
        fit_step_log(log)
    log.write_text('{"tokens": 3}\n')
    with pytest.raises(ValueError, match="line 1"):
        fit_step_log(log)


def test_a_fit_says_which_figures_are_not_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join(f'{{"tokens": {n}, "forward_us": {500 + 3 * n}, "sample_us": 0}}' for n in range(1, 40)))
    command = ["--fit", str(log), "--requests", "5", "--jobs", "1"]
    assert main([*command, "--json"]) == 0
    fitted, kept = json.loads(capsys.readouterr().out)["notes"]
    assert "c0 500000, c1 3000, c2 0, c3 0" in fitted
    assert "llama-8b on h100" in kept and "KV blocks" in kept and "--model-shape" in kept
    assert main([*command, "--kv-blocks", "700"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "bytes a block" in printed and "KV blocks," not in printed


def test_drawn_columns_are_independent_with_the_asked_mean() -> None:
    spec = Spec(
        trace=None,
        requests=20_000,
        prompt=Lengths.parse("lognormal:300:0.8"),
        output=Lengths.parse("10:30"),
        rate_rps=50,
        cv=2.0,
        max_tokens=0,
        classes={"realtime": 1.0, "low": 3.0},
        tenants=(7.0, 1.0, 2.0),
        ttft_slo_ms={"realtime": 200.0},
    )
    work = build(spec)
    assert work.prompt.mean() == pytest.approx(300, rel=0.05)
    assert (work.output.min(), work.output.max()) == (10, 30)
    assert np.array_equal(work.max_tokens, work.output)
    gaps = np.diff(work.arrived_ns) / 1e9
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05) and gaps.std() / gaps.mean() == pytest.approx(2, rel=0.05)
    assert (work.priority == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert np.bincount(work.tenant) / 20_000 == pytest.approx([0.7, 0.1, 0.2], abs=0.02)
    assert set(work.ttft_slo_ns[work.priority == 0]) == {200_000_000} and not work.ttft_slo_ns[work.priority == 3].any()


def test_a_trace_in_a_circle_goes_on_after_its_end(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5,10,1\n6,20,2\n9,30,3\n")
    work = build(Spec(trace=trace, requests=5, rate_scale=2.0))
    assert work.prompt.tolist() == [10, 20, 30, 10, 20]
    assert (work.arrived_ns / 1e9).tolist() == [0, 0.5, 2, 3, 3.5]  # laps of 4 s and one mean interval of 2 s, halved
    assert work.max_tokens.tolist() == [1024] * 5

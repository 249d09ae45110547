"""Drafts in the simulator: found by the shipped scheduler, right as often as asked for, and every output whole."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.scheduler.core.speculation.drafts import Speculation
from services.scheduler.core.types import Int32, Rows
from services.simulator.command.main import main
from services.simulator.device.clock import Linear
from services.simulator.engine import Run, Setup, simulate
from services.simulator.workload.arrivals import Lengths, Spec, build
from services.simulator.workload.traffic import read_trace
from services.simulator.workload.workload import Workload

CLOCK = Linear(2e6, 0.1e6)
SETUP = Setup(blocks=2000, max_seqs=16, max_step_tokens=512)
HEADER = "num_prefill_tokens,num_decode_tokens,acceptance\n"


def work(acceptance: float | None, requests: int = 12) -> Workload:
    """Return requests of 40 to 200 output tokens, two a second."""
    prompt, output = Lengths.parse("20:60"), Lengths.parse("40:200")
    return build(Spec(None, requests, prompt, output, rate_rps=2, max_tokens=400, seed=5, acceptance=acceptance))


def simulated(acceptance: float | None, setup: Setup = SETUP) -> Run:
    return simulate("orcinus", work(acceptance), setup, CLOCK)


run = functools.cache(simulated)


@pytest.mark.parametrize(("setup", "acceptance"), [
    (SETUP, 0.0),
    (SETUP, 0.5),
    (SETUP, 1.0),
    (replace(SETUP, lookahead=2), 0.5),
    (replace(SETUP, microbatches=2), 1.0),
    (replace(SETUP, blocks=60, max_seqs=8), 0.5),  # with preemptions
    (replace(SETUP, replicas=2, routing="scheduler"), 0.5),
])  # fmt: skip
def test_outputs_have_their_length_whatever_is_refused(setup: Setup, acceptance: float) -> None:
    found = run(acceptance, setup)
    assert found.seen.tokens.tolist() == work(acceptance).output.tolist()
    assert found.result["finished"] == 12
    assert found.result["drafted_tokens"] > 0 or not acceptance  # what is never right is soon not tried


def test_right_drafts_save_steps_and_wrong_ones_do_not() -> None:
    steps = {share: run(share).result["iterations"] for share in (None, 0.0, 0.5, 0.9, 1.0)}
    assert steps[None] == pytest.approx(steps[0.0], rel=0.05)
    assert steps[0.0] > steps[0.5] > steps[0.9] > steps[1.0]
    assert run(0.0).result["accepted_tokens"] == 0
    assert run(1.0).result["accepted_tokens"] == pytest.approx(run(1.0).result["drafted_tokens"], rel=0.1)


@pytest.mark.parametrize("share", [0.7, 0.9])
def test_first_drafts_are_right_as_often_as_asked_for(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, learn = np.zeros(2, np.int64), Speculation.learn

    def count(self: Speculation, rows: Rows, drafts: Int32, right: Int32) -> None:
        tried[:] += right.size, np.count_nonzero(right)
        learn(self, rows, drafts, right)

    monkeypatch.setattr(Speculation, "learn", count)
    simulated(share)
    assert tried[0] > 40
    assert tried[1] / tried[0] == pytest.approx(share, abs=2 * (share * (1 - share) / tried[0]) ** 0.5 + 0.02)


def test_same_seed_gives_the_same_run() -> None:
    first, second = run(0.5).result, simulated(0.5).result
    assert first | {"wall_s": 0} == second | {"wall_s": 0}


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    few = replace(SETUP, max_seqs=2)  # so that what is kept of one request is used for the next
    plain, drafted = run(None, few), run(1.0, few)
    assert drafted.result["tbt_ms"]["p50"] == pytest.approx(0, abs=1e-6) and plain.result["tbt_ms"]["p50"] > 2
    times, counts = drafted.seen.gaps.distribution()
    assert int(counts[times < 1].sum()) == pytest.approx(drafted.result["accepted_tokens"], rel=0.1)
    assert (times * counts).sum() == pytest.approx((drafted.seen.e2e_ns - drafted.seen.ttft_ns).sum(), rel=1e-3)


def test_trace_gives_each_request_its_share(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + "10,200,0\n10,200,1\n")
    spec = Spec(trace=trace, requests=4, at_once=True)
    assert build(spec).acceptance.tolist() == [0, 1, 0, 1]
    assert build(replace(spec, acceptance=0.5)).acceptance.tolist() == [0.5] * 4
    found = simulate("orcinus", build(spec), SETUP, CLOCK)
    assert found.result["accepted_tokens"] > 50
    assert found.seen.e2e_ns[[1, 3]].max() < found.seen.e2e_ns[[0, 2]].min()


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "much"])
def test_share_that_is_none_is_refused(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + f"10,10,{value}\n")
    with pytest.raises(ValueError, match=f"line 2: acceptance is '{value}'; give the share of drafts .*, 0 to 1"):
        read_trace(trace)
    assert main(["--acceptance", value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--acceptance" in line and value in line and "0 to 1" in line


def test_policy_with_padded_batches_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--prompt-tokens", "8", "--output-tokens", "8", "--requests", "4", "--at-once"]
    assert main(["--policy", "static", "--acceptance", "0.5", *drawn]) == 2
    assert "drop --acceptance" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_hold_where_the_last_row_is_at_the_end_of_its_context(seed: int) -> None:
    """With --max-tokens exact a sequence fills its row to the end, beside rows that have moved further."""
    command = "--acceptance 0.9 --max-seqs 4 --requests 30 --at-once --prompt-tokens 50 --output-tokens 150"
    assert main([*command.split(), "--max-tokens", "exact", "--seed", str(seed), "--json"]) == 0

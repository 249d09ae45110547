"""The article's program as a policy of `orcinus simulate`, over the same requests as the core's policies."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from services.simulator.command.main import main
from services.simulator.device.clock import Linear
from services.simulator.engine import Setup, simulate
from services.simulator.workload.workload import Workload, all_at_once

CLOCK = Linear(5e6, 50e3, 3.0, 0.5)


def drawn(seed: int, requests: int = 120) -> Workload:
    """Requests of three classes; those of class high are at risk at each step after their first output."""
    rng = np.random.default_rng(seed)
    output, priority = rng.integers(1, 60, requests), rng.integers(1, 4, requests)
    return Workload(
        np.sort(rng.integers(0, 2_000_000_000, requests)),
        rng.integers(1, 900, requests),
        output,
        max_tokens=output + rng.integers(0, 40, requests),
        priority=priority,
        ttft_slo_ns=rng.integers(0, 3, requests) * 400_000_000,
        tbt_slo_ns=np.where((priority == 1) & (rng.random(requests) < 0.2), 14_000_000, 0),
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_corrected_program_gives_the_figures_of_the_preset(seed: int) -> None:
    setup, results = Setup(900, max_seqs=40, lookahead=0), []
    for policy in ("article-corrected", "iteration-level"):
        run = simulate(policy, drawn(seed), setup, CLOCK)
        assert run.seen.ended == 120
        left_out = {"policy", "wall_s", "recomputed_tokens"}  # the core counts the latest output not as lost
        results.append({name: value for name, value in run.result.items() if name not in left_out})
    assert results[0]["preemptions"] > 0
    assert results[0] == results[1]


def test_the_first_output_of_the_program_comes_a_step_later() -> None:
    """A prompt of 100 is computed as 64 and 36; the program decodes both outputs after it."""
    workload, setup = all_at_once([100], [2], [9]), Setup(100, host_us=0)
    runs = [simulate(policy, workload, setup, Linear(1e6)) for policy in ("article", "article-corrected")]
    assert [run.result["iterations"] for run in runs] == [4, 3]
    assert [int(run.seen.ttft_ns[0]) for run in runs] == [3_000_000, 2_000_000]
    assert [run.result["computed_tokens"] for run in runs] == [102, 101]


def test_a_preempted_prompt_is_computed_again() -> None:
    run = simulate("article", drawn(1), Setup(900, max_seqs=40), CLOCK)
    assert run.result["recomputed_tokens"] > 0
    assert run.samples[0].blocks > 0


def test_the_program_stands_beside_other_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policy", "article,orcinus", "--requests", "20", "--jobs", "1", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["policy"], one["finished"]) for one in results] == [("article", 20), ("orcinus", 20)]
    assert results[0].keys() == results[1].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "2"], "policy article: 2 replicas, and the program has one; give 1"),
        (["--lookahead", "1"], "policy article: lookahead 1, and the program plans no step ahead; give 0"),
        (["--block-size", "32"], "policy article: blocks of 32 tokens"),
        (["--deadline-ms", "100"], "policy article: the program has no deadlines"),
        (["--acceptance", "0.5"], "policy article: the program has no drafts"),
        (["--kv-blocks", "20"], "blocks and would wait for ever; give more blocks"),
    ],
)
def test_options_that_the_program_would_ignore_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert main(["--policy", "article", "--requests", "3", "--jobs", "1", *options]) == 2
    assert message in capsys.readouterr().err

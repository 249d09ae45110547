"""The measured tables of the policies: their claims follow from their rows."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from bench.studies.policies import __main__ as policies
from bench.studies.policies import static as policies_static
from bench.studies.policies.claims import claims
from bench.studies.policies.runs import LOADS, Study, replica, run_studies
from services.scheduler.core.policy.presets import PRESETS
from services.simulator.device.roofline import Roofline
from services.simulator.jobs import Finished, Job, run_job
from services.simulator.workload.arrivals import CHAT, TRACES, Spec, build
from services.simulator.workload.workload import all_at_once

MEASURED = json.loads(policies.RESULT.read_text())


def test_the_committed_claims_follow_from_the_committed_rows() -> None:
    assert claims(MEASURED) == MEASURED["claims"]
    assert len(MEASURED["claims"]) == 2 * len(LOADS) + 2


def test_every_preset_finished_every_request_of_both_traces_at_every_load() -> None:
    runs = {(row["trace"], row["load"], row["policy"]) for row in MEASURED["rows"] if row["study"] == "main"}
    traces = [path.stem for path in TRACES.glob("*.csv")]
    assert runs == {(trace, load, policy) for trace in traces for load in LOADS for policy in PRESETS}
    assert all(row["finished"] == row["requests"] >= 1_000 for row in MEASURED["rows"])


def test_a_claim_is_missed_from_two_percent_below_the_best() -> None:
    changed = copy.deepcopy(MEASURED)
    rows = [
        row for row in changed["rows"] if (row["study"], row["trace"], row["load"]) == ("main", CHAT.stem, LOADS[0])
    ]
    for row in rows:
        row["goodput_rps"] = {"orcinus": 9.8, "tgi": 10.0}.get(row["policy"], 1.0)
    claim = claims(changed)[0]
    assert (claim["rival"], claim["ratio"], claim["holds"]) == ("tgi", 0.98, True)
    next(row for row in rows if row["policy"] == "tgi")["goodput_rps"] = 10.01
    assert not claims(changed)[0]["holds"]


def test_static_counts_with_its_best_batch_size_in_each_claim() -> None:
    changed = copy.deepcopy(MEASURED)
    for number, one in enumerate(changed["static"]["policies"]):
        one["saturation"]["throughput_tok_s"] = [19.0, 8.0, 10.0][min(number, 2)]
        one["crossing"] = {"throughput_tok_s": [50.0, 5.0][number]} if number < 2 else None
    latency, saturation = claims(changed)[-2:]
    assert (latency["ratio"], latency["holds"]) == (10.0, True)
    assert (saturation["ratio"], saturation["holds"]) == (1.9, False)


def test_rate_at_limit_is_found_between_two_points_of_curve() -> None:
    """Latency = 10 / (1 - rate / 8): 20 ms at a rate of 4, and never over 20 at a capacity of 100."""
    capacity = {"small": 8.0, "large": 100.0, "none": 0.5}

    def point(name: str, rate: float) -> dict[str, Any]:
        free = 1 - rate / capacity[name]
        return {"offered_rps": rate, "normalized_ms": 10 / free if free > 0 else 1e9, "throughput_tok_s": rate}

    curves = [[point(name, rate) for rate in (1.0, 3.0, 7.0)] for name in capacity]
    found = policies_static.find_crossings(
        list(capacity), curves, 20.0, 1.01, lambda tries: [point(name, rate) for name, rate in tries]
    )
    assert found[0] is not None and 4 / 1.01 <= found[0]["offered_rps"] <= 4
    assert found[1] is not None and found[1]["offered_rps"] == 7.0
    assert found[2] is None


def test_no_policy_beats_the_bound_summed_over_tokens() -> None:
    work = all_at_once([3, 5], [4, 1])
    context = (3) + (3 + 1) + (3 + 2)  # read by the three outputs that are fed again
    pairs = (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)
    all_ns = Roofline("llama-8b", "h100").step_ns(3 + 3 + 5, context, pairs)
    assert policies_static.bound_tok_s(work) == pytest.approx(13 / all_ns * 1e9)
    static = MEASURED["static"]
    assert all(one["saturation"]["throughput_tok_s"] < static["bound_tok_s"] for one in static["policies"])


def test_load_is_multiple_of_what_orca_reaches_with_same_requests() -> None:
    study = Study("main", Spec(trace=CHAT, requests=60), replica(), (0.5, 2.0), ("orca", "orcinus"))
    jobs: list[Job] = []

    def run(wanted: list[Job]) -> list[Finished]:
        jobs.extend(wanted)
        return [run_job(job) for job in wanted]

    (head,), rows = run_studies([study], run)
    at_once = run_job(Job("orca", replace(study.spec, at_once=True), study.setup, jobs[0].clock)).result
    assert head["saturation_rps"] == at_once["request_rps"]
    assert [(row["load"], row["policy"]) for row in rows] == [
        (load, policy) for load in (0.5, 2.0) for policy in ("orca", "orcinus")
    ]
    for job, row in zip(jobs[1:], rows, strict=True):
        arrived = build(job.spec).arrived_ns / 1e9
        assert 59 / (arrived[-1] - arrived[0]) == pytest.approx(row["load"] * head["saturation_rps"], rel=1e-6)

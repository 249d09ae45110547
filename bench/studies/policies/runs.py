"""The runs of the tables of docs/policies.md: studies, each a workload, a replica, policies and loads.

Called by policies.py. A load is a multiple of the request rate that `orca` reaches on the same requests with the same
replica when all arrive at once, measured in the same run; arrivals are the trace's own, stretched or compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.scheduler.core.policy.presets import PRESETS
from services.simulator.device.clock import RooflineClock
from services.simulator.device.roofline import Roofline
from services.simulator.engine import Setup
from services.simulator.jobs import Finished, Job
from services.simulator.workload.arrivals import CHAT, TRACES, Spec, build

SHAPE, DEVICE = "llama-8b", "h100"
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
QUICK_LOADS = (0.5, 1.0)
REQUESTS, SMALLER, QUICK = 3_000, 1_500, 120
CODE = TRACES / "azure_code_2023.csv"
SCARCE_BLOCKS = 3_000
CLASSES = {"realtime": 0.1, "high": 0.2, "normal": 0.5, "low": 0.2}
TTFT_MS = {"realtime": 500.0, "high": 1_000.0, "normal": 2_000.0, "low": 10_000.0}
TBT_MS = {"realtime": 50.0, "high": 75.0, "normal": 100.0, "low": 200.0}
PREFIX_GROUPS, PREFIX_TOKENS = 8, 1_024
SCARCE = ("orca", "sarathi", "vllm", "sglang", "lightllm", "ft-aimd", "trt-max-utilization", "orcinus")
SOME = ("orca", "sarathi", "vllm", "sglang", "lightllm", "fastgen", "iteration-level", "orcinus")
TITLES = {"azure_conv_2023": "chat trace", "azure_code_2023": "code trace"}
Runner = Callable[[list[Job]], list[Finished]]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Study:
    """`spec.rate_scale` is set for each load; `orca`'s saturation is measured with `spec` and `setup` as they are."""

    name: str
    spec: Spec
    setup: Setup
    loads: Sequence[float] = LOADS
    policies: Sequence[str] = tuple(PRESETS)

    @property
    def trace(self) -> str:
        return self.spec.trace.stem if self.spec.trace else ""


def replica(blocks: int = 0, max_seqs: int = 256) -> Setup:
    """Return the size of a replica; 0 blocks uses the device's number."""
    roofline = Roofline(SHAPE, DEVICE)
    return Setup(
        blocks=blocks or roofline.kv_blocks(16),
        max_seqs=max_seqs,
        host_blocks=roofline.host_blocks(16),
        block_bytes=int(roofline.kv_bytes_per_token) * 16,
        swap_bytes_s=roofline.swap_bytes_s,
        lookahead=1,  # of every policy, so that they are compared alike
    )


def clock() -> RooflineClock:
    return RooflineClock(Roofline(SHAPE, DEVICE))


def studies(quick: bool) -> list[Study]:
    """Return the studies of the page, or small versions of them."""
    many, fewer = (QUICK, QUICK) if quick else (REQUESTS, SMALLER)
    loads = QUICK_LOADS if quick else LOADS
    few_loads = QUICK_LOADS if quick else (0.75, 1.0, 1.25)
    scarce_loads = QUICK_LOADS if quick else (1.0, 1.5, 2.0)
    with_classes = Spec(trace=CHAT, requests=fewer, classes=CLASSES, ttft_slo_ms=TTFT_MS, tbt_slo_ms=TBT_MS)
    with_prefixes = Spec(trace=CHAT, requests=fewer, prefix_groups=PREFIX_GROUPS, prefix_tokens=PREFIX_TOKENS)
    return [
        *(Study("main", Spec(trace=trace, requests=many), replica(), loads) for trace in (CHAT, CODE)),
        Study("memory", Spec(trace=CHAT, requests=fewer), replica(SCARCE_BLOCKS), scarce_loads, SCARCE),
        Study("classes", with_classes, replica(), few_loads, SOME),
        Study("prefixes", with_prefixes, replica(), few_loads, SOME),
    ]


def run_studies(wanted: Sequence[Study], run: Runner) -> tuple[list[Row], list[Row]]:
    """Return the studies with their measurements, and one row per run in their order."""
    time = clock()
    full = run([Job("orca", replace(one.spec, at_once=True), one.setup, time) for one in wanted])
    heads, jobs, labels = [], [], []
    for study, saturated in zip(wanted, full, strict=True):
        arrivals = build(study.spec).arrived_ns
        trace_rps = (len(arrivals) - 1) / (int(arrivals[-1] - arrivals[0]) / 1e9)
        rate = float(saturated.result["request_rps"])
        heads.append(
            {
                "study": study.name,
                "trace": study.trace,
                "requests": len(arrivals),
                "kv_blocks": study.setup.blocks,
                "max_seqs": study.setup.max_seqs,
                "lookahead": study.setup.lookahead,
                "trace_rps": round(trace_rps, 4),
                "saturation_rps": rate,
                "saturation_tok_s": saturated.result["throughput_tok_s"],
                "loads": list(study.loads),
                "policies": list(study.policies),
            }
        )
        for load in study.loads:
            spec = replace(study.spec, rate_scale=load * rate / trace_rps)
            for policy in study.policies:
                jobs.append(Job(policy, spec, study.setup, time))
                labels.append({"study": study.name, "trace": study.trace, "load": load})
    rows = [{**label, **_shown(done.result)} for label, done in zip(labels, run(jobs), strict=True)]
    return heads, rows


def _shown(result: dict[str, Any]) -> Row:
    """Return the figures of a run that the page shows, and those of its classes if there are several."""
    keep = (
        "policy", "rate_scale", "requests", "finished", "throughput_tok_s", "output_tok_s", "request_rps",
        "goodput_rps", "preemptions", "recomputed_tokens", "swapped_bytes", "prefix_hit_tokens", "slo_violations",
        "padding", "iterations", "duration_s",
    )  # fmt: skip
    row = {name: result[name] for name in keep}
    for name in ("ttft_ms", "tbt_ms", "normalized_latency_ms"):
        row[name] = {p: result[name][p] for p in ("p50", "p99")}
    if result["classes"]:
        row["violations"] = {name: one["slo_violations"] for name, one in result["classes"].items()}
    return row


def rows_of(results: Row, head: Row, load: float) -> list[Row]:
    """Return the rows of one study and trace (`head`) at one load."""
    key = (head["study"], head["trace"], load)
    return [row for row in results["rows"] if (row["study"], row["trace"], row["load"]) == key]

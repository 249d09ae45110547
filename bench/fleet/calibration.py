"""The error of the fluid model: the same requests through it and through the scheduler's core."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.fleet.replica import Size, StepCost
from bench.fleet.run import Fleet, run
from bench.fleet.traffic import Spec, Traffic, build
from services.simulator.device.clock import RooflineClock
from services.simulator.device.roofline import Roofline
from services.simulator.engine import Setup, simulate
from services.simulator.workload.workload import Workload

FIGURES = (
    ("TTFT p50", "ttft_ms", "p50"),
    ("TTFT p99", "ttft_ms", "p99"),
    ("ms/token p50", "normalized_latency_ms", "p50"),
    ("ms/token p99", "normalized_latency_ms", "p99"),
    ("output tok/s", "output_tok_s", ""),
)
ROUTING = "least-tokens"


@dataclass(frozen=True, slots=True)
class Case:
    """requests and rate_rps: of one replica."""

    replicas: int
    rate_rps: float
    requests: int
    policy: str = "orcinus"


def compare(case: Case, shape: str, device: str, size: Size, seed: int = 0) -> dict[str, Any]:
    """Return the figures of both models, and the relative error of the fluid model."""
    roofline = Roofline(shape, device)
    traffic = build(Spec(case.requests * case.replicas, case.rate_rps * case.replicas, seed=seed))
    workload = Workload(traffic.arrived_ns, traffic.prompt, traffic.output)
    setup = Setup(
        blocks=size.kv_tokens // size.block_size,
        max_seqs=size.slots,
        block_size=size.block_size,
        step_tokens=size.step_tokens,
        lookahead=size.lookahead,
        replicas=case.replicas,
        routing=ROUTING,
        seed=seed,
    )
    begun = time.process_time()
    core = simulate(case.policy, workload, setup, RooflineClock(roofline)).result
    core_cpu_s = time.process_time() - begun
    fleet = Fleet(case.replicas, ROUTING, size, StepCost.of(roofline), seed=seed)
    fluid = run(fleet, Traffic.of(workload)).result
    rows = {name: _both(core, fluid, field, part) for name, field, part in FIGURES}
    return {
        "replicas": case.replicas,
        "rate_rps": case.rate_rps,
        "requests": case.requests * case.replicas,
        "figures": rows,
        "core_cpu_s": round(core_cpu_s, 1),
        "fluid_cpu_s": fluid["cpu_s"],
    }


def _both(core: dict[str, Any], fluid: dict[str, Any], field: str, part: str) -> dict[str, float]:
    one, other = (float(each[field][part] if part else each[field]) for each in (core, fluid))
    return {"core": round(one, 2), "fluid": round(other, 2), "error": round(other / one - 1, 4)}


def compare_all(
    cases: list[Case], shape: str, device: str, size: Size, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        say(f"calibration: {case.replicas} replicas at {case.rate_rps:g} requests/s each")
        found.append(compare(case, shape, device, size))
    return found

"""Simulate one scheduler with several replicas, each both or with a role: what clients see of a workload.

Called by bench/studies/roles/__main__.py; the simulator's loop runs it. Steps take what the roofline of a model on a
device says, copies between the tiers what its link allows; loads from another replica's host tier go over the reader's
link. The scheduler plans for one replica after another and takes PLAN_US for each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from services.scheduler.core.types import DECODE, PREFILL
from services.simulator.device.clock import RooflineClock
from services.simulator.device.roofline import Roofline
from services.simulator.engine import Run, Setup
from services.simulator.engine import simulate as run_simulation
from services.simulator.routing import SCHEDULER
from services.simulator.workload.workload import Workload

PLAN_US = 150.0
BLOCK = 16
SLOTS = 256
STEP_TOKENS = 8192
LOOKAHEAD = 1


@dataclass(frozen=True, slots=True)
class Cast:
    """How many replicas of which role."""

    both: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def name(self) -> str:
        """Return the label of the tables."""
        return f"{self.both} together" if self.both else f"{self.prefill} prefill + {self.decode} decode"

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the role of each replica."""
        return ("",) * self.both + (PREFILL,) * self.prefill + (DECODE,) * self.decode


def simulate(cast: Cast, work: Workload, roofline: Roofline) -> dict[str, Any]:
    """Run the workload to its end; return the simulator's figures and those of the hand-over."""
    setup = Setup(
        blocks=roofline.kv_blocks(BLOCK),
        max_seqs=SLOTS,
        block_size=BLOCK,
        host_blocks=roofline.host_blocks(BLOCK),
        max_step_tokens=STEP_TOKENS,
        lookahead=LOOKAHEAD,
        replicas=len(cast.roles),
        routing=SCHEDULER,
        host_us=PLAN_US,
        block_bytes=BLOCK * roofline.kv_bytes_per_token,
        swap_bytes_s=roofline.swap_bytes_s,
        roles=cast.roles,
        share_host_tiers=True,
    )
    return _result(cast, run_simulation("orcinus", work, setup, RooflineClock(roofline)))


def _result(cast: Cast, run: Run) -> dict[str, Any]:
    result, stats = run.result, run.stats[0]
    span_ns = result["duration_s"] * 1e9
    second_ns = run.seen.second_ns[run.seen.second_ns >= 0]
    second = np.percentile(second_ns, (50, 99)) / 1e6 if second_ns.size else (0.0, 0.0)
    kept = ("finished", "ttft_ms", "tbt_ms", "worst_gap_ms", "goodput_rps", "output_tok_s", "throughput_tok_s")
    return {
        "cast": cast.name,
        **{name: result[name] for name in kept},
        "second_token_ms": {"p50": round(float(second[0]), 2), "p99": round(float(second[1]), 2)},
        "handed_over": stats["handed_over"],
        "handed_over_blocks": stats["handed_over_blocks"],
        "not_handed_over": stats["not_handed_over"],
        "preemptions": stats["preemptions"],
        "busy": [round(device.busy_ns / span_ns, 3) for device in run.devices],
    }

"""One core with several replicas, each both or with a role, on a virtual clock: what clients see of a workload.

Called by bench/studies/roles/__main__.py. Steps take what the roofline of a model on a device says, copies between the
tiers what its link allows; loads from another replica's host tier go over the reader's link. The scheduler plans for
one replica after another and takes PLAN_NS for each step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.scheduler.core.core import Core
from services.scheduler.core.types import DECODE, PREFILL, Limits, Outcome, StepResult
from services.simulator.clock import RooflineClock
from services.simulator.device import Device
from services.simulator.engine import START_NS
from services.simulator.metrics import Recorder, figures
from services.simulator.roofline import Roofline
from services.simulator.workload import Workload

PLAN_NS = 150_000
BLOCK = 16
SLOTS = 256
STEP_TOKENS = 8192
LOOKAHEAD = 1
EVENT = tuple[int, int, int]  # ns, kind, number
ARRIVES, ANSWERS, LOOKS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Cast:
    """How many replicas of which role."""

    both: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def name(self) -> str:
        return f"{self.both} together" if self.both else f"{self.prefill} prefill + {self.decode} decode"

    @property
    def roles(self) -> list[str]:
        """Of each replica."""
        return [""] * self.both + [PREFILL] * self.prefill + [DECODE] * self.decode


@dataclass(slots=True)
class Run:
    """The state of one simulation."""

    core: Core
    devices: list[Device]
    seen: Recorder
    work: Workload
    events: list[EVENT] = field(default_factory=list)
    told: list[dict[int, list[int]]] = field(default_factory=list)  # of each replica: step -> peers to acknowledge
    second_ns: list[int] = field(default_factory=list)  # waits for the second token
    scheduler_ns: int = 0  # until when it plans

    def plan(self, now_ns: int) -> None:
        """Whatever may be planned, for all replicas."""
        for number, device in enumerate(self.devices):
            while len(device.queue) <= LOOKAHEAD:
                plan, outcome = self.core.plan(now_ns, number)
                if outcome is not None:
                    self.take(outcome, now_ns)
                if plan is None:
                    break
                self.scheduler_ns = max(self.scheduler_ns, now_ns) + PLAN_NS
                ticket = device.send(plan, self.scheduler_ns, self.seen.cell)
                self.told[number][plan.id] = [peer.number for peer in plan.peers if peer.host_tier]
                heapq.heappush(self.events, (ticket.end_ns, ANSWERS, number))
            if now_ns < (again := self.core.look_again_ns(number)) < now_ns + 10**10:
                heapq.heappush(self.events, (again, LOOKS, number))

    def answer(self, number: int, now_ns: int) -> None:
        """The oldest step of a replica."""
        ticket = self.devices[number].queue.popleft()
        result = StepResult(
            ticket.id, number, ticket.slots, ticket.tokens, swap_out_acks=ticket.swap_out, swap_in_acks=ticket.swap_in,
            step_ns=ticket.duration_ns, swap_ns=ticket.swap_ns,
            peer_acks=np.array(self.told[number].pop(ticket.id), np.int32),
        )  # fmt: skip
        self.take(self.core.apply(result, now_ns), now_ns)

    def take(self, outcome: Outcome, now_ns: int) -> None:
        second = (outcome.first == 1) & (outcome.counts > 0)
        if second.any():
            self.second_ns += outcome.waits_ns[second].tolist()
        self.seen.take(outcome, now_ns, None)


def simulate(cast: Cast, work: Workload, roofline: Roofline) -> dict[str, Any]:
    """Runs the workload to its end: the simulator's figures and those of the hand-over. Raises RuntimeError when
    requests are left."""
    core = Core("orcinus", lookahead=LOOKAHEAD, checkpoint_tokens=0)
    block_bytes = BLOCK * roofline.kv_bytes_per_token
    for number, role in enumerate(cast.roles):
        core.join(
            Limits(
                SLOTS,
                roofline.kv_blocks(BLOCK),
                BLOCK,
                work.longest,
                STEP_TOKENS,
                roofline.host_blocks(BLOCK),
                block_bytes,
                role=role,
                host_tier=f"folder/{number}",
                kv_format="one",
            )
        )
    block_ns = block_bytes / roofline.swap_bytes_s * 1e9
    devices = [
        Device(SLOTS, RooflineClock(roofline), work.output, 1, padded=False, at_end=False, block_ns=block_ns)
        for _ in cast.roles
    ]
    run = Run(core, devices, Recorder(work, START_NS, 2 * SLOTS * len(devices), at_end=False), work)
    run.told = [{} for _ in devices]
    run.plan(START_NS)  # they are told of each other before anything arrives
    run.events += [(int(at) + START_NS, ARRIVES, i) for i, at in enumerate(work.arrived_ns.tolist())]
    heapq.heapify(run.events)
    while run.events:
        now, kind, number = heapq.heappop(run.events)
        if kind == ARRIVES:
            run.take(core.add(work.request(number, START_NS), now), now)
        elif kind == ANSWERS:
            run.answer(number, now)
        run.plan(now)
    if core.unfinished:
        raise RuntimeError(f"{core.unfinished} requests are left of {len(work)}")
    return _result(cast, run)


def _result(cast: Cast, run: Run) -> dict[str, Any]:
    found, stats = figures(run.work, run.seen, START_NS), run.core.stats()
    span_ns = found["duration_s"] * 1e9
    second = np.percentile(run.second_ns, (50, 99)) / 1e6 if run.second_ns else (0.0, 0.0)
    kept = ("finished", "ttft_ms", "tbt_ms", "worst_gap_ms", "goodput_rps", "output_tok_s", "throughput_tok_s")
    return {
        "cast": cast.name,
        **{name: found[name] for name in kept},
        "second_token_ms": {"p50": round(float(second[0]), 2), "p99": round(float(second[1]), 2)},
        "handed_over": stats["handed_over"],
        "handed_over_blocks": stats["handed_over_blocks"],
        "not_handed_over": stats["not_handed_over"],
        "preemptions": stats["preemptions"],
        "busy": [round(device.busy_ns / span_ns, 3) for device in run.devices],
    }

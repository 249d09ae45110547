"""One core with several replicas on a virtual clock: what routing by prefix does to hits, balance and first tokens.

The workload has groups of requests with a common prefix. A replica's KV holds a part of the prefixes, so that a replica
that sees all groups finds few of them. Steps take what a linear model says; tokens mean nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.scheduler.core.core import Core
from services.scheduler.core.types import Limits, NewRequest, StepPlan, StepResult

BLOCK = 16
PREFIX, OWN, OUTPUT = 1024, 64, 32  # tokens of a request
GROUPS_A_REPLICA = 8
SLOTS = 32
STEP_NS, TOKEN_NS = 4e6, 4e4
LOAD = 0.8  # of what n replicas can serve at once if every prefix is found


@dataclass
class Run:
    """What came of one run."""

    computed: list[int]  # tokens by replica
    first_ns: list[int] = field(default_factory=list)  # times to the first token
    hits: int = 0
    asked: int = 0
    end_ns: int = 0

    def result(self, replicas: int, affinity: bool) -> dict[str, Any]:
        mean = sum(self.computed) / replicas
        return {
            "replicas": replicas,
            "affinity": affinity,
            "prefix_hit_rate": round(self.hits / self.asked, 4),
            "imbalance": round(max(self.computed) / mean, 3),
            "ttft_ms": {f"p{p}": round(float(np.percentile(self.first_ns, p)) / 1e6, 1) for p in (50, 99)},
            "output_tok_s": round(OUTPUT * len(self.first_ns) / (self.end_ns / 1e9)),
        }


def workload(replicas: int, requests: int, seed: int) -> list[NewRequest]:
    """Poisson arrivals, groups drawn evenly: as many groups as all replicas together can hold, and no more."""
    rng = np.random.default_rng(seed)
    groups = [rng.integers(0, 30_000, PREFIX).astype(np.int32) for _ in range(GROUPS_A_REPLICA * replicas)]
    busy_ns = OWN * TOKEN_NS + OUTPUT * (TOKEN_NS + STEP_NS / (SLOTS / 2))  # one request's share of a replica's time
    arrivals = np.cumsum(rng.exponential(busy_ns / (LOAD * replicas), requests)).astype(np.int64)
    made = []
    for number, arrived in enumerate(arrivals.tolist()):
        own = rng.integers(0, 30_000, OWN).astype(np.int32)
        prompt = np.concatenate([groups[int(rng.integers(len(groups)))], own])
        made.append(NewRequest(f"r{number}", [prompt], OUTPUT, gateway="g", arrived_ns=arrived + 1))
    return made


def simulate(replicas: int, affinity: bool, requests: int, seed: int = 1) -> dict[str, Any]:
    """Runs the workload to its end."""
    core = Core("orcinus", affinity=float(affinity), checkpoint_tokens=0)
    running = SLOTS * -(-(OWN + OUTPUT) // BLOCK)
    limits = Limits(
        slots=SLOTS, blocks=running + int(1.5 * GROUPS_A_REPLICA * PREFIX // BLOCK), block_size=BLOCK,
        max_model_len=PREFIX + OWN + OUTPUT, max_step_tokens=2048,
    )  # fmt: skip
    for _ in range(replicas):
        core.join(limits)
    run = Run([0] * replicas)
    work = workload(replicas, requests, seed)
    events: list[tuple[int, int, int]] = [(request.arrived_ns, 0, number) for number, request in enumerate(work)]
    heapq.heapify(events)
    queues: list[list[StepPlan]] = [[] for _ in range(replicas)]
    free = [0] * replicas
    now = 0
    while events:
        now, kind, number = heapq.heappop(events)
        if kind == 0:
            core.add(work[number], now)
        elif kind == 1:
            _answer(core, run, queues[number].pop(0), now)
        for replica in range(replicas):
            _plan(core, run, replica, queues, free, events, now)
    run.end_ns = now
    run.hits, run.asked = int(core.stats()["prefix_hit_tokens"]), PREFIX * requests
    return run.result(replicas, affinity)


def _plan(
    core: Core, run: Run, replica: int, queues: list[list[StepPlan]], free: list[int],
    events: list[tuple[int, int, int]], now: int,
) -> None:  # fmt: skip
    while (plan := core.plan(now, replica)[0]) is not None:
        tokens = int(plan.chunk_lengths.sum())
        run.computed[replica] += tokens
        free[replica] = max(free[replica], now) + int(STEP_NS + TOKEN_NS * tokens)
        queues[replica].append(plan)
        heapq.heappush(events, (free[replica], 1, replica))
    if (again := core.look_again_ns(replica)) > now and again < now + 10**10:
        heapq.heappush(events, (again, 2, replica))


def _answer(core: Core, run: Run, plan: StepPlan, now: int) -> None:
    slots = plan.chunk_slots[plan.samples]
    took = int(STEP_NS + TOKEN_NS * int(plan.chunk_lengths.sum()))
    outcome = core.apply(StepResult(plan.id, plan.replica, slots, np.full(slots.size, 7, np.int32), step_ns=took), now)
    starts = (outcome.first == 0) & (outcome.waits_ns >= 0)
    run.first_ns += outcome.waits_ns[starts].tolist()

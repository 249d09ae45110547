"""Simulate one scheduler with several replicas: what routing by prefix does to hits, balance and first tokens.

The workload has groups of requests with a common prefix. A replica's KV holds a part of the prefixes, so that a replica
that sees all groups finds few of them. The simulator's loop runs it; steps take what a linear model says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.simulator.device.clock import Linear
from services.simulator.engine import START_NS, Setup
from services.simulator.engine import simulate as run_simulation
from services.simulator.routing import SCHEDULER
from services.simulator.workload.workload import Workload

BLOCK = 16
PREFIX, OWN, OUTPUT = 1024, 64, 32  # tokens of a request
GROUPS_A_REPLICA = 8
SLOTS = 32
STEP_NS, TOKEN_NS = 4e6, 4e4
LOAD = 0.8  # of what n replicas can serve at once if every prefix is found
VOCABULARY = 30_000


def workload(replicas: int, requests: int, seed: int) -> Workload:
    """Return Poisson arrivals, groups drawn evenly: as many groups as all replicas together can hold, and no more."""
    rng = np.random.default_rng(seed)
    groups = GROUPS_A_REPLICA * replicas
    rng.integers(0, VOCABULARY, (groups, PREFIX))  # the committed figures drew prompts here, too
    busy_ns = OWN * TOKEN_NS + OUTPUT * (TOKEN_NS + STEP_NS / (SLOTS / 2))  # one request's share of a replica's time
    arrivals = np.cumsum(rng.exponential(busy_ns / (LOAD * replicas), requests)).astype(np.int64)
    group = np.zeros(requests, np.int64)
    for number in range(requests):
        rng.integers(0, VOCABULARY, OWN)
        group[number] = rng.integers(groups)
    prompt, output = np.full(requests, PREFIX + OWN), np.full(requests, OUTPUT)
    return Workload(arrivals, prompt, output, group=group, prefix_tokens=PREFIX)


def simulate(replicas: int, affinity: bool, requests: int, seed: int = 1) -> dict[str, Any]:
    """Run the workload to its end and return the figures of one row."""
    running_blocks = SLOTS * -(-(OWN + OUTPUT) // BLOCK)
    setup = Setup(
        blocks=running_blocks + int(1.5 * GROUPS_A_REPLICA * PREFIX // BLOCK),
        max_seqs=SLOTS,
        block_size=BLOCK,
        max_step_tokens=2048,
        lookahead=1,
        replicas=replicas,
        routing=SCHEDULER,
        host_us=0.0,
        affinity=float(affinity),
    )
    run = run_simulation("orcinus", workload(replicas, requests, seed), setup, Linear(STEP_NS, TOKEN_NS))
    computed = [device.tokens for device in run.devices]
    first_ms = run.seen.ttft_ns / 1e6
    seconds = (run.seen.end_ns - START_NS) / 1e9
    return {
        "replicas": replicas,
        "affinity": affinity,
        "prefix_hit_rate": round(run.result["prefix_hit_tokens"] / (PREFIX * requests), 4),
        "imbalance": round(max(computed) * replicas / sum(computed), 3),
        "ttft_ms": {f"p{p}": round(float(np.percentile(first_ms, p)), 1) for p in (50, 99)},
        "output_tok_s": round(OUTPUT * requests / seconds),
    }

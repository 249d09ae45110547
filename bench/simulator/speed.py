"""How fast the simulator is: iterations a minute on one core at 32, 64 and 256 running, with requests coming and going.

`orcinus simulate --speed`. All slots are full to the end: ten requests a slot, prompts of 64 to 191 tokens, outputs of
128 to 384. What is timed is simulate() as a whole; the best of several runs, because other programs only slow it down.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.simulator.clock import Linear
from bench.simulator.engine import Setup, simulate
from bench.simulator.workload import Workload

GOALS = {64: 1_000_000, 256: 400_000}  # iterations a minute
RUNNING = (32, 64, 256)
ROUNDS = 3


def measure(policy: str, running: int, requests: int = 0) -> dict[str, Any]:
    """One line of the result."""
    rng = np.random.default_rng(0)
    count = requests or 10 * running
    workload = Workload(np.zeros(count, np.int64), rng.integers(64, 192, count), rng.integers(128, 385, count))
    setup = Setup(blocks=running * 40, max_seqs=running)
    best, iterations = float("inf"), 0
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        iterations = simulate(policy, workload, setup, Linear(10e6)).result["iterations"]
        best = min(best, time.perf_counter() - begun)
    return {
        "policy": policy,
        "running": running,
        "iterations": iterations,
        "us_per_iteration": round(best / iterations * 1e6, 1),
        "iterations_per_minute": int(60 * iterations / best),
        "goal": GOALS.get(running),
    }

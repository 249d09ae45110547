"""`orcinus simulate --speed`: iterations a minute on one core with 32, 64 and 256 running requests that come and end.

All slots stay full: ten requests a slot, prompts of 64 to 191 tokens, outputs of 128 to 384. The figure is the time of
all of simulate(), the best of several runs, because other programs only slow it down. Wall time includes other
programs; the CPU time of the process does not.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from services.simulator.device.clock import Linear
from services.simulator.engine import Setup, simulate
from services.simulator.workload.workload import Workload

GOALS = {32: 1_000_000, 64: 1_000_000, 256: 400_000}  # iterations a minute
RUNNING = (32, 64, 256)
ROUNDS = 3


def measure_all(policies: list[str]) -> list[dict[str, Any]]:
    """Return a result for each policy and number of running requests, and show on stderr which is measured."""
    results = []
    for policy in policies:
        for running in RUNNING:
            print(f"{policy}, {running} running ...", file=sys.stderr, flush=True)
            results.append(measure(policy, running))
    return results


def measure(policy: str, running: int, requests: int = 0) -> dict[str, Any]:
    """Return one result."""
    rng = np.random.default_rng(0)
    count = requests or 10 * running
    workload = Workload(np.zeros(count, np.int64), rng.integers(64, 192, count), rng.integers(128, 385, count))
    setup = Setup(blocks=running * 40, max_seqs=running)
    wall, cpu, iterations = float("inf"), float("inf"), 0
    for _ in range(ROUNDS):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        iterations = simulate(policy, workload, setup, Linear(10e6)).result["iterations"]
        wall, cpu = min(wall, time.perf_counter() - begun), min(cpu, time.process_time() - begun_cpu)
    goal = GOALS.get(running)
    rates = {"iterations_per_minute": 60 * iterations / wall, "iterations_per_cpu_minute": 60 * iterations / cpu}
    return {
        "policy": policy,
        "running": running,
        "iterations": iterations,
        "us_per_iteration": round(wall / iterations * 1e6, 1),
        "cpu_us_per_iteration": round(cpu / iterations * 1e6, 1),
        **{name: int(rate) for name, rate in rates.items()},
        "goal": goal,
        "met": None if goal is None else rates["iterations_per_minute"] >= goal,
        "met_by_cpu_time": None if goal is None else rates["iterations_per_cpu_minute"] >= goal,
    }


def verdicts(results: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each policy: the goal is met, or the sizes at which it is missed."""
    sentences = []
    for policy in dict.fromkeys(r["policy"] for r in results):
        missed = [r for r in results if r["policy"] == policy and not r["met"]]
        where = "; ".join(
            f"{r['running']} running: {r['iterations_per_minute']:,} of {r['goal']:,} a minute"
            f"{', met by CPU time' if r['met_by_cpu_time'] else ''}"
            for r in missed
        )
        sentences.append(f"{policy}: goal missed at {where}" if missed else f"{policy}: goal met at all sizes")
    return sentences


def show(results: list[dict[str, Any]], as_json: bool, console: Console) -> int:
    """Print the results and the verdicts; return 0, since a slow machine is no error."""
    if as_json:
        print(json.dumps({"results": results, "verdicts": verdicts(results)}, indent=1))
        return 0
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    names = ("policy", "running", "us an iteration", "of CPU", "iterations a minute", "a CPU minute", "goal", "")
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for r in results:
        table.add_row(
            r["policy"], str(r["running"]), f"{r['us_per_iteration']:.1f}", f"{r['cpu_us_per_iteration']:.1f}",
            f"{r['iterations_per_minute']:,}", f"{r['iterations_per_cpu_minute']:,}", f"{r['goal']:,}",
            "met" if r["met"] else "missed",
        )  # fmt: skip
    console.print(table)
    for verdict in verdicts(results):
        console.print(verdict, markup=False, highlight=False)
    return 0

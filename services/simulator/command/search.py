"""Two searches over simulated runs: the best token budget, and the highest rate within the limits.

Called by main.py. Each policy has a separate search. A run is one Job, so several run at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from services.simulator.jobs import Finished, Job
from services.simulator.workload.arrivals import MAX_RATE, SLOWEST

BUDGETS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MAX_VIOLATIONS = 0.01  # at least 99 % of the requests are within their limits
MAX_TAIL = 0.1  # of the arrivals' time that a run may last after the last arrival: a growing backlog is no capacity
SAME = 0.005  # rates with a smaller relative difference count as equal
PRECISION = 1.02  # capacity: the rate that fails is at most this multiple of the one that holds
WIDEST = 1 << 12
Runner = Callable[[list[Job]], list[Finished]]


def knee(policies: list[str], base: Job, run: Runner) -> list[dict[str, Any]]:
    """Return for each policy the results of all budgets, and the best one.

    The best budget has the highest rate of requests within their SLOs; among equals the highest token rate; among these
    it is the smallest. The policy's limits on the budget still apply.
    """
    budgets = [b for b in BUDGETS if b <= base.setup.max_step_tokens]
    jobs = [
        replace(base, policy=policy, setup=replace(base.setup, step_tokens=budget))
        for policy in policies
        for budget in budgets
    ]
    results = [finished.result for finished in run(jobs)]
    knees = []
    for number, policy in enumerate(policies):
        mine = results[number * len(budgets) : (number + 1) * len(budgets)]
        kept = [(1 - r["slo_violations"]) * r["requests"] / r["duration_s"] for r in mine]
        near = [r for r, rate in zip(mine, kept, strict=True) if rate >= max(kept) * (1 - SAME)]
        fastest = max(r["throughput_tok_s"] for r in near)
        best = next(r for r in near if r["throughput_tok_s"] >= fastest * (1 - SAME))
        knees.append({"policy": policy, "step_tokens": best["step_tokens"] if max(kept) > 0 else None, "runs": mine})
    return knees


def capacity(policies: list[str], base: Job, run: Runner) -> list[dict[str, Any]]:
    """Return for each policy the highest rate scale that holds, to 2 %, by doubling and bisection from the given one.

    A scale holds if at most 1 % of the requests violate their limits and the run keeps up with the arrivals: it ends
    within a tenth of the arrivals' time after the last arrival. Without the second condition a burst that fits into the
    TTFT limit would hold at any rate.

    `bounded_by` names the condition that the next higher scale missed: `limits`; `requests` if it missed only the
    second one, so that more requests may show a higher rate; or None. rate_scale is None if even 1/4096 of the load
    fails.
    """
    searches = {policy: _Bisection(base.spec.rate_scale) for policy in policies}
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    while open_ones := [policy for policy in policies if not searches[policy].over]:
        jobs = [
            replace(base, policy=policy, spec=replace(base.spec, rate_scale=searches[policy].at))
            for policy in open_ones
        ]
        for policy, finished in zip(open_ones, run(jobs), strict=True):
            result = finished.result
            runs[policy].append(result)
            searches[policy].note(_within(result) and keeps_up(result))
    capacities = []
    for policy in policies:
        mine = sorted(runs[policy], key=lambda r: float(r["rate_scale"]))
        scale = searches[policy].holds
        best = next((r for r in mine if r["rate_scale"] == scale), None)
        above = next((r for r in mine if scale is None or r["rate_scale"] > scale), None)
        capacities.append(
            {
                "policy": policy,
                "rate_scale": scale,
                "arrival_rps": None
                if best is None
                else round((best["requests"] - 1) / max(best["arrivals_s"], 1e-9), 4),
                "bounded_by": None if above is None else "requests" if _within(above) else "limits",
                "runs": mine,
            }
        )
    return capacities


def _within(result: dict[str, Any]) -> bool:
    return float(result["slo_violations"]) <= MAX_VIOLATIONS


def keeps_up(result: dict[str, Any]) -> bool:
    """Return whether the run ends soon after its last arrival."""
    return float(result["duration_s"]) <= float(result["arrivals_s"]) * (1 + MAX_TAIL)


class _Bisection:
    """The search of one policy: `at` is the next scale to try, `holds` the highest that held."""

    def __init__(self, start: float) -> None:
        self.at, self.over = start, False
        self.holds: float | None = None
        self._fails: float | None = None
        self._start = start

    def note(self, held: bool) -> None:
        """Record whether the scale `at` held, and choose the next one."""
        if held:
            self.holds = self.at
        else:
            self._fails = self.at
        if self.holds is None:
            self.at /= 2
            self.over = self.at < max(self._start / WIDEST, SLOWEST)
        elif self._fails is None:
            self.at *= 2
            self.over = self.at > min(self._start * WIDEST, MAX_RATE)
        else:
            self.at = (self.holds * self._fails) ** 0.5
            self.over = self._fails <= self.holds * PRECISION


def show(what: str, results: list[dict[str, Any]], notes: list[str], as_json: bool, console: Console) -> int:
    """Print the results; return 1 if a policy has none, or its runs are too short to show a capacity, else 0."""
    key = "step_tokens" if what == "knee" else "rate_scale"
    if as_json:
        print(json.dumps({"find": what, "results": results, "notes": notes}, indent=1))
    else:
        for one in results:
            _show_runs(what, key, one, console)
        for note in notes:
            console.print(f"({note})", markup=False, highlight=False)
    short = [one["policy"] for one in results if one.get("bounded_by") == "requests"]
    if short:
        print(
            f"{', '.join(short)}: above this rate 99 % are still within their limits, but the runs are too short to "
            "show a capacity; give more --requests",
            file=sys.stderr,
        )
    return 1 if short or any(one[key] is None for one in results) else 0


def _show_runs(what: str, key: str, one: dict[str, Any], console: Console) -> None:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    names = (key, "outside limits", "goodput req/s", "tok/s", "TTFT p99 ms", "TBT p99 ms", "ends after, s")
    for name in names:
        table.add_column(name, justify="right")
    for r in one["runs"]:
        table.add_row(
            f"{r[key]:g}{' <' if r[key] == one[key] else ''}", f"{r['slo_violations']:.2%}",
            f"{r['goodput_rps']:.2f}", f"{r['throughput_tok_s']:,.0f}", _time(r["ttft_ms"]), _time(r["tbt_ms"]),
            f"{r['duration_s'] - r['arrivals_s']:.1f}",
        )  # fmt: skip
    console.print(table)
    if what == "knee":
        best = "no budget" if one[key] is None else f"budget of {one[key]} tokens a step"
        console.print(f"{one['policy']}: {best} keeps the most requests within their limits")
    elif one[key] is None:
        console.print(f"{one['policy']}: no rate keeps 99 % within their limits")
    else:
        least = "at least " if one["bounded_by"] == "requests" else ""
        console.print(
            f"{one['policy']}: 99 % within their limits up to {least}rate scale {one[key]:g}, "
            f"{one['arrival_rps']:.2f} requests/s"
        )


def _time(figures: dict[str, float | None]) -> str:
    return "-" if figures["p99"] is None else f"{figures['p99']:,.1f}"

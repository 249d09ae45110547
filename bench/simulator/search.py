"""Two searches over simulated runs: the best token budget, and the highest rate that keeps the SLOs.

Called by main.py. Each policy is searched alone; a run is one Job, so that several go on at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.simulator.jobs import Finished, Job

BUDGETS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MOST_VIOLATIONS = 0.01  # "keeps the SLOs": at least 99 % of the requests are within theirs
SAME = 0.005  # rates that differ by less count as equal
PRECISION = 1.02  # capacity: the rate that fails is at most so many times the one that holds
WIDEST = 1 << 12
Runner = Callable[[list[Job]], list[Finished]]


def knee(policies: list[str], base: Job, run: Runner) -> list[dict[str, Any]]:
    """For each policy all budgets' results, and the best: most requests a second within their SLOs; of equal ones the
    most tokens a second; of these the smallest budget. A policy's own limits on the budget go on holding."""
    budgets = [b for b in BUDGETS if b <= base.setup.max_step_tokens]
    jobs = [
        replace(base, policy=policy, setup=replace(base.setup, step_tokens=budget))
        for policy in policies
        for budget in budgets
    ]
    results = [finished.result for finished in run(jobs)]
    found = []
    for number, policy in enumerate(policies):
        mine = results[number * len(budgets) : (number + 1) * len(budgets)]
        kept = [(1 - r["slo_violations"]) * r["requests"] / r["duration_s"] for r in mine]
        near = [r for r, rate in zip(mine, kept, strict=True) if rate >= max(kept) * (1 - SAME)]
        most = max(r["throughput_tok_s"] for r in near)
        best = next(r for r in near if r["throughput_tok_s"] >= most * (1 - SAME))
        found.append({"policy": policy, "step_tokens": best["step_tokens"] if max(kept) > 0 else None, "runs": mine})
    return found


def capacity(policies: list[str], base: Job, run: Runner) -> list[dict[str, Any]]:
    """For each policy the highest rate scale with at most 1 % violations, to 2 %, by doubling and bisection from the
    given one. None where even 1/4096 of the load violates; violations are taken to grow with the load."""
    searches = {policy: _Bisection(base.spec.rate_scale) for policy in policies}
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    while open_ones := [policy for policy in policies if not searches[policy].over]:
        jobs = [
            replace(base, policy=policy, spec=replace(base.spec, rate_scale=searches[policy].at))
            for policy in open_ones
        ]
        for policy, finished in zip(open_ones, run(jobs), strict=True):
            runs[policy].append(finished.result)
            searches[policy].told(finished.result["slo_violations"] <= MOST_VIOLATIONS)
    found = []
    for policy in policies:
        scale = searches[policy].holds
        rate = next(
            ((r["requests"] - 1) / max(r["arrivals_s"], 1e-9) for r in runs[policy] if r["rate_scale"] == scale), None
        )
        found.append(
            {
                "policy": policy,
                "rate_scale": scale,
                "arrival_rps": None if rate is None else round(rate, 4),
                "runs": sorted(runs[policy], key=lambda r: float(r["rate_scale"])),
            }
        )
    return found


class _Bisection:
    """`at`: the scale to try next; `holds`: the highest known to hold."""

    def __init__(self, start: float) -> None:
        self.at, self.over = start, False
        self.holds: float | None = None
        self._fails: float | None = None
        self._start = start

    def told(self, held: bool) -> None:
        if held:
            self.holds = self.at
        else:
            self._fails = self.at
        if self.holds is None:
            self.at /= 2
            self.over = self.at < self._start / WIDEST
        elif self._fails is None:
            self.at *= 2
            self.over = self.at > self._start * WIDEST
        else:
            self.at = (self.holds * self._fails) ** 0.5
            self.over = self._fails <= self.holds * PRECISION


def show(what: str, found: list[dict[str, Any]], as_json: bool, console: Console) -> int:
    """Prints what was found; 1 if nothing was for some policy."""
    key = "step_tokens" if what == "knee" else "rate_scale"
    if as_json:
        print(json.dumps({"find": what, "results": found}, indent=1))
    else:
        for one in found:
            table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
            for name in (key, "violations", "goodput req/s", "tok/s", "TTFT p99 ms", "TBT p99 ms"):
                table.add_column(name, justify="right")
            for r in one["runs"]:
                table.add_row(
                    f"{r[key]:g}{' <' if r[key] == one[key] else ''}", f"{r['slo_violations']:.2%}",
                    f"{r['goodput_rps']:.2f}", f"{r['throughput_tok_s']:,.0f}", _time(r["ttft_ms"]), _time(r["tbt_ms"]),
                )  # fmt: skip
            console.print(table)
            best = "none keeps the SLOs" if one[key] is None else f"{key} {one[key]:g}"
            more = f", {one['arrival_rps']:.2f} requests/s" if one.get("arrival_rps") else ""
            console.print(f"{one['policy']}: {best}{more}")
    return 1 if any(one[key] is None for one in found) else 0


def _time(figures: dict[str, float | None]) -> str:
    return "-" if figures["p99"] is None else f"{figures['p99']:,.1f}"

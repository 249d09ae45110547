"""The runs behind docs/scale.md: `python -m bench.fleet.study` writes bench/results/fleet.json and two pictures.

Two minutes of one quiet core. Prices are arguments of `orcinus fleet`; here a replica's hour costs 1, so a cost is in
hours of a replica.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from bench.fleet.calibration import Case, compare_all
from bench.fleet.replica import Size, StepCost
from bench.fleet.routing import ROUTERS
from bench.fleet.run import Fleet, Ran, Rule, run
from bench.fleet.traffic import Spec, build
from bench.result import ROOT, commit, provenance, read, write
from services.simulator.device.roofline import Roofline

SHAPE, DEVICE = "llama-8b", "h100"
RESULT, PICTURES = ROOT / "bench" / "results" / "fleet.json", ROOT / "docs" / "img"
CASES = [Case(1, rate, 1000) for rate in (8.0, 16.0, 22.0)] + [
    Case(4, 16.0, 300),
    Case(4, 22.0, 300),
    Case(16, 16.0, 200),
]
PREDICTION = (
    "Fluid against core: tokens a second within 2 %, ms a token within 10 %, TTFT within 25 % below saturation. One "
    "queue has the lowest P99 TTFT, then least-tokens, two-choices, round-robin, random. Affinity finds twice the "
    "prefixes."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the requests of each run; below 1 nothing is written"
    )
    parser.add_argument(
        "--only", default="", help="one section, by its name in the result; the others stay as they are"
    )
    options = parser.parse_args()
    roofline = Roofline(SHAPE, DEVICE)
    size = Size(256, roofline.kv_blocks(16) * 16)
    base = Fleet(1000, "least-tokens", size, StepCost.of(roofline), price_hour=1.0)
    found: dict[str, Any] = {
        "bench": "fleet", **provenance(["python", "-m", "bench.fleet.study"], "orcinus"), "prediction": PREDICTION,
        "model": {"shape": SHAPE, "device": DEVICE, "slots": size.slots, "kv_tokens": size.kv_tokens,
                  "step_tokens": size.step_tokens},
    }  # fmt: skip
    share, only = options.share, options.only
    if only:
        found = {**found, **{name: each for name, each in read("fleet").items() if name not in found}}

    def several(name: str, fleets: list[tuple[str, Fleet]], spec: Spec) -> list[Ran]:
        if only not in ("", name):
            return []
        spec = replace(spec, requests=max(100, int(spec.requests * share)))
        traffic = build(spec)
        ran = []
        for label, fleet in fleets:
            print(f"{name}: {label}", file=sys.stderr)
            ran.append(run(fleet, traffic))
            ran[-1].result["label"] = label
        found[name] = {"commit": commit(), "rate_rps": spec.rate_rps, "runs": [each.result for each in ran]}
        return ran

    if not only:
        cases = [replace(case, requests=max(20, int(case.requests * share))) for case in CASES]
        found["calibration"] = compare_all(cases, SHAPE, DEVICE, size, lambda line: print(line, file=sys.stderr))
        found["sizes"] = {"runs": []}
        for n in (1, 16, 1000):
            print(f"sizes: {n} replicas", file=sys.stderr)
            ran = run(replace(base, replicas=n), build(Spec(max(100, int(1000 * n * share)), 18.0 * n)))
            found["sizes"]["runs"].append({**ran.result, "label": f"{n} replicas"})
    quarter = replace(base, replicas=250)
    blind = [(name, replace(quarter, routing=name)) for name in ROUTERS if name != "prefix"]
    routed = several("routing", blind, Spec(250_000, 4_500.0))
    mixed = replace(base, replicas=100, speeds=(1.0, 0.5))
    names = ("round-robin", "two-choices", "least-tokens", "one-queue")
    several("mixed", [(name, replace(mixed, routing=name)) for name in names], Spec(100_000, 1_200.0))
    prefixed = [(name, replace(base, replicas=64, routing=name)) for name in ("round-robin", "two-choices", "prefix")]
    several("prefix", prefixed, Spec(150_000, 64 * 14.0, groups=2048, prefix_tokens=1024, skew=1.0))
    failing = [
        (f"every {hours} h" if hours else "none", replace(base, replicas=100, mtbf_s=hours * 3600.0))
        for hours in (0, 4, 0.5)
    ]
    several("failures", failing, Spec(300_000, 1_600.0))
    rule = Rule(least=1, most=16)
    scaled = replace(base, replicas=4, routing="one-queue", scaler=rule)
    days = [("fixed at 5", replace(base, replicas=5, routing="one-queue"))] + [
        (f"scaled, {start} s to start", replace(scaled, scaler=replace(rule, startup_s=float(start))))
        for start in (60, 180, 600)
    ]
    day = several("autoscaling", days, Spec(576_000, 40.0, swing=0.8, day_s=14_400.0))
    found["requests"] = sum(each["requests"] for name in found for each in _runs(found[name]))
    if share == 1.0:
        write(RESULT, found)
        draw(routed, day)
        print(f"{RESULT} written", file=sys.stderr)
    return 0


def _runs(entry: Any) -> list[dict[str, Any]]:
    return entry["runs"] if isinstance(entry, dict) and "runs" in entry else []


def draw(routed: list[Ran], day: list[Ran]) -> None:
    """Plot TTFT by routing, and replicas and the age of the queue over a day. Parts that did not run are left out."""
    from matplotlib.figure import Figure

    if routed:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for each in routed:
            values = np.sort(each.ttft_s * 1000)
            at = np.linspace(0, len(values) - 1, 2000).astype(int)
            axes.plot(values[at], 1 - at / len(values), label=each.result["routing"])
        axes.set(title="250 replicas", xlabel="TTFT, ms", ylabel="share above", yscale="log", ylim=(1e-4, 1))
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(PICTURES / "fleet-routing.png", dpi=100)
    if day:
        figure = Figure(figsize=(12, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for each in day[1:]:
            hours, counts, ages = (np.array(column) for column in zip(*each.counts, strict=True))
            left.step(hours / 3600, counts, where="post", label=each.result["label"])
            right.plot(hours / 3600, ages)
        left.set(title="replicas over a short day", xlabel="hours")
        right.set(title="age of the oldest that waits, s", xlabel="hours")
        left.legend()
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.savefig(PICTURES / "fleet-day.png", dpi=100)


if __name__ == "__main__":
    sys.exit(main())

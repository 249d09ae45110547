"""`orcinus` against `static` at its best batch size: the curve, its crossing of twice the unloaded latency, the end.

Called by policies.py. Throughput is in tokens a second, prompts included, from the first arrival to the last delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bench.studies.policies.runs import DEVICE, QUICK, SHAPE, Row, Runner, clock, replica
from services.simulator.device.roofline import Roofline
from services.simulator.jobs import Job
from services.simulator.workload.arrivals import CHAT, Spec, build
from services.simulator.workload.workload import Workload

BATCHES, QUICK_BATCHES = (8, 16, 32, 64, 128, 256), (32,)
REQUESTS, SATURATING = 1_000, 3_000
UNLOADED = 0.01  # of orcinus's saturation rate: hardly two requests meet
TIMES = 2.0  # the unloaded median normalized latency
PRECISION, COARSE = 1.03, 1.25  # the rate that is over the limit is at most so many times the one that is within
CURVE = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of each policy's own saturation rate
GOALS = {"latency": 10.0, "saturation": 2.0}


def compare(quick: bool, run: Runner) -> Row:
    """Return the page's figures about `static`: an entry per policy with saturation, crossing and curve."""
    spec = Spec(trace=CHAT, requests=QUICK if quick else REQUESTS)
    all_of_it = replace(spec, requests=QUICK if quick else SATURATING)
    arrivals = build(spec).arrived_ns
    trace_rps = (len(arrivals) - 1) / (int(arrivals[-1] - arrivals[0]) / 1e9)
    names = ["orcinus", *(f"static:batch=static-{n}" for n in (QUICK_BATCHES if quick else BATCHES))]

    def job(policy: str, rps: float) -> Job:
        """Return a job with this number of requests a second; 0 means all at once."""
        given = replace(spec, rate_scale=rps / trace_rps) if rps else replace(all_of_it, at_once=True)
        return Job(policy, given, replica(), clock())

    def measured(jobs: Sequence[Job]) -> list[Row]:
        rates = [None if one.spec.at_once else round(one.spec.rate_scale * trace_rps, 4) for one in jobs]
        return [_point(done.result, rate) for done, rate in zip(run([*jobs]), rates, strict=True)]

    full = measured([job(name, 0) for name in names])
    alone = measured([job(name, UNLOADED * full[0]["request_rps"]) for name in ("orcinus", names[1])])
    limit = TIMES * alone[0]["normalized_ms"]
    drawn = [(name, share * point["request_rps"]) for name, point in zip(names, full, strict=True) for share in CURVE]
    points = measured([job(*one) for one in drawn])
    curves = [points[i : i + len(CURVE)] for i in range(0, len(points), len(CURVE))]
    crossings = find_crossings(
        names, curves, limit, COARSE if quick else PRECISION, lambda tries: measured([job(*one) for one in tries])
    )
    policies = [
        {"policy": name, "saturation": point, "crossing": crossing, "curve": curve}
        for name, point, crossing, curve in zip(names, full, crossings, curves, strict=True)
    ]
    return {
        "trace": CHAT.stem,
        "requests": len(arrivals),
        "saturating": all_of_it.requests,
        "unloaded_ms": {"orcinus": alone[0]["normalized_ms"], "static": alone[1]["normalized_ms"]},
        "limit_ms": round(limit, 4),
        "bound_tok_s": round(bound_tok_s(build(all_of_it)), 1),
        "policies": policies,
    }


def bound_tok_s(work: Workload) -> float:
    """Return an upper bound of the token rate: one step computes everything and reads the weights once.

    What is left is the arithmetic of every token and the KV that each of them reads, by the roofline's formula.
    """
    prompt, fed = work.prompt.astype(float), (work.output - 1).astype(float)  # the last output is never fed
    context = fed * prompt + fed * (fed - 1) / 2
    pairs = prompt * (prompt + 1) / 2
    all_ns = Roofline(SHAPE, DEVICE).step_ns(int((prompt + fed).sum()), float(context.sum()), float(pairs.sum()))
    return float((work.prompt + work.output).sum()) / (all_ns / 1e9)


def _point(result: dict[str, Any], offered_rps: float | None) -> Row:
    return {
        "offered_rps": offered_rps,
        "request_rps": result["request_rps"],
        "throughput_tok_s": result["throughput_tok_s"],
        "normalized_ms": result["normalized_latency_ms"]["p50"],
    }


def find_crossings(
    names: list[str],
    curves: list[list[Row]],
    limit: float,
    precision: float,
    measure: Callable[[list[tuple[str, float]]], list[Row]],
) -> list[Row | None]:
    """Return for each name the run at the highest rate with a median normalized latency within `limit` ms.

    Its curve, by rising rate, gives the rate that is within and the next one that is over; bisection of the logarithm
    until their ratio is `precision`. None where all of the curve is over; its end where all of it is within.
    """
    held: list[Row | None] = []
    low, high = [], []
    for curve in curves:
        over = next((i for i, point in enumerate(curve) if point["normalized_ms"] > limit), len(curve))
        held.append(curve[over - 1] if over else None)
        low.append(curve[over - 1]["offered_rps"] if over else 0.0)
        high.append(curve[over]["offered_rps"] if 0 < over < len(curve) else 0.0)
    while wanted := [i for i in range(len(names)) if high[i] > low[i] * precision]:
        rates = [(names[i], (low[i] * high[i]) ** 0.5) for i in wanted]
        for i, (_, rate), point in zip(wanted, rates, measure(rates), strict=True):
            if point["normalized_ms"] <= limit:
                held[i], low[i] = point, rate
            else:
                high[i] = rate
    return held

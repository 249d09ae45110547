"""Speculation beside none in the simulator, by the share of drafts that are right and by load.

    python -m bench.studies.acceptance [--requests N] [--seeds N] [--loads A,B] [--note TEXT]

The shipped scheduler guesses and decides; the device draws whether a draft is right. All runs of a seed see the same
requests. Load 1 is the rate at which requests that arrive at once are done without speculation. Step times are those of
the own CPU kernels with the demo model in float32. Writes bench/results/acceptance.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from bench.result import RESULTS, provenance, write
from services.simulator.device.clock import Linear
from services.simulator.engine import Setup, simulate
from services.simulator.grid import T_95
from services.simulator.workload.arrivals import Lengths, Spec, build
from shared.command_line.arguments import Parser

SHARES = (0.0, 0.3, 0.6, 0.9)
CLOCK = Linear(2.07e6, 0.15e6, 20.0, 10.0)  # 1 row 2.2 ms, 8 rows 3.3 ms: docs/cpu.md
SETUP = Setup(blocks=4000, max_seqs=32, max_step_tokens=512, host_us=1000.0)
GOAL = 0.97  # lower end of the interval of every ratio
PREDICTION = "no ratio below 0.97 at any load; no gain at 0, more than 1.3 at load 0.3 with 0.9"


def base(requests: int, seed: int) -> Spec:
    """Return requests of 64 to 256 prompt tokens and 32 to 160 output tokens."""
    prompt, output = Lengths.parse("64:256"), Lengths.parse("32:160")
    return Spec(trace=None, requests=requests, prompt=prompt, output=output, max_tokens=1, rate_rps=1, seed=seed)


def run(spec: Spec) -> dict[str, float]:
    """Return the figures of one run that are compared."""
    result = simulate("orcinus", build(spec), replace(SETUP, seed=spec.seed), CLOCK).result
    if result["finished"] != result["requests"]:
        raise RuntimeError(f"{result['requests'] - result['finished']} requests did not finish: {result['errors']}")
    return {
        "latency_ms": result["e2e_ms"]["mean"],
        "tok_s": result["output_tok_s"],
        "request_rps": result["request_rps"],
        "drafted": result["drafted_tokens"],
        "accepted": result["accepted_tokens"],
        "steps": result["iterations"],
    }


def interval(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the geometric mean of the ratios of pairs and its 95 % interval, by Student's t of the logarithms."""
    logs = [math.log(first / second) for first, second in pairs]
    mean, half = statistics.fmean(logs), 0.0
    if len(logs) > 1:
        half = T_95.get(len(logs), 1.96) * statistics.stdev(logs) / math.sqrt(len(logs))
    found = {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
    return {name: round(value, 4) for name, value in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("python -m bench.studies.acceptance", (__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100, help="of a run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each cell")
    parser.add_argument("--loads", type=_loads, default=(0.3, 0.8, 1.2), help="as 0.3,0.8")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--note", default="", help="kept in the result: what else the machine was doing")
    options = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else list(argv)
    about = provenance(["python", "-m", "bench.studies.acceptance", *given])
    seeds = range(1, options.seeds + 1)
    whole = run(replace(base(options.requests, 0), at_once=True, rate_rps=0))["request_rps"]
    cells = [(load, share) for load in options.loads for share in (None, *SHARES)]
    specs = [
        replace(base(options.requests, seed), rate_rps=whole * load, acceptance=share)
        for load, share in cells
        for seed in seeds
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(run, specs))
    found = {cell: runs[i * len(seeds) : (i + 1) * len(seeds)] for i, cell in enumerate(cells)}
    rows: list[dict[str, Any]] = []
    for load, share in cells:
        if share is None:
            continue
        ours, plain = found[load, share], found[load, None]
        drafted = sum(each["drafted"] for each in ours)
        steps = [(b["steps"], a["steps"]) for a, b in zip(ours, plain, strict=True)]
        rows.append(
            {
                "load": load,
                "acceptance": share,
                "latency": interval([(b["latency_ms"], a["latency_ms"]) for a, b in zip(ours, plain, strict=True)]),
                "throughput": interval([(a["tok_s"], b["tok_s"]) for a, b in zip(ours, plain, strict=True)]),
                "steps": interval(steps)["ratio"],
                "drafted": int(drafted),
                "right": round(sum(each["accepted"] for each in ours) / drafted, 3) if drafted else None,
            }
        )
        print(rows[-1], file=sys.stderr)
    lowest = min(min(row["latency"]["low"], row["throughput"]["low"]) for row in rows)
    outcome = {"prediction": PREDICTION, "goal": GOAL, "lowest": lowest, "met": lowest >= GOAL}
    result = {
        **about,
        "note": options.note,
        "seeds": options.seeds,
        "requests": options.requests,
        "capacity_rps": whole,
    }
    write(RESULTS / "acceptance.json", {**result, **outcome, "rows": rows}, rows_on_lines=True)
    return 0


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of numbers, as 0.3,0.8") from None
    if not all(0.01 <= load <= 10 for load in loads):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give loads from 0.01 to 10")
    return loads


if __name__ == "__main__":
    sys.exit(main())

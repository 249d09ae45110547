"""The effect of a flooding tenant on other tenants: section "Tenants" of docs/policies.md.

    python -m bench.studies.fairness           some minutes; writes bench/results/fairness.json and the page
    python -m bench.studies.fairness --quick   in small, in seconds; prints, writes nothing
    python -m bench.studies.fairness --policy orcinus    these rows anew, the others as they were

Simulated. Three tenants send a share of what the replica can do; a fourth floods it. Compared with the same three while
the fourth sends just what it was served in the flood: its fair share, since the three were served in full.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import render
from bench.result import RESULTS, provenance, read, write
from bench.studies.policies.runs import DEVICE, SHAPE, clock, replica
from services.simulator.engine import simulate
from services.simulator.metrics import Recorder
from services.simulator.workload.arrivals import CHAT, Spec, build
from services.simulator.workload.workload import Workload

POLICIES = ("orcinus", "orcinus:order=class", "sarathi:order=fair", "sarathi")
FLOODS = (1.5, 5.0)  # times the saturation
OTHERS = (0.15, 0.15, 0.15)
SATURATION_RPS = 21.08  # of `orca` on this replica and trace: bench/results/policies.json
SEEDS = (1, 2, 3)
SPAN_S, QUICK_SPAN_S = 300.0, 20.0
GOAL = 1.2
Row = dict[str, Any]
FIGURES = {"ttft_ms": "TTFT", "gap_ms": "gap", "latency_ms": "ms per output token"}


def arrivals(flood: float, span_s: float, seed: int) -> Workload:
    """Return Poisson arrivals with the chat trace's lengths; only the first tenant's load varies."""
    trace = build(Spec(trace=CHAT, requests=3_000))
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    for tenant, load in enumerate((flood, *OTHERS)):
        rng = np.random.default_rng([seed, tenant])
        count = int(rng.poisson(load * SATURATION_RPS * span_s))
        at = np.sort(rng.uniform(0, span_s, count))
        which = rng.integers(0, len(trace), count)
        columns.append((at, np.full(count, tenant), trace.prompt[which], trace.output[which]))
    at, tenants, prompt, output = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(at, kind="stable")
    return Workload(
        arrived_ns=np.rint(at[order] * 1e9).astype(np.int64),
        prompt=prompt[order],
        output=output[order],
        max_tokens=np.maximum(output[order], 1_024),
        tenant=tenants[order].astype(np.int64),
    )


def run(policy: str, flood: float, span_s: float, seed: int) -> tuple[Workload, Recorder]:
    workload = arrivals(flood, span_s, seed)
    return workload, simulate(policy, workload, replica(), clock()).seen


def served(workload: Workload, seen: Recorder, span_s: float) -> float:
    """Return the tokens of the first tenant's requests that ended in the span, in multiples of the saturation."""
    mine = workload.tenant == 0
    ended = mine & (seen.e2e_ns + workload.arrived_ns < span_s * 1e9)
    tokens = workload.prompt + workload.output
    return float(tokens[ended].sum() / tokens[mine].mean() / span_s / SATURATION_RPS)


def p99(workload: Workload, seen: Recorder) -> dict[str, float]:
    """Return P99 figures of the other tenants in ms: TTFT, P99 gap of a request, time for each output token."""
    others = workload.tenant > 0
    columns = seen.ttft_ns, seen.worst_ns, seen.e2e_ns / np.maximum(seen.tokens, 1)
    values = [float(np.percentile(column[others], 99)) / 1e6 for column in columns]
    return dict(zip(FIGURES, values, strict=True))


def compare(policy: str, flood: float, span_s: float, seed: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return the first tenant's share in the flood; the others' figures there, and while it sends just that."""
    workload, seen = run(policy, flood, span_s, seed)
    share = served(workload, seen, span_s)
    return share, p99(workload, seen), p99(*run(policy, share, span_s, seed))


def medians(policy: str, flood: float, of_seeds: Iterable[tuple[float, dict[str, float], dict[str, float]]]) -> Row:
    """Return a row of the table. of_seeds: compare() of each seed."""
    shares, in_flood, held = zip(*of_seeds, strict=True)

    def median(rows: Iterable[dict[str, float]], name: str) -> float:
        return round(float(np.median([row[name] for row in rows])), 1)

    return {
        "policy": policy,
        "flood": flood,
        "share": round(float(np.median(shares)), 3),
        **{name: {"flood": median(in_flood, name), "held": median(held, name)} for name in FIGURES},
    }


def provenance_of_rows(result: Row) -> str:
    """Return a sentence with the command, and the commit and date of each policy's rows."""
    by_commit: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        names = by_commit.setdefault((row["commit"], row["date"][:10]), [])
        if (name := f"`{row['policy']}`") not in names:
            names.append(name)
    rows = [f"{', '.join(names)} at commit {commit} on {date}" for (commit, date), names in by_commit.items()]
    return f"Made by `python -m bench.studies.fairness`: {'; '.join(rows)}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.fairness", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small, in seconds; writes nothing")
    given = sys.argv[1:] if argv is None else list(argv)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="only this one; may be repeated")
    parser.add_argument("--prediction", default="", help="what is expected, written before the run")
    options = parser.parse_args(given)
    span_s, seeds, floods = (QUICK_SPAN_S, SEEDS[:1], FLOODS[:1]) if options.quick else (SPAN_S, SEEDS, FLOODS)
    facts = provenance(["python", "-m", "bench.studies.fairness", *given])
    at, rows = {"commit": facts["commit"], "date": facts["date"]}, []
    kept = [] if options.quick else read("fairness")["rows"]
    with ProcessPoolExecutor() as pool:
        anew = {
            (policy, flood): [pool.submit(compare, policy, flood, span_s, seed) for seed in seeds]
            for policy in options.policy or POLICIES
            for flood in floods
        }
        for policy in POLICIES:
            rows += [row for row in kept if row["policy"] == policy and (policy, row["flood"]) not in anew]
            for flood in floods:
                if jobs := anew.get((policy, flood)):
                    rows.append(medians(policy, flood, [job.result() for job in jobs]) | at)
                    print(f"{policy}, flood of {flood:g}: {rows[-1]}", file=sys.stderr, flush=True)
    result = {
        **facts,
        "prediction": options.prediction,
        "shape": SHAPE,
        "device": DEVICE,
        "span_s": span_s,
        "seeds": list(seeds),
        "rows": rows,
    }
    if not options.quick:
        write(RESULTS / "fairness.json", result, rows_on_lines=True)
        render.write()
    print(render.section("fairness", results={"fairness": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

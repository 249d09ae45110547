"""Separate prefill and decode replicas against the same number of combined ones, on a virtual clock.

python -m bench.studies.roles            runs everything; writes roles.json and the tables of docs/roles.md
python -m bench.studies.roles --quick    one small case; prints, writes nothing
python -m bench.studies.roles --predict  writes the predictions alone, before anything ran
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import render
from bench.result import RESULTS, provenance, read, write
from bench.studies.roles.run import Cast, simulate
from services.simulator.device.roofline import Roofline
from services.simulator.workload.arrivals import TRACES, Lengths, Spec, build
from services.simulator.workload.workload import Workload

RESULT = RESULTS / "roles.json"
SHAPE, DEVICE = "llama-8b", "h100"
TTFT_SLO_MS, TBT_SLO_MS = 2000.0, 100.0  # limits of goodput; requests carry them, or not
BATCH = 64  # sequences that share a decode step where the nominal rate is computed
LOADS = (0.3, 0.6, 0.9)  # of the nominal rate
MIXES = {
    "chat": Spec(trace=None, prompt=Lengths.parse("lognormal:600:0.8"), output=Lengths.parse("lognormal:250:0.6")),
    "long prompts": Spec(
        trace=None, prompt=Lengths.parse("lognormal:6000:0.6"), output=Lengths.parse("lognormal:150:0.5")
    ),
    "azure conversation": Spec(trace=TRACES / "azure_conv_2023.csv"),
    "azure code": Spec(trace=TRACES / "azure_code_2023.csv"),
}
FOUR = (Cast(both=4), Cast(prefill=1, decode=3), Cast(prefill=2, decode=2), Cast(prefill=3, decode=1))
TWO = (Cast(both=2), Cast(prefill=1, decode=1))
PREDICTED = [
    "With limits told, together keeps TBT P99 below 100 ms by small chunks; without limits its TBT P99 is over 100 ms "
    "on long prompts at 0.6 and above, and that of every apart below 50 ms.",
    "TTFT P50 at 0.3 is lower together than in any split: more replicas compute prompts.",
    "The gap to the second token is longer apart than together at the median, by the prefill step under way and the "
    "copy (10 to 300 ms).",
    "On chat, where decoding is most of the work, 1 + 3 is the best split and loses to together in goodput at 0.9.",
    "On long prompts and azure code, where prompts are most of the work, 3 + 1 is the best split; it wins in goodput "
    "at 0.9 against together without limits and is within 10 % of together with limits.",
    "Tokens a second at 0.9: no split is more than 5 % above together.",
]


def nominal_rps(work: Workload, roofline: Roofline) -> float:
    """Return the rate that one replica could serve with prompts alone and outputs in steps of BATCH."""
    prompt, output = float(work.prompt.mean()), float(work.output.mean())
    context = prompt + output / 2
    prefill_ns = prompt * (roofline.step_ns(4096, 0, 0) / 4096) + roofline.step_ns(0, 0, prompt * prompt / 2)
    prefill_ns -= roofline.step_ns(0, 0, 0)
    return 1e9 / (prefill_ns + output * roofline.step_ns(BATCH, BATCH * context, 0) / BATCH)


def cases(requests: int, quick: bool) -> list[tuple[str, float, bool, int]]:
    """Return mix, load, whether requests have limits, and replicas of each case."""
    if quick:
        return [("chat", 0.6, True, 2)]
    limited = [(mix, load, True, 4) for mix in MIXES for load in LOADS]
    unlimited = [("long prompts", load, False, 4) for load in LOADS[1:]]
    return limited + unlimited + [(mix, 0.6, True, 2) for mix in ("chat", "long prompts")]


def measure(requests: int, quick: bool) -> list[dict[str, Any]]:
    """Return one entry per run."""
    roofline, found = Roofline(SHAPE, DEVICE), []
    for mix, load, limited, replicas in cases(requests, quick):
        spec = replace(MIXES[mix], requests=requests, seed=1, rate_rps=1.0)
        rate = load * replicas * nominal_rps(build(spec), roofline)
        limits: dict[str, Any] = {"ttft_slo_ms": {"": TTFT_SLO_MS}, "tbt_slo_ms": {"": TBT_SLO_MS}} if limited else {}
        work = build(replace(spec, rate_rps=rate, **limits))
        for cast in FOUR if replicas == 4 else TWO:
            begun = time.perf_counter()
            row = {"mix": mix, "load": load, "rate_rps": round(rate, 2), "limits": limited, "replicas": replicas}
            row |= simulate(cast, work, roofline)
            row["wall_s"] = round(time.perf_counter() - begun, 1)
            print(json.dumps(row), file=sys.stderr, flush=True)
            found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.roles", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small case; prints, writes nothing")
    parser.add_argument("--predict", action="store_true", help="writes the predictions alone")
    parser.add_argument("--requests", type=int, default=400, help="of each run (default 400)")
    args = parser.parse_args(argv)
    if args.quick:
        print(json.dumps(measure(100, quick=True), indent=1))
        return 0
    if args.predict:
        facts = provenance(["python", "-m", "bench.studies.roles", "--predict"])
        predicted = {"predicted": PREDICTED, "predicted_at": facts["date"], "predicted_commit": facts["commit"]}
        write(RESULT, predicted)
        return 0
    facts = provenance(["python", "-m", "bench.studies.roles", "--requests", str(args.requests)], "numpy")
    measured = {"shape": SHAPE, "device": DEVICE, "results": measure(args.requests, quick=False)}
    write(RESULT, read("roles") | facts | measured)
    render.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())

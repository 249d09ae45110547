"""`orcinus fleet`: up to 10,000 replicas and millions of requests, by the fluid model of `bench/fleet/replica.py`.

Exit codes: 0 fine; 1 a request did not finish; 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.fleet.calibration import Case, compare_all
from bench.fleet.replica import Size, StepCost
from bench.fleet.routing import ROUTERS
from bench.fleet.run import Fleet, Ran, Rule, run
from bench.fleet.traffic import Spec, build
from services.simulator.device.roofline import DEVICES, SHAPES, Roofline
from services.simulator.workload.arrivals import CHAT, Lengths
from shared.command_line.arguments import Parser

WIDTH = 150
COLUMNS = (
    "routing", "replicas", "done", "output\ntok/s", "TTFT ms\np50", "\np99", "ms/token\np50", "\np99", "good",
    "busy", "imba-\nlance", "hits", "failed", "replica\nhours", "$/M out", "CPU s",
)  # fmt: skip
CASES = [Case(n, rate, 1000 if n == 1 else 300) for n in (1, 4, 16) for rate in (8.0, 16.0, 22.0)]


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _main(parser().parse_args(sys.argv[1:] if argv is None else list(argv)))
    except SystemExit as stop:
        return int(stop.code or 0)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> Parser:
    found = Parser(
        "orcinus fleet", "Simulate up to 10,000 replicas and millions of requests with a fluid model of a replica."
    )
    add = found.add_argument
    add("--replicas", type=_counts, default=[16], metavar="N,..", help="1 to 10,000; several: a run each (default 16)")
    add("--routing", type=_routers, default=["least-tokens"], metavar="A,..", help=f"of {', '.join(ROUTERS)}, or all")
    add("--requests", type=int, default=100_000, metavar="N", help="of a run")
    add("--rate", type=float, default=16.0, metavar="R", help="requests a second and replica, on average")
    add("--trace", type=Path, default=CHAT, help="CSV of lengths, drawn with repetition (default: the chat trace)")
    add("--prompt-tokens", type=Lengths.parse, metavar="L", help="lengths instead: N, LOW:HIGH or lognormal:MEAN:SIGMA")
    add("--output-tokens", type=Lengths.parse, metavar="L", help="as --prompt-tokens")
    add("--prefix-groups", type=int, default=0, metavar="N", help="so many shared beginnings of prompts")
    add("--prefix-tokens", type=int, default=512, metavar="N", help="of each, before the prompt")
    add("--prefix-skew", type=float, default=0.0, metavar="A", help="popularity of the i-th is 1/i^A; 0: all alike")
    add("--swing", type=float, default=0.0, metavar="S", help="of the rate over a day, 0 to below 1; 0: constant")
    add("--day-s", type=float, default=86_400.0, metavar="S", help="length of that day")
    add("--model-shape", choices=sorted(SHAPES), default="llama-8b", help="sizes of the model")
    add("--device", choices=sorted(DEVICES), default="h100", help="rates of the device")
    add("--max-seqs", type=int, default=256, help="slots of a replica")
    add("--step-tokens", type=int, default=512, help="token budget of a step")
    add("--speeds", type=_speeds, default=(1.0,), metavar="X,..", help="of the replicas, in turn (default 1)")
    add("--mtbf-h", type=float, default=0.0, metavar="H", help="mean hours between a replica's failures; 0: none")
    add("--restart-s", type=float, default=120.0, metavar="S", help="until it serves again")
    add("--autoscale", type=_range, metavar="MIN:MAX", help="the rule of deploy/kubernetes/overlays/autoscaling")
    add("--startup-s", type=float, default=180.0, metavar="S", help="until a new replica serves")
    add(
        "--price",
        type=float,
        default=0.0,
        metavar="P",
        help="price of an hour of a replica of speed 1; 0 shows no cost",
    )
    add("--seed", type=int, default=0, help="of the traffic")
    add("--calibrate", action="store_true", help="compare with the scheduler's own core, instead (some minutes)")
    add("--json", action="store_true", help="print one JSON object on stdout")
    return found


def _main(options: argparse.Namespace) -> int:
    roofline = Roofline(options.model_shape, options.device)
    size = Size(options.max_seqs, roofline.kv_blocks(16) * 16, options.step_tokens)
    if options.calibrate:
        found = compare_all(CASES, options.model_shape, options.device, size, lambda line: print(line, file=sys.stderr))
        _print(options, {"calibration": found}, lambda console: console.print(calibration_table(found)))
        return 0
    if not 1 <= options.max_seqs <= 65_536 or not options.max_seqs < options.step_tokens + 1 <= 1 << 20:
        raise ValueError(f"--step-tokens {options.step_tokens} must be --max-seqs ({options.max_seqs}) at least")
    results = []
    for replicas in options.replicas:
        for routing in options.routing:
            print(f"{routing}, {replicas} replicas", file=sys.stderr)
            results.append(one(options, roofline, size, replicas, routing).result)
    _print(options, {"results": results}, lambda console: console.print(table(results)))
    return int(any(each["finished"] < each["requests"] for each in results))


def one(options: argparse.Namespace, roofline: Roofline, size: Size, replicas: int, routing: str) -> Ran:
    """Simulate one run of the options. Raises ValueError."""
    scaler = None
    if options.autoscale:
        scaler = Rule(least=options.autoscale[0], most=options.autoscale[1], startup_s=options.startup_s)
    traffic = build(
        Spec(
            options.requests, options.rate * replicas, options.trace, options.prompt_tokens, options.output_tokens,
            options.prefix_groups, options.prefix_tokens if options.prefix_groups else 0, options.prefix_skew,
            options.swing, options.day_s, options.seed,
        )
    )  # fmt: skip
    fleet = Fleet(
        replicas, routing, size, StepCost.of(roofline), options.speeds, options.mtbf_h * 3600, options.restart_s,
        scaler=scaler, price_hour=options.price, seed=options.seed,
    )  # fmt: skip
    return run(fleet, traffic)


def _print(options: argparse.Namespace, found: dict[str, Any], show: Any) -> None:
    if options.json:
        print(json.dumps(found))
    else:
        show(Console(width=max(Console().width, WIDTH)))


def table(results: list[dict[str, Any]]) -> Table:
    """Return the results as a table."""
    made = _table(COLUMNS)
    for r in results:
        times = [f"{r[name][p]:,.1f}" for name in ("ttft_ms", "normalized_latency_ms") for p in ("p50", "p99")]
        made.add_row(
            r["routing"], f"{r['replicas']:,}", f"{r['finished']:,}", f"{r['output_tok_s']:,.0f}", *times,
            f"{r['good_share']:.2%}", f"{r['device_busy']:.1%}",
            "-" if r["imbalance"] is None else f"{r['imbalance']:.3f}", f"{r['hit_share']:.1%}",
            f"{r['failures']:,}", f"{r['replica_hours']:,.1f}",
            f"{r['cost_per_million_output']:.3f}" if "cost" in r else "-", f"{r['cpu_s']:.1f}",
        )  # fmt: skip
    return made


def calibration_table(found: list[dict[str, Any]]) -> Table:
    """Return a table of the core's figure, the fluid model's, and the error."""
    made = _table(("replicas", "req/s each", *(found[0]["figures"] if found else ()), "CPU s"))
    for each in found:
        cells = [f"{f['core']:,.1f} {f['fluid']:,.1f} {f['error']:+.1%}" for f in each["figures"].values()]
        made.add_row(
            f"{each['replicas']}", f"{each['rate_rps']:g}", *cells, f"{each['core_cpu_s']} {each['fluid_cpu_s']}"
        )
    return made


def _table(columns: Sequence[str]) -> Table:
    made = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for at, name in enumerate(columns):
        made.add_column(name, justify="left" if at == 0 else "right", no_wrap=True)
    return made


def _counts(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not all(1 <= count <= 10_000 for count in found):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: 1 to 10,000 replicas")
    return found


def _routers(text: str) -> list[str]:
    found = list(ROUTERS) if text == "all" else text.split(",")
    if unknown := [name for name in found if name not in ROUTERS]:
        raise argparse.ArgumentTypeError(f"no routing {unknown[0][:40]!r}; there are {', '.join(ROUTERS)}")
    return found


def _speeds(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if not all(0.001 <= speed <= 1000 for speed in found):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: speeds are 0.001 to 1,000")
    return found


def _range(text: str) -> tuple[int, int]:
    least, most = (int(part) for part in text.split(":"))
    if not 1 <= least <= most <= 10_000:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give MIN:MAX with 1 <= MIN <= MAX <= 10,000")
    return least, most


if __name__ == "__main__":
    sys.exit(main())

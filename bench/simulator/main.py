"""`orcinus simulate`: runs what the options say, and prints a table or one JSON object.

Exit codes: 0 fine; 1 a request did not finish, or what was searched for was not found; 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.simulator.engine import Stuck
from bench.simulator.jobs import Job, run_all
from bench.simulator.options import WrongUse, at_scale, clock_of, parser, setup_of, spec_of

WIDTH = 140  # columns the table needs
COLUMNS = (
    "policy", "load", "done", "tok/s", "output\ntok/s", "goodput\nreq/s", "TTFT ms\np50", "\np99",
    "TBT ms\np50", "\np99", "ms/token\np50", "\np99", "pre-\nempted", "tokens\nagain", "blocks\nswapped",
    "padding", "steps",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
        return run(options)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (WrongUse, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stuck as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Dispatches to what was asked for. Raises WrongUse, ValueError, Stuck."""
    spec, setup, clock = spec_of(options), setup_of(options), clock_of(options)
    scales = options.rate_scale
    jobs = [Job(policy, at_scale(spec, scale), setup, clock) for policy in options.policy for scale in scales]
    finished = run_all(jobs, options.jobs)
    results = [one.result for one in finished]
    if options.json:
        print(json.dumps({"results": results}, indent=1))
    else:
        show(results, Console(width=max(Console().width, WIDTH)))
    return told(results)


def told(results: list[dict[str, Any]]) -> int:
    """1, and a line on stderr, when not every request finished."""
    short = [r for r in results if r["finished"] < r["requests"]]
    for result in short:
        why = "; ".join(f"{count} x {error}" for error, count in result["errors"].items())[:400]
        missing = result["requests"] - result["finished"]
        print(f"{result['policy']}: {missing} requests did not finish: {why}", file=sys.stderr)
    return 1 if short else 0


def show(results: list[dict[str, Any]], console: Console) -> None:
    """The table for people."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for r in results:
        times = (r[name][p] for name in ("ttft_ms", "tbt_ms", "normalized_latency_ms") for p in ("p50", "p99"))
        table.add_row(
            r["policy"], f"{r['rate_scale']:g}", f"{r['finished']:,}", f"{r['throughput_tok_s']:,.0f}",
            f"{r['output_tok_s']:,.0f}", f"{r['goodput_rps']:.2f}",
            *("-" if time is None else f"{time:,.1f}" for time in times),
            f"{r['preemptions']:,}", f"{r['recomputed_tokens']:,}", f"{r['swapped_blocks']:,}",
            f"{r['padding']:.1%}", f"{r['iterations']:,}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

"""`orcinus simulate`: run the simulations that the options describe, and print a table or one JSON object.

Exit codes: 0 success; 1 a request did not finish, a search has no result, or a case differs; 2 wrong use, or too large
a run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from services.simulator.command.grid import run_grid
from services.simulator.command.options import WrongUse, clock_of, notes_of, options_of, setup_of, spec_of
from services.simulator.command.search import capacity, knee
from services.simulator.command.search import show as show_search
from services.simulator.command.speed import measure_all
from services.simulator.command.speed import show as show_speed
from services.simulator.engine import Stuck
from services.simulator.jobs import Finished, Job, run_all
from services.simulator.literature.cases import check_steps, print_steps
from shared.messages import quantity

WIDTH = 165  # columns the table needs
COLUMNS = (
    "policy", "load", "done", "tok/s", "output\ntok/s", "goodput\nreq/s", "TTFT ms\np50", "\np99",
    "TBT ms\np50", "\np99", "ms/token\np50", "\np99", "pre-\nempted", "tokens\nagain", "blocks\nswapped",
    "padding", "steps",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(options_of(given))
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except (WrongUse, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, OverflowError) as error:
        command = shlex.join(given)[:300] or "the defaults"
        print(f"error: too large for this machine: {command} ({error or 'out of memory'}); give less", file=sys.stderr)
        return 2
    except Stuck as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Run the options and return the exit code. Raises WrongUse, ValueError, Stuck."""
    console = Console(width=max(Console().width, WIDTH))
    if options.reproduce:
        from services.simulator.literature.main import reproduce

        return reproduce(options.json)
    if options.cases is not None:
        make = print_steps if options.steps else check_steps
        return make(options.cases, options.program)
    if options.speed:
        return show_speed(measure_all(options.policy), options.json, console)
    if options.grid is not None:
        return run_grid(options.grid, options.page, options.json, lambda jobs: run_all(jobs, options.jobs))
    base = Job(options.policy[0], spec_of(options), setup_of(options), clock_of(options))
    notes = notes_of(options, base.setup, base.clock)

    def run_jobs(jobs: list[Job]) -> list[Finished]:
        return run_all(jobs, options.jobs)

    if options.find:
        search = knee if options.find == "knee" else capacity
        return show_search(options.find, search(options.policy, base, run_jobs), notes, options.json, console)
    draw = _drawing(options) if options.plots is not None else None
    finished = run_jobs(
        [
            replace(base, policy=policy, spec=replace(base.spec, rate_scale=scale))
            for policy in options.policy
            for scale in options.rate_scale
        ]
    )
    results = [one.result for one in finished]
    if options.json:
        print(json.dumps({"results": results, "notes": notes}, indent=1))
    else:
        show(results, console)
        for note in notes:
            console.print(f"({note})", markup=False, highlight=False)
    if draw is not None:
        source = base.spec.trace.stem if base.spec.trace else "drawn lengths"
        written = draw(finished, options.plots, f"{source}: {_replica(options)}")
        print("wrote " + ", ".join(str(path) for path in written), file=sys.stderr)
    return report_unfinished(results)


def _drawing(options: argparse.Namespace) -> Callable[[list[Finished], Path, str], list[Path]]:
    """Return the function that draws the plots. Raises WrongUse if matplotlib is missing or the folder not writable."""
    try:
        from services.simulator.command.plots import draw

        options.plots.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.plots):
            pass
    except ImportError as error:
        raise WrongUse(f"--plots: needs matplotlib ({error}); run `make install-dev` in a checkout") from error
    except OSError as error:
        raise WrongUse(f"--plots {options.plots}: {error.strerror}; give a folder that can be written") from error
    return draw


def _replica(options: argparse.Namespace) -> str:
    """Return the source of the step times, for the title of a plot."""
    if options.step_time or options.fit:
        return f"step times of {options.step_time or options.fit}"
    return f"{options.model_shape} on {options.replicas} x {options.device}"


def report_unfinished(results: list[dict[str, Any]]) -> int:
    """Return 1 and print a line on stderr if a request did not finish, else return 0."""
    short = [r for r in results if r["finished"] < r["requests"]]
    for result in short:
        why = "; ".join(f"{count} x {error}" for error, count in result["errors"].items())[:400]
        missing = result["requests"] - result["finished"]
        print(f"{result['policy']}: {quantity(missing, 'request')} did not finish: {why}", file=sys.stderr)
    return 1 if short else 0


def show(results: list[dict[str, Any]], console: Console) -> None:
    """Print the results as a table."""
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

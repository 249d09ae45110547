"""The context of a load run's figures: machine, versions, command, commit; tables and CSV.

Called by `bench/serve/main.py`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

SECRET_OPTION = "--api-key"  # noqa: S105 - the option's name
LATENCIES = ("ttft_ms", "tbt_ms", "tpot_ms", "normalized_latency_ms", "e2e_ms", "late_ms")


def command_line(argv: Sequence[str]) -> list[str]:
    """Return the command as typed, without the key."""
    shown: list[str] = []
    for word in argv:
        if shown and shown[-1] == SECRET_OPTION:
            shown.append("***")
        elif word.startswith(f"{SECRET_OPTION}="):
            shown.append(f"{SECRET_OPTION}=***")
        else:
            shown.append(word)
    return ["orcinus", "bench", "serve", *shown]


def load_name(run: dict[str, Any]) -> str:
    """Return the name of a load: `8 at a time`, `2 a second`, `trace x 1.5`."""
    if run["loop"] == "closed":
        return f"{run['concurrency']} at a time"
    return f"{run['rate']:g} a second" if run["rate"] else f"{run['trace']} x {run['rate_scale']:g}"


def csv_rows(runs: Sequence[dict[str, Any]]) -> str:
    """Return one row per run with a column for each figure; percentiles are columns such as `ttft_ms.p50`."""
    columns = (
        "loop", "rate", "concurrency", "requests", "finished", "failed", "wall_s", "throughput_tok_s", "output_tok_s",
        "request_rps", "goodput_rps", "client_cpu",
    )  # fmt: skip
    percentiles = [(name, p) for name in LATENCIES for p in ("p50", "p90", "p99")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*columns, *(f"{name}.{p}" for name, p in percentiles)])
    for run in runs:
        writer.writerow([*(run[column] for column in columns), *(run[name][p] for name, p in percentiles)])
    return out.getvalue()


def shown(value: Any) -> str:
    """Return a figure as text."""
    return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)


def print_sweep(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """Print one row per run."""
    table = Table(title=f"{runs[0]['model']} at {runs[0]['url']}")
    names = ("load", "finished", "output tok/s", "goodput, 1/s", "TTFT p50, ms", "p99", "TBT p50, ms", "p99")
    for column in names:
        table.add_column(column, justify="left" if column == "load" else "right")
    for run in runs:
        latencies = (shown(run[name][p]) for name in ("ttft_ms", "tbt_ms") for p in ("p50", "p99"))
        rates = (shown(run["output_tok_s"]), shown(run["goodput_rps"]))
        table.add_row(load_name(run), f"{run['finished']} of {run['requests']}", *rates, *latencies)
    console.print(table)


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print the figures as a table, on stdout without `--json`."""
    table = Table(title=f"{result['model']} at {result['url']}")
    for column in ("milliseconds", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name in LATENCIES:
        table.add_row(name.removesuffix("_ms"), *(shown(result[name][p]) for p in ("p50", "p90", "p99")))
    console.print(table)
    console.print(
        f"{result['finished']} of {result['requests']} requests finished in {shown(result['wall_s'])} s: "
        f"{shown(result['output_tok_s'])} output tok/s, {shown(result['throughput_tok_s'])} tok/s with prompts, "
        f"goodput {shown(result['goodput_rps'])} requests/s"
    )
    if result["errors"]:
        console.print("failed: " + ", ".join(f"{count} {kind}" for kind, count in result["errors"].items()))

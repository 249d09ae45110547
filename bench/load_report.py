"""What stands around the figures of a load run: machine, versions, command, commit; and the table for people.

Called by `bench/load.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import commit, machine, versions

SECRET_OPTION = "--api-key"  # noqa: S105 - the option's name
LATENCIES = ("ttft_ms", "tbt_ms", "tpot_ms", "normalized_latency_ms", "e2e_ms", "late_ms")


def command_line(argv: Sequence[str]) -> str:
    """The command as it was typed, without the key."""
    shown: list[str] = []
    for word in argv:
        if shown and shown[-1] == SECRET_OPTION:
            shown.append("***")
        elif word.startswith(f"{SECRET_OPTION}="):
            shown.append(f"{SECRET_OPTION}=***")
        else:
            shown.append(word)
    return "orcinus bench serve " + shlex.join(shown)


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    return {
        "command": command_line(argv),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def print_table(result: dict[str, Any], console: Console) -> None:
    """The figures for people, on stdout when `--json` was not asked for."""

    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)

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

"""The gateway bench's table for people; bench/gateway/main.py shows it when --json was not asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "case", "tokens/s", "events/s", "CPU us a token", "wait p50, ms", "p99", "gateway ran", "in line", "beside it",
)  # fmt: skip


def show(results: Sequence[Mapping[str, Any]], goals: Mapping[str, float]) -> None:
    """One row a case; shares are of one core."""
    console = Console()
    table = Table(title=f"One gateway process on one core, {results[0]['clients']} streams")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "case" else "right")
    for line in results:
        waits = (f"{line[name]:.2f}" if name in line else "" for name in ("wait_p50_ms", "wait_p99_ms"))
        beside = line["client_and_publisher_ran"] + line["redis_ran"]
        table.add_row(
            f"{line['case']}, {line['endpoint']}", f"{line['tokens_s']:,}", f"{line['events_s']:,}",
            f"{line['cpu_us_per_token']:.1f}", *waits, f"{line['gateway_ran']:.0%}", f"{line['gateway_waited']:.0%}",
            f"{beside:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print("Shares of one core: in line, when it could have run and another process did; beside it, the bench.")
    console.print(
        f"Goals: {goals['tokens_s']:,} tokens/s, and a p50 of {goals['wait_p50_ms']:g} ms at 10,000 tokens/s."
    )

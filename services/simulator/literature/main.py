"""`orcinus simulate --reproduce`: compare tables T1 to T11 of the literature with simulated ones; T5 also over the chat
trace.

The published figures are constants in the modules of this package and enter comparisons only. The `sense` of a table
says how exactly it should be reproduced.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Shown

from services.simulator.jobs import Report, progress
from services.simulator.literature.batching import batching_systems, parts_of_an_iteration, parts_of_the_gain
from services.simulator.literature.chunks import chunk_sizes, chunk_sizes_chat, iteration_parts
from services.simulator.literature.granularity import by_request_and_iteration, timelines
from services.simulator.literature.load import slo_under_load
from services.simulator.literature.priorities import classes
from services.simulator.literature.static import padded_batches, slots_in_use
from services.simulator.literature.table import Cell, Table

WIDTH = 140
TABLES: tuple[Callable[[Report], Table], ...] = (
    slots_in_use,
    padded_batches,
    slo_under_load,
    lambda _: iteration_parts(),
    chunk_sizes,
    chunk_sizes_chat,
    classes,
    by_request_and_iteration,
    lambda _: timelines(),
    batching_systems,
    parts_of_the_gain,
    lambda _: parts_of_an_iteration(),
)


def reproduce(json: bool) -> int:
    """Print all tables, or one JSON object; return 0 if each is reproduced in its sense, else 1. Takes a minute."""
    tables: list[Table] = []
    for make in TABLES:
        print(f"table {len(tables) + 1} of {len(TABLES)} ...", file=sys.stderr, flush=True)
        with progress() as report:
            tables.append(make(report))
    missed = [table.name for table in tables if not table.reproduced]
    if json:
        print(
            json_module.dumps({"tables": [table.to_json() for table in tables], "verdict": verdict(tables)}, indent=1)
        )
    else:
        console = Console(width=max(Console().width, WIDTH))
        for table in tables:
            show(table, console)
    print(verdict(tables), file=sys.stderr)
    return 1 if missed else 0


def verdict(tables: list[Table]) -> str:
    """Return one line: the tables that are not reproduced in their sense, and the ratios that the others miss."""
    missed = [table.name for table in tables if not table.reproduced]
    parts = [f"not in their sense: {', '.join(missed)}" if missed else "all in their sense"]
    for table in tables:
        beside = [holds for _, holds, required in table.claims if not required]
        if len(beside) < len(table.claims) and not all(beside):
            parts.append(f"{table.name}: {beside.count(False)} of {len(beside)} ratios missed")
    return "; ".join(parts)


def show(table: Table, console: Console) -> None:
    """Print the rows, the required claims, and those of the other claims that do not hold."""
    shown = Shown(box=SIMPLE, title=f"{table.name}  {table.title} ({table.sense})", title_justify="left")
    for i, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if i else "left")
    for row in table.rows:
        shown.add_row(*(_text(cell) for cell in row))
    console.print(shown)
    for claim, holds, required in table.claims:
        if required or not holds:
            console.print(f"  {'holds ' if holds else 'MISSED'}  {claim}", markup=False, highlight=False)
    for note in table.notes:
        console.print(f"  ({note})", markup=False, highlight=False)
    console.print()


def _text(cell: Cell) -> str:
    return "-" if cell is None else f"{cell:,.10g}" if isinstance(cell, float) else str(cell)

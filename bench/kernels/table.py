"""The result of `orcinus bench kernels` as a table of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = ("operation", "size", "type", "us", "GB/s", "TFLOP/s", "of floor", "error", "beside it, us")


def table(found: Mapping[str, Any]) -> str:
    """A line about the machine, then one a row."""
    peaks = found["peaks"]
    rates = ", ".join(f"{rate:.3g} TFLOP/s {name}" for name, rate in peaks["tflop_s"].items())
    lines = [
        f"{peaks['device']}: memory is copied at {peaks['copy_gb_s']:,.0f} GB/s, read at {peaks['read_gb_s']:,.0f}; "
        f"{rates}"
    ]
    return "\n".join([*lines, *columns([HEAD, *map(cells, found["rows"])])])


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table."""
    beside = [f"{name} {number(us)}" for name, us in row["peers_us"].items()]
    return (
        row["op"],
        row["shape"],
        row["dtype"],
        number(row["us"]),
        number(row["gb_s"]),
        number(row["tflop_s"]),
        "-" if row["of_floor"] is None else f"{row['of_floor']:.2f}",
        "-" if row["error"] is None else f"{row['error']:.1e}",
        "; ".join([*beside, *([row["said"]] if row["said"] else [])]),
    )


def number(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows in columns as wide as they need; all but names and the last to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell if i == last else cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

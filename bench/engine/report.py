"""The tables of `orcinus bench engine` for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 110  # a pipe has no width; the tables need this


def show(found: dict[str, Any]) -> None:
    """Prints iterations beside their floors, then, if it was measured, where their time goes."""
    console = Console()
    console.width = max(console.width, WIDTH)
    model, floor = found["model"], found["floor"]
    weights = "" if model["quantize"] == "none" else f", {model['quantize']} weights"
    where = f"{floor['threads']} threads" if not floor["device"] else floor["device"]
    rate = f"{floor['float32_gflop_s']:.0f} GFLOP/s float32"
    if floor["device"]:
        rate = f"{floor['float32_gflop_s'] / 500:.3g} TFLOP/s in 16 bits"
    console.print(
        f"{model['name']}, {model['layers']} layers, {model['dtype']}{weights}, {model['backend']} kernels, "
        f"{model['matrices']} matrices, {where}; memory {floor['read_gb_s']:.0f} GB/s, {rate}"
    )
    table = Table()
    for name in ("iteration", "tokens", "ms", "p99", "forward", "sample", "floor", "x floor", "torch's matrices"):
        table.add_column(name, justify="left" if name == "iteration" else "right", no_wrap=True)
    for row in found["results"]:
        numbers = (row[name] for name in ("total_ms", "p99_ms", "forward_ms", "sample_ms", "floor_ms"))
        table.add_row(
            row["case"],
            str(row["tokens"]),
            *(f"{number:.2f}" for number in numbers),
            f"{row['ratio']:.2f}",
            f"{row['torch_linear_ms']:.2f}",
        )
    console.print(table)
    profiled = [row for row in found["results"] if "profile_us" in row]
    if not profiled:
        return
    names = sorted(set().union(*(row["profile_us"] for row in profiled)))
    table = Table(title="microseconds of an iteration by operation")
    table.add_column("iteration")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("outside", justify="right")
    for row in profiled:
        spent = row["profile_us"]
        outside = 1000 * row["total_ms"] - sum(spent.values())
        table.add_row(row["case"], *(f"{spent.get(name, 0.0):.0f}" for name in names), f"{outside:.0f}")
    console.print(table)

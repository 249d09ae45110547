"""Draw the chart of docs/peers.md. Called by `python -m bench.peers`; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers import table
from bench.peers.servers import CLASSES, OURS

OURS_COLOUR, THEIR_COLOURS = "#d1495b", ("#30638e", "#5b8e7d", "#8a7aa8", "#a98467", "#7a8b99", "#b7b7a4")
Row = dict[str, Any]


def chart(result: Row, path: Path) -> None:
    """Draw output tokens a second at 1, 8 and 32, one panel a class; whiskers are the range of the rounds."""
    from matplotlib.figure import Figure

    classes = [name for name in CLASSES if any(row["class"] == name and row["medians"] for row in result["rows"])]
    figure = Figure(figsize=(6 * len(classes), 4.2), layout="constrained")
    for axes, precision in zip(figure.subplots(1, len(classes), squeeze=False)[0], classes, strict=True):
        members = [row for row in result["rows"] if row["class"] == precision and row["medians"]]
        width = 0.8 / len(members)
        colours = iter(THEIR_COLOURS * 3)
        for place, row in enumerate(members):
            bars = [
                (spot, found["output_tok_s"])
                for spot, cell in enumerate(("c1", "c8", "c32"))
                if (found := table.in_cell(row, cell))
            ]
            heights = [figures["median"] for _, figures in bars]
            spans = [[f["median"] - f["low"] for _, f in bars], [f["high"] - f["median"] for _, f in bars]]
            axes.bar(
                [spot + (place - (len(members) - 1) / 2) * width for spot, _ in bars],
                heights,
                width * 0.92,
                yerr=spans,
                capsize=2,
                label=row["name"],
                color=OURS_COLOUR if row["peer"] == OURS else next(colours),
            )
        axes.set_xticks(range(3), ["1", "8", "32"])
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("output tokens a second")
        axes.set_title(f"{precision}: {CLASSES[precision]}", fontsize=9)
        axes.legend(fontsize=7, frameon=False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)

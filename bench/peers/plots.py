"""Draw the charts of docs/peers.md. Called by `python -m bench.peers` and `bench.peers.kill`; needs matplotlib."""

from __future__ import annotations

import statistics
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
    peers = dict.fromkeys(row["peer"] for row in result["rows"] if row["peer"] != OURS)
    colours = dict(zip(peers, THEIR_COLOURS, strict=False)) | {OURS: OURS_COLOUR}
    figure = Figure(figsize=(6 * len(classes), 4.2), layout="constrained")
    for axes, precision in zip(figure.subplots(1, len(classes), squeeze=False)[0], classes, strict=True):
        members = [row for row in result["rows"] if row["class"] == precision and row["medians"]]
        width = 0.8 / len(members)
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
                color=colours[row["peer"]],
            )
        axes.set_xticks(range(3), ["1", "8", "32"])
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("output tokens a second")
        axes.set_title(f"{precision}: {CLASSES[precision]}", fontsize=9)
        axes.legend(fontsize=7, frameon=False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)


def kill_chart(result: Row, path: Path) -> None:
    """Draw what became of the streams and how long the next token took, one bar a case; medians of the rounds."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["rounds"]]
    names = [f"{row['server']}\n{row['killed']} killed" for row in rows]
    figure = Figure(figsize=(11, 0.55 * len(rows) + 1.4), layout="constrained")
    answers, waits = figure.subplots(1, 2, sharey=True)
    left = [0.0] * len(rows)
    parts = (("right", "whole and right", "#5b8e7d"), ("resumed_right", "cut off, right after going on", "#a9c5a0"),
             ("lost", "lost", "#d1495b"))  # fmt: skip
    for part, label, colour in parts:
        widths = [statistics.median(kept(found)[part] for found in row["rounds"]) for row in rows]
        answers.barh(names, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    answers.set_xlabel(f"answers, of {result['settings']['streams']} streams at once")
    answers.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    answers.invert_yaxis()
    bars = waits.barh(
        names,
        [row["first_token_s"] for row in rows],
        color=["#5b8e7d" if row["peer"] == OURS else "#7a8b99" for row in rows],  # red is for what was lost
    )
    waits.bar_label(bars, fmt=" %.1f s", fontsize=8)
    waits.set_xlabel("seconds until a new request has its first token")
    waits.margins(x=0.15)
    for axes in (answers, waits):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def kept(found: Row) -> Row:
    """Return a round with `lost`: streams that gave no right answer, also not after going on."""
    return {**found, "lost": found["streams"] - found["right"] - found["resumed_right"]}

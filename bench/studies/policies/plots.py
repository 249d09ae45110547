"""Plot the pictures of docs/policies.md from the committed results. Needs matplotlib (`bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from bench.studies.policies.claims import OURS
from bench.studies.policies.runs import TITLES

_MARKS = "osD^v<>PX*hpdH8"
_DPI = 100


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write goodput-TRACE.png for each trace, and static.png; return the paths."""
    written = []
    for head in results["studies"]:
        if head["study"] == "main":
            written.append(folder / f"goodput-{head['trace']}.png")
            _save(_goodput(results, head), written[-1])
    written.append(folder / "static.png")
    _save(_static(results["static"]), written[-1])
    return written


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, metadata={"Software": ""})


def _look(policy: str, number: int) -> dict[str, Any]:
    """Return the style of a line: ours black and thick, ten colours for others, then the same dashed."""
    if policy == OURS:
        return {"color": "black", "linewidth": 2.5, "marker": "o", "zorder": 3}
    stroke = "-" if number < 10 else "--"
    return {"color": f"C{number % 10}", "linestyle": stroke, "marker": _MARKS[number], "markersize": 5}


def _goodput(results: dict[str, Any], head: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in results["rows"] if (row["study"], row["trace"]) == ("main", head["trace"])]
    for number, policy in enumerate(head["policies"]):
        line = [(row["load"], row["goodput_rps"]) for row in rows if row["policy"] == policy]
        axes.plot(*zip(*line, strict=True), label=policy, **_look(policy, number))
    rate = head["saturation_rps"]
    axes.plot(
        head["loads"], [load * rate for load in head["loads"]], color="0.6", linestyle=":", label="all that arrive"
    )
    axes.set_ylim(bottom=0, top=1.15 * max(row["goodput_rps"] for row in rows))
    axes.set_title(f"{TITLES[head['trace']]}: requests a second within 2 s and 100 ms")
    axes.set_xlabel(f"load, times {rate:.1f} requests a second")
    _finish(axes, "goodput, requests a second")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _static(static: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, one in enumerate(static["policies"]):
        points = sorted(one["curve"] + [one["crossing"]] * bool(one["crossing"]), key=lambda p: p["offered_rps"])
        line = [(point["normalized_ms"], point["throughput_tok_s"]) for point in points]
        label = one["policy"].replace("static:batch=static-", "static, batches of ")
        axes.plot(*zip(*line, strict=True), label=label, **_look(one["policy"], number))
    axes.axvline(static["limit_ms"], color="0.4", linestyle=":", label="twice the unloaded latency")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter("")
    axes.set_title(f"{TITLES[static['trace']]}: throughput against latency")
    axes.set_xlabel("median normalized latency, ms per output token")
    _finish(axes, "tokens a second, prompts included")
    axes.legend(fontsize="small")
    return figure


def _finish(axes: Axes, y: str) -> None:
    axes.set_ylabel(y)
    axes.grid(alpha=0.3, which="both")

"""Plots of simulated runs, one PNG each: trade-off, distributions, utilisation over time, violations against load.

Needs matplotlib (the `bench` extra) and no display. Called by main.py with --plots.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.simulator.jobs import Finished

_STYLES = ("-", "--", ":", "-.")
_MARKS = "osD^v<>PX*hp"


def draw(runs: Sequence[Finished], folder: Path, title: str) -> list[Path]:
    """Write four plots into `folder` and return their paths. The runs of one policy at several loads form one line."""
    policies = list(dict.fromkeys(run.result["policy"] for run in runs))
    by_policy = {policy: [run for run in runs if run.result["policy"] == policy] for policy in policies}
    written = []
    for name, size, make in (
        ("throughput_tbt", (7, 5), _trade_off),
        ("distributions", (12, 5), _distributions),
        ("utilisation", (12, 5), _utilisation),
        ("violations", (7, 5), _violations),
    ):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title)
        make(figure, by_policy)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=110)
    return written


def _look(number: int) -> dict[str, Any]:
    """Return the style of a line: ten colours, then the same colours with another stroke."""
    return {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)]}


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _trade_off(figure: Figure, by_policy: dict[str, list[Finished]]) -> None:
    axes = figure.subplots()
    for number, (policy, runs) in enumerate(by_policy.items()):
        x = [run.result["tbt_ms"]["p99"] for run in runs if run.result["tbt_ms"]["p99"] is not None]
        y = [run.result["throughput_tok_s"] for run in runs if run.result["tbt_ms"]["p99"] is not None]
        axes.plot(x, y, marker=_MARKS[number % len(_MARKS)], label=policy, **_look(number))
    axes.set_xscale("log")
    _finish(axes, "P99 time between tokens, ms", "tokens a second, prompts included")


def _distributions(figure: Figure, by_policy: dict[str, list[Finished]]) -> None:
    """Plot the highest load of each policy."""
    ttft, tbt = figure.subplots(1, 2)
    for number, (policy, runs) in enumerate(by_policy.items()):
        run = runs[-1]
        label = f"{policy}, load {run.result['rate_scale']:g}"
        first = np.sort(run.ttft_ns) / 1e6
        if first.size:
            ttft.step(first, np.arange(1, first.size + 1) / first.size, where="post", label=label, **_look(number))
        times, counts = run.gaps
        if times.size:
            tbt.step(times / 1e6, np.cumsum(counts) / counts.sum(), where="post", label=label, **_look(number))
    for axes, what in ((ttft, "time to first token, ms"), (tbt, "time between tokens, ms")):
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        _finish(axes, what, "share at or below")


def _utilisation(figure: Figure, by_policy: dict[str, list[Finished]]) -> None:
    """Plot the highest load of each policy."""
    slots, blocks = figure.subplots(1, 2, sharex=True)
    for number, (policy, runs) in enumerate(by_policy.items()):
        samples = runs[-1].samples
        times = [sample.time_s for sample in samples]
        slots.plot(times, [sample.slots for sample in samples], label=policy, lw=0.8, **_look(number))
        blocks.plot(times, [sample.blocks for sample in samples], label=policy, lw=0.8, **_look(number))
    for axes, what in ((slots, "share of slots in use"), (blocks, "share of KV blocks in use")):
        axes.set_ylim(0, 1.02)
        _finish(axes, "seconds", what)


def _violations(figure: Figure, by_policy: dict[str, list[Finished]]) -> None:
    axes = figure.subplots()
    for number, (policy, runs) in enumerate(by_policy.items()):
        loads = [run.result["rate_scale"] for run in runs]
        shares = [100 * run.result["slo_violations"] for run in runs]
        axes.plot(loads, shares, marker=_MARKS[number % len(_MARKS)], label=policy, **_look(number))
    axes.set_ylim(-2, 102)
    _finish(axes, "load (times the trace's rate)", "requests outside their SLOs, %")

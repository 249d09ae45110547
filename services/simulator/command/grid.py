"""`orcinus simulate --grid FILE`: run a grid, print where ours is beaten, and write a page of heat maps."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from services.simulator.command.options import WrongUse, clock_of, options_of, setup_of, spec_of
from services.simulator.command.values import policies
from services.simulator.grid import FIGURES, MARGIN, Cell, Grid, as_json, cells_of, compare, read_grid, summary
from services.simulator.jobs import Finished, Job
from shared.messages import quantity

FORBIDDEN = {
    "grid",
    "page",
    "json",
    "plots",
    "find",
    "reproduce",
    "cases",
    "speed",
    "policy",
    "seed",
    "jobs",
    "rate-scale",
}
"""Options that a grid sets itself or that make no run."""


def run_grid(path: Path, page: Path | None, as_object: bool, run: Callable[[list[Job]], list[Finished]]) -> int:
    """Run a grid and show it; return 1 if a request did not finish. Raise WrongUse, ValueError."""
    grid = read_grid(path)
    cells = cells_of(grid)
    jobs = [job for cell in cells for job in _jobs(grid, cell)]
    if page is not None:
        _check_writable(page)
    results = [finished.result for finished in run(jobs)]
    each = len(grid.policies) * len(grid.seeds)
    for number, cell in enumerate(cells):
        mine = iter(results[number * each : (number + 1) * each])
        compare(cell, grid.policies, {policy: [next(mine) for _ in grid.seeds] for policy in grid.policies})
    if as_object:
        print(json.dumps(as_json(grid, cells), indent=1))
    else:
        show(grid, cells, Console())
    if page is not None:
        page.write_text(render(grid, cells))
        print(f"wrote {page}", file=sys.stderr)
    total, finished = (sum(int(result[name]) for result in results) for name in ("requests", "finished"))
    if finished < total:
        left = quantity(total - finished, "request")
        print(f"--grid: {left} of {total:,} did not finish; latency and TTFT leave them out", file=sys.stderr)
        return 1
    return 0


def _jobs(grid: Grid, cell: Cell) -> list[Job]:
    """Return the runs of a cell, policy by policy. Raise WrongUse with the cell's name."""
    names = {word.removeprefix("--").partition("=")[0] for word in cell.arguments}
    if wrong := sorted(names & FORBIDDEN):
        raise WrongUse(f"--grid: {cell.workload}: {wrong[0]}: a grid sets this itself; drop it")
    try:
        for policy in grid.policies:
            policies(policy)
        options = options_of(cell.arguments)
        base = Job("", spec_of(options), setup_of(options), clock_of(options))
    except (WrongUse, argparse.ArgumentTypeError) as error:
        raise WrongUse(f"--grid: {cell.workload}: {error}") from error
    return [
        replace(base, policy=policy, spec=replace(base.spec, seed=seed), setup=replace(base.setup, seed=seed))
        for policy in grid.policies
        for seed in grid.seeds
    ]


def _check_writable(page: Path) -> None:
    try:
        with page.open("a"):
            pass
    except OSError as error:
        raise WrongUse(f"--page {page}: {error.strerror}; give a file that can be written") from error


def show(grid: Grid, cells: list[Cell], console: Console) -> None:
    """Print the counts and each cell in which a policy beats the first."""
    counts_of = summary(cells)
    ours = grid.policies[0]
    table = Table(
        box=SIMPLE, title=f"cells in which a policy beats {ours} by more than {MARGIN:.0%}", title_justify="left"
    )
    for name in ("cell", "policy", *(figure.name for figure in FIGURES)):
        table.add_column(name, justify="left" if name in ("cell", "policy") else "right")
    for cell in cells:
        for policy in cell.beaten_by():
            ratios = [cell.ratios[figure.name][policy][0] for figure in FIGURES]
            table.add_row(cell.name, policy, *(f"{ratio - 1:+.1%}" for ratio in ratios))
    if counts_of["beaten"]:
        console.print(table)
    for part in ("all", "tuned", "held back"):
        counts = counts_of[part]
        console.print(f"{part}: {ours} is not beaten in {counts['not beaten']} of {counts['cells']} cells")


def render(grid: Grid, cells: list[Cell]) -> str:
    """Return the page: for each figure a heat map of ours as a share of the best policy."""
    environment = Environment(
        loader=PackageLoader("services.simulator.command", "."), autoescape=True, undefined=StrictUndefined
    )
    rows: dict[tuple[str, str], dict[float | None, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.workload, cell.limits), {})[cell.load] = cell
    loads: list[float | None] = [*grid.loads, *([None] if any(cell.load is None for cell in cells) else [])]
    return environment.get_template("grid.html").render(
        grid=grid,
        rows=rows,
        loads=loads,
        figures=FIGURES,
        summary=summary(cells),
        margin=MARGIN,
        colour=colour,
        tip=tip,
    )


def colour(share: float) -> str:
    """Return a CSS colour of a share of the best: green at 1, yellow at 0.95, red at 0.8 and below."""
    hue = 130 * max(0.0, min(1.0, (share - 0.8) / 0.2)) ** 1.5
    return f"hsl({hue:.0f} 60% 55%)"


def tip(cell: Cell, figure: str) -> str:
    """Return what a cell says under the pointer: each policy's value and its ratio to ours with its interval."""
    values: dict[str, Any] = cell.values[figure]
    lines = [cell.name + (" (held back)" if cell.held_back else "")]
    for policy, value in values.items():
        if policy in cell.ratios[figure]:
            ratio, low, high = cell.ratios[figure][policy]
            lines.append(f"{policy}: {value:,.4g} ({ratio - 1:+.1%}; 95 % {low - 1:+.1%} to {high - 1:+.1%})")
        else:
            lines.append(f"{policy}: {value:,.4g}")
    return "\n".join(lines)

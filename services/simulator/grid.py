"""A grid of workloads, limits and loads from a TOML file: every preset in every cell, and where one beats the first.

`orcinus simulate --grid FILE` runs it; docs/simulate.md#grids describes the file. A cell is a workload at a load under
limits, run once for each policy and seed; all policies of a cell and seed see the same requests.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MARGIN = 0.02
"""A policy that is better by more than this in one figure, and not worse by more in any other, beats ours."""
HELD_BACK_OF = 3
"""A cell in so many is held back from tuning, by a hash of its name."""
MAX_BYTES = 1 << 20
MAX_RUNS = 100_000
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided 95 % quantiles of Student's t by the number of seeds; above 10: 1.96, which is a little narrow."""

Option = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that cells are compared in."""

    name: str
    title: str
    of: Callable[[dict[str, Any]], float]
    higher: bool  # is better


def _goodput(result: dict[str, Any]) -> float:
    return (1 - float(result["slo_violations"])) * int(result["requests"]) / float(result["duration_s"])


def _latency(mean_ms: float | None) -> float:
    """Return a latency; no request finished counts as infinite."""
    return math.inf if mean_ms is None else float(mean_ms)


FIGURES = (
    Figure("goodput", "Goodput: requests a second within the limits", _goodput, higher=True),
    Figure("throughput", "Throughput: tokens a second", lambda result: float(result["throughput_tok_s"]), higher=True),
    Figure("latency", "Mean end-to-end latency", lambda result: _latency(result["e2e_ms"]["mean"]), higher=False),
    Figure("ttft_p99", "TTFT p99", lambda result: _latency(result["ttft_ms"]["p99"]), higher=False),
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Workload(_Strict):
    """One row of the grid: options of `orcinus simulate` without their dashes."""

    name: str = Field(min_length=1, max_length=60)
    rate: float = Field(0, ge=0, le=1e6, description="requests a second at load 1; 0: all arrive at once")
    options: dict[str, Option] = {}
    limits: list[tuple[float, float]] = Field(
        [(0, 0)], min_length=1, max_length=20, description="TTFT, TBT in ms; 0: none"
    )


class Grid(_Strict):
    """The file."""

    policies: list[str] = Field(
        min_length=2, max_length=50, description="presets; the first is compared with the others"
    )
    seeds: list[Annotated[int, Field(ge=0, le=2**32 - 1)]] = Field(min_length=1, max_length=50)
    loads: list[Annotated[float, Field(gt=0, le=1e6)]] = Field(min_length=1, max_length=50)
    options: dict[str, Option] = {}
    workloads: list[Workload] = Field(min_length=1, max_length=200)


@dataclass(slots=True)
class Cell:
    """One workload at one load under one pair of limits."""

    workload: str
    limits: str
    load: float | None  # None: all requests at once
    arguments: list[str]
    ratios: dict[str, dict[str, tuple[float, float, float]]] = field(default_factory=dict)
    """By figure and policy: how much better it is than ours (1.02: by 2 %), and the ends of the 95 % interval."""
    values: dict[str, dict[str, float]] = field(default_factory=dict)  # by figure and policy, mean over the seeds

    @property
    def name(self) -> str:
        load = "at once" if self.load is None else f"load {self.load:g}"
        return f"{self.workload}, {self.limits}, {load}"

    @property
    def held_back(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] % HELD_BACK_OF == 0

    def beaten_by(self) -> dict[str, list[str]]:
        """Return the policies that are better in a figure and in none worse, with these figures."""
        beaten: dict[str, list[str]] = {}
        for policy in next(iter(self.ratios.values())):
            ratios = {figure: self.ratios[figure][policy][0] for figure in self.ratios}
            better = [figure for figure, ratio in ratios.items() if ratio > 1 + MARGIN]
            if better and min(ratios.values()) >= 1 - MARGIN:
                beaten[policy] = better
        return beaten

    def best(self, figure: str) -> float:
        """Return ours as a share of the best policy in a figure: 1 where ours is the best."""
        return min(1.0, 1 / max(ratio for ratio, _, _ in self.ratios[figure].values()))


def read_grid(path: Path) -> Grid:
    """Read and check a grid. Raise ValueError with the place and the value."""
    try:
        if not path.is_file():
            raise ValueError(f"--grid {path}: no such file; give a TOML file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"--grid {path}: larger than {MAX_BYTES:,} bytes; give a smaller grid")
        grid = Grid.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"--grid {path}: {error.strerror}; give a file that can be read") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--grid {path}: is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        value = f"{first['input']!r}: "[:42] if isinstance(first["input"], Option) else ""
        raise ValueError(f"--grid {path}: {where}: {value}{first['msg']}; see docs/simulate.md#grids") from error
    lists: dict[str, list[Any]] = {
        "policy": grid.policies,
        "seed": grid.seeds,
        "load": grid.loads,
        "workload": [workload.name for workload in grid.workloads],
    }
    lists |= {f"workload {each.name!r}: pair of limits": each.limits for each in grid.workloads}
    for name, values in lists.items():
        if twice := [value for number, value in enumerate(values) if value in values[:number]]:
            raise ValueError(f"--grid {path}: {name} {twice[0]!r} is given twice; drop one")
    return grid


def cells_of(grid: Grid) -> list[Cell]:
    """Return the cells, in the order of the file. Raise ValueError for too many runs."""
    cells = []
    for workload in grid.workloads:
        for ttft_ms, tbt_ms in workload.limits:
            options = {**grid.options, **workload.options}
            if ttft_ms:
                options["ttft-slo-ms"] = ttft_ms
            if tbt_ms:
                options["tbt-slo-ms"] = tbt_ms
            limits = f"{ttft_ms:g} / {tbt_ms:g} ms" if ttft_ms or tbt_ms else "no limits"
            for load in grid.loads if workload.rate else [None]:
                at: dict[str, Option] = {"at-once": True} if load is None else {"rate": round(workload.rate * load, 6)}
                cells.append(Cell(workload.name, limits, load, arguments(options | at)))
    runs = len(cells) * len(grid.policies) * len(grid.seeds)
    if runs > MAX_RUNS:
        raise ValueError(f"--grid: {runs:,} runs, at most {MAX_RUNS:,}; give fewer cells, policies or seeds")
    return cells


def arguments(options: dict[str, Option]) -> list[str]:
    """Return options as they stand on the command line; `name = true` is an option without a value."""
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value is not False
    ]


def compare(cell: Cell, policies: Sequence[str], results: dict[str, list[dict[str, Any]]]) -> None:
    """Fill in a cell. results: by policy, a result for each seed."""
    ours, *others = policies
    for figure in FIGURES:
        values = {policy: [figure.of(result) for result in results[policy]] for policy in policies}
        cell.values[figure.name] = {policy: statistics.fmean(values[policy]) for policy in policies}
        pairs = {policy: list(zip(values[policy], values[ours], strict=True)) for policy in others}
        cell.ratios[figure.name] = {policy: _ratio(pairs[policy], figure.higher) for policy in others}


def _ratio(pairs: list[tuple[float, float]], higher: bool) -> tuple[float, float, float]:
    """Return the geometric mean of paired ratios (above 1: the other is better) and the ends of its 95 % interval."""
    logs = [_log(other, ours) if higher else _log(ours, other) for other, ours in pairs]
    mean = statistics.fmean(logs)
    half = 0.0
    if len(logs) > 1:
        half = T_95.get(len(logs), 1.96) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _log(numerator: float, denominator: float) -> float:
    """Return the logarithm of a ratio within [1/1000, 1000]: a figure may be 0."""
    if numerator == denominator:
        return 0.0
    return math.log(min(max(numerator / denominator if denominator else 1e3, 1e-3), 1e3))


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the counts, for all cells and for the held-back ones, and the exceptions."""

    def count(chosen: list[Cell]) -> dict[str, int]:
        return {"cells": len(chosen), "not beaten": sum(not cell.beaten_by() for cell in chosen)}

    return {
        "all": count(list(cells)),
        "tuned": count([cell for cell in cells if not cell.held_back]),
        "held back": count([cell for cell in cells if cell.held_back]),
        "beaten": {cell.name: cell.beaten_by() for cell in cells if cell.beaten_by()},
    }


def as_json(grid: Grid, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return everything that the page shows."""
    rows = [
        {
            "workload": cell.workload,
            "limits": cell.limits,
            "load": cell.load,
            "held_back": cell.held_back,
            "arguments": " ".join(cell.arguments),
            "values": _rounded(cell.values),
            "ratios": _rounded(cell.ratios),
            "beaten_by": cell.beaten_by(),
        }
        for cell in cells
    ]
    return {"policies": grid.policies, "seeds": grid.seeds, "margin": MARGIN, "summary": summary(cells), "cells": rows}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if math.isfinite(value) else None

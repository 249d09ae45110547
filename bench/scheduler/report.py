"""Print the scheduler bench's tables; bench/scheduler/main.py calls it without --json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

Line = dict[str, Any]
Column = tuple[str, Callable[[Line], str]]


def show(found: Line) -> None:
    """Print a table for each part that was measured, with its goals."""
    console = Console()
    if found["results"]:
        columns = [_plain("running"), *_COSTS, _GOAL, _RATIO, ("protobuf", _pair("wire_us"))]
        _table(console, "Steady decode", columns, found["results"])
    if "admission" in found:
        about = [
            _plain("running"),
            _plain("entering"),
            _plain("prompt_tokens"),
            _plain("cached_tokens"),
            _plain("evicts"),
        ]
        _table(console, "An iteration in which prompts enter", [*about, *_COSTS, _GOAL], found["admission"])
    if "wire" in found:
        names = ("plan", "apply", "encode", "parse", "stats", "batch", "resp", "total")
        columns = [_plain("case"), _plain("running"), *((name, _pair(f"{name}_us")) for name in names), _LOWEST, _GOAL]
        _table(console, "All that the scheduler computes", columns, found["wire"])
    if "cases" in found:
        columns = [_plain("case"), _plain("running"), *_BEST, ("/ floor", _of_floor), ("goal", _verdict)]
        _table(console, "Cases beside the floor: p50 / p90 of the best round", columns, found["cases"])
    for name, lines in found.get("curves", {}).items():
        _table(console, f"Cost by {name}", [_plain("case"), _plain(name), *_COSTS, _RATIO], lines)
    console.print("Microseconds, p50 / p99: medians of the rounds; lowest: p50 of the best round.")


def _table(console: Console, title: str, columns: list[Column], lines: list[Line]) -> None:
    table = Table(title=title)
    for name, _ in columns:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*(cell(line) for _, cell in columns))
    console.print(table)


def _plain(name: str) -> Column:
    return name.replace("_", " "), lambda line: _shown(line[name])


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).lower()


def _pair(name: str) -> Callable[[Line], str]:
    return lambda line: f"{line[name]['p50']:.1f} / {line[name]['p99']:.1f}"


def _ratio(line: Line) -> str:
    goal = f" (<= {line['goal_p99_over_p50']})" if "goal_p99_over_p50" in line else ""
    return f"{line['p99_over_p50']:.1f}{goal}"


def _best(name: str) -> Callable[[Line], str]:
    return lambda line: f"{line[name]['p50']:.1f} / {line[name]['p90']:.1f}" if name in line else ""


def _of_floor(line: Line) -> str:
    if "ratio_to_steady" in line:
        return f"{line['ratio']:.2f} ({line['ratio_to_steady']:.2f} of steady)"
    return f"{line['ratio']:.2f}"


def _verdict(line: Line) -> str:
    """Return the goal of a case, and whether it is met."""
    if "met" not in line:
        return ""
    verdict = "met" if line["met"] else "missed"
    if "goal_ratio_to_steady" in line:
        return f"<= {line['goal_ratio_to_steady']} of steady: {verdict}"
    return f"<= {line['goal_ratio']}: {verdict}"


_LOWEST: Column = ("lowest", lambda line: f"{line['total_us']['lowest']:.1f}")
_GOAL: Column = ("goal (p50)", lambda line: f"{line['goal_us']}" if "goal_us" in line else "")
_RATIO: Column = ("p99 / p50", _ratio)
_COSTS: list[Column] = [
    ("plan", _pair("plan_us")),
    ("apply", _pair("apply_us")),
    ("plan + apply", _pair("total_us")),
    _LOWEST,
]
_BEST: list[Column] = [
    ("add", _best("add_us")),
    ("plan + apply", _best("total_us")),
]

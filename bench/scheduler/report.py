"""The scheduler bench's tables for people; bench/scheduler/main.py shows them when --json was not asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

Line = dict[str, Any]
Column = tuple[str, Callable[[Line], str]]


def show(found: Line) -> None:
    """Each part that was measured: p50 / p99 in microseconds, the lowest p50 of the rounds, the goals."""
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


_LOWEST: Column = ("lowest", lambda line: f"{line['total_us']['lowest']:.1f}")
_GOAL: Column = ("goal (p50)", lambda line: f"{line['goal_us']}" if "goal_us" in line else "")
_RATIO: Column = ("p99 / p50", _ratio)
_COSTS: list[Column] = [
    ("plan", _pair("plan_us")),
    ("apply", _pair("apply_us")),
    ("plan + apply", _pair("total_us")),
    _LOWEST,
]

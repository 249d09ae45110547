"""Turn the figures of every round into medians, classes and ratios. Pure; bench/templates/peers.md shows them.

A result is the object that `bench/peers/run.py` writes: `rows`, each with `rounds`, each with `cells` by name (`c1`,
`c8`, `c32`, `longest`, `mix`). A cell counts when all its requests finished with as many tokens as were asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.peers.servers import CLASSES, EXACT, INT4, OURS, REDUCED

CELLS = ("c1", "c8", "c32", "longest", "mix")
# What is compared: label, cell, figure, whether more is better.
COMPARED = (
    ("tok/s at 1", "c1", "output_tok_s", True),
    ("tok/s at 8", "c8", "output_tok_s", True),
    ("tok/s at 32", "c32", "output_tok_s", True),
    ("TTFT of 2,000 tokens", "longest", "ttft_ms.p50", False),
    ("P99 TBT in the mix", "mix", "tbt_ms.p99", False),
    ("tok/s in the mix", "mix", "output_tok_s", True),
)
FIGURES = (
    "output_tok_s",
    "ttft_ms.p50",
    "ttft_ms.p99",
    "tbt_ms.p50",
    "tbt_ms.p99",
    "tbt_ms.max",
    "long_ttft_ms.p50",
    "cpu_s_per_1000_tokens",
    "server_cores",
    "client_cores",
    "other_cores",
)
BUSY_CORES = 0.15
Row = dict[str, Any]


def goal(label: str, precision: str) -> float | None:
    """Return the wanted ratio of Orcinus to the best peer: a bound for times, a minimum else; None without a goal."""
    if label == "tok/s at 1":
        return 1.1 if precision == INT4 else 1.0
    if label in ("tok/s at 8", "tok/s at 32"):
        return 1.1 if precision in (EXACT, REDUCED) else None
    return None if label == "tok/s in the mix" else 1.0


def value(cell: Row, figure: str) -> float | None:
    """Return a figure such as `tbt_ms.p99` of a cell; None if the cell lacks it."""
    found: Any = cell
    for name in figure.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else float(found)


def counts(cell: Row) -> bool:
    """Return whether every request of the cell ended with every token."""
    return bool(cell["requests"] and cell["finished"] == cell["requests"] and not cell["short"])


def median_and_range(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "low": min(values), "high": max(values), "n": len(values)}


def medians(rounds: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return cell -> figure -> median, low, high and n over the rounds in which the cell counts.

    Those that other programs disturbed are left out where one was quiet.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in CELLS:
        cells = [round_["cells"][name] for round_ in rounds if name in round_["cells"]]
        good = [cell for cell in cells if counts(cell)]
        quiet = [cell for cell in good if cell["other_cores"] <= BUSY_CORES]
        figures = {}
        for figure in FIGURES:
            if values := [number for cell in quiet or good if (number := value(cell, figure)) is not None]:
                figures[figure] = median_and_range(values)
        if figures:
            found[name] = figures
    return found


def class_of(declared: str, same: int | None, of: int) -> str:
    """Return the class of a server: exact only while every answer equals the reference's."""
    return declared if declared != EXACT or same == of else REDUCED


def finish(result: Row) -> Row:
    """Add class and medians to every row, and the ratios to the result."""
    for row in result["rows"]:
        row["class"] = class_of(row["declared"], row["same_answers"], row["of_answers"])
        row["medians"] = medians(row["rounds"])
        row["memory_mib"] = max(
            (round_["memory_mib"] for round_ in row["rounds"] if "memory_mib" in round_), default=None
        )
    result["ratios"] = ratios(result["rows"])
    return result


RUN = ("command", "date", "commit", "machine")
"""What `merged` keeps of the run of each row."""


def merged(before: Row, result: Row) -> Row:
    """Return a result in which a later run of some classes replaces their rows; each row names its `run`.

    Raises ValueError where the two were not measured alike.
    """
    for key in ("settings", "model_sha256"):
        if before[key] != result[key]:
            raise ValueError(f"{key}: {result[key]}, not the {before[key]} of the other classes; measure all of them")
    measured = {row["declared"] for row in result["rows"]}
    kept = [row for row in before["rows"] if row["declared"] not in measured]
    rows = [
        {"run": {key: one[key] for key in RUN}, **row}
        for one, of in ((before, kept), (result, result["rows"]))
        for row in of
    ]
    return finish({**before, "rows": rows})


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return Orcinus against the best peer of each class for each figure; a class without either has no line."""
    found = []
    for precision in CLASSES:
        members = [row for row in rows if row["class"] == precision]
        for label, cell, figure, more in COMPARED:
            ours = best([row for row in members if row["peer"] == OURS], cell, figure, more)
            theirs = best([row for row in members if row["peer"] != OURS], cell, figure, more)
            if ours is None or theirs is None:
                continue
            ratio = ours[1] / theirs[1]
            wanted = goal(label, precision)
            found.append(
                {
                    "class": precision,
                    "what": label,
                    "orcinus": ours[1],
                    "ours": ours[0],
                    "best_peer": theirs[0],
                    "best": theirs[1],
                    "ratio": round(ratio, 3),
                    "goal": wanted,
                    "more_is_better": more,
                    "reached": None if wanted is None else ratio >= wanted if more else ratio <= wanted,
                }
            )
    return found


def best(rows: Sequence[Row], cell: str, figure: str, more: bool) -> tuple[str, float] | None:
    """Return name and median of the best row; None if no row has the figure."""
    known = [(row["name"], row["medians"][cell][figure]["median"]) for row in rows if figure in in_cell(row, cell)]
    return (max if more else min)(known, key=lambda pair: pair[1]) if known else None


def in_cell(row: Row, cell: str) -> Row:
    found: Row = row["medians"].get(cell, {})
    return found


def disturbed(rows: Sequence[Row]) -> list[str]:
    """Return the measurements in which other programs used more than `BUSY_CORES` of the machine."""
    return [
        f"{row['name']}, round {round_['round']}, {name}: {cell['other_cores']:.2f} cores"
        for row in rows
        for round_ in row["rounds"]
        for name, cell in round_["cells"].items()
        if cell["other_cores"] > BUSY_CORES
    ]

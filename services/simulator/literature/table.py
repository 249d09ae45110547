"""A table of the literature beside a simulated one: rows, and claims that hold or do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def unseen(done: int, total: int) -> None:
    """Show no progress."""


Cell = float | int | str | None


@dataclass(slots=True)
class Table:
    """A comparison. `sense` says how exactly to reproduce the table; the required claims decide whether it is."""

    name: str
    title: str
    sense: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    claims: list[tuple[str, bool, bool]] = field(default_factory=list)  # text, holds, required
    notes: list[str] = field(default_factory=list)

    def claim(self, text: str, holds: bool, required: bool = True) -> None:
        self.claims.append((text, bool(holds), required))

    @property
    def reproduced(self) -> bool:
        return all(holds for _, holds, required in self.claims if required)

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.name,
            "title": self.title,
            "sense": self.sense,
            "columns": list(self.columns),
            "rows": self.rows,
            "claims": [{"claim": text, "holds": holds, "required": req} for text, holds, req in self.claims],
            "notes": self.notes,
            "reproduced": self.reproduced,
        }


def monotone(values: Sequence[float], rising: bool = True) -> bool:
    """Return whether the values never move against the direction; equal neighbours are allowed."""
    pairs = list(itertools.pairwise(values))
    return all(a <= b for a, b in pairs) if rising else all(a >= b for a, b in pairs)

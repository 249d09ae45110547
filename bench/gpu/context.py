"""The inputs of the parts of `bench.gpu`, and access to the results of earlier parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a part. `found` holds the results of the parts before it."""

    device: str
    quick: bool
    out: Path

    def found(self, part: str) -> dict[str, Any]:
        """Return the result of a part; empty if it has not run."""
        try:
            result: dict[str, Any] = json.loads((self.out / f"{part}.json").read_text())
        except (OSError, ValueError):
            return {}
        return result

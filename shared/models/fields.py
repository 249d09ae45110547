"""Read the fields of a model's JSON files, each with a type and bounds.

No value of a file (`model_files.read_json`) is used unchecked. Imports no torch: `orcinus up` reads before anything
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ModelError
from shared.messages import quote

LARGEST = 1 << 24  # of any size; a vocabulary or a context beyond it is a mistake


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields under their usual names, defaults filled in; `field_names` gives the names that the file uses instead.

    A field that is null is as one that is left out. All methods raise ModelError.
    """

    raw: Mapping[str, Any]
    source: str  # the file, for errors
    field_names: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            wanted = f"a positive integer up to {most}" if least == 1 else f"an integer from {least} to {most}"
            raise self._type_error(key, value, wanted)
        return value

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        value = self._value(key, default)
        # NaN is in no range.
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self._type_error(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._type_error(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._type_error(key, value, "a string")
        return value

    def fields(self, key: str) -> dict[str, Any]:
        """Return an object; empty when there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._type_error(key, value, "an object")
        return value

    def name(self, key: str) -> str:
        """Return the field's name for people, with the one that the file uses."""
        name = self.field_names.get(key)
        return f"{key} ({name})" if name else key

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source}: {self.name(key)} is missing{self._remedy}")
        return value

    def _type_error(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.source}: {self.name(key)} is {quote(value, 60)}, expected {expected}{self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"; {self.remedy}" if self.remedy else ""

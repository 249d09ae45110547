"""Read JSON of a model directory, each field with a type and bounds.

No value of a file reaches the arithmetic unchecked. Imports no torch: `orcinus up` reads before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

from shared.errors import ModelError

LARGEST = 1 << 24  # of any size; a vocabulary or a context beyond it is a mistake


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields under their usual names, defaults filled in; `field_names` gives the names that the file uses instead.

    A field that is null is as one that is left out. All methods raise ModelError.
    """

    raw: Mapping[str, Any]
    where: str  # the file, for errors
    field_names: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            wanted = f"a positive integer up to {most}" if least == 1 else f"an integer from {least} to {most}"
            raise self._refused(key, value, wanted)
        return value

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        value = self._value(key, default)
        # NaN is in no range.
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self._refused(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._refused(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._refused(key, value, "a string")
        return value

    def fields(self, key: str) -> dict[str, Any]:
        """Return an object; empty when there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._refused(key, value, "an object")
        return value

    def name(self, key: str) -> str:
        """Return the field's name for people, with the one that the file uses."""
        name = self.field_names.get(key)
        return f"{key} ({name})" if name else key

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {self.name(key)} is missing{self._remedy}")
        return value

    def _refused(self, key: str, value: Any, wanted: str) -> ModelError:
        said = repr(value)
        said = said if len(said) <= 60 else said[:57] + "..."
        return ModelError(f"{self.where}: {self.name(key)} is {said}, expected {wanted}{self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"; {self.remedy}" if self.remedy else ""


JSON_BYTES = 64 << 20
"""Bound of a JSON file of a model directory; the index of the largest models has a few MB."""


JsonT = TypeVar("JsonT", dict[str, Any], list[Any])


@overload
def read_json(path: Path) -> dict[str, Any]: ...
@overload
def read_json(path: Path, kind: type[JsonT]) -> JsonT: ...
def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Read a JSON object, or a list, from a file of the model directory. Raise ModelError."""
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: no regular file; replace it with the file of the model")
        if (size := path.stat().st_size) > JSON_BYTES:
            raise ModelError(f"{path}: {size} bytes, more than {JSON_BYTES}; replace it with the file of the model")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: MODEL must name a Hugging Face model directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, kind):
        raise ModelError(f"{path} holds no JSON {'object' if kind is dict else 'list'}")
    return value

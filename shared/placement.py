"""The record in Redis that says whether a model is to have workers. The placer writes it; launcher, gateways and
commands read it.

It outlives the placer: while none runs, models stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from shared.keys import CLASSES

MAX_MS = 7 * 24 * 3600 * 1000
MAX_FAILED = 6
"""More loads that failed are not counted."""


@dataclass(frozen=True, slots=True)
class Placement:
    """awake: whether the model is to have its workers. load_ms: from that wish to a worker that serves, as it was
    measured last; 0 before. since_ms: the time of the last change of `awake`, by Redis's clock. wake_ms: until a
    request that comes now, of each class, would begin to run; 0 while the model serves. failed: loads that were given
    up since the model served last.
    """

    awake: bool
    load_ms: int = 0
    since_ms: int = 0
    wake_ms: tuple[int, ...] = (0,) * len(CLASSES)
    failed: int = 0

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, raw: bytes) -> Placement:
        """Raise ValueError or TypeError for a record that no placer writes."""
        fields: Any = orjson.loads(raw)
        if not isinstance(fields, dict) or set(fields) != {"awake", "load_ms", "since_ms", "wake_ms", "failed"}:
            raise ValueError("not the fields of a placement")
        awake, waits = fields["awake"], fields["wake_ms"]
        if not isinstance(awake, bool) or not isinstance(waits, list) or len(waits) != len(CLASSES):
            raise TypeError("awake: not a boolean, or wake_ms: not a number for each class")
        if not all(_is_count(number, MAX_MS) for number in (fields["load_ms"], *waits)):
            raise ValueError(f"load_ms or wake_ms: not a whole number from 0 to {MAX_MS}")
        if not _is_count(fields["since_ms"], 1 << 53):
            raise ValueError("since_ms: not a time")
        if not _is_count(fields["failed"], MAX_FAILED):
            raise ValueError(f"failed: not a whole number from 0 to {MAX_FAILED}")
        return cls(awake, fields["load_ms"], fields["since_ms"], tuple(waits), fields["failed"])


def read_placements(raw_records: Mapping[bytes, bytes]) -> dict[str, Placement]:
    """Return the records of the hash by model, without those that cannot be read."""
    placements = {}
    for name, raw in raw_records.items():
        try:
            placements[name.decode()] = Placement.decode(raw)
        except (ValueError, TypeError):
            continue
    return placements


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most

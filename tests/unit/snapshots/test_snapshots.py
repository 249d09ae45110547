"""What users see stays as it was recorded, or changes on purpose."""

from __future__ import annotations

import difflib

import pytest

from tests.unit.snapshots.record import FOLDER
from tests.unit.snapshots.surfaces import SURFACES

REMEDY = (
    "re-record with `python -m tests.unit.snapshots.record` and add an entry to docs/changes.md when a user sees the "
    "change"
)


@pytest.mark.parametrize("name", SURFACES)
def test_surface_equals_its_snapshot(name: str) -> None:
    recorded, rendered = (FOLDER / name).read_text(), SURFACES[name]()
    diff = difflib.unified_diff(recorded.splitlines(), rendered.splitlines(), "recorded", "now", lineterm="")
    if recorded != rendered:
        pytest.fail(f"{name}: what users see has changed; {REMEDY}\n" + "\n".join(diff), pytrace=False)

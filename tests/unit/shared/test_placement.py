"""What the placer writes of a model, and what is no such record."""

from __future__ import annotations

import pytest

from shared.placement import MOST_MS, Placement, read_placements

PLACED = Placement(True, 1200, 1_700_000_000_000, (0, 10, 20, 30), 2)


def test_record_is_read_as_it_was_written() -> None:
    assert Placement.decode(PLACED.encode()) == PLACED
    assert read_placements({b"a": PLACED.encode(), b"b": b"{", b"\xff": PLACED.encode()}) == {"a": PLACED}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("true", "1"), ("1200", "-1"), ("1200", "1.5"), ("1200", str(MOST_MS + 1)), ("1200", "true"),
        ("1700000000000", "1e30"), ("[0,10,20,30]", "[0,10,20]"), ("[0,10,20,30]", '[0,10,20,"x"]'),
        ("[0,10,20,30]", "0"), ("load_ms", "load"), ("{", "["),
        ('"failed":2', '"failed":7'), ('"failed":2', '"failed":-1'), (',"failed":2', ""),
    ],
)  # fmt: skip
def test_record_that_no_placer_writes_is_refused(old: str, new: str) -> None:
    text = PLACED.encode().decode()
    assert old in text
    with pytest.raises((ValueError, TypeError)):
        Placement.decode(text.replace(old, new).encode())

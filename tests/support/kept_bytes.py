"""The bytes that the queue counts of requests that have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def kept_bytes(rows: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> int:
    """Return the sum over the rows of `queue:kept`, as XRANGE gives them."""
    return sum(int(row[b"bytes"]) for _, row in rows)

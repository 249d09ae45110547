"""Stop strings, found in text that arrives in pieces.

The match that ends first wins (of two that end together, the longer), so the outcome does not depend on where the
pieces were cut: it is that of reading character by character. Text that may be the beginning of a stop string is held
back until that is decided.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

SHARED = 16
"""Lists of stop strings of which the beginnings are kept for the next request with the same list."""


@functools.lru_cache(maxsize=SHARED)
def _beginnings(stops: tuple[str, ...]) -> frozenset[str]:
    """Return all beginnings of stop strings: up to a megabyte, which all choices of a request share."""
    return frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))


class StopMatcher:
    """Feed text through; what comes out will never have to be taken back."""

    __slots__ = ("_buffer", "_include", "_longest", "_prefixes", "_stops", "matched_stop")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._prefixes = _beginnings(self._stops)
        self._longest = max((len(stop) for stop in self._stops), default=1) - 1
        self._buffer = ""
        self.matched_stop: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be shown now. After a match (`matched_stop` is set) nothing more comes out."""
        if self.matched_stop is not None:
            return ""
        if not self._stops:
            return text
        text = self._buffer + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, start, self.matched_stop = min(matches)
            self._buffer = ""
            return text[: end if self._include else start]
        keep = self._overlap(text)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back; for the end of a sequence that found no stop string, or to skip matching for a
        while.
        """
        rest, self._buffer = self._buffer, ""
        return rest

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[len(text) - size :] in self._prefixes:
                return size
        return 0

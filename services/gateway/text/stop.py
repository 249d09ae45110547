"""Stop strings, found in text that arrives in pieces.

The match that ends first wins (of two that end together, the longer), so the outcome does not depend on where the
pieces were cut: it is that of reading character by character. Text that may be the beginning of a stop string is held
back until that is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text through; what comes out will never have to be taken back."""

    __slots__ = ("_held", "_include", "_longest", "_prefixes", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._prefixes = frozenset(stop[:size] for stop in self._stops for size in range(1, len(stop)))
        self._longest = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be shown now. After a match (`matched` is set) nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = self._overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back; for the end of a sequence that found no stop string, or to skip matching for a
        while.
        """
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[len(text) - size :] in self._prefixes:
                return size
        return 0

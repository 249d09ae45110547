"""Say what a command waits for: never silent for longer than LINE_S."""

from __future__ import annotations

import time
from collections.abc import Callable

LINE_S = 3.0


class Waiting:
    """Lines about one thing: one at each change of its state, and one with the seconds where it stays the same."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """say: takes each line."""
        self._say = say
        self._clock = clock
        self._started_at = self._said_at = clock()
        self._state = ""

    def look(self, state: str) -> None:
        """Take the state as it is now; called several times a second."""
        now = self._clock()
        if state != self._state:
            self._state = state
            self._say(state)
        elif now - self._said_at >= LINE_S:
            self._say(f"{state}, after {now - self._started_at:.0f} s")
        else:
            return
        self._said_at = now

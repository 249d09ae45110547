"""Ends by a stop string, told to the client only once Redis knows them.

The scheduler learns of a stop string from the gateway alone. Were the end told first and the gateway killed then, the
record would keep another end, and whoever asks again would be told that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S = 30.0
"""For a Redis that is away. Then the end is told all the same: it is right, and a client cannot wait for ever."""


class Endings:
    """Choices of one request whose end is held back."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called when `take` has something new."""
        self._wake = wake
        self._held: dict[int, asyncio.TimerHandle] = {}
        self._ready: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._held or self._ready)

    def hold(self, choice: int) -> Callable[[], None]:
        """Holds the end of a choice until what is returned is called, or for WAIT_S."""

        def release() -> None:
            if (timer := self._held.pop(choice, None)) is not None:
                timer.cancel()
                self._ready.append(choice)
                self._wake()

        self._held[choice] = asyncio.get_running_loop().call_later(WAIT_S, release)
        return release

    def take(self) -> list[int]:
        """Choices whose end may be told since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Nobody is told any more."""
        for timer in self._held.values():
            timer.cancel()
        self._held.clear()

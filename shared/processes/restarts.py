"""Delays before a dead process is started again: services by the launcher, gateway processes by their parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay before a restart: first_s, times `factor` for each further death within window_s, at most cap_s.

    Death number `loop` in the window is a crash loop. A process that was ready for settled_s has its record cleared.
    """

    first_s: float = 0.2
    factor: float = 2.5
    cap_s: float = 30.0
    window_s: float = 60.0
    loop: int = 5
    settled_s: float = 0.0

    def delay_s(self, deaths: int) -> float:
        return min(self.first_s * self.factor ** max(deaths - 1, 0), self.cap_s)

    def with_death(self, deaths: Sequence[float], now: float, ready_s: float | None) -> list[float]:
        """Return the record of deaths with one that happened now.

        ready_s: time that the process had been ready; None if it never was.
        """
        settled = ready_s is not None and ready_s >= self.settled_s
        return [*(() if settled else (at for at in deaths if now - at < self.window_s)), now]

"""When a process that died is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before a restart: first_s, then `factor` times more for each further death in window_s, at most cap_s.

    Death number `loop` in the window is called a crash loop. A process that became ready clears its record.
    """

    first_s: float = 0.2
    factor: float = 2.5
    cap_s: float = 30.0
    window_s: float = 60.0
    loop: int = 5

    def delay_s(self, deaths: int) -> float:
        return min(self.first_s * self.factor ** max(deaths - 1, 0), self.cap_s)

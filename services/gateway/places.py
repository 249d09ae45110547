"""Places for refused requests: a Retry-After that counts those which were sent away before.

A time until there is room is true for one client, and while no other comes. The work of all that were told to come
back is therefore kept as a backlog that drains with time, each further one is told to come behind it, and the time is
that at the rate which admitted requests leave: where they take all of it, as in a lasting overload, there is none. A
request that comes back in time, known by its content, has a place: it may exceed the bounds that refused it, so that
new ones do not take what was promised.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from shared.keys import CLASSES

HORIZON_S = 60.0
"""Nothing is promised beyond: the answer is a time between one and two horizons, so that not all come back at once."""
WINDOW_S = 10.0
"""Over which the work of admitted requests is averaged."""
LEAST_SPARE = 0.05
IDLE_SPARE = 0.9
"""From here on all of the rate counts as left."""
EARLY_S = 1.0
LATE_S = 15.0
MOST = 65_536
"""Places at a time; the rate of the workers allows fewer in a horizon, unless requests are tiny."""


@dataclass(slots=True)
class Backlog:
    """Seconds of work that were promised and are to come, at a moment."""

    seconds: float = 0.0
    at: float = 0.0

    def after(self, now: float) -> float:
        return max(0.0, self.seconds - (now - self.at))


class Places:
    """The places that this gateway has promised."""

    def __init__(self) -> None:
        self._backlog = Backlog()
        self._due: dict[int, float] = {}  # oldest promise first
        self._admitted = [0.0] * len(CLASSES)  # seconds of work, which count less the older they are
        self._admitted_at = 0.0

    def admitted(self, priority: str, work_s: float, now: float) -> None:
        """Count the work of an admitted request."""
        faded = math.exp((self._admitted_at - now) / WINDOW_S)
        self._admitted = [faded * seconds for seconds in self._admitted]
        self._admitted_at = now
        self._admitted[CLASSES.index(priority)] += work_s

    def spare(self, priority: str, now: float) -> float:
        """Return the share of the workers' rate that admitted requests of this class and better ones have left."""
        seconds = sum(self._admitted[: CLASSES.index(priority) + 1])
        left = 1 - seconds * math.exp((self._admitted_at - now) / WINDOW_S) / WINDOW_S
        return 1.0 if left >= IDLE_SPARE else max(LEAST_SPARE, left)

    def promise(self, content: int, priority: str, wait_s: float, work_s: float, now: float) -> int:
        """Return the seconds after which a refused request should come back, at least 1.

        wait_s: until there is room when nothing else comes. work_s: its own work at the rate of the workers.
        """
        due = self._due.get(content)
        if due is not None and now < due:  # its work is counted
            return max(1, math.ceil(due - now))
        wait_s = (wait_s + self._backlog.after(now)) / self.spare(priority, now)
        if wait_s >= HORIZON_S or len(self._due) >= MOST:
            return math.ceil(random.uniform(HORIZON_S, 2 * HORIZON_S))  # noqa: S311 - spread, no secret
        self._backlog = Backlog(self._backlog.after(now) + work_s, now)
        self._due.pop(content, None)
        self._due[content] = now + wait_s
        return max(1, math.ceil(wait_s))

    def take(self, content: int, now: float) -> bool:
        """Return whether a request has a place now, and give the place up. One that comes too early keeps it."""
        while self._due and now - (first := next(iter(self._due.items())))[1] > LATE_S:
            del self._due[first[0]]
        due = self._due.get(content)
        if due is None or now < due - EARLY_S:
            return False
        del self._due[content]
        return now <= due + LATE_S

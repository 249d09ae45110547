"""When each request got its first slot, its first token and its end: for histograms and for traces. Pure.

A scheduler that takes a request up from another one did not see its start, and tells nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.types import FinishedRequest, Outcome


@dataclass(slots=True)
class Life:
    """Of one request, in ns of the monotonic clock."""

    started_ns: int
    first_token_ns: int = 0
    ended_ns: int = 0


class Lives:
    """One entry for each request between its first slot and its end."""

    def __init__(self, ended: Callable[[FinishedRequest, Life], None]) -> None:
        """`ended` is called with each request that got a token, at its end."""
        self._lives: dict[str, Life] = {}
        self._ended = ended

    def __len__(self) -> int:
        return len(self._lives)

    def seen(self, outcome: Outcome, now_ns: int) -> None:
        """What one call of the core made known."""
        for request_id in outcome.started:
            self._lives[request_id] = Life(now_ns)
        for row in np.flatnonzero((outcome.first == 0) & (outcome.counts > 0)):
            life = self._lives.get(outcome.requests[row].id)
            if life is not None and not life.first_token_ns:
                life.first_token_ns = now_ns
        for finished in outcome.ended:
            life = self._lives.pop(finished.request.id, None)
            if life is not None and life.first_token_ns:
                life.ended_ns = now_ns
                self._ended(finished, life)

"""Spans of what the scheduler saw of a request: queue, prefill and decode, made at its end from three times.

Their parent is the gateway's span, by the request's traceparent; a request without one leaves none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.types import FinishedRequest, Outcome
from shared.keys import CLASSES
from shared.settings import SchedulerSettings
from shared.traces import Tracer, Value


@dataclass(slots=True)
class Timeline:
    """Of one request, in ns of the monotonic clock."""

    started_ns: int
    first_token_ns: int = 0
    ended_ns: int = 0


class RequestTimes:
    """One entry for each request between its first slot and its end."""

    def __init__(self, ended: Callable[[FinishedRequest, Timeline], None]) -> None:
        """`ended` is called with each request that got a token, at its end."""
        self._lives: dict[str, Timeline] = {}
        self._ended = ended

    def __len__(self) -> int:
        return len(self._lives)

    def seen(self, outcome: Outcome, now_ns: int) -> None:
        """What one call of the core made known."""
        for request_id in outcome.started:
            self._lives[request_id] = Timeline(now_ns)
        for row in np.flatnonzero((outcome.first == 0) & (outcome.counts > 0)):
            life = self._lives.get(outcome.requests[row].id)
            if life is not None and not life.first_token_ns:
                life.first_token_ns = now_ns
        for finished in outcome.ended:
            life = self._lives.pop(finished.request.id, None)
            if life is not None and life.first_token_ns:
                life.ended_ns = now_ns
                self._ended(finished, life)


class Spans:
    """Tells a collector of each request that ended."""

    def __init__(self, settings: SchedulerSettings, scheduler_id: str) -> None:
        """Raises ConfigurationError when the SDK is missing."""
        self._tracer = Tracer(settings.otlp_endpoint, "scheduler", scheduler_id)
        self._model = settings.served_model_name
        self._shard = settings.shard

    def ended(self, finished: FinishedRequest, life: Timeline) -> None:
        """A request that got tokens has ended."""
        request = finished.request
        parent = request.payload.traceparent
        if not parent:
            return
        to_wall = time.time_ns() - time.monotonic_ns()
        arrived, started, first, ended = (
            at + to_wall for at in (request.arrived_ns, life.started_ns, life.first_token_ns, life.ended_ns)
        )
        attributes: dict[str, Value] = {
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request.id,
            "orcinus.shard": self._shard,
            "orcinus.class": CLASSES[request.priority],
        }
        prompt = sum(prompt.size for prompt in request.prompts)
        output = sum(output.size for output in finished.outputs)
        self._tracer.whole("queue", parent, min(arrived, started), started, attributes)
        self._tracer.whole("prefill", parent, started, first, {**attributes, "gen_ai.usage.input_tokens": prompt})
        self._tracer.whole("decode", parent, first, ended, {**attributes, "gen_ai.usage.output_tokens": output})

    def close(self) -> None:
        """Sends what is queued, for a few seconds at most."""
        self._tracer.close()

"""Record the times of each request, first slot, first token and end, for the histograms and spans of the scheduler.

A request has spans (queue, prefill, decode) when its traceparent names the gateway's span. A scheduler that takes a
request up from another one did not see its start, and records no times of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.types import FinishedRequest, Outcome
from shared.keys import CLASSES
from shared.settings import SchedulerSettings
from shared.telemetry.traces import Tracer, Value


@dataclass(slots=True)
class Timeline:
    """The times of one request, in ns of the monotonic clock."""

    started_ns: int
    first_token_ns: int = 0
    ended_ns: int = 0


class RequestTimes:
    """The times of each request between its first slot and its end."""

    def __init__(self, ended: Callable[[FinishedRequest, Timeline], None]) -> None:
        """ended: called with each request that got a token, at its end."""
        self._timelines: dict[str, Timeline] = {}
        self._ended = ended

    def __len__(self) -> int:
        return len(self._timelines)

    def record(self, outcome: Outcome, now_ns: int) -> None:
        """Record the starts, first tokens and ends of one outcome."""
        for request_id in outcome.started_ids:
            self._timelines[request_id] = Timeline(now_ns)
        begins = outcome.first_indices == 0
        for row in np.flatnonzero(begins & (outcome.counts > 0)) if begins.any() else ():
            timeline = self._timelines.get(outcome.requests[row].id)
            if timeline is not None and not timeline.first_token_ns:
                timeline.first_token_ns = now_ns
        for finished in outcome.ended_requests:
            timeline = self._timelines.pop(finished.request.id, None)
            if timeline is not None and timeline.first_token_ns:
                timeline.ended_ns = now_ns
                self._ended(finished, timeline)


class Spans:
    """Sends the spans of each request that ended to a collector."""

    def __init__(self, settings: SchedulerSettings, scheduler_id: str) -> None:
        """Start the tracer. Raises ConfigurationError if the SDK is missing."""
        self._tracer = Tracer(settings.otlp_endpoint, "scheduler", scheduler_id)
        self._model = settings.served_model_name
        self._shard = settings.shard

    def add(self, finished: FinishedRequest, timeline: Timeline) -> None:
        """Make the spans of a request that got tokens and has ended."""
        request = finished.request
        parent = request.payload.traceparent
        if not parent:
            return
        to_wall = time.time_ns() - time.monotonic_ns()
        arrived, started, first, ended = (
            at + to_wall for at in (request.arrived_ns, timeline.started_ns, timeline.first_token_ns, timeline.ended_ns)
        )
        attributes: dict[str, Value] = {
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request.id,
            "orcinus.shard": self._shard,
            "orcinus.class": CLASSES[request.priority],
        }
        prompt = sum(prompt.size for prompt in request.prompts)
        output = sum(output.size for output in finished.outputs)
        self._tracer.record("queue", parent, min(arrived, started), started, attributes)
        self._tracer.record("prefill", parent, started, first, {**attributes, "gen_ai.usage.input_tokens": prompt})
        self._tracer.record("decode", parent, first, ended, {**attributes, "gen_ai.usage.output_tokens": output})

    def close(self) -> None:
        """Send the queued spans, for a few seconds at most."""
        self._tracer.close()

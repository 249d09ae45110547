"""Spans of what the scheduler saw of a request: queue, prefill and decode, made at its end from three times.

Their parent is the gateway's span, by the request's traceparent; a request without one leaves none.
"""

from __future__ import annotations

import time

from services.scheduler.core.types import FinishedRequest
from services.scheduler.requests.request_times import Life
from shared.keys import CLASSES
from shared.settings import SchedulerSettings
from shared.traces import Tracer, Value


class Spans:
    """Tells a collector of each request that ended."""

    def __init__(self, settings: SchedulerSettings, scheduler_id: str) -> None:
        """Raises ConfigurationError when the SDK is missing."""
        self._tracer = Tracer(settings.otlp_endpoint, "scheduler", scheduler_id)
        self._model = settings.served_model_name
        self._shard = settings.shard

    def ended(self, finished: FinishedRequest, life: Life) -> None:
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

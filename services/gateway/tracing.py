"""Send a span for each request, with the attributes of OpenTelemetry's GenAI conventions: no prompt, no output.

The scheduler's spans (queue, prefill, decode) are its children: `Request.traceparent` carries it there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.gateway.errors import ApiError
from services.gateway.request import GenerationSpec
from shared.telemetry.traces import Tracer, Value, traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span


OPERATIONS = {"chat": "chat", "completions": "text_completion"}  # the name of any other endpoint is its operation


class Tracing:
    """Begin the span of each request. A gateway without the address of a collector has no Tracing."""

    def __init__(self, endpoint: str, gateway_id: str) -> None:
        """Raise ConfigurationError when the SDK is missing."""
        self._tracer = Tracer(endpoint, "gateway", gateway_id)

    def begin(self, spec: GenerationSpec, arrived_at: float) -> RequestSpan:
        """Begin a span at `arrived_at` (time.monotonic()); the request carries it to the scheduler."""
        from opentelemetry.trace import SpanKind

        operation = OPERATIONS.get(spec.endpoint, spec.endpoint)
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "orcinus",
            "gen_ai.request.model": spec.model,
            "gen_ai.request.max_tokens": spec.max_tokens,
            "gen_ai.request.choice.count": spec.choices,
            "gen_ai.request.temperature": round(spec.sampling.temperature, 6),
            "gen_ai.request.top_p": round(spec.sampling.top_p, 6),
            "orcinus.class": spec.priority,
            "orcinus.stream": spec.stream,
        }
        wall_ns = time.time_ns() - int((time.monotonic() - arrived_at) * 1e9)
        span = self._tracer.begin(f"{operation} {spec.model}", spec.traceparent, wall_ns, attributes, SpanKind.SERVER)
        spec.traceparent = traceparent(span)
        return RequestSpan(span, spec)

    def close(self) -> None:
        self._tracer.close()


class RequestSpan:
    """The span of one request; ends with its delivery."""

    def __init__(self, span: Span, spec: GenerationSpec) -> None:
        self._span = span
        self._spec = spec

    def first_token(self) -> None:
        self._span.add_event("first_token")

    def end(self, output_tokens: int, reasons: list[str], is_done: bool, failure: ApiError | None) -> None:
        """End the span with usage and finish reasons, or with the reason why the request failed."""
        from opentelemetry.trace import Status, StatusCode

        span, spec = self._span, self._spec
        span.set_attribute("gen_ai.response.id", spec.id)
        span.set_attribute("gen_ai.response.model", spec.model)
        span.set_attribute("gen_ai.usage.input_tokens", spec.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", output_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if not is_done:
            span.set_attribute("error.type", (failure.code or "error") if failure else "client_left")
            span.set_status(Status(StatusCode.ERROR))
        span.end()

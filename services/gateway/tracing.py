"""The span of a request at the gateway, with the attributes of OpenTelemetry's GenAI conventions. No prompt, no output.

The scheduler's spans (queue, prefill, decode) are its children: `Request.traceparent` carries it there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shared.settings import GatewaySettings
from shared.traces import Tracer, Value, traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span

    from services.gateway.delivery.generation import Generation
    from services.gateway.openai.validate import GenerationSpec

OPERATIONS = {"chat": "chat", "completions": "text_completion"}


class Tracing:
    """Begins spans where a collector is set; else does nothing."""

    def __init__(self, settings: GatewaySettings, gateway_id: str) -> None:
        """Raises ConfigurationError when a collector is set and the SDK is missing."""
        endpoint = settings.otlp_endpoint
        self._tracer = Tracer(endpoint, "gateway", gateway_id) if endpoint else None

    def begin(self, spec: GenerationSpec, started: float) -> RequestSpan | None:
        """A span from `started` (time.monotonic()) on; the request carries it to the scheduler."""
        if self._tracer is None:
            return None
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
        wall_ns = time.time_ns() - int((time.monotonic() - started) * 1e9)
        span = self._tracer.begin(f"{operation} {spec.model}", spec.traceparent, wall_ns, attributes, SpanKind.SERVER)
        spec.traceparent = traceparent(span)
        return RequestSpan(span, spec.id)

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()


class RequestSpan:
    """Ends with the request's delivery."""

    def __init__(self, span: Span, request_id: str) -> None:
        self._span = span
        self._request_id = request_id

    def first_token(self) -> None:
        self._span.add_event("first_token")

    def end(self, generation: Generation) -> None:
        """Usage, finish reasons, or why it failed."""
        from opentelemetry.trace import Status, StatusCode

        span, usage = self._span, generation.usage
        span.set_attribute("gen_ai.response.id", self._request_id)
        span.set_attribute("gen_ai.response.model", generation.spec.model)
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        reasons = [choice.finish_reason or "" for choice in generation.choices]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if not generation.done:
            failure = generation.failure
            span.set_attribute("error.type", (failure.code or "error") if failure else "client_left")
            span.set_status(Status(StatusCode.ERROR))
        span.end()

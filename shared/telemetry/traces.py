"""Spans for an OpenTelemetry collector, by OTLP over HTTP. Off unless `otlp_endpoint` is set; the SDK is an extra.

Exported by a thread of the SDK from a bounded queue: a collector that is slow or gone costs spans, never a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span
    from opentelemetry.trace import SpanKind

log = logging.getLogger("orcinus.traces")

QUEUED_SPANS = 2048
EXPORT_MS = 1000
TIMEOUT_S = 5.0
LAST_WORDS_S = 3.0
"""What a stopping process waits for the collector."""

Value = str | int | float | bool | Sequence[str]


class Tracer:
    """Makes spans of one service. Times are ns of the wall clock."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """Raises ConfigurationError when the extra `otel` is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigurationError(
                "ORCINUS_OTLP_ENDPOINT needs the extra `otel`: pip install 'orcinus[otel]', or leave it empty"
            ) from error
        base = endpoint.rstrip("/")
        address = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=address, timeout=TIMEOUT_S),
            max_queue_size=QUEUED_SPANS,
            schedule_delay_millis=EXPORT_MS,
            export_timeout_millis=1000 * TIMEOUT_S,
        )
        resource = Resource({"service.name": f"orcinus-{service}", "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("orcinus")
        log.info("traces go to %s", address)

    def begin(
        self, name: str, parent: str, start_ns: int, attributes: Mapping[str, Value], kind: SpanKind | None = None
    ) -> Span:
        """A span that has to be ended. `parent`: a traceparent; without a valid one a trace begins."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": parent})
        started = self._tracer.start_span(
            name, context, kind or SpanKind.INTERNAL, attributes=dict(attributes), start_time=start_ns
        )
        return started  # type: ignore[return-value]

    def whole(self, name: str, parent: str, start_ns: int, end_ns: int, attributes: Mapping[str, Value]) -> None:
        """A span that is over."""
        self.begin(name, parent, start_ns, attributes).end(end_ns)

    def close(self) -> None:
        """Sends what is queued, for a few seconds at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(LAST_WORDS_S)


def traceparent(span: Span) -> str:
    """What the next service needs to make children of a span (W3C Trace Context)."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

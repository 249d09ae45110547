"""Spans for an OpenTelemetry collector, by OTLP over HTTP. Off unless `otlp_endpoint` is set; the SDK is an extra.

A thread of the SDK exports from a bounded queue. A collector that is slow or down loses spans and never delays a
request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanKind

log = logging.getLogger("orcinus.traces")

QUEUED_SPANS = 2048
EXPORT_MS = 1000
TIMEOUT_S = 5.0
FLUSH_S = 3.0
"""Time that a stopping process waits for the collector."""

Value = str | int | float | bool | Sequence[str]


class Tracer:
    """Makes the spans of one service. Times are ns of the wall clock."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """Start the exporter. Raises ConfigurationError if the extra `otel` is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigurationError(
                "ORCINUS_OTLP_ENDPOINT: needs the extra `otel`; leave it empty, or run "
                "`.venv/bin/pip install -e '.[otel]'` in the checkout"
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
        """Return a started span, which the caller ends. `parent` is a traceparent; an invalid one starts a trace."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": parent})
        span = self._tracer.start_span(
            name, context, kind or SpanKind.INTERNAL, attributes=dict(attributes), start_time=start_ns
        )
        return span

    def record(self, name: str, parent: str, start_ns: int, end_ns: int, attributes: Mapping[str, Value]) -> None:
        """Record a span that has ended."""
        self.begin(name, parent, start_ns, attributes).end(end_ns)

    def close(self) -> None:
        """Send the queued spans, within FLUSH_S at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def traceparent(span: Span) -> str:
    """Return the traceparent of a span, with which the next service makes children (W3C Trace Context)."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

"""The gateway's Prometheus metrics. One registry per gateway, so that tests may have several in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 600,
)  # fmt: skip
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 80)


class Metrics:
    """Named by what they count; units in the names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter("orcinus_gateway_requests", "HTTP answers", ["endpoint", "code"], registry=self.registry)
        self.ttft = Histogram(
            "orcinus_gateway_time_to_first_token_seconds", "From the request's arrival to its first token",
            ["endpoint"], buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.gap = Histogram(
            "orcinus_gateway_inter_token_seconds", "Between two deliveries of one request",
            buckets=_GAPS, registry=self.registry,
        )  # fmt: skip
        self.duration = Histogram(
            "orcinus_gateway_request_duration_seconds", "From the request's arrival to its last token",
            ["endpoint"], buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("orcinus_gateway_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.output_tokens = Counter("orcinus_gateway_output_tokens", "Tokens delivered", registry=self.registry)
        self.active = Gauge("orcinus_gateway_active_requests", "Requests that run now", registry=self.registry)
        self.cancelled = Counter(
            "orcinus_gateway_cancelled_requests", "Requests whose client left", registry=self.registry
        )
        self.slow_clients = Counter("orcinus_gateway_slow_clients", "Clients cut for slowness", registry=self.registry)
        self.duplicates = Counter("orcinus_gateway_duplicate_rows", "Rows received again", registry=self.registry)
        self.refilled = Counter("orcinus_gateway_refilled_rows", "Gaps filled from records", registry=self.registry)

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self.registry)

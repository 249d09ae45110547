"""Keep the gateway's Prometheus metrics: deliveries to clients, and the stack as of the last look at Redis.

One registry per gateway, so that tests may have several in one process. Names have units; a request's figures are
observed at its end and with each delivery, none per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.cluster import Cluster, number
from services.gateway.request import GenerationSpec
from shared.keys import CLASSES
from shared.telemetry.metrics import CALLS_S, GAPS_S, SECONDS, TOKENS, Alias, Aliases, ColumnHistogram

C = TypeVar("C", bound=Collector)
P = "orcinus_gateway_"
S = "orcinus_stack_"
GAPS_KEPT = 4096
"""Gaps between deliveries that are noted before they are counted."""

ALIASES = (
    Alias("vllm:num_requests_running", S + "running_sequences", {}),
    Alias("vllm:num_requests_waiting", S + "waiting_sequences", {}),
    Alias("vllm:kv_cache_usage_perc", S + "kv_usage_ratio", {}),
    Alias("vllm:gpu_cache_usage_perc", S + "kv_usage_ratio", {}),
    Alias("vllm:cache_config_info", S + "kv_cache_info", {"block_size": "block_size", "blocks": "num_gpu_blocks"}),
    Alias("vllm:prompt_tokens", P + "prompt_tokens", {}),
    Alias("vllm:generation_tokens", P + "output_tokens", {}),
    Alias("vllm:request_success", P + "finished_choices", {"finish_reason": "finished_reason"}),
    Alias("vllm:request_prompt_tokens", P + "request_prompt_tokens", {}),
    Alias("vllm:request_generation_tokens", P + "request_output_tokens", {}),
    Alias("vllm:request_params_n", P + "request_choices", {}),
    Alias("vllm:request_params_max_tokens", P + "request_max_tokens", {}),
    Alias("vllm:time_to_first_token_seconds", P + "time_to_first_token_seconds", {}),
    Alias("vllm:inter_token_latency_seconds", P + "inter_token_seconds", {}),
    Alias("vllm:time_per_output_token_seconds", P + "inter_token_seconds", {}),
    Alias("vllm:e2e_request_latency_seconds", P + "request_duration_seconds", {}),
)
"""Figures of the scheduler have theirs in services/scheduler/metrics.py, so that none is counted twice."""


class Metrics:
    """All metrics of a gateway, named by what they count."""

    def __init__(self, model: str = "", aliases: bool = False) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._collectors: list[Collector] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            return self._keep(Counter(P + name, text, labels, registry=registry))

        def histogram(name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
            return self._keep(Histogram(P + name, text, labels, buckets=bounds, registry=registry))

        self.answers = counter(
            "requests", "HTTP answers, by endpoint and code; 499: the client had left", "endpoint", "code"
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival at the gateway to its first token, by endpoint",
            SECONDS,
            "endpoint",
        )
        self._deliveries = Deliveries()
        registry.register(self._keep(self._deliveries))
        self.on_delivery = self._deliveries.on_delivery
        self.duration = histogram(
            "request_duration_seconds", "From arrival to the last token, by endpoint", SECONDS, "endpoint"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.active = self._keep(Gauge(P + "active_requests", "Requests that run or wait now", registry=registry))
        self.cancellations = counter(
            "cancelled_requests", "Requests that ended before their last token: mostly, clients that left"
        )
        self.slow_clients = counter("slow_clients", "Clients cut because they did not read")
        self.refused_grammars = counter(
            "refused_grammars",
            "Grammars refused, by reason: invalid, ended (beyond processor time or memory), unavailable, busy",
            "reason",
        )
        self.duplicates = counter("duplicate_rows", "Deliveries that were there already")
        self.refills = counter("refilled_rows", "Gaps filled from records")
        self.unreadable = counter("unreadable_records", "Records of Redis that were set aside, by kind of key", "kind")
        self.resumptions = counter("resumed_requests", "Requests that this gateway went on with")
        self.batch_lines = counter("batch_lines", "Lines of batches, by outcome: answered, failed", "outcome")
        self.batches = self._keep(
            Gauge(P + "driven_batches", "Batches that this gateway drives now", registry=registry)
        )
        self._finish_counts = counter(
            "finished_choices", "Choices that came to an end, by finish_reason", "finish_reason"
        )
        self._sizes = (
            histogram("request_prompt_tokens", "Prompt tokens of a finished request", TOKENS),
            histogram("request_output_tokens", "Output tokens of a finished request", TOKENS),
            histogram("request_choices", "Choices of a finished request: prompts x n", (1, 2, 5, 10, 20, 50, 100)),
            histogram("request_max_tokens", "max_tokens of a finished request", TOKENS),
        )
        self._call = histogram("redis_call_seconds", "Calls of scripts in Redis, by script", CALLS_S, "script")
        self._calls: dict[str, Histogram] = {}
        self._lag = histogram(
            "delivery_lag_seconds", "From a token batch's entry in Redis (its clock) to its reading here", CALLS_S
        )
        self._stack = StackCollector()
        registry.register(self._keep(self._stack))
        if aliases:
            registry.register(Aliases(self._collectors, ALIASES, model))

    def _keep(self, collector: C) -> C:
        self._collectors.append(collector)
        return collector

    def watch(self, cluster: Cluster, reason_not_ready: Callable[[], str]) -> None:
        """Take the metrics of the stack from the snapshots of `cluster`, and from that function whether it is ready."""
        self._stack.cluster, self._stack.reason_not_ready = cluster, reason_not_ready

    def call(self, script: str, seconds: float) -> None:
        """Count the answer of a script and its time."""
        if script not in self._calls:
            self._calls[script] = self._call.labels(script)
        self._calls[script].observe(seconds)

    def read(self, entry_id: bytes) -> None:
        """Note that a token batch was read; the id of an entry is the time, in ms, at which Redis took it."""
        self._lag.observe(max(0.0, time.time() - int(entry_id.partition(b"-")[0]) / 1000))

    def count_finished(
        self, spec: GenerationSpec, reasons: list[str | None], output_tokens: int, seconds: float
    ) -> None:
        """Count a request that was delivered to its end."""
        self.duration.labels(spec.endpoint).observe(seconds)
        for reason in reasons:
            self._finish_counts.labels(reason or "").inc()
        values = (spec.prompt_tokens, output_tokens, spec.choices, spec.max_tokens)
        for histogram, value in zip(self._sizes, values, strict=True):
            histogram.observe(value)

    def text(self) -> bytes:
        """Return the exposition format of Prometheus."""
        return generate_latest(self.registry)


class Deliveries(Collector):
    """Note deliveries, and count them when metrics are read: both cost as much as a token's text."""

    def __init__(self) -> None:
        self._tokens = 0
        self._gaps_s: list[float] = []
        self._gaps = ColumnHistogram(P + "inter_token_seconds", "Between two deliveries of one request", GAPS_S)

    def on_delivery(self, tokens: int, gap_s: float | None) -> None:
        """Note a delivery. gap_s: since the request's last one; None for the first."""
        self._tokens += tokens
        if gap_s is not None:
            self._gaps_s.append(gap_s)
            if len(self._gaps_s) >= GAPS_KEPT:
                self._count()

    def _count(self) -> None:
        if self._gaps_s:
            gaps_s, self._gaps_s = self._gaps_s, []
            self._gaps.observe(np.asarray(gaps_s))
            self._gaps.settle()

    def collect(self) -> Iterator[Metric]:
        self._count()
        yield CounterMetricFamily(P + "output_tokens", "Tokens delivered", self._tokens)
        yield self._gaps.family()


class StackCollector(Collector):
    """Queue, KV blocks, workers and Redis, from the last look of this gateway, which is a second old at most."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.reason_not_ready: Callable[[], str] = lambda: "not started"

    def collect(self) -> Iterator[Metric]:
        cluster = self.cluster
        snapshot = cluster.snapshot if cluster is not None else None

        def total(name: str) -> float:
            return snapshot.total(name) if snapshot else 0.0

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(S + name, text, value)

        used_blocks = total("blocks_total") - total("blocks_free") - total("blocks_cached") - total("blocks_draining")
        yield gauge("ready", "1 when new work would be served", float(not self.reason_not_ready()))
        yield gauge("stalled_seconds", "Time in which work was there and no step was answered", _stalled_s(cluster))
        yield gauge("schedulers", "Shards that a scheduler leads", len(snapshot.leases) if snapshot else 0)
        yield gauge("workers", "Workers that are registered", len(snapshot.workers) if snapshot else 0)
        yield gauge("running_sequences", "Sequences in slots, all shards", total("running"))
        yield self._by_class("waiting_sequences", "Sequences that wait for a slot, all shards, by class", total)
        yield gauge("kv_blocks", "KV blocks on the devices", total("blocks_total"))
        yield gauge(
            "kv_usage_ratio", "Share of them that sequences hold", used_blocks / max(1.0, total("blocks_total"))
        )
        yield self._info(total)
        queue = snapshot.queue if snapshot else {}
        yield gauge("queued_requests", "Requests that wait for their first step", number(queue.get("requests")))
        yield gauge("queued_tokens", "Their prompt tokens", number(queue.get("tokens")))
        yield gauge(
            "queued_bytes", "Bytes in Redis of requests, until five minutes after their end", number(queue.get("bytes"))
        )
        yield gauge("redis_up", "1 when Redis answers", float(cluster is not None and not cluster.redis_error))
        yield gauge("redis_memory_bytes", "Memory that Redis uses", snapshot.memory_used if snapshot else 0)
        yield gauge("redis_memory_limit_bytes", "Its maxmemory; 0: none", snapshot.memory_most if snapshot else 0)

    @staticmethod
    def _by_class(name: str, text: str, total: Callable[[str], float]) -> Metric:
        family = GaugeMetricFamily(S + name, text, labels=["class"])
        for each in CLASSES:
            family.add_metric([each], total(f"waiting_{each}"))
        return family

    def _info(self, total: Callable[[str], float]) -> Metric:
        family = GaugeMetricFamily(
            S + "kv_cache_info", "Always 1; block_size and blocks are labels", labels=["block_size", "blocks"]
        )
        snapshot = self.cluster.snapshot if self.cluster is not None else None
        sizes = {stats.get("block_size", "0") for stats in snapshot.stats.values()} if snapshot else set()
        family.add_metric([min(sizes, default="0"), f"{total('blocks_total'):.0f}"], 1)
        return family


def _stalled_s(cluster: Cluster | None) -> float:
    return cluster.stalled_s() if cluster is not None else 0.0

"""The scheduler's Prometheus metrics: counters and gauges are fields of its last report, histograms take columns.

No code here runs once a token: an iteration costs a few calls, a request a few more at its start and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.core.types import FinishedRequest
from services.scheduler.tracing import Timeline
from shared.keys import CLASSES
from shared.telemetry.metrics import CALLS_S, GAPS_S, SECONDS, TOKENS, Alias, Aliases, ColumnHistogram, ColumnHistograms

CALLS = ("claim", "publish", "fenced", "lease", "release", "give", "take_worker", "give_worker")
DECODE, PREFILL = 0, 1


@dataclass(frozen=True, slots=True)
class Reported:
    """A metric family with values from fields of `stats:{shard}`; `fields` maps each field to the value of `label`."""

    name: str
    text: str
    fields: Mapping[str, str]
    label: str = ""
    counter: bool = False
    scale: float = 1.0

    def family(self, stats: Mapping[str, Any]) -> Metric:
        """Return the family of one report."""
        return self._family([], [([], stats)])

    def family_of(self, replicas: Mapping[str, Mapping[str, Any]]) -> Metric:
        """Return the family with a label `replica` before `label`. replicas: their fields by worker id."""
        return self._family(["replica"], [([name], figures) for name, figures in replicas.items()])

    def _family(self, labels: list[str], rows: list[tuple[list[str], Mapping[str, Any]]]) -> Metric:
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = kind(self.name, self.text, labels=[*labels, self.label] if self.label else labels)
        for of, figures in rows:
            for name, value in self.fields.items():
                family.add_metric([*of, value] if self.label else of, self.scale * float(figures.get(name, 0)))
        return family


def _by_class(name: str) -> dict[str, str]:
    return {f"{name}_{each}": each for each in CLASSES}


P = "orcinus_scheduler_"
REPORTED = (
    Reported(P + "running_sequences", "Sequences in slots", {"running": ""}),
    Reported(P + "waiting_sequences", "Sequences waiting for a slot, by class", _by_class("waiting"), "class"),
    Reported(P + "swapped_sequences", "Waiting sequences with their KV in the host tier", {"swapped": ""}),
    Reported(P + "parked_sequences", "Sequences set aside: in quarantine, or without a gateway", {"parked": ""}),
    Reported(P + "queued_tokens", "Tokens waiting to be computed", {"queued_tokens": ""}),
    Reported(
        P + "queue_age_seconds",
        "Age of the oldest request that never ran, by class",
        _by_class("queue_age_ms"),
        "class",
        scale=1e-3,
    ),
    Reported(P + "steps_in_flight", "Steps in flight", {"in_flight": ""}),
    Reported(P + "workers", "Connected workers", {"workers": ""}),
    Reported(
        P + "kv_blocks",
        "KV blocks on the device, by state: free, cached, draining, used",
        {"blocks_free": "free", "blocks_cached": "cached", "blocks_draining": "draining", "blocks_used": "used"},
        "state",
    ),
    Reported(
        P + "host_kv_blocks",
        "KV blocks of the host tier, by state: free, used",
        {"host_blocks_free": "free", "host_blocks_used": "used"},
        "state",
    ),
    Reported(P + "kv_usage_ratio", "Fraction of the device's KV blocks that sequences hold", {"kv_usage": ""}),
    Reported(
        P + "predicted_time_to_first_token_seconds",
        "Predicted time to first token of a new request, by class",
        _by_class("predicted_ttft_ms"),
        "class",
        scale=1e-3,
    ),
    Reported(
        P + "ttft_predicted_median_seconds",
        "Predicted time to first token of the requests that started in the last minute, median, by class",
        _by_class("ttft_predicted_ms_p50"),
        "class",
        scale=1e-3,
    ),
    Reported(
        P + "ttft_measured_median_seconds",
        "Measured time to first token of the same requests, median, by class",
        _by_class("ttft_ms_p50"),
        "class",
        scale=1e-3,
    ),
    Reported(
        P + "ttft_error_median_seconds",
        "Difference of the two of each request, either way, median, by class",
        _by_class("ttft_error_ms_p50"),
        "class",
        scale=1e-3,
    ),
    Reported(
        P + "prefill_tokens_per_second", "Prompt tokens per second of steps with prompt tokens", {"prefill_tok_s": ""}
    ),
    Reported(P + "report_timestamp_seconds", "Time of the last report", {"time_ms": ""}, scale=1e-3),
    Reported(P + "steps", "Steps planned", {"iteration": ""}, counter=True),
    Reported(P + "output_tokens", "Tokens produced", {"tokens_total": ""}, counter=True),
    Reported(P + "preemptions", "Preempted sequences", {"preemptions": ""}, counter=True),
    Reported(
        P + "recomputed_tokens", "Tokens computed again after preemptions", {"recomputed_tokens": ""}, counter=True
    ),
    Reported(P + "swapped_blocks", "Blocks copied between the tiers", {"swapped_blocks": ""}, counter=True),
    Reported(P + "handed_over", "Sequences that prefill replicas handed over", {"handed_over": ""}, counter=True),
    Reported(
        P + "handed_over_blocks",
        "KV blocks of sequences that were handed over",
        {"handed_over_blocks": ""},
        counter=True,
    ),
    Reported(
        P + "not_handed_over",
        "Sequences that a full host tier kept from a hand-over at first",
        {"not_handed_over": ""},
        counter=True,
    ),
    Reported(P + "prefix_hit_tokens", "Tokens found in the prefix cache", {"prefix_hit_tokens": ""}, counter=True),
    Reported(P + "drafted_tokens", "Guesses of next tokens that were checked", {"drafted_tokens": ""}, counter=True),
    Reported(P + "accepted_tokens", "Guesses of next tokens that were right", {"accepted_tokens": ""}, counter=True),
    Reported(
        P + "ended_requests",
        "Requests that ended, by outcome: finished, cancelled, failed",
        {"finished": "finished", "cancelled": "cancelled", "failed": "failed"},
        "outcome",
        counter=True,
    ),
    Reported(
        P + "slo_violations",
        "Requests with a first token after ttft_slo_ms, by class",
        _by_class("slo_violations"),
        "class",
        counter=True,
    ),
)

R = P + "replica_"
OF_REPLICA = (
    Reported(R + "running_sequences", "Sequences in slots, by replica (worker id)", {"running": ""}),
    Reported(R + "loading_sequences", "Sequences in slots that wait for KV from a host tier", {"loading": ""}),
    Reported(R + "slots", "Slots of the replica", {"slots": ""}),
    Reported(
        R + "kv_blocks",
        "KV blocks on the device, by state: free, cached, draining, used",
        {"blocks_free": "free", "blocks_cached": "cached", "blocks_draining": "draining", "blocks_used": "used"},
        "state",
    ),
    Reported(
        R + "host_kv_blocks",
        "KV blocks of the host tier, by state: free, cached, used",
        {"host_blocks_free": "free", "host_blocks_cached": "cached", "host_blocks_used": "used"},
        "state",
    ),
    Reported(R + "steps_in_flight", "Steps in flight", {"in_flight": ""}),
    Reported(R + "step_seconds", "Mean duration of a step since the last report", {"step_ms": ""}, scale=1e-3),
    Reported(R + "idle_ratio", "Fraction of the time without a step", {"idle_pct": ""}, scale=1e-2),
    Reported(R + "tokens_per_second", "Tokens sampled per second since the last report", {"tok_s": ""}),
    Reported(
        R + "prefix_hit_tokens",
        "Tokens found in the replica's prefix cache since it joined",
        {"prefix_hit_tokens": ""},
        counter=True,
    ),
    Reported(
        R + "swapped_blocks",
        "Blocks copied between the replica's tiers since it joined",
        {"swapped_blocks": ""},
        counter=True,
    ),
    Reported(R + "epoch", "Epoch of the replica's Run", {"epoch": ""}),
)
"""Families with one series a replica; those of a lost replica disappear with the next report."""

ALIASES = (
    Alias("vllm:num_preemptions", P + "preemptions", {}),
    Alias("vllm:prefix_cache_hits", P + "prefix_hit_tokens", {}),
    Alias("vllm:spec_decode_num_draft_tokens", P + "drafted_tokens", {}),
    Alias("vllm:spec_decode_num_accepted_tokens", P + "accepted_tokens", {}),
    Alias("vllm:iteration_tokens_total", P + "step_tokens", {}),
    Alias("vllm:request_queue_time_seconds", P + "queue_seconds", {}),
    Alias("vllm:request_prefill_time_seconds", P + "prefill_seconds", {}),
    Alias("vllm:request_decode_time_seconds", P + "decode_seconds", {}),
    Alias("vllm:request_inference_time_seconds", P + "inference_seconds", {}),
)
"""Aliases of metrics that only the scheduler has; the gateway has the rest, so no figure is counted twice."""


class _Reports(Collector):
    """The families of the last report."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}
        self.replicas: Mapping[str, Mapping[str, Any]] = {}  # by worker id

    def collect(self) -> Iterator[Metric]:
        stats, replicas = self.stats, self.replicas
        for each in REPORTED:
            yield each.family(stats)
        for each in OF_REPLICA:
            yield each.family_of(replicas)
        info = GaugeMetricFamily(R + "info", "Always 1; role and state are labels", labels=["replica", "role", "state"])
        for name, figures in replicas.items():
            info.add_metric([name, str(figures["role"]), str(figures["state"])], 1)
        yield info


class Metrics:
    """The registry of the process; `serve` of shared/telemetry/metrics.py shows it."""

    def __init__(
        self, model: str = "", aliases: bool = False, on_end: Callable[[FinishedRequest, Timeline], None] | None = None
    ) -> None:
        """on_end: called with each request that got tokens, at its end."""
        self._on_end = on_end
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reports = _Reports()
        self._ttft = ColumnHistogram(P + "time_to_first_token_seconds", "From enqueue to the first token", SECONDS)
        self._gap = ColumnHistogram(P + "time_between_tokens_seconds", "Between tokens of a sequence", GAPS_S)
        self._step = ColumnHistogram(P + "step_seconds", "Duration of a step in the worker", GAPS_S)
        self._step_tokens = ColumnHistogram(
            P + "step_tokens",
            "Tokens of a step, by phase: decode, prefill",
            (0, *TOKENS),
            "phase",
            ("decode", "prefill"),
        )
        self._plan = ColumnHistogram(P + "plan_seconds", "Time of the scheduler to plan or to apply a step", CALLS_S)
        self._queue = ColumnHistogram(P + "queue_seconds", "From enqueue to the first slot", SECONDS)
        self._prefill = ColumnHistogram(P + "prefill_seconds", "From the first slot to the first token", SECONDS)
        self._decode = ColumnHistogram(P + "decode_seconds", "From the first token to the last", SECONDS)
        self._inference = ColumnHistogram(P + "inference_seconds", "From the first slot to the last token", SECONDS)
        self._calls = ColumnHistogram(
            P + "redis_call_seconds", "Duration of Redis scripts, by script", CALLS_S, "script", CALLS
        )
        self._histograms = ColumnHistograms(
            self._ttft, self._gap, self._step, self._step_tokens, self._plan, self._queue, self._prefill, self._decode,
            self._inference, self._calls,
        )  # fmt: skip
        self.unreadable = Counter(
            P + "unreadable_records",
            "Records of Redis or a worker that were set aside, by kind",
            ["kind"],
            registry=self.registry,
        )
        self.registry.register(self._reports)
        self.registry.register(self._histograms)
        if aliases:
            self.registry.register(Aliases((self._reports, self._histograms), ALIASES, model))

    def report(self, stats: Mapping[str, Any]) -> None:
        """Take the fields of `stats:{shard}`, once a second, and count the values observed since."""
        held = _used_blocks(stats)
        usage = held["blocks_used"] / max(1, int(stats.get("blocks_total", 0)))
        self._reports.stats = {**stats, **held, "kv_usage": usage}
        self._histograms.settle()

    def replicas(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the rows of `stats:{shard}:replicas`, once a second."""
        self._reports.replicas = {name: {**figures, **_used_blocks(figures)} for name, figures in rows.items()}

    def call(self, script: str, seconds: float) -> None:
        """Observe the duration of a Redis script."""
        if script in CALLS:
            self._calls.observe(seconds, CALLS.index(script))

    def step(self, step_ns: int, decode: int, prefill: int) -> None:
        """Observe a step that was answered."""
        self._step.observe(step_ns / 1e9)
        self._step_tokens.observe(decode, DECODE)
        self._step_tokens.observe(prefill, PREFILL)

    def observe_plan(self, spent_ns: int) -> None:
        """Observe the time that the core took to plan or apply a step."""
        self._plan.observe(spent_ns / 1e9)

    def waits(self, first_ns: npt.NDArray[np.int64], between_ns: npt.NDArray[np.int64]) -> None:
        """Observe waits: first_ns [n] since arrival, between_ns [m] since the previous token."""
        if first_ns.size:
            self._ttft.observe(first_ns / 1e9)
        if between_ns.size:
            self._gap.observe(between_ns / 1e9)

    def observe_end(self, finished: FinishedRequest, life: Timeline) -> None:
        """Observe the times of a request that got tokens and has ended."""
        self._queue.observe(max(0, life.started_ns - finished.request.arrived_ns) / 1e9)
        self._prefill.observe((life.first_token_ns - life.started_ns) / 1e9)
        self._decode.observe((life.ended_ns - life.first_token_ns) / 1e9)
        self._inference.observe((life.ended_ns - life.started_ns) / 1e9)
        if self._on_end is not None:
            self._on_end(finished, life)


def _used_blocks(stats: Mapping[str, Any]) -> dict[str, int]:
    """Return the blocks of both tiers that sequences hold: blocks that are not free, cached or draining."""
    return {
        f"{tier}blocks_used": int(stats.get(f"{tier}blocks_total", 0))
        - sum(int(stats.get(f"{tier}blocks_{state}", 0)) for state in ("free", "cached", "draining"))
        for tier in ("", "host_")
    }

"""The worker's Prometheus metrics: where the time of a step goes, and what it ran. Fed once a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from protos import worker_pb2
from services.worker.slots import Chunks
from shared.telemetry.metrics import GAPS_S

P = "orcinus_worker_"
PHASES = ("queued", "idle", "forward", "sample", "swap")


class Metrics:
    """One registry; `serve` of shared/telemetry/metrics.py exposes it."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        seconds = Histogram(
            P + "step_phase_seconds",
            "By phase: queued (before the device took it), idle (the device, before it), forward, sample, swap",
            ["phase"], buckets=GAPS_S, registry=registry,
        )  # fmt: skip
        self._seconds = [seconds.labels(phase) for phase in PHASES]
        self._busy = Counter(P + "busy_seconds", "Time in which the device computed", registry=registry)
        self._rank_busy = Counter(
            P + "rank_busy_seconds", "Time in which each rank of the replica computed", ["rank"], registry=registry
        )
        tokens = Counter(
            P + "computed_tokens", "Tokens computed, by phase: decode, prefill", ["phase"], registry=registry
        )
        self._decode, self._prefill = tokens.labels("decode"), tokens.labels("prefill")
        self._sampled = Counter(P + "sampled_tokens", "Tokens drawn", registry=registry)
        self._errors = Counter(P + "failed_sequences", "Sequences that failed alone", registry=registry)
        self._late = Counter(
            P + "late_rows", "Rows that sat out a step because their grammar's mask was not there", registry=registry
        )
        self.grammars_ended = Counter(
            P + "grammars_ended", "Grammars beyond the processor time or memory of their process", registry=registry
        )
        self._sequences = Gauge(P + "step_sequences", "Sequences of the last step", registry=registry)
        copied = Counter(
            P + "copied_blocks", "KV blocks copied between the tiers, by to: host, device", ["to"], registry=registry
        )
        self._to_host, self._to_device = copied.labels("host"), copied.labels("device")
        self._last = Gauge(P + "last_step", "The last step answered", registry=registry)

    def answering(self, last_step: Callable[[], int]) -> None:
        """Set the source of the gauge of the last step."""
        self._last.set_function(last_step)

    def rank_busy(self, rank: int, seconds: float) -> None:
        """Add the seconds that a rank computed; `step` adds those of rank 0."""
        self._rank_busy.labels(str(rank)).inc(seconds)

    def step(self, result: worker_pb2.Result, chunks: Chunks) -> None:
        """Add a step that was answered. A chunk of one token counts as a decode; guesses count as neither."""
        took = result.timings
        for seconds, nanoseconds in zip(
            self._seconds, (took.queued_ns, took.idle_ns, took.forward_ns, took.sample_ns, took.swap_ns), strict=True
        ):
            seconds.observe(nanoseconds / 1e9)
        busy_s = (took.forward_ns + took.sample_ns) / 1e9
        self._busy.inc(busy_s)
        self.rank_busy(0, busy_s)
        lengths = chunks.lengths if chunks.drafts is None else chunks.lengths - chunks.drafts
        decode = int(np.count_nonzero(lengths == 1))
        self._decode.inc(decode)
        self._prefill.inc(int(lengths.sum()) - decode)
        self._sampled.inc(len(result.tokens) // 4)
        self._errors.inc(len(result.errors))
        self._late.inc(len(result.late_slots) // 4)
        self._sequences.set(len(chunks.slots))
        self._to_host.inc(len(result.swap_out_acks) // 4)
        self._to_device.inc(len(result.swap_in_acks) // 4)

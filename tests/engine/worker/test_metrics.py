"""The worker's metrics are the sums of what its results say."""

from __future__ import annotations

import numpy as np
import pytest

from protos import worker_pb2
from services.worker.metrics import Metrics
from services.worker.slots import Chunks
from shared.columns import pack


def test_worker_metrics_add_up_what_steps_took_and_ran() -> None:
    metrics = Metrics()
    metrics.answering(lambda: 17)
    timings = worker_pb2.Timings(
        queued_ns=1_000_000, idle_ns=2_000_000, forward_ns=30_000_000, sample_ns=4_000_000, total_ns=35_000_000
    )
    result = worker_pb2.Result(slots=pack([0, 2]), tokens=pack([9, 9]), timings=timings, swap_out_acks=pack([5, 6, 7]))
    result.late_slots = pack([1])
    lengths = np.array([1, 40, 1], np.int32)
    slots = np.arange(3, dtype=np.int32)
    chunks = Chunks(slots=slots, starts=slots, lengths=lengths, samples=np.array([True, False, True]), late=slots[:0])
    for _ in range(2):
        metrics.step(result, chunks)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"orcinus_worker_{name}", labels)

    assert value("busy_seconds_total") == pytest.approx(0.068)
    assert value("step_phase_seconds_sum", phase="forward") == pytest.approx(0.06)
    assert value("step_phase_seconds_count", phase="idle") == 2
    assert (value("computed_tokens_total", phase="decode"), value("computed_tokens_total", phase="prefill")) == (4, 80)
    assert (value("sampled_tokens_total"), value("step_sequences"), value("last_step")) == (4, 3, 17)
    assert value("late_rows_total") == 2
    assert (value("copied_blocks_total", to="host"), value("copied_blocks_total", to="device")) == (6, 0)

"""Metrics of iterations and requests beside prometheus_client, the ring of steps, the times of requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.scheduler.core.types import Finish, FinishedRequest, NewRequest, Outcome
from services.scheduler.metrics import ALIASES, Metrics
from services.scheduler.telemetry import COLUMNS, COUNTED_AT_ONCE, ROWS, Iterations, Stats
from services.scheduler.tracing import RequestTimes, Timeline
from services.scheduler.workers.loop import WorkerRates
from shared.telemetry.metrics import PENDING_COLUMNS, Alias, Aliases, ColumnHistogram, ColumnHistograms
from shared.wire.columns import unpack
from tests.support.stand_ins.written_stack import REPLICA

BOUNDS = (0.1, 0.5, 1, 2.5)


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    """Sample with its labels -> value; without the time at which a family was made."""
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "_created" not in line}


def test_histogram_of_columns_says_what_one_of_single_values_says() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    single = Histogram("x_seconds", "x", ["class"], buckets=BOUNDS, registry=theirs)
    columns = ColumnHistogram("x_seconds", "x", BOUNDS, "class", ("a", "b"))
    ours.register(ColumnHistograms(columns))
    random = np.random.default_rng(5)
    for number, name in enumerate("ab"):
        for _ in range(3):
            values = np.concatenate([random.exponential(1, 40), BOUNDS])  # a bound belongs to its bucket
            columns.observe(values, number)
            for value in values:
                single.labels(name).observe(value)
    columns.settle()
    assert exposed(ours) == pytest.approx(exposed(theirs))


def test_unsettled_columns_are_counted_before_they_pile_up() -> None:
    columns = ColumnHistogram("x_seconds", "x", BOUNDS)
    for _ in range(PENDING_COLUMNS):
        columns.observe(0.2)
    assert columns.family().samples[-2].value == PENDING_COLUMNS


def test_an_alias_sums_up_the_labels_that_it_leaves_out() -> None:
    registry = CollectorRegistry()
    columns = ColumnHistogram("ours_seconds", "x", BOUNDS, "class", ("a", "b"))
    columns.observe(np.array([0.2, 0.3]), 0)
    columns.observe(0.3, 1)
    columns.settle()
    registry.register(Aliases([ColumnHistograms(columns)], [Alias("vllm:x_seconds", "ours_seconds", {})], "m"))
    found = exposed(registry)
    assert found['vllm:x_seconds_count{engine="0",model_name="m"}'] == 3
    assert found['vllm:x_seconds_bucket{engine="0",le="0.1",model_name="m"}'] == 0
    assert found['vllm:x_seconds_bucket{engine="0",le="0.5",model_name="m"}'] == 3


def test_metrics_of_the_scheduler_are_what_its_statistics_were_fed() -> None:
    metrics = Metrics("demo", aliases=True)
    stats = Stats(0, metrics)
    stats.step(decode=3, prefill=40, spent_ns=2_000_000)
    stats.result(30_000_000, 5, prefill=40, decode=3)
    stats.call("publish", 0.002)
    core = {"running": 7, "waiting_low": 4, "blocks_total": 10, "blocks_free": 2, "blocks_cached": 3, "preemptions": 6}
    stats.snapshot(core, 1_000_000_000, 1000, 4, "orcinus", 1)
    found = exposed(metrics.registry)
    assert found["orcinus_scheduler_running_sequences"] == 7
    assert found['orcinus_scheduler_waiting_sequences{class="low"}'] == 4
    assert found['orcinus_scheduler_kv_blocks{state="used"}'] == 5
    assert found["orcinus_scheduler_kv_usage_ratio"] == 0.5
    assert found["orcinus_scheduler_preemptions_total"] == 6
    assert found["orcinus_scheduler_step_seconds_sum"] == pytest.approx(0.03)
    assert found['orcinus_scheduler_step_tokens_sum{phase="prefill"}'] == 40
    assert found['orcinus_scheduler_redis_call_seconds_count{script="publish"}'] == 1
    assert found['vllm:num_preemptions_total{engine="0",model_name="demo"}'] == 6
    assert len({name.partition("{")[0] for name in found if name.startswith("vllm:")}) >= len(ALIASES)


def test_first_tokens_are_counted_at_once_and_steady_decode_in_groups() -> None:
    counts = [0, 0]

    class Counter(Metrics):
        def waits(self, first_ns: npt.NDArray[np.int64], between_ns: npt.NDArray[np.int64]) -> None:
            counts[0] += first_ns.size
            counts[1] += between_ns.size

    stats = Stats(0, Counter("demo"))

    def counted(first: int, outcomes: int = 1) -> list[int]:
        """Return how many first and later tokens are counted after outcomes of one token each."""
        for index in range(first, first + outcomes):
            stats.outcome(
                Outcome(
                    requests=[NewRequest("a", [np.zeros(5, np.int32)], max_tokens=99)],
                    gateways=["g"],
                    choices=np.zeros(1, np.int32),
                    first_indices=np.array([index], np.int32),
                    counts=np.ones(1, np.int32),
                    tokens=np.ones(1, np.int32),
                    waits_ns=np.ones(1, np.int64),
                    finish=np.zeros(1, np.uint8),
                ),
                1_000_000_000,
            )
        return counts

    assert counted(0) == [1, 0]
    assert counted(1, COUNTED_AT_ONCE - 1) == [1, 0]
    assert counted(COUNTED_AT_ONCE) == [1, COUNTED_AT_ONCE]
    assert counted(5) == [1, COUNTED_AT_ONCE]
    assert counted(0) == [2, COUNTED_AT_ONCE + 1]
    assert counted(5) == [2, COUNTED_AT_ONCE + 1]
    stats.snapshot({}, 2_000_000_000, 1000, 4, "orcinus", 1)
    assert counts == [2, COUNTED_AT_ONCE + 2]


def test_each_replica_has_its_own_series_until_it_is_lost() -> None:
    metrics = Metrics("demo", aliases=True)
    before = exposed(metrics.registry)
    stats = Stats(0, metrics)
    stats.replicas({"worker-0": REPLICA, "worker-1": {**REPLICA, "role": "decode", "running": 3}})
    found = exposed(metrics.registry)
    assert found['orcinus_scheduler_replica_running_sequences{replica="worker-0"}'] == REPLICA["running"]
    assert found['orcinus_scheduler_replica_running_sequences{replica="worker-1"}'] == 3
    assert found['orcinus_scheduler_replica_kv_blocks{replica="worker-1",state="used"}'] == 600
    assert found['orcinus_scheduler_replica_host_kv_blocks{replica="worker-0",state="used"}'] == 100
    assert found['orcinus_scheduler_replica_step_seconds{replica="worker-0"}'] == pytest.approx(0.0115)
    assert found['orcinus_scheduler_replica_prefix_hit_tokens_total{replica="worker-0"}'] == 2048
    assert found['orcinus_scheduler_replica_info{replica="worker-1",role="decode",state="serving"}'] == 1
    assert {name for name in found if name.startswith("vllm:")} == {n for n in before if n.startswith("vllm:")}
    stats.replicas({"worker-1": REPLICA})
    left = [name for name in exposed(metrics.registry) if "replica=" in name]
    assert left and all('replica="worker-1"' in name for name in left)


def test_pace_of_a_worker_covers_answers_since_the_last_report() -> None:
    pace = WorkerRates()
    pace.on_answer(step_ns=30_000_000, idle_ns=10_000_000, tokens=12)
    pace.on_answer(step_ns=10_000_000, idle_ns=0, tokens=8)
    assert pace.take(2.0) == {"tok_s": 10.0, "step_ms": 20.0, "idle_pct": 20.0}
    assert pace.take(1.0) == {"tok_s": 0.0, "step_ms": 0.0, "idle_pct": 0.0}


def test_the_ring_holds_the_last_iterations_oldest_first() -> None:
    ring = Iterations()
    assert ring.fields()["last"] == 0
    for number in range(3):
        ring.add(1000 * number, 2_000_000, number, 10 * number, 0)
    assert unpack(bytes(ring.fields()["prefill"])).tolist() == [0, 10, 20]  # type: ignore[arg-type]
    for number in range(3, ROWS + 5):
        ring.add(1000 * number, 1 << 62, number, 0, 1)
    fields = ring.fields()
    columns = {name: unpack(bytes(fields[name])).tolist() for name in COLUMNS}  # type: ignore[arg-type]
    assert fields["last"] == ROWS + 5
    assert columns["decode"] == columns["idle_us"] == list(range(5, ROWS + 5))
    assert set(columns["step_us"]) == {2**31 - 1}, "too long for the column, not wrapped"


def one(request_id: str, first: int) -> Outcome:
    request = NewRequest(request_id, [np.array([1], np.int32)], 4)
    column = np.array([first], np.int32)
    return Outcome(
        requests=[request], gateways=["g"], choices=column, first_indices=column, counts=np.array([1], np.int32)
    )


def test_request_has_start_first_token_and_end_and_leaves_nothing() -> None:
    told: list[tuple[str, Timeline]] = []
    request_times = RequestTimes(lambda finished, life: told.append((finished.request.id, life)))
    request_times.record(Outcome(started_ids=["a", "b"]), 10)
    request_times.record(one("a", 0), 20)
    request_times.record(one("a", 0), 25)  # of its second choice
    request_times.record(one("a", 1), 30)
    request_times.record(one("other", 0), 30)  # its start was another scheduler's
    for request_id in ("a", "b", "other"):  # b has got no token
        request = NewRequest(request_id, [np.array([1], np.int32)], 4)
        request_times.record(Outcome(ended_requests=[FinishedRequest(request, [], [Finish.STOP])]), 40)
    assert told == [("a", Timeline(10, 20, 40))]
    assert len(request_times) == 0

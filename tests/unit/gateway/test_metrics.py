"""The gateway's metrics: what was delivered, the stack as it was last seen, and both by the names of vLLM."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.cluster import Cluster, Snapshot
from services.gateway.metrics import ALIASES, GAPS_KEPT, Metrics
from services.gateway.request import Limits
from services.scheduler.metrics import ALIASES as SCHEDULER_ALIASES
from shared.settings import DEMO_MODEL, GatewaySettings
from tests.support.gateway.generations import spec

STATS = {
    "shard-0": {
        "workers": "1", "running": "5", "waiting_low": "3",
        "blocks_total": "100", "blocks_free": "20", "block_size": "16",
    },
    "shard-1": {
        "running": "2", "waiting_high": "1",
        "blocks_total": "100", "blocks_cached": "40", "block_size": "16",
    },
}  # fmt: skip


def exposed(metrics: Metrics) -> dict[str, float]:
    """`name{label=value,...}` -> value, as Prometheus's own parser reads the text."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    settings = GatewaySettings(model=DEMO_MODEL, redis_url="redis://127.0.0.1:1/0")
    cluster = Cluster(settings, "gateway-1", Limits(max_model_len=100, max_choices=8))
    cluster.redis_error = ""
    cluster.snapshot = Snapshot(
        at=time.monotonic(), leases=frozenset(STATS), workers={"w": {}}, stats=STATS, memory_used=3, memory_most=9,
        queue={"requests": "4", "tokens": "44", "bytes": "4444"},
    )  # fmt: skip
    found = Metrics("demo", aliases=True)
    found.watch(cluster, cluster.reason_not_ready)
    return found


def test_stack_metrics_sum_all_shards_of_the_last_snapshot(metrics: Metrics) -> None:
    assert (
        exposed(metrics).items()
        >= {
            "orcinus_stack_running_sequences": 7,
            "orcinus_stack_waiting_sequences{class=low}": 3,
            "orcinus_stack_kv_usage_ratio": 0.7,
            "orcinus_stack_ready": 1,
            "orcinus_stack_schedulers": 2,
            "orcinus_stack_workers": 1,
            "orcinus_stack_queued_requests": 4,
            "orcinus_stack_queued_tokens": 44,
            "orcinus_stack_queued_bytes": 4444,
            "orcinus_stack_redis_memory_bytes": 3,
            "orcinus_stack_redis_memory_limit_bytes": 9,
        }.items()
    )


def test_aliases_have_vllms_names(metrics: Metrics) -> None:
    metrics.count_finished(spec(n=2, max_tokens=40), ["stop", "length"], 30, 2.0)
    found = exposed(metrics)
    of_model = "{engine=0,model_name=demo}"
    assert found["vllm:num_requests_running" + of_model] == 7
    assert found["vllm:num_requests_waiting" + of_model] == 4
    assert found["vllm:kv_cache_usage_perc" + of_model] == 0.7
    assert found["vllm:cache_config_info{block_size=16,engine=0,model_name=demo,num_gpu_blocks=200}"] == 1
    assert found["vllm:request_success_total{engine=0,finished_reason=stop,model_name=demo}"] == 1
    assert found["vllm:request_generation_tokens_sum" + of_model] == 30
    assert found["vllm:request_params_max_tokens_sum" + of_model] == 40
    assert found["vllm:e2e_request_latency_seconds_bucket{engine=0,le=2.5,model_name=demo}"] == 1
    assert found["vllm:e2e_request_latency_seconds_bucket{engine=0,le=1.0,model_name=demo}"] == 0


def test_gateway_and_scheduler_share_no_alias() -> None:
    gateway, scheduler = ({alias.name for alias in aliases} for aliases in (ALIASES, SCHEDULER_ALIASES))
    assert not gateway & scheduler


def test_metrics_are_zero_without_a_snapshot_and_without_aliases() -> None:
    found = exposed(Metrics())
    assert (found["orcinus_stack_ready"], found["orcinus_stack_redis_up"], found["orcinus_stack_workers"]) == (0, 0, 0)
    assert not [name for name in found if name.startswith("vllm")]


def test_delivery_lag_counts_from_the_entry_in_redis() -> None:
    metrics = Metrics()
    metrics.read(f"{int(time.time() * 1000) - 3000}-0".encode())
    metrics.read(f"{int(time.time() * 1000) + 9000}-0".encode())  # a clock ahead of this one
    assert exposed(metrics)["orcinus_gateway_delivery_lag_seconds_sum"] == pytest.approx(3, abs=1)


def test_delivered_tokens_are_counted_once_over_several_scrapes() -> None:
    metrics = Metrics()
    name = "orcinus_gateway_inter_token_seconds"
    assert exposed(metrics)["orcinus_gateway_output_tokens_total"] == 0
    metrics.on_delivery(3, None)
    for _ in range(GAPS_KEPT + 1):
        metrics.on_delivery(2, 0.002)
    metrics.on_delivery(1, 0.02)
    for _ in range(2):
        found = exposed(metrics)
        assert found["orcinus_gateway_output_tokens_total"] == 2 * GAPS_KEPT + 6
        assert (found[f"{name}_bucket{{le=0.001}}"], found[f"{name}_bucket{{le=0.0025}}"]) == (0, GAPS_KEPT + 1)
        assert found[f"{name}_count"] == GAPS_KEPT + 2
        assert found[f"{name}_sum"] == pytest.approx(0.002 * (GAPS_KEPT + 1) + 0.02)

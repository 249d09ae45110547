"""Write Grafana's two boards from the tables below: `python -m deploy.observability.boards`.

The Prometheus board asks metrics (docs/metrics.md), the Redis board the keys of docs/redis.md. A test compares both
with what the services export and write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).parent / "grafana" / "boards"
PROMETHEUS = {"type": "prometheus", "uid": "orcinus-prometheus"}
REDIS = {"type": "redis-datasource", "uid": "orcinus-redis"}
HALF, FULL, HEIGHT = 12, 24, 8

G, S, W, T = "orcinus_gateway_", "orcinus_scheduler_", "orcinus_worker_", "orcinus_stack_"


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Return p50, p95 and p99 of a histogram."""
    return [
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[$__rate_interval])))", f"p{round(100 * q)}")
        for q in (0.5, 0.95, 0.99)
    ]


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}[$__rate_interval]))"


PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    ("Output tokens a second", "short", [(rate(G + "output_tokens_total"), "delivered"),
                                         (rate(S + "output_tokens_total"), "produced")]),
    ("Time to the first token", "s", quantiles(G + "time_to_first_token_seconds")),
    ("Time between deliveries", "s", quantiles(G + "inter_token_seconds")),
    ("Whole requests", "s", quantiles(G + "request_duration_seconds")),
    ("Sequences", "short", [(f"max({T}running_sequences)", "running"),
                            (f"max by (class) ({T}waiting_sequences)", "waiting {{class}}"),
                            (f"sum({S}swapped_sequences)", "swapped")]),
    ("Answers a second", "short", [(rate(G + "requests_total", "code"), "{{code}}")]),
    ("Queue, prefill, decode: p95", "s", [
        (f"histogram_quantile(0.95, sum by (le) (rate({S}{name}_seconds_bucket[$__rate_interval])))", name)
        for name in ("queue", "prefill", "decode")]),
    ("Predicted time to the first token", "s", [
        (f"min by (class) ({S}predicted_time_to_first_token_seconds)", "{{class}}")]),
    ("KV blocks", "short", [(f"sum by (state) ({S}kv_blocks)", "{{state}}"),
                            (f"sum by (state) ({S}host_kv_blocks)", "host {{state}}")]),
    ("KV in use", "percentunit", [(f"max({T}kv_usage_ratio)", "device")]),
    ("Tokens of a step", "short", [
        (f"sum by (phase) (rate({S}step_tokens_sum[$__rate_interval])) / "
         f"sum by (phase) (rate({S}step_tokens_count[$__rate_interval]))", "{{phase}}")]),
    ("Step", "s", quantiles(S + "step_seconds")),
    ("Share of a device's time", "percentunit", [(f"rate({W}busy_seconds_total[$__rate_interval])", "{{instance}}")]),
    ("Preempted, swapped, computed again", "short", [(rate(S + "preemptions_total"), "sequences preempted"),
                                                     (rate(S + "swapped_blocks_total"), "blocks swapped"),
                                                     (rate(S + "recomputed_tokens_total"), "tokens recomputed")]),
    ("Redis: calls, p99", "s", [
        (f"histogram_quantile(0.99, sum by (le, script) (rate({name}redis_call_seconds_bucket[$__rate_interval])))",
         f"{service} {{{{script}}}}") for name, service in ((G, "gateway"), (S, "scheduler"))]),
    ("Redis: memory", "bytes", [(f"max({T}redis_memory_bytes)", "used"),
                                (f"max({T}redis_memory_limit_bytes)", "limit")]),
    ("SLO missed a second", "short", [(rate(S + "slo_violations_total", "class"), "{{class}}")]),
    ("Clients that left or were cut, gaps, repetitions", "short", [
        (rate(G + "cancelled_requests_total"), "left"), (rate(G + "slow_clients_total"), "cut"),
        (rate(G + "refilled_rows_total"), "gaps filled"), (rate(G + "duplicate_rows_total"), "received twice")]),
)  # fmt: skip
"""Title, unit, and (query, legend) of each line."""

KEY = "orcinus:{${model}}:"
OVER_TIME = (
    ("Output tokens a second", "short", ("tok_s",)),
    ("Sequences", "short", ("running", "waiting", "swapped")),
    ("Time to the first token", "ms", ("ttft_ms_p50", "ttft_ms_p99")),
    ("Time between tokens", "ms", ("tbt_ms_p50", "tbt_ms_p99")),
    ("KV blocks", "short", ("blocks_free", "blocks_cached", "blocks_draining", "host_blocks_free")),
    ("Waiting by class", "short", ("waiting_realtime", "waiting_high", "waiting_normal", "waiting_low")),
)
"""Title, unit, fields of `stats:{shard}:history`."""


def place(number: int, wide: bool = False) -> dict[str, int]:
    return {
        "x": 0 if wide else HALF * (number % 2),
        "y": HEIGHT * (number // 2),
        "w": FULL if wide else HALF,
        "h": HEIGHT,
    }


def chart(number: int, title: str, unit: str, source: dict[str, str], targets: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place(number),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "targets": [{"refId": chr(65 + at), "datasource": source, **target} for at, target in enumerate(targets)],
    }


def numbers(panel: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return only these columns of the stream's entries, as numbers over time."""
    kinds = [{"targetField": "$time", "destinationType": "time"}]
    kinds += [{"targetField": name, "destinationType": "number"} for name in fields]
    return {
        **panel,
        "transformations": [
            {"id": "filterFieldsByName", "options": {"include": {"names": ["$time", *fields]}}},
            {"id": "convertFieldType", "options": {"conversions": kinds}},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "$time"}]}},
        ],
    }


def table(number: int, title: str, command: dict[str, Any]) -> dict[str, Any]:
    target = {"refId": "A", "datasource": REDIS, "type": "command", **command}
    return {
        "id": number + 1, "type": "table", "title": title, "datasource": REDIS, "gridPos": place(number),
        "targets": [target],
    }  # fmt: skip


def board(uid: str, title: str, panels: list[dict[str, Any]], variables: dict[str, str]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["orcinus"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": name, "type": "textbox", "query": value, "current": {"text": value, "value": value}}
                     for name, value in variables.items()]
        },
        "panels": panels,
    }  # fmt: skip


def boards() -> dict[str, dict[str, Any]]:
    """Return file name -> board."""
    prometheus = [
        chart(number, title, unit, PROMETHEUS, [{"expr": query, "legendFormat": legend} for query, legend in lines])
        for number, (title, unit, lines) in enumerate(PANELS)
    ]
    history = {"type": "command", "command": "xrevrange", "keyName": KEY + "stats:$shard:history", "start": "+",
               "end": "-", "count": 1800}  # fmt: skip
    redis = [
        numbers(chart(number, title, unit, REDIS, [history]), fields)
        for number, (title, unit, fields) in enumerate(OVER_TIME)
    ]
    last = len(redis)
    redis.append(table(last, "All statistics", {"command": "hgetall", "keyName": KEY + "stats:$shard"}))
    events = {"command": "xrevrange", "keyName": KEY + "events", "start": "+", "end": "-", "count": 50}
    redis.append(table(last + 1, "Events", events))
    redis.append(table(last + 2, "Queue", {"command": "hgetall", "keyName": KEY + "queue"}))
    return {
        "orcinus.json": board("orcinus", "Orcinus", prometheus, {}),
        "orcinus-redis.json": board(
            "orcinus-redis", "Orcinus, from Redis", redis, {"model": "demo-model", "shard": "shard-0"}
        ),
    }


if __name__ == "__main__":
    for name, made in boards().items():
        (BOARDS / name).write_text(json.dumps(made, indent=1) + "\n")

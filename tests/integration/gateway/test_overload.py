"""Backpressure: which requests get 429, in which order, and with which Retry-After. Scripted stats, real scripts."""

from __future__ import annotations

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.stack import PLAIN
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import until


def shard(gateway: GatewayProcess) -> dict[str, str]:
    """Return the stats that the gateway has read."""
    return dict(httpx.get(gateway.ops_url + "/stats", verify=PLAIN, timeout=60).json()["shards"].get("shard-0", {}))


def test_full_queue_is_429_until_retry_after(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    scheduler.client.hset(gateway.keys.queue, "tokens", 999)
    scheduler.stats(prefill_tok_s=70)
    until("the rate is known", lambda: shard(gateway).get("prefill_tok_s") == "70")

    def answered(waiting: int, priority: str) -> httpx.Response:
        scheduler.client.hset(gateway.keys.queue, "tokens", waiting)
        return gateway.post("/v1/completions", {"prompt": [5] * 10, "priority": priority})

    for priority in ("normal", "low"):
        full = answered(985, priority)
        error = full.json()["error"]
        assert (full.status_code, error["code"], f"class {priority}" in error["message"]) == (429, "queue_full", True)
        after = int(full.headers["retry-after"])
        assert answered(985 - 70 * (after - 1), priority).status_code == 429
        assert answered(985 - 70 * after, priority).status_code == 200
    assert answered(985, "realtime").status_code == 200


@pytest.mark.parametrize(
    ("field", "limit_ms", "predicted_ms", "retry_after"),
    [
        ("ttft_slo_ms", 4999, 5000, "1"),
        ("ttft_slo_ms", 100, 10_000_000, "beyond"),
        ("deadline_ms", 1500, 5000, "4"),
    ],
)
def test_late_first_token_is_429_with_its_prediction(
    gateway: GatewayProcess, scheduler: ScriptedScheduler,
    field: str, limit_ms: int, predicted_ms: int, retry_after: str,
) -> None:  # fmt: skip
    scheduler.stats(queued_tokens_normal=480, predicted_ttft_ms_normal=predicted_ms, prefill_tok_s=100)
    known = str(predicted_ms)
    until("the forecast is known", lambda: shard(gateway).get("predicted_ttft_ms_normal") == known)
    answer = gateway.post("/v1/completions", {"prompt": "x", field: limit_ms})
    scheduler.stats(predicted_ttft_ms_normal=0)
    assert answer.status_code == 429
    after = answer.headers["retry-after"]
    assert 60 <= int(after) <= 120 if retry_after == "beyond" else after == retry_after
    error = answer.json()["error"]
    code = "slo_unreachable" if field == "ttft_slo_ms" else "deadline_unreachable"
    assert (error["code"], error["param"]) == (code, field)
    figures = (f"{predicted_ms} ms", f"{field}: ", f"later than {limit_ms} ms", "480 prompt tokens", "100 a second")
    assert all(figure in error["message"] for figure in figures)

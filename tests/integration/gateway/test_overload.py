"""Backpressure: who is refused with 429, in which order, and when to come again. Scripted figures, real scripts."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from tests.integration.conftest import KEY, OTHER
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_scheduler import ScriptedScheduler
from tests.support.stack import PLAIN
from tests.support.waiting import until


def post(gateway: GatewayProcess, path: str, body: Any, key: str = KEY) -> httpx.Response:
    return httpx.post(
        gateway.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60, verify=PLAIN
    )


def shard(gateway: GatewayProcess) -> dict[str, str]:
    """The statistics that the gateway has read."""
    found: dict[str, str] = httpx.get(gateway.ops_url + "/stats", verify=PLAIN).json()["shards"]["shard-0"]
    return found


def test_a_full_queue_is_429_until_retry_after_and_low_finds_it_full_first(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    scheduler.client.hset(gateway.keys.queue, "tokens", 999)
    scheduler.stats(prefill_tok_s=70)
    until("the rate is known", lambda: shard(gateway).get("prefill_tok_s") == "70")
    body = {"model": gateway.name, "prompt": [5] * 10}

    def answered(waiting: int, priority: str) -> httpx.Response:
        scheduler.client.hset(gateway.keys.queue, "tokens", waiting)
        return post(gateway, "/v1/completions", {**body, "priority": priority})

    for priority in ("normal", "low"):
        full = answered(985, priority)
        error = full.json()["error"]
        assert (full.status_code, error["code"], f"class {priority}" in error["message"]) == (429, "queue_full", True)
        after = int(full.headers["retry-after"])
        assert answered(985 - 70 * (after - 1), priority).status_code == 429
        assert answered(985 - 70 * after, priority).status_code == 200
    assert answered(985, "realtime").status_code == 200


def test_a_tenant_that_fills_its_share_of_the_queue_is_429_and_others_are_not(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    first = post(gateway, "/v1/completions", {"model": gateway.name, "prompt": [5] * 10, "background": True})
    assert first.status_code == 202
    tenant = scheduler.client.hget(gateway.keys.req(first.json()["id"]), "tenant")
    until("nothing waits", lambda: not scheduler.client.exists(gateway.keys.queue_tenants))
    scheduler.client.hset(gateway.keys.queue, "tokens", 395)
    scheduler.client.hset(gateway.keys.queue_tenants, tenant, 395)
    body = {"model": gateway.name, "prompt": [5] * 10}
    full = post(gateway, "/v1/completions", body)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "tenant_queue_full")
    assert int(full.headers["retry-after"]) >= 1
    assert post(gateway, "/v1/completions", body, key=OTHER).status_code == 200


def test_a_class_that_waits_too_long_is_429_until_retry_after(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    queued = 0

    def answered(wait_ms: int, priority: str = "normal") -> httpx.Response:
        nonlocal queued
        queued += 1
        waits = {f"queued_tokens_{priority}": queued, f"predicted_ttft_ms_{priority}": wait_ms}
        scheduler.stats(**waits, prefill_tok_s=100)
        until("the forecast is known", lambda: shard(gateway).get(f"queued_tokens_{priority}") == str(queued))
        # Somebody waits, so that it is not the first.
        scheduler.client.hset(gateway.keys.queue, "tokens", 10)
        tenant = hashlib.sha256(KEY.encode()).hexdigest()[:16]
        scheduler.client.hset(gateway.keys.queue_tenants, tenant, 10)
        return post(gateway, "/v1/completions", {"model": gateway.name, "prompt": "x", "priority": priority})

    for priority, wait_ms in (("normal", 50_500), ("low", 32_500)):
        late = answered(wait_ms, priority)
        assert (late.status_code, late.json()["error"]["code"]) == (429, "overloaded")
        after = int(late.headers["retry-after"])
        assert after == 3
        assert answered(wait_ms - 1000 * (after - 1), priority).status_code == 429
        assert answered(wait_ms - 1000 * after, priority).status_code == 200


@pytest.mark.parametrize(
    ("field", "limit_ms", "predicted_ms", "code", "retry_after"),
    [
        ("ttft_slo_ms", 1000, 5000, "slo_unreachable", "4"),
        ("ttft_slo_ms", 4999, 5000, "slo_unreachable", "1"),
        ("ttft_slo_ms", 100, 10_000_000, "slo_unreachable", "60"),
        ("deadline_ms", 1500, 5000, "deadline_unreachable", "4"),
    ],
)
def test_a_first_token_that_would_come_too_late_is_429_with_the_figures(
    gateway: GatewayProcess,
    scheduler: ScriptedScheduler,
    field: str,
    limit_ms: int,
    predicted_ms: int,
    code: str,
    retry_after: str,
) -> None:
    scheduler.stats(queued_tokens_normal=480, predicted_ttft_ms_normal=predicted_ms, prefill_tok_s=100)
    known = str(predicted_ms)
    until("the forecast is known", lambda: shard(gateway).get("predicted_ttft_ms_normal") == known)
    answer = post(gateway, "/v1/completions", {"model": gateway.name, "prompt": "x", field: limit_ms})
    scheduler.stats(predicted_ttft_ms_normal=0)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, retry_after)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, field)
    figures = (f"{predicted_ms} ms", f"{field}: ", f"later than {limit_ms} ms", "480 prompt tokens", "100 a second")
    for figure in figures:
        assert figure in error["message"]


def test_the_prediction_is_that_of_the_requests_class_and_says_what_explains_it(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    waits = {"queued_tokens_low": 480, "behind_low": 32, "predicted_ttft_ms_low": 17175, "starts_s": 1.863}
    urgent = {"queued_tokens_realtime": 3, "behind_realtime": 0, "predicted_ttft_ms_realtime": 20}
    scheduler.stats(**waits, **urgent, predicted_ttft_ms=17175, queued_tokens=480, prefill_tok_s=103)
    until("the forecast is known", lambda: shard(gateway).get("prefill_tok_s") == "103")
    body = {"model": gateway.name, "prompt": "x", "ttft_slo_ms": 500}
    served = post(gateway, "/v1/completions", {**body, "priority": "realtime"})
    refused = post(gateway, "/v1/completions", {**body, "priority": "low"})
    scheduler.stats(predicted_ttft_ms_low=0)
    assert served.status_code == 200
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "17")
    message = refused.json()["error"]["message"]
    assert "32 sequences wait for slots or memory before it, 1.86 start a second" in message
    assert "prompt tokens" not in message


def test_a_limit_that_is_kept_or_has_nothing_before_it_is_not_refused(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    body = {"model": gateway.name, "prompt": "x", "ttft_slo_ms": 1000, "deadline_ms": 60_000}
    scheduler.stats(queued_tokens_normal=480, predicted_ttft_ms_normal=1000, prefill_tok_s=101)
    until("the forecast is known", lambda: shard(gateway).get("prefill_tok_s") == "101")
    assert post(gateway, "/v1/completions", body).status_code == 200
    scheduler.stats(queued_tokens_normal=0, predicted_ttft_ms_normal=5000, prefill_tok_s=102)
    until("nothing waits", lambda: shard(gateway).get("prefill_tok_s") == "102")
    assert post(gateway, "/v1/completions", body).status_code == 200


def test_a_prefill_rate_that_nobody_measured_refuses_no_ttft_and_asks_for_a_second(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, answers: None
) -> None:
    scheduler.stats(waiting=4, queued_tokens_normal=400, predicted_ttft_ms_normal=5000, prefill_tok_s=0)
    until("the waiting are known", lambda: shard(gateway).get("waiting") == "4")
    body = {"model": gateway.name, "prompt": "x", "ttft_slo_ms": 1000}
    assert post(gateway, "/v1/completions", body).status_code == 200
    # Far past the limit: the end of the request before may still be counted.
    scheduler.client.hset(gateway.keys.queue, "tokens", 2000)
    full = post(gateway, "/v1/completions", body)
    scheduler.stats(predicted_ttft_ms_normal=0)
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")

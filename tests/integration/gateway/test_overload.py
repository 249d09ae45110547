"""Backpressure: which requests get 429, in which order, and with which Retry-After. Scripted stats, real scripts."""

from __future__ import annotations

import httpx

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

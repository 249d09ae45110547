"""A gateway that takes no more says so in the shape of `/v1/messages`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.gateway_process import running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler, answering

BODY: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}


def test_limit_of_a_key_and_missing_scheduler_come_with_retry_after(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    with running_gateway(tmp_path, model, redis_server, requests_per_minute=1) as gateway:
        away = gateway.post("/v1/messages", BODY)
        assert (away.status_code, away.json()["error"]["type"]) == (503, "overloaded_error")
        assert int(away.headers["retry-after"]) >= 1
        scheduler = ScriptedScheduler(redis_server.client, gateway.keys).lead()
        gateway.wait_ready()
        with answering(scheduler, lambda _: [50]):
            assert gateway.post("/v1/messages", BODY).status_code == 200
            limited = gateway.post("/v1/messages", BODY)
        assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) >= 1

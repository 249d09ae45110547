"""The line that a gateway logs for each request: ids, class, tokens, time, status, and no text of a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.conftest import KEY, TEXT
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.process import GatewayProcess, led_gateway, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import answering
from tests.support.waiting import until

SECRET = "what the prompt says"


def lines(gateway: GatewayProcess, count: int) -> list[dict[str, Any]]:
    """Return the fields of the request log, as soon as there are `count` lines."""

    def logged() -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in gateway.log().splitlines() if '"orcinus.request"' in line]
        return rows if len(rows) >= count else []

    return until(f"{count} lines", logged)


def test_log_has_a_line_for_each_request(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    redis_server.client.flushdb()
    with led_gateway(tmp_path, model, redis_server, log_json=True, api_key=KEY) as (gateway, scheduler):
        gateway.key = KEY
        with answering(scheduler, lambda claimed: token_ids(TEXT)):
            body = {"prompt": SECRET, "max_tokens": 100, "priority": "high"}
            answer = gateway.post("/v1/completions", body, headers={"x-request-id": "mine-1"})
            gateway.post("/v1/completions", {**body, "max_tokens": -1})
            gateway.get("/v1/requests/%0Aforged")
            gateway.post("/v1/responses/forged/cancel", {})
            gateway.post("/v1/score", {}, key="wrong")  # refused before it meets its route
            gateway.get("/v1/forged")
            gateway.get("/health/live")
        done, bad, unknown, *more = lines(gateway, 6)
        usage = answer.json()["usage"]
        assert (done["request"], done["method"], done["endpoint"]) == ("mine-1", "POST", "/v1/completions")
        assert (done["id"], done["model"], done["class"]) == (answer.json()["id"], gateway.name, "high")
        assert (done["prompt_tokens"], done["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (done["status"], bad["status"], unknown["status"]) == (200, 400, 404)
        assert done["ms"] > 0 and done["key"] and done["key"] not in KEY
        assert "id" not in bad
        named = [line["endpoint"] for line in (unknown, *more)]
        assert named == ["/v1/requests/{id}", "/v1/responses/{id}/cancel", "/v1/score", "other"]
        assert not any(word in gateway.log() for word in (SECRET, KEY, "forged", "Uvicorn"))


def test_log_can_be_turned_off(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    with running_gateway(tmp_path, model, redis_server, request_log=False) as gateway:
        assert gateway.get("/v1/models").status_code == 200
        gateway.stop()
        assert "endpoint=/v1/models" not in gateway.log()

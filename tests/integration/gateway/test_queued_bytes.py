"""A tenant that fills Redis: the bound on the bytes of its requests, at a gateway with default limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import KEY, OTHER
from tests.support.gateway_process import GatewayProcess, led_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import CANCELLED, ERROR, Line, ScriptedScheduler


@pytest.fixture
def attacked(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> Iterator[tuple[GatewayProcess, ScriptedScheduler]]:
    """A gateway with the keys of two tenants, over a Redis of 64 MiB."""
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    with led_gateway(tmp_path, model, redis_server, api_key_file=tmp_path / "keys") as (gateway, scheduler):
        gateway.key = KEY
        yield gateway, scheduler


def with_schema(gateway: GatewayProcess, **options: Any) -> httpx.Response:
    """Send a request of one token with a schema of 40 KB, which runs without its client."""
    schema = {"type": "string", "enum": [f"{number:05d}" * 20 for number in range(390)]}
    form = {"type": "json_schema", "json_schema": {"name": "big", "schema": schema}}
    body = {"prompt": [5], "max_tokens": 1, "background": True, "response_format": form}
    return gateway.post("/v1/completions", body, **options)


def test_tenant_that_fills_redis_with_schemas_is_429_alone(
    attacked: tuple[GatewayProcess, ScriptedScheduler],
) -> None:
    gateway, scheduler = attacked
    client, keys = scheduler.client, gateway.keys
    before = client.info("memory")["used_memory"]
    sent = []
    while (answer := with_schema(gateway)).status_code == 202:
        sent.append(answer.json()["id"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "tenant_queue_full"), error
    most = int(0.8 * 0.5 * 0.5 * client.info("memory")["maxmemory"])  # class normal, a tenant's share, half of Redis
    held = int(client.hget(keys.queue, "bytes"))
    assert f"hold {held} of at most {most + 1} bytes in Redis" in error["message"]
    assert held <= most < held + 50_000
    assert client.info("memory")["used_memory"] - before < 1.3 * most
    other = with_schema(gateway, key=OTHER)
    assert other.status_code == 202

    gateway.request("DELETE", f"/v1/requests/{sent[0]}")
    ends = {sent[0]: Line(sent[0], 0, finish=CANCELLED), sent[1]: Line(sent[1], 0, finish=ERROR, error="dead")}
    for request_id in [*sent, other.json()["id"]]:
        claimed = scheduler.claim()
        assert claimed.id == request_id
        if line := ends.get(request_id):
            scheduler.publish(line, ended=[(request_id, [line.finish], [0])])
        else:
            scheduler.serve(claimed, [50])
    assert (client.hget(keys.queue, "bytes"), client.hgetall(keys.queue_bytes)) == (b"0", {})
    assert with_schema(gateway).status_code == 202
    scheduler.serve(scheduler.claim(), [50])


def test_tenant_that_fills_redis_with_prompt_logprobs_is_429_alone(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    """The log-probabilities of a prompt stay for five minutes behind the end of their request."""
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    options = {"api_key_file": tmp_path / "keys", "max_queued_bytes": 60_000}
    body = {"prompt": [5] * 100, "max_tokens": 1, "prompt_logprobs": 20, "background": True}
    with led_gateway(tmp_path, model, redis_server, **options) as (gateway, scheduler):
        gateway.key = KEY
        assert gateway.post("/v1/completions", body).status_code == 202
        scheduler.serve(scheduler.claim(), [50])
        again = gateway.post("/v1/completions", body)
        assert (again.status_code, again.json()["error"]["code"]) == (429, "tenant_queue_full")
        assert 240 < int(again.headers["retry-after"]) <= 300, "when these are gone"
        assert gateway.post("/v1/completions", body, key=OTHER).status_code == 202

"""A tenant that fills Redis: the bound on the bytes of its requests, at a gateway with default limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.request import KEPT_KEY_BYTES
from tests.integration.conftest import KEY, OTHER
from tests.support.checkpoints.tokenizers import write_model
from tests.support.gateway.process import GatewayProcess, led_gateway
from tests.support.kept_bytes import kept_bytes
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import CANCELLED, ERROR, LENGTH, Line, ScriptedScheduler

RECORD_BYTES = 1536
"""Of the record of a request that has ended, as in lib.lua."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with vectors of 64 numbers."""
    directory = write_model(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    return directory


@pytest.fixture
def attacked(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> Iterator[tuple[GatewayProcess, ScriptedScheduler]]:
    """A gateway with the keys of two tenants, over a Redis of 64 MiB."""
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    redis_server.client.flushall()
    with led_gateway(tmp_path, model, redis_server, api_key_file=tmp_path / "keys") as (gateway, scheduler):
        gateway.key = KEY
        yield gateway, scheduler


def with_schema(gateway: GatewayProcess, first: int = 0, **options: Any) -> httpx.Response:
    """Send a request of one token with a schema of 40 KB, which runs without its client. first: number in it."""
    schema = {"type": "string", "enum": [f"{number:05d}" * 20 for number in range(first, first + 390)]}
    form = {"type": "json_schema", "json_schema": {"name": "big", "schema": schema}}
    body = {"prompt": [5], "max_tokens": 1, "background": True, "response_format": form}
    return gateway.post("/v1/completions", body, **options)


def test_tenant_that_fills_redis_with_schemas_is_429_alone(
    attacked: tuple[GatewayProcess, ScriptedScheduler],
) -> None:
    gateway, scheduler = attacked
    client, keys = scheduler.client, gateway.keys
    before = client.info("memory")["used_memory_dataset"]
    sent: list[str] = []
    while (answer := with_schema(gateway, len(sent))).status_code == 202:
        sent.append(answer.json()["id"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "tenant_queue_full"), error
    most = int(0.8 * 0.5 * 0.5 * client.info("memory")["maxmemory"])  # class normal, a tenant's share, half of Redis
    held = int(client.hget(keys.queue, "bytes"))
    assert f"hold {held} of at most {most + 1} bytes in Redis" in error["message"]
    assert held <= most < held + 50_000
    assert client.info("memory")["used_memory_dataset"] - before < 1.3 * most
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
    assert int(client.hget(keys.queue, "bytes")) == kept_bytes(client.xrange(keys.queue_kept)) < 0.05 * held, (
        "without their schemas"
    )
    assert with_schema(gateway).status_code == 202
    scheduler.serve(scheduler.claim(), [50])


def test_schema_of_many_requests_counts_once(attacked: tuple[GatewayProcess, ScriptedScheduler]) -> None:
    gateway, scheduler = attacked
    client, keys = scheduler.client, gateway.keys
    before = client.info("memory")["used_memory_dataset"]
    sent = [with_schema(gateway).json()["id"] for _ in range(100)]
    other = with_schema(gateway, key=OTHER).json()["id"]
    held = [int(size) for size in client.hgetall(keys.queue_bytes).values()]
    assert 40_000 < min(held) < 50_000 < max(held) < 40_000 + 100 * 3000, "each tenant has a text of its own"
    assert sum(held) == int(client.hget(keys.queue, "bytes"))
    assert client.info("memory")["used_memory_dataset"] - before < 1.25 * sum(held)
    for request_id in [*sent, other]:
        claimed = scheduler.claim()
        assert claimed.id == request_id
        scheduler.serve(claimed, [50])
    assert int(client.hget(keys.queue, "bytes")) == kept_bytes(client.xrange(keys.queue_kept)) < 101 * 2000
    assert not client.exists(keys.queue_grammars)


LOGPROBS = {"max_tokens": 100, "logprobs": 20}
STOPS = [f"{number:02d}" + "é" * 248 for number in range(16)]
"""Of 8 kB."""


@pytest.mark.parametrize(
    ("path", "body", "record", "most_bytes"),
    [
        (
            "completions",
            {"prompt": [5] * 100, "max_tokens": 1, "prompt_logprobs": 20},
            ("prompt_logprobs", 16_800),
            60_000,
        ),
        ("completions", {"prompt": [5], **LOGPROBS}, ("logprobs", 16_400), 60_000),
        ("embeddings", {"input": [[5]] * 40}, ("logprobs", 256), 120_000),
        ("completions", {"prompt": ["x" * 300] * 40, "max_tokens": 1, "echo": True}, None, 180_000),
        ("completions", {"prompt": [5], "max_tokens": 1, "n": 128}, None, 120_000),
        ("completions", {"prompt": [[5]] * 128, "max_tokens": 1}, None, 120_000),
        ("completions", {"prompt": [5], "max_tokens": 1, "stop": STOPS}, None, 40_000),
        ("completions", {"prompt": [5], "max_tokens": 1}, None, 10_000),
    ],
    ids=["prompt logprobs", "logprobs", "vectors", "echo", "choices", "prompts", "stop", "plain"],
)
def test_tenant_that_fills_redis_with_what_stays_is_429_alone(
    path: str,
    body: dict[str, Any],
    record: tuple[str, int] | None,
    most_bytes: int,
    tmp_path: Path,
    model: Path,
    redis_server: RedisServer,
) -> None:
    """Records, choices and texts stay for five minutes behind the end of their request."""
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    body = {"background": True} | body
    options = {"api_key_file": tmp_path / "keys", "max_queued_bytes": most_bytes}
    redis_server.client.flushall()
    with led_gateway(tmp_path, model, redis_server, **options) as (gateway, scheduler):
        gateway.key = KEY
        first = gateway.post(f"/v1/{path}", body)
        assert first.status_code == 202, first.text
        claimed = scheduler.claim()
        choices = len(claimed.prompts) * claimed.request.n
        if record is not None:
            for choice in range(choices):
                scheduler.client.set(f"{gateway.keys.prefix}{record[0]}:{claimed.id}:{choice}", bytes(record[1]))
        scheduler.publish(started=[claimed.id])
        scheduler.end(claimed, [[50]] * choices, [LENGTH] * choices)
        again = gateway.post(f"/v1/{path}", body)
        assert (again.status_code, again.json()["error"]["code"]) == (429, "tenant_queue_full"), again.text
        assert 240 < int(again.headers["retry-after"]) <= 300, "when these are gone"
        assert gateway.post(f"/v1/{path}", body, key=OTHER).status_code == 202


def test_request_that_ends_early_holds_only_the_records_that_it_got(
    attacked: tuple[GatewayProcess, ScriptedScheduler],
) -> None:
    gateway, scheduler = attacked
    assert gateway.post("/v1/completions", {"prompt": [5], "background": True, **LOGPROBS}).status_code == 202
    assert int(scheduler.client.hget(gateway.keys.queue, "bytes")) > 16_400
    claimed = scheduler.claim()
    line = Line(claimed.id, 0, [50], finish=LENGTH, logprobs=[bytes(164)])
    scheduler.publish(
        line, started=[claimed.id], checkpoints=[(claimed.id, 0, 0, [50])], ended=[(claimed.id, [LENGTH], [1])]
    )
    delivery = len(scheduler.client.hget(gateway.keys.req(claimed.id), "delivery"))
    beside = RECORD_BYTES + 2 * KEPT_KEY_BYTES + delivery
    assert int(scheduler.client.hget(gateway.keys.queue, "bytes")) == 164 + beside

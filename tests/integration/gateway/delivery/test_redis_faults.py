"""A gateway that loses its Redis: clients of running streams see a pause, new ones a 503, nothing is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.keys import Keys
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.clients import raw_post, streamed
from tests.support.gateway.process import GatewayProcess, led_gateway, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.waiting import until

TOKENS = token_ids("The quick brown fox jumps over the lazy dog")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", "--appendfsync", "always") as running:
        yield running


@pytest.fixture
def led(tmp_path: Path, model: Path, server: RedisServer) -> Iterator[tuple[GatewayProcess, ScriptedScheduler]]:
    with led_gateway(tmp_path, model, server) as found:
        yield found


def until_not_ready(gateway: GatewayProcess) -> None:
    until("the gateway is not ready", lambda: gateway.status("/health/ready") == 503)


def serves_again(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> bool:
    gateway.wait_ready()
    stream, claimed = streamed(gateway, scheduler)
    scheduler.serve(claimed, TOKENS)
    return stream.join().tokens() == TOKENS


def left_behind(gateway: GatewayProcess) -> bytes:
    return json.dumps({"model": gateway.name, "prompt": "x", "stream": True}).encode()


def test_streams_continue_after_redis_was_killed_and_restarted(
    server: RedisServer, led: tuple[GatewayProcess, ScriptedScheduler]
) -> None:
    gateway, scheduler = led
    stream, claimed = streamed(gateway, scheduler)
    scheduler.publish(Line(claimed.id, 0, TOKENS[:3]))
    until("the first tokens arrived", lambda: len(stream.tokens()) == 3)
    server.stop(signal.SIGKILL)
    until_not_ready(gateway)
    refused = gateway.post("/v1/completions", {"prompt": "x"})
    assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
    assert gateway.status("/health/live") == 200
    server.start()
    scheduler.publish(Line(claimed.id, 3, TOKENS[3:], finish=LENGTH))
    assert stream.join().tokens() == TOKENS
    assert serves_again(gateway, scheduler)


def test_cancel_is_sent_when_redis_is_back(server: RedisServer, led: tuple[GatewayProcess, ScriptedScheduler]) -> None:
    gateway, scheduler = led
    with raw_post(gateway, left_behind(gateway)):
        claimed = scheduler.claim()
        server.stop(signal.SIGKILL)
        until_not_ready(gateway)
    until("the request is forgotten", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)
    server.start()
    scheduler.wait_control("cancel", claimed.id)


def test_redis_that_refuses_writes_costs_503s_and_no_task(
    server: RedisServer, led: tuple[GatewayProcess, ScriptedScheduler]
) -> None:
    gateway, scheduler = led
    with raw_post(gateway, left_behind(gateway)):
        claimed = scheduler.claim()
        server.client.config_set("min-replicas-to-write", 1)
        until_not_ready(gateway)
    refused = gateway.post("/v1/completions", {"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_refused")
    assert int(refused.headers["retry-after"]) >= 1
    until("the cancel was refused", lambda: "refused by Redis" in gateway.log())
    server.client.config_set("min-replicas-to-write", 0)
    gateway.wait_ready()
    scheduler.wait_control("cancel", claimed.id)
    assert serves_again(gateway, scheduler)


def test_reader_continues_after_error_replies(
    server: RedisServer, led: tuple[GatewayProcess, ScriptedScheduler]
) -> None:
    gateway, scheduler = led
    stream, claimed = streamed(gateway, scheduler)
    server.client.execute_command("ACL", "SETUSER", "default", "-xread", "-hgetall")
    until_not_ready(gateway)
    until("the reader was refused", lambda: "to read tokens" in gateway.log())
    scheduler.serve(claimed, TOKENS)
    server.client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert stream.join().tokens() == TOKENS
    gateway.wait_ready()


def test_gateway_without_permissions_at_its_start_waits(server: RedisServer, tmp_path: Path, model: Path) -> None:
    scheduler = ScriptedScheduler(server.client, Keys(model.name)).lead()
    server.client.execute_command("ACL", "SETUSER", "default", "-ping", "-xread", "-info")
    with running_gateway(tmp_path, model, server) as gateway:
        until("the reader was refused", lambda: "to read tokens" in gateway.log())
        assert gateway.post("/v1/completions", {"prompt": "x"}).status_code == 503
        server.client.execute_command("ACL", "SETUSER", "default", "+@all")
        assert serves_again(gateway, scheduler)

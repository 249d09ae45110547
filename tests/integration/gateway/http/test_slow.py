"""Clients that do not read: their connections are cut, others never notice, and what they named runs on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support import sse
from tests.support.gateway_clients import Stream, raw_post
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.stack import RedisServer
from tests.support.waiting import until

MANY = 600_000
"""Of a character that JSON spells with six: more than all buffers of a connection hold. In one row the mailbox never
overflows."""
PIECE = 5000
KEY = "slow-one"


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("gateway")
    settings = {"client_write_s": 0.5, "client_buffer_events": 16, "keepalive_s": 0.1}
    with running_gateway(directory, model, redis_server, **settings) as running:
        yield running


@pytest.fixture
def scheduler(gateway: GatewayProcess, redis_server: RedisServer) -> ScriptedScheduler:
    leading = ScriptedScheduler(redis_server.client, gateway.keys).lead()
    gateway.wait_ready()
    return leading


@pytest.fixture(scope="module")
def wide(tokenizer: Tokenizer) -> int:
    (token,) = tokenizer.encode("\x01").ids
    return token


def content(gateway: GatewayProcess, **fields: Any) -> bytes:
    return json.dumps({"model": gateway.name, "prompt": "x", "return_token_ids": True, **fields}).encode()


def unread(gateway: GatewayProcess, key: str = "", **fields: Any) -> socket.socket:
    """A connection that sent a request and reads nothing."""
    body = content(gateway, **fields)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", gateway.port))
    connection.sendall((head + (f"Idempotency-Key: {key}\r\n" if key else "") + "\r\n").encode() + body)
    return connection


def is_cut(gateway: GatewayProcess, before: float) -> None:
    until("the client is cut", lambda: gateway.metric("orcinus_gateway_slow_clients_total") > before)
    until("nothing is active", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)


def test_a_stream_that_is_not_read_is_cut_though_little_waits(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, wide: int
) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    with unread(gateway, stream=True):
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [wide] * MANY))
        scheduler.wait_control("cancel", claimed.id)
        is_cut(gateway, before)


def test_a_whole_answer_that_is_not_read_is_cut(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, wide: int
) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    with unread(gateway) as connection:
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [wide] * MANY, finish=LENGTH))
        scheduler.end(claimed, [[wide] * MANY], [LENGTH])
        is_cut(gateway, before)
        connection.settimeout(30)
        assert sum(map(len, iter(lambda: connection.recv(1 << 20), b""))) < 9 * MANY, "all of it was sent"


def test_one_that_named_its_request_is_detached_and_comes_back_for_the_rest(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, wide: int
) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    with unread(gateway, KEY, stream=True):
        claimed = scheduler.claim()
        for first in range(0, MANY, PIECE):
            scheduler.publish(Line(claimed.id, first, [wide] * PIECE))
        is_cut(gateway, before)
    told = httpx.get(f"{gateway.url}/v1/requests/{claimed.id}", timeout=30).json()
    assert (told["status"], told["cancel_requested"]) == ("claimed", False)
    scheduler.end(claimed, [[wide] * MANY], [LENGTH])
    headers = {"Idempotency-Key": KEY, "Content-Type": "application/json"}
    body = content(gateway, stream=True)
    again = httpx.post(f"{gateway.url}/v1/completions", content=body, headers=headers, timeout=60)
    *told, last = sse.parse(again.content)
    assert last.data == sse.DONE
    assert sum(len(choice["token_ids"]) for event in told for choice in event.json["choices"]) == MANY
    assert claimed.id not in {command.cancel.id for command in scheduler.controls()}


def test_a_client_that_does_not_read_is_cut_and_others_are_not(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    body = {"model": gateway.name, "prompt": "x", "stream": True, "max_tokens": 500, "return_token_ids": True, "n": 64}
    with raw_post(gateway, json.dumps(body).encode(), receive_buffer=4096):
        slow = scheduler.claim()
        other = Stream(gateway)
        quick = scheduler.claim()
        step = 0

        def pushed_until_cut() -> bool:
            nonlocal step
            for _ in range(10):  # a look at the metrics costs more than a step
                rows = [Line(slow.id, 5 * step, [60, 61, 62, 63, 64], choice) for choice in range(64)]
                scheduler.publish(*rows, Line(quick.id, step, [65]))
                step += 1
            return gateway.metric("orcinus_gateway_slow_clients_total") > before or step >= 390

        until("the slow client is cut", pushed_until_cut, 60, every=0.001)
        assert gateway.metric("orcinus_gateway_slow_clients_total") == before + 1
        reason = scheduler.wait_control("cancel", slow.id).cancel.reason
        assert "slow" in reason
    scheduler.publish(Line(quick.id, step, [66], finish=LENGTH))
    other.join()
    assert other.tokens() == [65] * step + [66]
    until("nothing is active", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)

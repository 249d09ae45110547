"""Clients that do not read: their connections are cut, other streams are not, and a named request continues."""

from __future__ import annotations

import json
import socket
from typing import Any

from tests.support import sse
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.clients import raw_post, streamed
from tests.support.gateway.process import GatewayProcess
from tests.support.stand_ins.scripted_scheduler import LENGTH, Line, ScriptedScheduler
from tests.support.waiting import until

MANY = 600_000
"""Of a character that JSON spells with six: more than all buffers of a connection hold. In one row the mailbox never
overflows."""
PIECE = 5000
KEY = "slow-one"
GATEWAY = {"client_write_s": 0.5, "client_buffer_events": 16, "keepalive_s": 0.1}
(WIDE,) = token_ids("\x01")


def content(gateway: GatewayProcess, **fields: Any) -> bytes:
    return json.dumps({"model": gateway.name, "prompt": "x", "return_token_ids": True, **fields}).encode()


def unread(gateway: GatewayProcess, key: str = "", **fields: Any) -> socket.socket:
    """Return a connection that sent a request and reads nothing."""
    return raw_post(gateway, content(gateway, **fields), receive_buffer=4096, key=key)


def is_cut(gateway: GatewayProcess, before: float) -> None:
    until("the client is cut", lambda: gateway.metric("orcinus_gateway_slow_clients_total") > before)
    until("nothing is active", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)


def test_unread_stream_is_cut_though_little_waits(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    with unread(gateway, stream=True):
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [WIDE] * MANY))
        scheduler.wait_control("cancel", claimed.id)
        is_cut(gateway, before)


def test_unread_answer_is_cut(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    with unread(gateway) as connection:
        claimed = scheduler.claim()
        scheduler.publish(Line(claimed.id, 0, [WIDE] * MANY, finish=LENGTH))
        scheduler.end(claimed, [[WIDE] * MANY], [LENGTH])
        is_cut(gateway, before)
        connection.settimeout(30)
        assert sum(map(len, iter(lambda: connection.recv(1 << 20), b""))) < 9 * MANY, "all of it was sent"


def test_slow_client_with_a_named_request_resumes_it(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    with unread(gateway, KEY, stream=True):
        claimed = scheduler.claim()
        for first in range(0, MANY, PIECE):
            scheduler.publish(Line(claimed.id, first, [WIDE] * PIECE))
        is_cut(gateway, before)
    record = gateway.get(f"/v1/requests/{claimed.id}").json()
    assert (record["status"], record["cancel_requested"]) == ("claimed", False)
    scheduler.end(claimed, [[WIDE] * MANY], [LENGTH])
    headers = {"Idempotency-Key": KEY, "Content-Type": "application/json"}
    again = gateway.request("POST", "/v1/completions", content=content(gateway, stream=True), headers=headers)
    *events, last = sse.parse(again.content)
    assert last.data == sse.DONE
    assert sum(len(choice["token_ids"]) for event in events for choice in event.json["choices"]) == MANY
    assert claimed.id not in {command.cancel.id for command in scheduler.controls()}


def test_slow_client_is_cut_and_other_streams_continue(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    before = gateway.metric("orcinus_gateway_slow_clients_total")
    with unread(gateway, stream=True, max_tokens=500, n=64):
        slow = scheduler.claim()
        other, quick = streamed(gateway, scheduler)
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
        assert "slow" in scheduler.wait_control("cancel", slow.id).cancel.reason
    scheduler.publish(Line(quick.id, step, [66], finish=LENGTH))
    other.join()
    assert other.tokens() == [65] * step + [66]
    until("nothing is active", lambda: gateway.metric("orcinus_gateway_active_requests") == 0)

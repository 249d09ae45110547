"""Requests that run without a client: fetched by id, their stop strings matched, adopted when their gateway dies."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.process import GatewayProcess, led_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import LENGTH, Claimed, Line, ScriptedScheduler
from tests.support.waiting import until

GATEWAY: dict[str, Any] = {}
TEXT = "a quick brown fox"


def begin(gateway: GatewayProcess, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "The", "max_tokens": 400, "background": True, **fields}
    answer = gateway.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 202, answer.text
    begun: dict[str, Any] = answer.json()
    assert (begun["status"], begun["background"]) == ("queued", True)
    assert answer.headers["location"] == f"/v1/requests/{begun['id']}"
    return begun


def state(gateway: GatewayProcess, request_id: str) -> dict[str, Any]:
    answer = gateway.get(f"/v1/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ended(gateway: GatewayProcess, request_id: str) -> dict[str, Any]:
    return until("it has ended", lambda: (found := state(gateway, request_id))["status"] == "finished" and found)


def end_at_stop(scheduler: ScriptedScheduler, claimed: Claimed) -> None:
    """All tokens are produced before the stop of the gateway comes; the record keeps what counts."""
    tokens = token_ids(TEXT)
    scheduler.publish(Line(claimed.id, 0, tokens))
    stop = scheduler.wait_control("stop", claimed.id).stop
    assert (stop.choice, stop.at_token) == (0, len(token_ids("a quick brown"))), "the token that ends k br is the last"
    scheduler.end(claimed, [tokens], [LENGTH])


def test_background_answer_is_fetched_by_id_after_the_end(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    tokens = token_ids(TEXT)
    begun = begin(gateway, return_token_ids=True)
    claimed = scheduler.claim()
    assert (claimed.id, claimed.request.background) == (begun["id"], True)
    assert "result" not in state(gateway, begun["id"])
    scheduler.serve(claimed, tokens)
    result = ended(gateway, begun["id"])["result"]
    choice = {"index": 0, "logprobs": None, "finish_reason": "length", "text": TEXT, "token_ids": tokens}
    assert (result["id"], result["object"], result["created"]) == (begun["id"], "text_completion", begun["created"])
    assert result["choices"] == [choice]
    assert result["usage"]["completion_tokens"] == len(tokens)
    stream = gateway.get(f"/v1/requests/{begun['id']}/stream").text
    assert stream.endswith("data: [DONE]\n\n")


def test_background_chat_has_the_answer_of_a_chat(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = gateway.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, "background": True})
    assert answer.status_code == 202
    scheduler.serve(scheduler.claim(), [50])
    result = ended(gateway, answer.json()["id"])["result"]
    assert (result["object"], result["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")


def test_stop_strings_are_matched_without_a_reader(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    begun = begin(gateway, stop=["k br"])
    end_at_stop(scheduler, scheduler.claim())
    found = ended(gateway, begun["id"])
    assert (found["finish_reasons"], found["result"]["choices"][0]["text"]) == (["stop"], "a quic")
    assert found["result"]["usage"] == found["usage"]
    until("it is forgotten", lambda: not any(scheduler.client.scan_iter(match="*background:*")))


def test_stop_strings_are_matched_after_a_reader_left(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    begun = begin(gateway, stop=["k br"])
    claimed = scheduler.claim()
    with httpx.stream("GET", f"{gateway.url}/v1/requests/{begun['id']}/stream", timeout=60):
        scheduler.wait_control("adopt", claimed.id)
    scheduler.wait_control("adopt", claimed.id)  # the gateway takes it back
    end_at_stop(scheduler, claimed)
    assert ended(gateway, begun["id"])["result"]["choices"][0]["text"] == "a quic"


def test_cancelled_background_request_has_no_answer(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    begun = begin(gateway)
    claimed = scheduler.claim()
    assert gateway.request("DELETE", f"/v1/requests/{begun['id']}").json()["cancelled"]
    scheduler.wait_control("cancel", claimed.id)
    scheduler.publish(Line(claimed.id, 0, finish=3), ended=[(claimed.id, [3], [0])])
    found = ended(gateway, begun["id"])
    assert (found["finish_reasons"], "result" in found) == (["cancelled"], False)


def test_background_request_runs_once_under_its_key(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    headers = {"Idempotency-Key": "one"}
    begun = begin(gateway, headers)
    claimed = scheduler.claim()
    assert begin(gateway, headers)["id"] == begun["id"] == claimed.id
    other = gateway.post("/v1/completions", {"prompt": "A", "background": True}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    scheduler.serve(claimed, [50])
    assert ended(gateway, begun["id"])["result"]
    assert scheduler.claim_one() is None


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_another_gateway_adopts_a_background_request_when_its_gateway_ends(
    gateway: GatewayProcess, redis_server: RedisServer, model: Path, tmp_path: Path, how: int
) -> None:
    with led_gateway(tmp_path, model, redis_server, drain_s=60) as (dying, scheduler):
        begun = begin(dying, stop=["k br"])
        claimed = scheduler.claim()
        dying.stop(how)
    redis_server.client.delete(gateway.keys.alive("gateway", claimed.request.gateway))  # it would run out in 5 s
    adopted = scheduler.wait_control("adopt", claimed.id).adopt.gateway
    assert adopted != claimed.request.gateway
    claimed.request.gateway = adopted
    end_at_stop(scheduler, claimed)
    assert ended(gateway, begun["id"])["result"]["choices"][0]["text"] == "a quic"

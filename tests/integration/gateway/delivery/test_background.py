"""Requests that run without a client: told of by id, their stop strings matched, adopted when their gateway dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_scheduler import LENGTH, Claimed, Line, ScriptedScheduler
from tests.support.stack import RedisServer
from tests.support.waiting import until

TEXT = "a quick brown fox"


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer
) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), model, redis_server) as running:
        yield running


@pytest.fixture
def scheduler(gateway: GatewayProcess, redis_server: RedisServer) -> ScriptedScheduler:
    leading = ScriptedScheduler(redis_server.client, gateway.keys).lead()
    gateway.wait_ready()
    return leading


def begin(gateway: GatewayProcess, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "The", "max_tokens": 400, "background": True, **fields}
    answer = gateway.post("/v1/completions", body, headers=headers or {})
    assert answer.status_code == 202, answer.text
    told: dict[str, Any] = answer.json()
    assert (told["status"], told["background"]) == ("queued", True)
    assert answer.headers["location"] == f"/v1/requests/{told['id']}"
    return told


def state(gateway: GatewayProcess, request_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{gateway.url}/v1/requests/{request_id}", timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ended(gateway: GatewayProcess, request_id: str) -> dict[str, Any]:
    return until("it has ended", lambda: (told := state(gateway, request_id))["status"] == "finished" and told)


def end_at_stop(scheduler: ScriptedScheduler, claimed: Claimed, tokens: list[int]) -> None:
    """All tokens are produced before the stop of the gateway comes; the record keeps what counts."""
    scheduler.publish(Line(claimed.id, 0, tokens))
    scheduler.wait_control("stop", claimed.id)
    scheduler.end(claimed, [tokens], [LENGTH])


def test_its_id_comes_at_once_and_the_whole_answer_once_it_has_ended(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(TEXT).ids
    told = begin(gateway, return_token_ids=True)
    claimed = scheduler.claim()
    assert (claimed.id, claimed.request.background) == (told["id"], True)
    assert "result" not in state(gateway, told["id"])
    scheduler.serve(claimed, tokens)
    result = ended(gateway, told["id"])["result"]
    choice = {"index": 0, "logprobs": None, "finish_reason": "length", "text": TEXT, "token_ids": tokens}
    assert (result["id"], result["object"], result["created"]) == (told["id"], "text_completion", told["created"])
    assert result["choices"] == [choice]
    assert result["usage"]["completion_tokens"] == len(tokens)
    stream = httpx.get(f"{gateway.url}/v1/requests/{told['id']}/stream", timeout=30).text
    assert stream.endswith("data: [DONE]\n\n")


def test_of_a_chat_the_answer_is_that_of_a_chat(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = gateway.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, "background": True})
    assert answer.status_code == 202
    scheduler.serve(scheduler.claim(), [50])
    result = ended(gateway, answer.json()["id"])["result"]
    assert (result["object"], result["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")


def test_stop_strings_are_matched_though_nobody_reads(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    told = begin(gateway, stop=["k br"])
    end_at_stop(scheduler, scheduler.claim(), tokenizer.encode(TEXT).ids)
    found = ended(gateway, told["id"])
    assert (found["finish_reasons"], found["result"]["choices"][0]["text"]) == (["stop"], "a quic")
    assert found["result"]["usage"] == found["usage"]
    until("it is forgotten", lambda: not any(scheduler.client.scan_iter(match="*background:*")))


def test_a_reader_may_come_and_go_and_stop_strings_are_matched_afterwards(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    told = begin(gateway, stop=["k br"])
    claimed = scheduler.claim()
    with httpx.stream("GET", f"{gateway.url}/v1/requests/{told['id']}/stream", timeout=30):
        scheduler.wait_control("adopt", claimed.id)
    scheduler.wait_control("adopt", claimed.id)  # the gateway takes it back
    end_at_stop(scheduler, claimed, tokenizer.encode(TEXT).ids)
    assert ended(gateway, told["id"])["result"]["choices"][0]["text"] == "a quic"


def test_it_can_be_cancelled_and_has_no_answer_then(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    told = begin(gateway)
    claimed = scheduler.claim()
    assert httpx.delete(f"{gateway.url}/v1/requests/{told['id']}", timeout=30).json()["cancelled"]
    scheduler.wait_control("cancel", claimed.id)
    scheduler.publish(Line(claimed.id, 0, finish=3), ended=[(claimed.id, [3], [0])])
    found = ended(gateway, told["id"])
    assert found["finish_reasons"] == ["cancelled"]
    assert "result" not in found


def test_sent_again_under_its_key_it_is_the_same_request(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    headers = {"Idempotency-Key": "one"}
    told = begin(gateway, headers)
    claimed = scheduler.claim()
    assert begin(gateway, headers)["id"] == told["id"] == claimed.id
    other = gateway.post("/v1/completions", {"prompt": "A", "background": True}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    scheduler.serve(claimed, [50])
    assert ended(gateway, told["id"])["result"]
    assert scheduler.claim_one() is None


@pytest.mark.parametrize("fields", [{"stream": True}, {"max_tokens": 0, "echo": True}], ids=str)
def test_what_cannot_run_in_the_background_is_refused(gateway: GatewayProcess, fields: dict[str, Any]) -> None:
    answer = gateway.post("/v1/completions", {"prompt": "The", "background": True, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_when_its_gateway_ends_another_one_adopts_it_and_matches_its_stop_strings(
    gateway: GatewayProcess,
    scheduler: ScriptedScheduler,
    tokenizer: Tokenizer,
    redis_server: RedisServer,
    model: Path,
    tmp_path: Path,
    how: int,
) -> None:
    with running_gateway(tmp_path, model, redis_server, drain_s=60) as dying:
        dying.wait_ready()
        told = begin(dying, stop=["k br"])
        claimed = scheduler.claim()
        dying.stop(how)
    redis_server.client.delete(gateway.keys.alive("gateway", claimed.request.gateway))  # it would run out in 5 s
    adopted = scheduler.wait_control("adopt", claimed.id).adopt.gateway
    assert adopted != claimed.request.gateway
    claimed.request.gateway = adopted
    end_at_stop(scheduler, claimed, tokenizer.encode(TEXT).ids)
    assert ended(gateway, told["id"])["result"]["choices"][0]["text"] == "a quic"

"""The HTTP front as clients see it: the official client, errors by name, keys, requests by id, tokens."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from shared.wire.columns import unpack
from tests.integration.conftest import KEY, OTHER, TEXT
from tests.support.checkpoints.tokenizers import CONTEXT, token_ids
from tests.support.docs.bad_requests import CHAT
from tests.support.gateway.clients import posted
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import PLAIN
from tests.support.stand_ins.scripted_scheduler import LENGTH, STOP, Line, ScriptedScheduler


@pytest.fixture
def client(client: openai.OpenAI, answers: None) -> openai.OpenAI:
    """The official client; its requests are answered."""
    return client


def test_choices_are_in_order_with_lists_of_prompts_and_n(
    client: openai.OpenAI, gateway: GatewayProcess, answers: None
) -> None:
    answer = client.completions.create(model=gateway.name, prompt=["a", "b"], n=2, max_tokens=100, echo=True)
    assert [choice.text for choice in answer.choices] == ["a" + TEXT, "a" + TEXT, "b" + TEXT, "b" + TEXT]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model=gateway.name, prompt=[[5, 6], [7]], max_tokens=100)
    assert ids.usage is not None
    assert (len(ids.choices), ids.usage.prompt_tokens) == (2, 3)


def test_echo_alone_returns_the_prompt_without_a_request(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    body = {"prompt": "just this", "echo": True, "max_tokens": 0}
    answer = gateway.post("/v1/completions", body).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("just this", 0)
    assert scheduler.claim_one() is None


def test_models_are_listed_and_found(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    assert [card.id for card in client.models.list()] == [gateway.name]
    assert client.models.retrieve(gateway.name).id == gateway.name
    answer = gateway.get("/v1/models")
    page, card = answer.json(), answer.json()["data"][0]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, gateway.name, gateway.name)
    assert (card["type"], card["display_name"], card["lifecycle"]) == ("model", gateway.name, "active")  # Anthropic's
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"


def test_scheduler_gets_every_field_of_the_request(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    body = {
        "prompt": [5, 6, 7], "max_tokens": 9, "min_tokens": 2, "n": 2, "temperature": 0.5,
        "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -1, "stop": ["a", "b"], "stop_token_ids": [8],
        "ignore_eos": True, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1,
        "logit_bias": {"3": -5}, "priority": "high", "ttft_slo_ms": 100, "tbt_slo_ms": 50, "deadline_ms": 9000,
    }  # fmt: skip
    with posted(gateway, body):
        claimed = scheduler.claim()
        scheduler.publish(*(Line(claimed.id, 0, [9, 10], choice, LENGTH) for choice in range(2)))
    request = claimed.request
    assert claimed.stream.endswith("requests:high")
    assert claimed.prompts == [[5, 6, 7]]
    assert (request.n, request.max_tokens, request.min_tokens) == (2, 9, 2)
    assert request.stop_token_ids == (8).to_bytes(4, "little")  # ignore_eos: only the client's
    sampling = request.sampling
    assert sampling.seed == 2**64 - 1
    assert (sampling.top_k, round(sampling.temperature, 3), round(sampling.min_p, 3)) == (40, 0.5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (request.ttft_slo_ms, request.tbt_slo_ms) == (100, 50)
    assert 0 < request.deadline_ms <= 9000  # what is left of it
    assert sampling.bias_ids == (3).to_bytes(4, "little")
    assert len(request.cache_salt) == 16


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b"", 400), (b"[" * 50_000, 400), (b'{"prompt": "' + b"x" * 200_001 + b'"}', 413)],
    ids=lambda value: str(value)[:20],
)
def test_broken_body_that_comes_in_chunks_is_refused(gateway: GatewayProcess, content: bytes, status: int) -> None:
    pieces = (content[at : at + 10_000] for at in range(0, len(content), 10_000))
    answer = gateway.request("POST", "/v1/completions", content=pieces, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_unknown_paths_methods_and_types_have_the_shape_of_openai(gateway: GatewayProcess) -> None:
    missing = gateway.get("/v1/nothing%3Fhere")
    assert missing.json()["error"]["message"].startswith("unknown path /v1/nothing?here; ")
    wrong = gateway.get("/v1/completions")
    form = gateway.request("POST", "/v1/completions", data={"a": "b"})
    resume = gateway.get("/v1/requests/cmpl-x/stream")
    assert [a.status_code for a in (missing, wrong, form, resume)] == [404, 405, 415, 404]
    for path in ("/v1/files", "/v1/batches"):
        off = gateway.get(path)
        assert (off.status_code, off.json()["error"]["code"]) == (404, "files_off")
    untyped = gateway.request("POST", "/v1/completions", content=b'{"prompt": "a page of another site"}')
    assert (untyped.status_code, untyped.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert wrong.headers["allow"] == "POST"
    assert gateway.request("OPTIONS", "/v1/requests/x").headers["allow"] == "DELETE, GET"
    # Beside a route with a placeholder, a path of its own says what it takes.
    assert gateway.request("OPTIONS", "/v1/responses/input_tokens").headers["allow"] == "POST"
    assert all(set(a.json()["error"]) == {"message", "type", "param", "code"} for a in (missing, wrong, form, resume))


def test_x_request_id_is_returned(gateway: GatewayProcess) -> None:
    good, odd = (gateway.get("/v1/models", headers={"x-request-id": name}) for name in ("mine-1", "a b<script>"))
    assert good.headers["x-request-id"] == "mine-1"
    assert re.fullmatch(r"[0-9a-f]{32}", odd.headers["x-request-id"])


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff"])
def test_everything_but_health_needs_a_key(gateway: GatewayProcess, value: str) -> None:
    headers: Any = {"Authorization": value.encode("latin-1")} if value else {}
    paths = ["/v1/models", "/version", "/metrics", "/stats", "/openapi.json", "/v1/requests/x", "/nothing"]
    for path in paths:
        answer = gateway.get(path, headers=headers, key="")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
    for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"):
        assert gateway.request("POST", path, json={}, headers=headers, key="").status_code == 401
    assert gateway.get("/health", headers=headers, key="").status_code == 200


def test_metrics_are_on_both_ports(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    client.completions.create(model=gateway.name, prompt="x", max_tokens=3)
    for text in (gateway.get("/metrics").text, httpx.get(gateway.ops_url + "/metrics", verify=PLAIN, timeout=60).text):
        assert 'orcinus_gateway_requests_total{code="200",endpoint="/v1/completions"}' in text
        assert "orcinus_gateway_time_to_first_token_seconds_bucket" in text
    stats = httpx.get(gateway.ops_url + "/stats", verify=PLAIN, timeout=60).json()
    assert stats["leases"] == ["shard-0"]
    assert stats["gateway"]["not_ready"] is None


def test_request_is_seen_and_cancelled_by_its_key_only(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    with gateway.stream({"prompt": "x"}) as stream:
        name = stream.headers["x-orcinus-request"]
        path = f"/v1/requests/{name}"
        assert gateway.get(path).json()["status"] == "queued"
        claimed = scheduler.claim()
        assert claimed.id == name
        for method, asked in (("GET", path), ("DELETE", path), ("GET", path + "/stream")):
            assert gateway.request(method, asked, key=OTHER).status_code == 404
        assert gateway.request("DELETE", path).json()["cancelled"] is True
        scheduler.wait_control("cancel", name)
        scheduler.serve(claimed, [50, 51], finish=STOP)
    record = gateway.get(path).json()
    assert (record["status"], record["finish_reasons"]) == ("finished", ["stop"])
    assert record["usage"]["completion_tokens"] == 2
    assert gateway.get("/v1/requests/cmpl-none").status_code == 404


@pytest.mark.parametrize("streamed", [False, True])
def test_prediction_goes_to_the_scheduler_and_usage_counts_guesses(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, streamed: bool
) -> None:
    body = {"model": gateway.name, "prompt": "x", "max_tokens": 6, "stream": streamed}
    body |= {"prediction": {"type": "content", "content": [{"type": "text", "text": TEXT}]}}
    body |= {"stream_options": {"include_usage": True}} if streamed else {}
    with posted(gateway, body) as answers:
        claimed = scheduler.claim()
        assert claimed.request.speculate and unpack(claimed.request.prediction).tolist() == token_ids(TEXT)
        scheduler.publish(Line(claimed.id, 0, [50, 51, 52], drafts=4), started=[claimed.id])  # two of four were right
        scheduler.publish(Line(claimed.id, 3, [53, 54, 55], drafts=2, finish=LENGTH))
        scheduler.end(claimed, [[50, 51, 52, 53, 54, 55]], [LENGTH])
    text = answers[0].text
    found = json.loads([line for line in text.split("data: ") if '"usage":{' in line][-1] if streamed else text)
    details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
    assert found["usage"]["completion_tokens_details"] == details
    assert found["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "x", "speculate": "off"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ],
)
def test_request_can_do_without_guesses(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, path: str, asked: dict[str, Any]
) -> None:
    with gateway.stream({"model": gateway.name, "speculate": False, **asked}, path) as answer:
        claimed = scheduler.claim()
        assert not claimed.request.speculate and not claimed.request.prediction
        scheduler.serve(claimed, [50, 51])
        assert "prediction_tokens" not in answer.read().decode()


def test_tokenize_and_detokenize_are_inverse(gateway: GatewayProcess, tokenizer: Tokenizer) -> None:
    answer = gateway.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    assert answer["tokens"] == token_ids(TEXT)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    assert gateway.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": TEXT}
    chat = gateway.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert tokenizer.decode(chat, skip_special_tokens=False).endswith("<|im_start|>assistant\n")

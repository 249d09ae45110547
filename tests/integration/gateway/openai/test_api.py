"""The HTTP front as clients see it: the official client, errors by name, keys, limits, health, start and stop."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from tests.integration.conftest import KEY, OTHER, TEXT
from tests.support.docs.bad_fields import BAD, CHAT, NO_TOOLS
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_scheduler import LENGTH, STOP, Line, ScriptedScheduler
from tests.support.stack import PLAIN, RedisServer
from tests.support.tokenizers import CONTEXT, write_model


@pytest.fixture
def client(gateway: GatewayProcess, answers: None) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def post(gateway: GatewayProcess, path: str, body: Any, key: str = KEY, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(gateway.url + path, json=body, headers=headers, timeout=60, verify=PLAIN, **options)


def get(gateway: GatewayProcess, path: str, key: str = KEY) -> httpx.Response:
    return httpx.get(
        gateway.url + path, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60, verify=PLAIN
    )


# The official client


def test_a_completion_through_the_official_client(
    client: openai.OpenAI, gateway: GatewayProcess, tokenizer: Tokenizer
) -> None:
    answer = client.completions.create(model=gateway.name, prompt="The", max_tokens=100, user="u", seed=7)
    tokens = len(tokenizer.encode(TEXT).ids)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "length")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (tokens, tokens + answer.usage.prompt_tokens)


def test_a_chat_through_the_official_client(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    answer = client.chat.completions.create(
        model=gateway.name,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]},
        ],
        max_completion_tokens=100,
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        logit_bias={"5": -100},
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-")


def test_a_streamed_completion_says_the_same(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    stream = client.completions.create(
        model=gateway.name, prompt="The", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(
    client: openai.OpenAI, gateway: GatewayProcess
) -> None:
    chunks = list(
        client.chat.completions.create(
            model=gateway.name, messages=[{"role": "user", "content": "hi"}], max_tokens=100, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_lists_of_prompts_and_n_make_choices_in_order(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    answer = client.completions.create(model=gateway.name, prompt=["a", "b"], n=2, max_tokens=100, echo=True)
    assert [choice.text for choice in answer.choices] == ["a" + TEXT, "a" + TEXT, "b" + TEXT, "b" + TEXT]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model=gateway.name, prompt=[[5, 6], [7]], max_tokens=100)
    assert len(ids.choices) == 2
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_echo_alone_returns_the_prompt_and_asks_nobody(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    body = {"model": gateway.name, "prompt": "just this", "echo": True, "max_tokens": 0}
    answer = post(gateway, "/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "just this"
    assert answer["usage"]["completion_tokens"] == 0
    assert scheduler.claim_one() is None


def test_echo_in_a_stream_comes_first(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    stream = client.completions.create(model=gateway.name, prompt="Say: ", max_tokens=100, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Say: " + TEXT


def test_models_are_listed_and_found(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    assert [card.id for card in client.models.list()] == [gateway.name]
    assert client.models.retrieve(gateway.name).id == gateway.name
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"


def test_what_the_scheduler_gets_is_what_was_asked(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    body = {
        "model": gateway.name, "prompt": [5, 6, 7], "max_tokens": 9, "min_tokens": 2, "n": 2, "temperature": 0.5,
        "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -1, "stop": ["a", "b"], "stop_token_ids": [8],
        "ignore_eos": True,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"3": -5},
        "priority": "high", "ttft_slo_ms": 100, "tbt_slo_ms": 50, "deadline_ms": 9000,
    }  # fmt: skip
    thread = threading.Thread(target=post, args=(gateway, "/v1/completions", body))
    thread.start()
    claimed = scheduler.claim()
    scheduler.publish(*(Line(claimed.id, 0, [9, 10], choice, LENGTH) for choice in range(2)))
    thread.join(30)
    request = claimed.request
    assert claimed.stream.endswith("requests:high")
    assert claimed.prompts == [[5, 6, 7]]
    assert (request.n, request.max_tokens, request.min_tokens) == (2, 9, 2)
    assert request.stop_token_ids == (8).to_bytes(4, "little")  # ignore_eos: only the client's
    sampling = request.sampling
    assert sampling.seed == 2**64 - 1
    assert (sampling.top_k, round(sampling.temperature, 3), round(sampling.min_p, 3)) == (40, 0.5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (request.ttft_slo_ms, request.tbt_slo_ms, request.deadline_ms) == (100, 50, 9000)
    assert sampling.bias_ids == (3).to_bytes(4, "little")
    assert len(request.cache_salt) == 16


def test_a_long_prompt_travels_in_a_key_of_its_own(tmp_path: Path, redis_server: RedisServer) -> None:
    model = write_model(tmp_path / "long")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (model / "config.json").write_text(json.dumps(config))
    with running_gateway(tmp_path, model, redis_server) as own:
        scheduler = ScriptedScheduler(redis_server.client, own.keys).lead()
        own.wait_ready()
        prompt = list(range(5, 25)) * 1000
        thread = threading.Thread(target=own.post, args=("/v1/completions", {"prompt": prompt, "max_tokens": 1}))
        thread.start()
        claimed = scheduler.claim()
        assert claimed.request.prompts_apart
        assert claimed.prompts == [prompt]
        scheduler.serve(claimed, [9])
        thread.join(30)


# Errors


@pytest.mark.parametrize(("path", "body", "param", "said"), [*BAD, NO_TOOLS], ids=lambda value: str(value)[:50])
def test_a_bad_field_is_named_with_its_value_or_limit(
    gateway: GatewayProcess, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    answer = post(gateway, f"/v1/{path}", {"model": gateway.name, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"3", 400),
        (b"", 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": NaN}', 400),
        (b"[" * 50_000, 400),
        (b'{"a":' * 40 + b"1" + b"}" * 40, 400),
        (b'{"prompt": "' + b"x" * 200_001 + b'"}', 413),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_broken_body_is_refused(gateway: GatewayProcess, content: bytes, status: int, chunked: bool) -> None:
    pieces = (content[at : at + 10_000] for at in range(0, len(content), 10_000))
    answer = httpx.post(
        gateway.url + "/v1/completions",
        content=pieces if chunked else content,
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        timeout=30,
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_unknown_paths_methods_and_types_have_openais_shape(gateway: GatewayProcess) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    missing = get(gateway, "/v1/nothing")
    wrong = httpx.get(gateway.url + "/v1/completions", headers=headers, verify=PLAIN)
    form = httpx.post(gateway.url + "/v1/completions", data={"a": "b"}, headers=headers)
    resume = get(gateway, "/v1/requests/cmpl-x/stream")
    assert [a.status_code for a in (missing, wrong, form, resume)] == [404, 405, 415, 404]
    assert wrong.headers["allow"] == "POST"
    assert httpx.options(gateway.url + "/v1/requests/x", headers=headers).headers["allow"] == "DELETE, GET"
    assert all(set(a.json()["error"]) == {"message", "type", "param", "code"} for a in (missing, wrong, form, resume))


def test_request_ids_come_back(gateway: GatewayProcess) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    given = httpx.get(gateway.url + "/v1/models", headers={**headers, "x-request-id": "mine-1"})
    odd = httpx.get(gateway.url + "/v1/models", headers={**headers, "x-request-id": "a b<script>"})
    assert given.headers["x-request-id"] == "mine-1"
    assert re.fullmatch(r"[0-9a-f]{32}", odd.headers["x-request-id"])


# Keys


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff"])
def test_everything_but_health_needs_a_key(gateway: GatewayProcess, value: str) -> None:
    headers = {"Authorization": value.encode("latin-1")} if value else {}
    paths = ["/v1/models", "/version", "/metrics", "/stats", "/openapi.json", "/v1/requests/x", "/nothing"]
    for path in paths:
        answer = httpx.get(gateway.url + path, headers=headers, verify=PLAIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
    for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"):
        assert httpx.post(gateway.url + path, json={}, headers=headers, verify=PLAIN).status_code == 401
    assert httpx.get(gateway.url + "/health", headers=headers, verify=PLAIN).status_code == 200


def test_metrics_are_on_the_ops_port_and_with_a_key_on_the_public_one(
    gateway: GatewayProcess, client: openai.OpenAI
) -> None:
    client.completions.create(model=gateway.name, prompt="x", max_tokens=3)
    for text in (get(gateway, "/metrics").text, httpx.get(gateway.ops_url + "/metrics", verify=PLAIN).text):
        assert 'orcinus_gateway_requests_total{code="200",endpoint="/v1/completions"}' in text
        assert "orcinus_gateway_time_to_first_token_seconds_bucket" in text
    stats = httpx.get(gateway.ops_url + "/stats", verify=PLAIN).json()
    assert stats["leases"] == ["shard-0"]
    assert stats["gateway"]["not_ready"] is None


def test_a_request_is_seen_and_cancelled_by_its_owner_only(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    body = {"model": gateway.name, "prompt": "x", "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", gateway.url + "/v1/completions", json=body, headers=headers, timeout=30) as stream:
        name = stream.headers["x-orcinus-request"]
        assert get(gateway, f"/v1/requests/{name}").json()["status"] == "queued"
        assert get(gateway, f"/v1/requests/{name}", OTHER).status_code == 404
        claimed = scheduler.claim()
        assert claimed.id == name
        other = httpx.delete(gateway.url + f"/v1/requests/{name}", headers={"Authorization": f"Bearer {OTHER}"})
        assert other.status_code == 404
        assert (
            httpx.delete(gateway.url + f"/v1/requests/{name}", headers=headers, verify=PLAIN).json()["cancelled"]
            is True
        )
        scheduler.wait_control("cancel", name)
        scheduler.serve(claimed, [50, 51], finish=STOP)
    record = get(gateway, f"/v1/requests/{name}").json()
    assert (record["status"], record["finish_reasons"], record["usage"]["completion_tokens"]) == (
        "finished",
        ["stop"],
        2,
    )
    assert get(gateway, "/v1/requests/cmpl-none").status_code == 404


# Tokens


def test_tokens_go_there_and_back(gateway: GatewayProcess, tokenizer: Tokenizer) -> None:
    answer = post(gateway, "/tokenize", {"model": gateway.name, "prompt": TEXT, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(TEXT).ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    assert post(gateway, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": TEXT}
    chat = post(gateway, "/tokenize", {"messages": CHAT}).json()["tokens"]
    assert tokenizer.decode(chat, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert post(gateway, "/tokenize", {"prompt": "x", "messages": CHAT}).status_code == 400
    assert post(gateway, "/detokenize", {"tokens": [10**6]}).json()["error"]["param"] == "tokens"

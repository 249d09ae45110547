"""The whole stack as a client sees it: right answers through the official client, bad input refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import orjson
import pytest

from tests.deploy import test_observability as observability
from tests.support.models import Reference, make_llama
from tests.support.stack import PATIENT_MS, Stack, running_stack
from tests.support.waiting import free_port, until

KEY = "sk-orcinus-test"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_llama(tmp_path_factory.mktemp("api") / "tiny", requests=4, output_tokens=24, seed=20261123)


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(
        tmp_path_factory.mktemp("stack"), reference.path, key=KEY, dtype="float32", tool_parser="hermes",
        scheduler_metrics_port=free_port(), worker_metrics_port=free_port(), metrics_aliases="true",
        lease_ms=PATIENT_MS,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0)


EXTRA = {"ignore_eos": True, "return_token_ids": True}


@pytest.mark.smoke
def test_the_official_client_gets_the_references_tokens(
    stack: Stack, client: openai.OpenAI, reference: Reference
) -> None:
    answer = client.completions.create(
        model=stack.name, prompt=reference.prompts[0], max_tokens=24, temperature=0, extra_body=EXTRA
    )
    choice = answer.choices[0]
    assert choice.token_ids == reference.outputs[0]  # type: ignore[attr-defined]
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(reference.prompts[0]), 24)


def test_a_stream_says_the_same_as_one_answer(stack: Stack, client: openai.OpenAI, reference: Reference) -> None:
    arguments: dict[str, Any] = {
        "model": stack.name, "prompt": reference.prompts, "max_tokens": 24, "temperature": 0, "extra_body": EXTRA
    }  # fmt: skip
    whole = client.completions.create(**arguments)
    text = [""] * len(reference.prompts)
    ids: list[list[int]] = [[] for _ in reference.prompts]
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.text
            ids[choice.index] += getattr(choice, "token_ids", None) or []
    assert ids == reference.outputs
    assert text == [choice.text for choice in whole.choices]


def test_chat_streams_through_the_async_client(stack: Stack) -> None:
    async def talk() -> tuple[str, str | None, int]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=KEY, max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=stack.name,
                messages=[{"role": "user", "content": "naïve 🐋?"}],
                max_tokens=12,
                temperature=0.7,
                seed=7,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            text, reason, used = "", None, 0
            async for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
                used = chunk.usage.completion_tokens if chunk.usage else used
            return text, reason, used

    first, again = asyncio.run(talk()), asyncio.run(talk())
    assert first == again  # a seed fixes the answer
    assert first[1:] == ("length", 12)


def test_choices_of_one_seeded_request_differ(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.completions.create(model=stack.name, prompt="abc", max_tokens=16, n=3, temperature=1.5, seed=1)
    assert len({choice.text for choice in answer.choices}) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_a_stop_string_ends_the_request_and_its_record(
    stack: Stack, client: openai.OpenAI, reference: Reference
) -> None:
    whole = client.completions.create(
        model=stack.name, prompt=reference.prompts[1], max_tokens=24, temperature=0, extra_body=EXTRA
    ).choices[0]
    stop = whole.text[4:6]
    answer = client.completions.create(
        model=stack.name, prompt=reference.prompts[1], max_tokens=24, temperature=0, stop=[stop], extra_body=EXTRA
    )
    choice = answer.choices[0]
    assert choice.text == whole.text[: whole.text.index(stop)]
    assert choice.finish_reason == "stop"
    after = stack.settled()
    assert after["blocks"] == after["total"]
    raw: dict[bytes, bytes] = stack.redis.client.hgetall(stack.keys.req(answer.id))  # type: ignore[assignment]
    assert answer.usage is not None
    assert int(raw[b"output_tokens"]) == answer.usage.completion_tokens
    length: int = stack.redis.client.strlen(stack.keys.out(answer.id, 0))  # type: ignore[assignment]
    assert length == 4 * answer.usage.completion_tokens


def test_a_deadline_ends_a_request_with_its_own_reason(stack: Stack) -> None:
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "deadline_ms": 1}
    answer = stack.post("/v1/completions", {**body, "n": 2})
    assert answer.status_code == 200, answer.text
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["deadline"] * 2
    streamed = stack.post("/v1/completions", {**body, "deadline_ms": 20, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert orjson.loads(events[-1])["choices"][0]["finish_reason"] == "deadline"
    assert stack.settled()["pending"] == [0, 0, 0, 0]


def test_tokens_go_there_and_back(stack: Stack) -> None:
    text = "Orcinus orca, 逆戟鲸 🐋"
    tokens = stack.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert stack.post("/detokenize", {"tokens": tokens}).json()["prompt"] == text


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "no-such-model", "prompt": "x"}, 404, "model"),
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x" * 5000}, 400, "prompt"),
    ({"prompt": "x", "max_tokens": 5000}, 400, "max_tokens"),
    ({"prompt": [1, 2, 999_999]}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": "x", "temperature": 9}, 400, "temperature"),
    ({"prompt": "x", "top_p": 0}, 400, "top_p"),
    ({"prompt": "x", "n": 100_000}, 400, "n"),
    ({"prompt": "x", "stop": ["a"] * 99}, 400, "stop"),
    ({"prompt": "x", "priority": "urgent"}, 400, "priority"),
    ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_refused_by_name(stack: Stack, body: dict[str, Any], status: int, param: str) -> None:
    answer = stack.post("/v1/completions", body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]


def test_no_key_and_a_wrong_key_are_401(stack: Stack) -> None:
    for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
        answer = httpx.get(f"{stack.url}/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": ', 400),
        (b"[" * 100_000, 400),
    ],
    ids=["10 MB", "broken UTF-8", "half a JSON", "100,000 brackets"],
)
def test_a_broken_body_is_refused_and_the_next_request_is_served(stack: Stack, body: bytes, status: int) -> None:
    headers = {**stack.headers, "Content-Type": "application/json"}
    answer = httpx.post(f"{stack.url}/v1/completions", content=body, headers=headers, timeout=30)
    assert answer.status_code == status
    assert json.loads(answer.text)["error"]["message"]
    assert stack.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


# Structured output and tools, from a model that would not say such things by itself

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
RING: Any = {"type": "function", "function": {"name": "ring", "parameters": PERSON, "strict": True}}
FLY: Any = {"type": "function", "function": {"name": "fly"}}
ASK: Any = [{"role": "user", "content": "x"}]
FEW_BLANKS = {str(byte): -100 for byte in b" \t\n\r"}  # this model likes them as much as anything else


def test_outputs_keep_to_schema_pattern_and_choices(stack: Stack, client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(
        model=stack.name, messages=ASK, response_format=schema, n=8, max_tokens=200, seed=1
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
    for field, valid in (("guided_choice", ["left", "right"]), ("guided_regex", "[a-f]{3}-[0-9]+!")):
        stream = client.completions.create(
            model=stack.name, prompt=["a", "b"], max_tokens=60, seed=1, stream=True, extra_body={field: valid}
        )
        texts = ["", ""]
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert all(text in valid if isinstance(valid, list) else re.fullmatch(valid, text) for text in texts)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ring"}}])
def test_tools_that_have_to_be_called_are_called_whole_and_streamed(
    stack: Stack, client: openai.OpenAI, choice: Any
) -> None:
    arguments: dict[str, Any] = {
        "model": stack.name, "messages": ASK, "tools": [RING, FLY], "tool_choice": choice, "seed": 5,
        "parallel_tool_calls": False, "max_tokens": 180, "logit_bias": FEW_BLANKS,
    }  # fmt: skip
    whole = client.chat.completions.create(**arguments).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name in ("ring", "fly")
    assert call.function.name == "ring" or choice == "required"
    jsonschema.validate(json.loads(call.function.arguments), PERSON if call.function.name == "ring" else {})
    with client.chat.completions.stream(**arguments) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    (streamed,) = final.message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    again = client.chat.completions.create(
        model=stack.name, messages=[*ASK, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}],
        max_tokens=2,
    )  # fmt: skip
    assert again.choices[0].message.tool_calls is None


def test_a_bound_output_is_the_same_whatever_runs_beside_it(stack: Stack) -> None:
    body = {"model": stack.name, "prompt": "a", "max_tokens": 99, "seed": 9, "guided_json": PERSON}

    async def ask(client: httpx.AsyncClient, **fields: Any) -> str:
        answer = await client.post(f"{stack.url}/v1/completions", json={**body, **fields}, timeout=120)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    async def run() -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
            alone = await ask(client)
            others = [ask(client, seed=seed, prompt="b" * seed) for seed in range(1, 9)]
            assert (await asyncio.gather(ask(client), *others))[0] == alone

    asyncio.run(run())


def test_every_service_exports_what_boards_ask_and_they_agree(stack: Stack) -> None:
    scheduler, worker = (stack.settings[f"{name}_metrics_port"] for name in ("scheduler", "worker"))
    addresses = [f"{stack.url}/metrics", *(f"http://127.0.0.1:{port}/metrics" for port in (scheduler, worker))]

    def counted() -> dict[str, float]:
        pages = [httpx.get(address, headers=stack.headers).text for address in addresses]
        lines = [line for page in pages for line in page.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = counted()
    tokens = len(stack.complete("one two three", 8, ignore_eos=True))
    produced = "orcinus_scheduler_output_tokens_total"
    until("the scheduler has reported", lambda: counted()[produced] >= before[produced] + tokens)
    found = counted()
    series = {name.partition("{")[0] for name in found}
    asked = {name for query in observability.queries() for name in re.findall(r"\borcinus_\w+", query)}
    assert asked <= series, asked - series
    for name in ("orcinus_gateway_output_tokens_total", "orcinus_worker_sampled_tokens_total"):
        assert found[name] >= before[name] + tokens, name
    assert found["orcinus_scheduler_queue_seconds_count"] > before["orcinus_scheduler_queue_seconds_count"]
    assert found['orcinus_scheduler_redis_call_seconds_count{script="publish"}'] > 0
    assert found['orcinus_gateway_redis_call_seconds_count{script="enqueue"}'] > 0
    gauge = f'vllm:num_requests_running{{engine="0",model_name="{stack.name}"}}'
    assert found[gauge] == found["orcinus_stack_running_sequences"]
    assert "vllm:request_queue_time_seconds_count" in series, "at the scheduler"

"""The official Python client, 2.x and 3.x."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI, server: Any) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).owned_by == "orcinus"


def test_completion_and_usage(client: openai.OpenAI, server: Any, continued: str) -> None:
    answer = client.completions.create(model=server.model, prompt="def add(", max_tokens=12, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (continued, "length")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_chat(client: openai.OpenAI, server: Any, chat: Any, said: str) -> None:
    answer = client.chat.completions.create(model=server.model, messages=chat, max_completion_tokens=12, temperature=0)
    assert answer.choices[0].message.content == said
    assert answer.choices[0].message.role == "assistant"


def test_stream_with_usage(client: openai.OpenAI, server: Any, chat: Any, said: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=server.model, messages=chat, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == said
    assert chunks[-1].usage.completion_tokens == 12


def test_stream_helper(client: openai.OpenAI, server: Any, chat: Any, said: str) -> None:
    arguments = {"model": server.model, "messages": chat, "max_tokens": 12, "temperature": 0}
    with client.chat.completions.stream(**arguments) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == said


def test_many_at_once(server: Any, continued: str) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(
            model=server.model, prompt="def add(", max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.base, api_key=server.key, max_retries=0) as client:
            return list(await asyncio.gather(*(one(client) for _ in range(16))))

    assert asyncio.run(many()) == [continued] * 16


def test_errors(client: openai.OpenAI, server: Any) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-none", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=server.model, prompt="x", temperature=7)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=server.model, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_response_goes_on_from_a_stored_one(client: openai.OpenAI, server: Any) -> None:
    first = client.responses.create(model=server.model, input="def add(", max_output_tokens=4, temperature=0)
    second = client.responses.create(
        model=server.model, input="more", previous_response_id=first.id, max_output_tokens=4, temperature=0
    )
    told: Any = [
        {"role": "user", "content": "def add("},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    whole = client.responses.create(model=server.model, input=told, max_output_tokens=4, temperature=0, store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_stop(client: openai.OpenAI, server: Any, continued: str) -> None:
    stop = continued[3:5]
    answer = client.completions.create(model=server.model, prompt="def add(", max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].text == continued[: continued.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_seed_and_n(client: openai.OpenAI, server: Any, chat: Any) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=server.model, messages=chat, max_tokens=12, temperature=1, seed=seed, n=3
        )
        return [choice.message.content for choice in answer.choices]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) > 1


def test_logprobs(client: openai.OpenAI, server: Any, chat: Any, said: str) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=chat, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 12
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == said
    assert [token.top_logprobs[0].token for token in tokens] == [token.token for token in tokens]  # greedy
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)


def test_tool(client: openai.OpenAI, server: Any, chat: Any, add_tool: Any, is_sum: Any) -> None:
    arguments: dict[str, Any] = {
        "model": server.model, "messages": chat, "max_tokens": 600, "seed": 3, "tools": [add_tool],
        "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    choice = client.chat.completions.create(**arguments).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert is_sum(json.loads(call.function.arguments))
    with client.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert (streamed.function.name, streamed.function.arguments) == ("add", call.function.arguments)


def test_response_format(client: openai.OpenAI, server: Any, chat: Any, answer_schema: Any, is_answer: Any) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=chat, max_tokens=600, seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": answer_schema}},
    )  # fmt: skip
    assert is_answer(json.loads(answer.choices[0].message.content))
    assert answer.choices[0].finish_reason == "stop"


def test_response_with_a_tool(client: openai.OpenAI, server: Any, chat: Any, add_tool: Any, is_sum: Any) -> None:
    arguments: dict[str, Any] = {
        "model": server.model, "input": chat, "max_output_tokens": 600, "tool_choice": "required",
        "tools": [{"type": "function", **add_tool["function"]}], "parallel_tool_calls": False,
        "extra_body": {"seed": 3},
    }  # fmt: skip
    answer = client.responses.create(**arguments)
    (call,) = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "add", "completed")
    assert is_sum(json.loads(call.arguments))
    with client.responses.stream(**arguments) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == ("add", call.arguments)


def test_response_with_a_schema(client: openai.OpenAI, server: Any, answer_schema: Any, is_answer: Any) -> None:
    answer = client.responses.create(
        model=server.model, input="hi", max_output_tokens=600, extra_body={"seed": 3},
        text={"format": {"type": "json_schema", "name": "answer", "schema": answer_schema, "strict": True}},
    )  # fmt: skip
    assert is_answer(json.loads(answer.output_text))


def test_leaving_a_stream_cancels(client: openai.OpenAI, server: Any) -> None:
    stream = client.completions.create(
        model=server.model, prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    request_id = next(iter(stream)).id
    stream.close()
    assert server.ended(request_id)["finish_reasons"] == ["cancelled"]


def test_response(client: openai.OpenAI, server: Any, chat: Any, said: str) -> None:
    answer = client.responses.create(model=server.model, input=chat, max_output_tokens=12, temperature=0)
    assert answer.output_text == said
    assert answer.usage.output_tokens == 12


def test_response_events(client: openai.OpenAI, server: Any, said: str, chat: Any) -> None:
    stream = client.responses.create(
        model=server.model, input=chat[0]["content"], max_output_tokens=12, temperature=0, stream=True
    )
    events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
    assert events[-1].response.output_text == said


def test_response_in_the_background(client: openai.OpenAI, server: Any, said: str, chat: Any) -> None:
    begun = client.responses.create(
        model=server.model, input=chat, max_output_tokens=12, temperature=0, background=True
    )
    server.ended(begun.id)
    assert client.responses.retrieve(begun.id).output_text == said


def test_files_and_batches(client: openai.OpenAI, server: Any, continued: str) -> None:
    url: Any = "/v1/completions"
    body = {"model": server.model, "prompt": "def add(", "max_tokens": 12, "temperature": 0}
    lines = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n in range(3)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    for _ in range(600):
        if (batch := client.batches.retrieve(batch.id)).status in ("completed", "failed"):
            break
        time.sleep(0.1)
    assert batch.status == "completed" and batch.request_counts.completed == 3
    assert batch.usage.output_tokens == 3 * 12 and batch.usage.total_tokens > 36
    rows = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert [row["response"]["body"]["choices"][0]["text"] for row in rows] == [continued] * 3
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    for name in (file.id, batch.output_file_id):
        assert client.files.delete(name).deleted

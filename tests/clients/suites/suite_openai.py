"""The official Python client, 2.x and 3.x."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0) as made:
        yield made


class Answer(pydantic.BaseModel):
    sure: bool


def test_parse_helpers(client: openai.OpenAI, server: Any, chat: Any) -> None:
    given = {"model": server.model, "extra_body": {"seed": 3}}
    chosen = client.chat.completions.parse(messages=chat, max_tokens=600, response_format=Answer, **given).choices[0]
    assert isinstance(chosen.message.parsed, Answer)
    told = client.responses.parse(input=chat, max_output_tokens=600, text_format=Answer, **given)
    assert isinstance(told.output_parsed, Answer)


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
    last = list(
        client.completions.create(
            model=server.model, prompt="def add(", max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )[-1]
    assert (last.choices, last.usage.completion_tokens) == ([], 12)


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


HI: Any = [{"role": "user", "content": "hi"}]
GENERATES: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "chat": (lambda c, **f: c.chat.completions.create(messages=HI, **f), {"temperature": 7}, "equal to 2; got 7"),
    "completions": (lambda c, **f: c.completions.create(prompt="x", **f), {"stop": ["a"] * 17}, "at most 16 items"),
    "responses": (lambda c, **f: c.responses.create(input="x", **f), {"max_output_tokens": 0}, "equal to 1; got 0"),
    "counted": (lambda c, **f: c.responses.input_tokens.count(input="x", **f), {"tools": [{}]}, "'function'; got None"),
    "stored": (lambda c, **f: c.responses.create(input="x", **f), {"previous_response_id": "resp_1"}, "'resp_1'"),
    "embeddings": (lambda c, **f: c.embeddings.create(input="x", **f), {"dimensions": 0}, "equal to 1; got 0"),
}


@pytest.mark.parametrize("name", GENERATES)
def test_errors(client: openai.OpenAI, server: Any, name: str) -> None:
    call, bad, words = GENERATES[name]
    with pytest.raises(openai.AuthenticationError, match="not valid; send it as"):
        call(client.with_options(api_key="wrong"), model=server.model)
    with pytest.raises(
        openai.NotFoundError, match=f"'none' does not exist; this server has '{server.model}'"
    ) as missing:
        call(client, model="none")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        call(client, model=server.model, **bad)
    assert refused.value.param == next(iter(bad)) and refused.value.param in refused.value.message
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]


KEEPS: dict[str, tuple[Callable[[openai.OpenAI], Any], type[openai.APIStatusError], str | None]] = {
    "model": (lambda c: c.models.retrieve("org/none"), openai.NotFoundError, "model"),
    "response": (lambda c: c.responses.retrieve("resp_1"), openai.NotFoundError, "request_id"),
    "stream of a response": (lambda c: c.responses.retrieve("resp_1", stream=True), openai.BadRequestError, "stream"),
    "file": (lambda c: c.files.retrieve("file-1"), openai.NotFoundError, "file_id"),
    "purpose": (lambda c: c.files.create(file=b"x", purpose="vision"), openai.BadRequestError, "purpose"),
    "files": (lambda c: c.files.list(limit=0), openai.BadRequestError, "limit"),
    "batch": (lambda c: c.batches.retrieve("batch_1"), openai.NotFoundError, "batch_id"),
    "audio": (lambda c: c.audio.speech.create(model="m", input="x", voice="ash"), openai.NotFoundError, None),
    "batch of a file": (
        lambda c: c.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h"),
        openai.BadRequestError,
        "input_file_id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEEPS)
def test_errors_of_what_is_kept(client: openai.OpenAI, name: str) -> None:
    call, kind, param = KEEPS[name]
    with pytest.raises(openai.AuthenticationError):
        call(client.with_options(api_key="wrong"))
    with pytest.raises(kind) as refused:
        call(client)
    assert refused.value.param == param


def test_raw_responses_and_ids(client: openai.OpenAI, server: Any, chat: Any, said: str) -> None:
    asked = {"model": server.model, "messages": chat, "max_tokens": 12, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert raw.parse().choices[0].message.content == said
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with client.chat.completions.with_streaming_response.create(**asked, stream=True) as response:
        assert [line for line in response.iter_lines() if line.startswith("data")][-1] == "data: [DONE]"


def test_timeout_leaves_nothing(client: openai.OpenAI, server: Any) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.01).completions.create(
            model=server.model, prompt="x", max_tokens=900, n=4, extra_body={"ignore_eos": True}
        )


def test_retry_after_is_obeyed(client: openai.OpenAI, server: Any) -> None:
    limited = client.with_options(api_key=server.limited)
    with pytest.raises(openai.RateLimitError, match="30 requests a minute; retry after") as refused:
        for _ in range(60):
            limited.completions.create(model=server.model, prompt="x", max_tokens=1)
    assert int(refused.value.response.headers["retry-after"]) >= 1, "the client's own pause is shorter"
    raw = limited.with_options(max_retries=1).completions.with_raw_response
    assert raw.create(model=server.model, prompt="x", max_tokens=1).retries_taken == 1


def test_embeddings(client: openai.OpenAI, server: Any) -> None:
    arguments = {"model": server.model, "input": ["def add(", "x"]}
    packed = client.embeddings.create(**arguments)  # the client asks for base64 by itself
    plain = client.embeddings.create(**arguments, encoding_format="float")
    assert [one.embedding for one in packed.data] == [pytest.approx(one.embedding, abs=1e-7) for one in plain.data]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 1
    short = client.embeddings.create(model=server.model, input=[[5, 6, 7]], dimensions=8)
    assert sum(number**2 for number in short.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    assert len(short.data[0].embedding) == 8


def test_thinking(client: openai.OpenAI, server: Any, thinks: Any) -> None:
    arguments: dict[str, Any] = {"model": server.model, "messages": thinks, "max_tokens": 8, "temperature": 0}
    arguments["extra_body"] = {"continue_final_message": True}
    answer = client.chat.completions.create(**arguments)
    assert answer.choices[0].message.content is None and answer.choices[0].message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**arguments, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == answer.choices[0].message.reasoning_content


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
    count = client.responses.input_tokens.count(model=server.model, input="more", previous_response_id=first.id)
    assert (count.object, count.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    before = [item.content for item in client.responses.input_items.list(second.id, limit=1, order="asc")]
    assert [parts[0].text for parts in before] == ["def add(", first.output_text, "more"]
    assert client.responses.retrieve(first.id).output_text == first.output_text
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
    begun = client.responses.create(
        model=server.model, input=chat, background=True, extra_body={"ignore_eos": True, "priority": "low"}
    )
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_files_and_batches(client: openai.OpenAI, server: Any, continued: str) -> None:
    url: Any = "/v1/completions"
    body = {"model": server.model, "prompt": "def add(", "max_tokens": 12, "temperature": 0}
    lines = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n in range(3)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert file.id in [each.id for each in client.files.list(purpose="batch", limit=1)]
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
    with pytest.raises(openai.ConflictError, match=batch.id):
        client.batches.cancel(batch.id)
    for name in (file.id, batch.output_file_id):
        assert client.files.delete(name).deleted

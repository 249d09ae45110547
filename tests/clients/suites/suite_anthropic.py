"""The official Python client of Anthropic's API, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from conftest import until

GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # newer clients have no argument of that name


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tool(add_tool: dict[str, Any]) -> dict[str, Any]:
    function = add_tool["function"]
    return {"name": function["name"], "description": "adds", "input_schema": function["parameters"]}


def test_message(client: anthropic.Anthropic, server: Any, chat: Any, said: str) -> None:
    answer = client.messages.create(model=server.model, messages=chat, max_tokens=12, **GREEDY)
    assert [block.text for block in answer.content] == [said]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 12)
    counted = client.messages.count_tokens(model=server.model, messages=chat)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached
    turns = [*chat, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Go on."}]
    more = client.messages.create(model=server.model, messages=turns, max_tokens=5, **GREEDY)
    assert more.usage.output_tokens == 5


def test_stream_adds_up_to_the_message(client: anthropic.Anthropic, server: Any, chat: Any, said: str) -> None:
    arguments = {"model": server.model, "messages": chat, "max_tokens": 12, **GREEDY}
    with client.messages.stream(**arguments) as stream:
        assert "".join(stream.text_stream) == said
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == (said, "max_tokens", 12)
    kinds = [event.type for event in client.messages.create(**arguments, stream=True)]
    assert (kinds[:2], kinds[-3:]) == (
        ["message_start", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )


def test_stop_sequence(client: anthropic.Anthropic, server: Any, chat: Any, said: str) -> None:
    stop = said[len(said) // 2 :][:3]
    answer = client.messages.create(model=server.model, messages=chat, max_tokens=12, stop_sequences=[stop], **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == said.partition(stop)[0]


def test_tools_whole_and_streamed(client: anthropic.Anthropic, server: Any, chat: Any, tool: Any, is_sum: Any) -> None:
    arguments = {
        "model": server.model, "messages": chat, "max_tokens": 300, **GREEDY, "tools": [tool],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    }  # fmt: skip
    answer = client.messages.create(**arguments)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "add", "tool_use")
    assert is_sum(call.input)
    with client.messages.stream(**arguments) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)


HI: Any = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "message": (lambda c, **f: c.messages.create(**{"max_tokens": 5} | f), {"max_tokens": 0}, "equal to 1; got 0"),
    "stop": (lambda c, **f: c.messages.create(max_tokens=5, **f), {"stop_sequences": ["a"] * 17}, "at most 16 items"),
    "blocks": (lambda c, **f: c.messages.create(max_tokens=5, **f), {"messages": IMAGE}, "must be one of text, tool"),
    "counted": (lambda c, **f: c.messages.count_tokens(**f), {"messages": []}, "at least 1 item"),
    "stream": (
        lambda c, **f: c.messages.stream(max_tokens=5, **f).__enter__(),
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        "less than max_tokens, 5; got 2000",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors(client: anthropic.Anthropic, server: Any, name: str) -> None:
    call, bad, words = CALLS[name]
    given = {"model": server.model, "messages": HI}
    with pytest.raises(anthropic.AuthenticationError, match="not valid; send it as"):
        call(client.with_options(api_key="wrong"), **given)
    with pytest.raises(anthropic.NotFoundError, match=f"does not exist; this server has '{server.model}'") as missing:
        call(client, **given | {"model": "none"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        call(client, **given | bad)
    assert next(iter(bad)) in refused.value.body["error"]["message"]
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]


def test_models(client: anthropic.Anthropic, server: Any) -> None:
    (model,) = client.models.list(limit=1)
    assert (model.id, model.type, model.display_name) == (server.model, "model", server.model)
    assert client.beta.models.retrieve(server.model).created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError, match="'org/none' does not exist") as missing:
        client.models.retrieve("org/none")
    assert missing.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    bearer = anthropic.Anthropic(base_url=server.url, auth_token=server.key, max_retries=0)
    assert bearer.models.list().data == [model]


def test_raw_responses_and_ids(client: anthropic.Anthropic, server: Any, chat: Any, said: str) -> None:
    asked = {"model": server.model, "messages": chat, "max_tokens": 12, **GREEDY}
    raw = client.messages.with_raw_response.create(**asked)
    assert raw.parse().content[0].text == said
    assert raw.parse()._request_id == raw.headers["request-id"]
    with client.messages.with_streaming_response.create(**asked, stream=True) as response:
        assert [line for line in response.iter_lines() if line][-1] == 'data: {"type":"message_stop"}'


def test_timeout_leaves_nothing(client: anthropic.Anthropic, server: Any, chat: Any) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.01).messages.create(
            model=server.model, messages=chat, max_tokens=400, extra_body={"ignore_eos": True}
        )


def test_retry_after_is_obeyed(client: anthropic.Anthropic, server: Any) -> None:
    limited = client.with_options(api_key=server.limited)
    asked: dict[str, Any] = {"model": server.model, "messages": HI, "max_tokens": 1}
    with pytest.raises(anthropic.RateLimitError, match="30 requests a minute; retry after") as refused:
        for _ in range(60):
            limited.messages.create(**asked)
    assert int(refused.value.response.headers["retry-after"]) >= 1, "the client's own pause is shorter"
    assert limited.with_options(max_retries=1).messages.with_raw_response.create(**asked).retries_taken == 1


def test_thinking_whole_and_streamed(client: anthropic.Anthropic, server: Any, thinks: Any) -> None:
    arguments = {"model": server.model, "messages": thinks, "max_tokens": 8, **GREEDY}
    answer = client.messages.create(**arguments)
    (block,) = answer.content
    assert block.type == "thinking" and block.thinking and block.signature
    assert answer.usage.output_tokens_details.thinking_tokens == 8
    with client.messages.stream(**arguments) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        (streamed,) = stream.get_final_message().content
    assert (streamed.type, streamed.thinking, thought) == ("thinking", block.thinking, block.thinking)
    with client.messages.stream(**arguments, thinking={"type": "adaptive", "display": "omitted"}) as stream:
        (hidden,) = stream.get_final_message().content
    assert (hidden.type, hidden.thinking, bool(hidden.signature)) == ("thinking", "", True)


class Answer(pydantic.BaseModel):
    sure: bool


def test_structured_output(client: anthropic.Anthropic, server: Any, chat: Any) -> None:
    arguments = {"model": server.model, "messages": chat, "max_tokens": 300, "output_format": Answer}
    assert isinstance(client.messages.parse(**arguments).parsed_output, Answer)
    with client.messages.stream(**arguments) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Answer)


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def test_tool_runner_goes_on_without_a_thread(client: anthropic.Anthropic, server: Any, chat: Any) -> None:
    runner = client.beta.messages.tool_runner(
        model=server.model, messages=chat, max_tokens=400, tools=[add], max_iterations=1,
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    )  # fmt: skip
    (message,) = runner
    assert [block.name for block in message.content] == ["add"]
    with pytest.raises(anthropic.BadRequestError, match="holds no conversations; send all messages"):
        client.beta.messages.create(model=server.model, messages=chat, max_tokens=1, thread={"type": "create"})


def test_batches(client: anthropic.Anthropic, server: Any, chat: Any, said: str) -> None:
    batches = client.messages.batches

    def begin(*lengths: int, **params: Any) -> Any:
        params |= {"model": server.model, "messages": chat, "temperature": 0}
        asked = [{"custom_id": f"{at}", "params": params | {"max_tokens": size}} for at, size in enumerate(lengths)]
        return batches.create(requests=asked)

    def ended(batch: Any) -> Any:
        until("the batch has ended", lambda: batches.retrieve(batch.id).processing_status == "ended")
        return batches.retrieve(batch.id)

    made = begin(12, 0)
    assert (made.processing_status, made.request_counts.processing) == ("in_progress", 2)
    counts = ended(made).request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (1, 1, 0)
    good, bad = (line.result for line in batches.results(made.id))
    assert (good.type, good.message.content[0].text, good.message.usage.output_tokens) == ("succeeded", said, 12)
    assert (bad.type, bad.error.error.type) == ("errored", "invalid_request_error")
    assert "max_tokens" in bad.error.error.message
    long = begin(*[400] * 70, ignore_eos=True)
    assert [batch.id for batch in batches.list(limit=1)][:2] == [long.id, made.id]
    assert batches.cancel(long.id).cancel_initiated_at is not None
    assert ended(long).request_counts.canceled > 0
    assert {line.result.type for line in batches.results(long.id)} >= {"canceled"}
    for batch in (made, long):
        assert batches.delete(batch.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError, match="GET /v1/messages/batches"):
            batches.retrieve(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="at least 1 item"):
        batches.create(requests=[])


def test_many_at_once(server: Any, chat: Any, said: str) -> None:
    async def one(client: anthropic.AsyncAnthropic) -> str:
        arguments = {"model": server.model, "messages": chat, "max_tokens": 12, **GREEDY}
        async with client.messages.stream(**arguments) as stream:
            return await stream.get_final_text()

    async def many() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
            return list(await asyncio.gather(*(one(client) for _ in range(8))))

    assert asyncio.run(many()) == [said] * 8


def test_client_that_leaves_cancels(client: anthropic.Anthropic, server: Any, chat: Any) -> None:
    with client.messages.create(
        model=server.model, messages=chat, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        first = next(iter(stream))
    assert server.ended(first.message.id)["finish_reasons"] == ["cancelled"]

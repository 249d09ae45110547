"""The official Python client of Anthropic's API, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

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


def test_errors(client: anthropic.Anthropic, server: Any, chat: Any) -> None:
    given = {"model": server.model, "messages": chat, "max_tokens": 5}
    with pytest.raises(anthropic.AuthenticationError, match="not valid"):
        client.with_options(api_key="wrong").messages.create(**given)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**given | {"model": "none"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="type must be one of text"):
        client.messages.create(**given | {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})
    bearer = anthropic.Anthropic(base_url=server.url, auth_token=server.key, max_retries=0)
    assert bearer.messages.create(**given).usage.output_tokens == 5


def test_client_that_leaves_cancels(client: anthropic.Anthropic, server: Any, chat: Any) -> None:
    with client.messages.create(
        model=server.model, messages=chat, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        first = next(iter(stream))
    assert server.ended(first.message.id)["finish_reasons"] == ["cancelled"]

"""litellm with the provider `openai` at our address."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest


@pytest.fixture(scope="module")
def where(server: Any) -> dict[str, Any]:
    return {"model": f"openai/{server.model}", "api_base": server.base, "api_key": server.key, "max_retries": 0}


@pytest.fixture(scope="module")
def where_text(server: Any, where: dict[str, Any]) -> dict[str, Any]:
    return {**where, "model": f"text-completion-openai/{server.model}"}


def test_completion(where_text: dict[str, Any], continued: str) -> None:
    answer = litellm.text_completion(**where_text, prompt="def add(", max_tokens=12, temperature=0)
    assert answer.choices[0].text == continued


def test_chat_and_usage(where: dict[str, Any], chat: Any, said: str) -> None:
    answer = litellm.completion(**where, messages=chat, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == said
    assert answer.usage.completion_tokens == 12


def test_stream_with_usage(where: dict[str, Any], chat: Any, said: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**where, messages=chat, max_tokens=12, temperature=0, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    assert chunks[-1].usage.completion_tokens == 12


def test_errors(where: dict[str, Any], chat: Any) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**where, "api_key": "wrong"}, messages=chat)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**where, "model": "openai/gpt-none"}, messages=chat)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**where, messages=chat, temperature=7)


def test_logprobs(where: dict[str, Any], chat: Any) -> None:
    answer = litellm.completion(**where, messages=chat, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content) == 6


def test_tool(where: dict[str, Any], chat: Any, add_tool: Any, is_sum: Any) -> None:
    answer = litellm.completion(
        **where, messages=chat, max_tokens=600, seed=3, tools=[add_tool], tool_choice="required"
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "add"
    assert is_sum(json.loads(call.function.arguments))


def test_response_format(where: dict[str, Any], chat: Any, answer_schema: Any, is_answer: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer_schema}}
    answer = litellm.completion(**where, messages=chat, max_tokens=600, seed=3, response_format=form)
    assert is_answer(json.loads(answer.choices[0].message.content))


def test_leaving_a_stream_cancels(where: dict[str, Any], chat: Any, server: Any) -> None:
    stream = litellm.completion(**where, messages=chat, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    request_id = next(stream).id
    stream.completion_stream.close()
    assert server.ended(request_id)["finish_reasons"] == ["cancelled"]


def test_response(where: dict[str, Any], said: str, chat: Any) -> None:
    answer = litellm.responses(**where, input=chat[0]["content"], max_output_tokens=12, temperature=0)
    assert answer.output[0].content[0].text.startswith(said)  # it asks for 16 tokens, the least that OpenAI gives


def test_embeddings(where: dict[str, Any]) -> None:
    assert len(litellm.embedding(**where, input=["x", "y"]).data) == 2


def test_messages(where: dict[str, Any], chat: Any, said: str, server: Any) -> None:
    asked = {**where, "model": f"anthropic/{server.model}", "api_base": server.url, "messages": chat, "max_tokens": 12}
    assert litellm.completion(**asked, temperature=0).choices[0].message.content == said
    chunks = list(litellm.completion(**asked, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    with pytest.raises(litellm.NotFoundError, match=f"this server has '{server.model}'"):
        litellm.completion(**asked | {"model": "anthropic/none"})

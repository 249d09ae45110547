"""langchain-openai: ChatOpenAI and OpenAI at our address."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


def chat_model(server: Any, **options: Any) -> ChatOpenAI:
    arguments = {"model": server.model, "max_tokens": 12, "temperature": 0, "api_key": server.key, **options}
    return ChatOpenAI(base_url=server.base, max_retries=0, **arguments)


def test_completion(server: Any, continued: str) -> None:
    model = OpenAI(
        model=server.model, base_url=server.base, api_key=server.key, max_tokens=12, temperature=0, max_retries=0
    )
    assert model.invoke("def add(") == continued


def test_chat_and_usage(server: Any, chat: Any, said: str) -> None:
    answer = chat_model(server).invoke([HumanMessage(chat[0]["content"])])
    assert answer.content == said
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"


def test_stream_with_usage(server: Any, chat: Any, said: str) -> None:
    chunks = list(chat_model(server, stream_usage=True).stream(chat[0]["content"]))
    assert "".join(chunk.content for chunk in chunks) == said
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 12


def test_batch_and_async(server: Any, chat: Any, said: str) -> None:
    model = chat_model(server)
    assert [answer.content for answer in model.batch([chat[0]["content"]] * 4)] == [said] * 4
    assert asyncio.run(model.ainvoke(chat[0]["content"])).content == said


def test_errors(server: Any) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat_model(server, api_key="wrong").invoke("hi")
    with pytest.raises(openai.NotFoundError):
        chat_model(server, model="gpt-none").invoke("hi")
    with pytest.raises(openai.BadRequestError) as refused:
        chat_model(server, temperature=7).invoke("hi")
    assert refused.value.param == "temperature"


def test_logprobs(server: Any, chat: Any) -> None:
    answer = chat_model(server, logprobs=True, top_logprobs=2).invoke(chat[0]["content"])
    assert len(answer.response_metadata["logprobs"]["content"]) == 12


def test_tool(server: Any, chat: Any, add_tool: Any, is_sum: Any) -> None:
    model = chat_model(server, max_tokens=600, temperature=1, seed=3).bind_tools(
        [add_tool], tool_choice="any", parallel_tool_calls=False
    )
    (call,) = model.invoke(chat[0]["content"]).tool_calls
    assert call["name"] == "add"
    assert is_sum(call["args"])
    whole = None
    for chunk in model.stream(chat[0]["content"]):
        whole = chunk if whole is None else whole + chunk
    assert [one["args"] for one in whole.tool_calls] == [call["args"]]


def test_structured_output(server: Any, chat: Any, answer_schema: Any, is_answer: Any) -> None:
    model = chat_model(server, max_tokens=600, temperature=1, seed=3).with_structured_output(
        answer_schema, method="json_schema"
    )
    assert is_answer(model.invoke(chat[0]["content"]))


def test_leaving_a_stream_cancels(server: Any) -> None:
    model = chat_model(server, max_tokens=900, extra_body={"ignore_eos": True}, include_response_headers=True)
    stream = model.stream("hi")
    request_id = next(stream).response_metadata["headers"]["x-orcinus-request"]
    stream.close()
    assert server.ended(request_id)["finish_reasons"] == ["cancelled"]


def test_response(server: Any, chat: Any, said: str) -> None:
    answer = chat_model(server, use_responses_api=True).invoke(chat[0]["content"])
    assert answer.text == said


def test_embeddings(server: Any) -> None:
    model = OpenAIEmbeddings(
        model=server.model, base_url=server.base, api_key=server.key, dimensions=8, check_embedding_ctx_length=False
    )
    assert [len(vector) for vector in model.embed_documents(["x", "y"])] == [8, 8]

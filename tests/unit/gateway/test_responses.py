"""`/v1/responses` over chat: input items become messages, and events add up to the response."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.delivery.stream import Delta, Usage
from services.gateway.errors import ApiError
from services.gateway.openai.bodies import AllowedChoice, ChatBody
from services.gateway.openai.responses import (
    GUESSES,
    ResponseEvents,
    ResponsesBody,
    chat_body,
    in_words_of_responses,
    messages,
    of_chat,
    shell,
    truncate,
)
from services.gateway.text.tools.reader import CallPiece
from tests.support import sse

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody(**{"model": "m", "input": "hi", **fields})


def test_calls_of_one_turn_become_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    items = [
        {"role": "user", "content": "add"},
        {**call, "id": "fc_1", "status": "completed"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
    ]
    chat = chat_body(body(input=items, tools=[TOOL]))
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool"]
    assert [one.id for one in chat.messages[1].tool_calls or []] == ["c1", "c2"]
    assert [(message.tool_call_id, message.content) for message in chat.messages[2:]] == [("c1", "7"), ("c2", "8")]


def test_thinking_belongs_to_the_answer_or_call_behind_it() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    items = [
        {"role": "user", "content": "add"},
        thought,
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "thanks"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},  # is no turn
        {"role": "user", "content": "more"},
    ]
    chat = chat_body(body(input=items, tools=[TOOL], reasoning={"effort": "low"}))
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant", "user", "user"]
    assert [message.reasoning_content for message in chat.messages] == [None, "hm", *[None] * 4]
    assert [one.id for one in chat.messages[1].tool_calls or []] == ["c1"]
    assert chat.messages[3].content == "7" and chat.reasoning_effort == "low"
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    with pytest.raises(ApiError, match="encrypted_content is not supported"):
        chat_body(body(input=[sealed, {"role": "user", "content": "x"}]))
    with pytest.raises(ApiError) as refused:
        chat_body(body(reasoning={"effort": "huge"}))
    assert "'reasoning.effort'" in refused.value.message and refused.value.param == "reasoning.effort"


def test_tools_choice_and_format_become_those_of_chat() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    chat = chat_body(body(tools=[TOOL], tool_choice={"type": "function", "name": "add"}, text={"format": form}))
    assert chat.tools is not None
    assert (chat.tools[0].function.name, chat.tools[0].function.strict) == ("add", True)
    assert chat.tool_choice is not None and not isinstance(chat.tool_choice, str)
    assert chat.tool_choice.function.name == "add"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    chosen = chat_body(body(tools=[TOOL], tool_choice=allowed)).tool_choice
    assert isinstance(chosen, AllowedChoice) and chosen.allowed_tools.mode == "required"
    assert [tool.function.name for tool in chosen.allowed_tools.tools] == ["add"]
    assert chat.response_format is not None
    assert chat.response_format.model_dump(exclude_none=True)["json_schema"]["name"] == "x"


@pytest.mark.parametrize(
    ("said", "param", "heard", "place"),
    [
        ("Invalid value for 'messages[2].content'", "messages[2].content", "Invalid value for 'input'", "input"),
        ("your messages has 9 tokens", "messages", "your input has 9 tokens", "input"),
        ("max_tokens must be less", "max_tokens", "max_output_tokens must be less", "max_output_tokens"),
        ("response_format is wrong", "response_format", "text.format is wrong", "text.format"),
        ("verbosity is not supported", "verbosity", "text.verbosity is not supported", "text.verbosity"),
        ("tools[1].function.x is unknown", "tools[1].function.x", "tools[1].x is unknown", "tools[1].x"),
        ("tool_choice.allowed_tools.tools[0].function.name", "tool_choice", "tool_choice.tools[0].name", "tool_choice"),
        ("reasoning_effort is wrong", "reasoning_effort", "reasoning.effort is wrong", "reasoning.effort"),
        ("temperature is wrong", "temperature", "temperature is wrong", "temperature"),
    ],
)
def test_errors_name_the_fields_of_responses(said: str, param: str, heard: str, place: str) -> None:
    error = in_words_of_responses(ApiError(400, said, param=param))
    assert (error.message, error.param) == (heard, place)


PIECES = [
    Delta(0, "Let me", [1], None),
    Delta(0, " see", [2], None, [CallPiece(0, "call_a", "add", "")]),
    Delta(0, "", [3], None, [CallPiece(0, "", "", '{"a"'), CallPiece(0, "", "", ": 1}")]),
    Delta(0, "", [4], "tool_calls", [CallPiece(1, "call_b", "sub", "{}")]),
]
CALL_AT_THE_END = {"tool_calls": "completed", "stop": "incomplete", "length": "incomplete"}
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    {"id": "call_b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
]


SAID: dict[str, tuple[list[Delta], dict[str, Any]]] = {
    "text and calls": (PIECES, {"content": "Let me see", "tool_calls": CALLS}),
    "a call that a stop cut": (
        [*PIECES[:3], Delta(0, "", [4], "stop", PIECES[3].calls)],
        {"content": "Let me see", "tool_calls": CALLS},
    ),
    "a call alone": (
        [Delta(0, "", [4], "tool_calls", [CallPiece(0, "call_b", "sub", "{}")])],
        {"content": None, "tool_calls": CALLS[1:]},
    ),
    "text alone": ([Delta(0, "hello", [1], "stop")], {"content": "hello"}),
    "nothing": ([Delta(0, "", [1], "length")], {"content": ""}),
    "thinking before all": (
        [Delta(0, "", [1], None, reasoning="hm"), Delta(0, "so", [2], None, reasoning="!"), *PIECES[1:]],
        {"content": "so see", "reasoning_content": "hm!", "tool_calls": CALLS},
    ),
    "thinking that was cut": (
        [Delta(0, "", [1], "length", reasoning="hm")],
        {"content": None, "reasoning_content": "hm"},
    ),
    "thinking before a call that was cut": (
        [Delta(0, "", [1], "length", [CallPiece(0, "call_b", "sub", "{}")], reasoning="hm")],
        {"content": None, "reasoning_content": "hm", "tool_calls": CALLS[1:]},
    ),
}


@pytest.mark.parametrize(("deltas", "message"), SAID.values(), ids=SAID)
def test_response_events_add_up_to_the_response(deltas: list[Delta], message: dict[str, Any]) -> None:
    reason = deltas[-1].finish_reason
    begun = shell(body(), "resp_1", 5)
    usage = Usage(3, 4, reasoning_tokens=2)
    generation: Any = SimpleNamespace(choices=[SimpleNamespace(finish_reason=reason)])
    writer = ResponseEvents(generation, begun)
    told = writer.echo() + b"".join(writer.events([delta]) for delta in deltas) + writer.end(usage)
    events = [event.json for event in sse.parse(told)]
    choice = {"message": message, "finish_reason": reason}
    expected = of_chat(begun, {"choices": [choice], "usage": usage.body()})
    assert events[-1]["response"] == expected
    assert expected["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    types = [event["type"] for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-2:] == ["response.output_item.done", f"response.{expected['status']}"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            items[event["output_index"]] = items.get(event["output_index"], "") + event["delta"]
    wholes = [item.get("arguments") or item["content"][0]["text"] for item in expected["output"]]
    assert [items.get(index, "") for index in range(len(wholes))] == wholes
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == expected["output"]
    statuses = [item["status"] for item in done if item["type"] == "function_call"]
    assert statuses == ["completed"] * (len(statuses) - 1) + [CALL_AT_THE_END[reason]] * bool(statuses)


def conversation(*turns: int) -> list[dict[str, Any]]:
    """Return instructions and turns of so many messages: the user's, and answers to it."""
    found: list[dict[str, Any]] = [{"role": "developer", "content": "d"}]
    for number, size in enumerate(turns):
        found += [{"role": "user" if at == 0 else "assistant", "content": f"{number}.{at}"} for at in range(size)]
    return found


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_truncation_leaves_out_as_few_first_turns_as_it_can(turns: list[int], room: int) -> None:
    tried = []

    async def make(chat: ChatBody) -> Any:
        tried.append(len(chat.messages))
        if len(chat.messages) > room:
            raise ApiError(400, "too long", code="context_length_exceeded")
        return chat

    asked = chat_body(body(input=conversation(*turns), truncation="auto", instructions="be brief"))
    sizes = [2 + sum(turns[dropped:]) for dropped in range(len(turns))]
    fitting = [dropped for dropped, size in enumerate(sizes) if size <= room]
    if not fitting:
        with pytest.raises(ApiError, match="too long"):
            asyncio.run(truncate(asked, make))
        return
    kept = asyncio.run(truncate(asked, make)).messages
    assert [message.role for message in kept[:3]] == ["system", "developer", "user"]
    assert [message.content for message in kept[2:]] == [
        f"{number}.{at}" for number, size in enumerate(turns) for at in range(size) if number >= fitting[0]
    ]
    assert len(tried) <= GUESSES + 1 + len(turns).bit_length()


@given(st.lists(st.integers(1, 400), min_size=2, max_size=400), st.floats(0.05, 0.95))
@settings(max_examples=60, deadline=None)
def test_truncation_guesses_by_the_tokens_of_what_does_not_fit(sizes: list[int], share: float) -> None:
    """Each try encodes a conversation."""
    tried = list[int]()
    most = int(share * sum(sizes))

    async def make(chat: ChatBody) -> ChatBody:
        tokens = sum(len(str(message.content)) for message in chat.messages)
        tried.append(tokens)
        if tokens > most:
            error = ApiError(400, "too long", code="context_length_exceeded")
            error.fits = most / tokens
            raise error
        return chat

    chat = chat_body(body(input=[{"role": "user", "content": "x" * size} for size in sizes], truncation="auto"))
    try:
        kept = asyncio.run(truncate(chat, make)).messages
    except ApiError:
        assert sizes[-1] > most
    else:
        ends = list(accumulate(reversed(sizes)))
        assert len(kept) == sum(end <= most for end in ends)
        assert len(tried) <= GUESSES + 1 + len(sizes).bit_length()


@pytest.mark.parametrize("turns", [2, 50, 4000])
def test_truncation_tries_a_conversation_of_equal_turns_four_times(turns: int) -> None:
    tried = list[int]()

    async def make(chat: ChatBody) -> ChatBody:
        tried.append(len(chat.messages))
        if (tokens := 7 * len(chat.messages) + 20) > (most := 3 * turns + 25):
            error = ApiError(400, "too long", code="context_length_exceeded")
            error.fits = most / tokens
            raise error
        return chat

    chat = chat_body(body(input=[{"role": "user", "content": "x" * 20}] * turns, truncation="auto"))
    assert len(asyncio.run(truncate(chat, make)).messages) == max(1, (3 * turns + 5) // 7)
    assert len(tried) <= 4


def test_truncation_passes_other_faults_on() -> None:
    async def make(chat: ChatBody) -> Any:
        if len(chat.messages) > 4:
            raise ApiError(400, "too long", code="context_length_exceeded")
        raise ApiError(404, "no such model")

    with pytest.raises(ApiError, match="no such model"):
        asyncio.run(truncate(chat_body(body(input=conversation(2, 2, 2))), make))


def test_many_reasoning_items_merge_in_linear_work() -> None:
    """Joined item by item, these copied 200 GB."""
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 100_000}]}
    answer = {"type": "message", "role": "assistant", "content": "y"}
    found = messages(body(), [item] * 2000 + [answer])
    assert [message.get("content") for message in found] == ["y", "hi"]
    assert len(found[0]["reasoning_content"]) == 2000 * 100_000

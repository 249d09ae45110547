"""`/v1/messages` over chat: blocks become messages of chat, and events add up to the whole message."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from services.gateway.anthropic.answers import Block, MessageEvents, whole_message
from services.gateway.anthropic.batches import MessageBatchBody
from services.gateway.anthropic.bodies import MessagesBody, chat_body, in_words_of_messages, places_of
from services.gateway.delivery.stream import Finish, Row
from services.gateway.errors import ApiError, invalid
from services.gateway.openai.bodies import ChatBody, parse_body
from services.gateway.openai.chat import plain_messages
from services.gateway.request import THINKING, GenerationSpec, ToolUse
from tests.support import sse
from tests.support.checkpoints.tokenizers import token_ids
from tests.support.gateway.generations import CUTS, EOS, generation, in_rows, rows, spec, stored, streamed

CACHED = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}, **CACHED}
SAID = (
    'why?</think>Ah. <tool_call>{"name": "add", "arguments": {"a": [1, "é"]}}</tool_call> '
    'and <tool_call>{"name": "add"}'
)
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"


def chat(**fields: Any) -> ChatBody:
    given: dict[str, Any] = {"model": "m", "max_tokens": 4000, "messages": [{"role": "user", "content": "hi"}]}
    return chat_body(parse_body(orjson.dumps(given | fields), MessagesBody))


def refusal(**fields: Any) -> str:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400
    return refused.value.message


def test_blocks_become_messages_of_chat() -> None:
    calls = [{"type": "tool_use", "id": f"t{at}", "name": "add", "input": {"a": at}} for at in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "7", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "8"}]},
    ]
    body = chat(
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief", **CACHED}],
        messages=[
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "I ", "citations": None},
                    {"type": "text", "text": "add"},
                    *calls,
                ],
            },
            {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
            {"role": "system", "content": "soon"},
            {"role": "user", "content": "now"},
        ],
        tools=[TOOL],
    )
    assert [(message.role, message.content) for message in body.messages] == [
        ("system", "be\nbrief"), ("user", "one\ntwo"), ("assistant", "I add"), ("tool", "7"), ("tool", "8"),
        ("user", "go on"), ("system", "soon"), ("user", "now"),
    ]  # fmt: skip
    turn = body.messages[2]
    assert turn.reasoning_content == "hm" and not body.continue_final_message
    made = [(call.id, json.loads(call.function.arguments)) for call in turn.tool_calls or []]
    assert made == [("t1", {"a": 1}), ("t2", {"a": 2})]
    assert [message.tool_call_id for message in body.messages[3:5]] == ["t1", "t2"]
    (tool,) = body.tools or []
    function = tool.function
    assert (function.name, function.description, function.parameters) == ("add", "adds", {"type": "object"})


def test_last_message_of_the_assistant_is_continued() -> None:
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "The"},
        {"role": "assistant", "content": " fox"},
    ]
    body = chat(messages=turns)
    assert body.continue_final_message and [message.content for message in body.messages] == ["x", "The fox"]
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    assert "without a tool_result" in refusal(messages=[*turns, {"role": "assistant", "content": [call]}], tools=[TOOL])


@pytest.mark.parametrize(
    ("system", "wanted"),
    [
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "You"}], "You"),
        (f"{BILLING.upper()}\nYou\n{BILLING}", f"You\n{BILLING}"),
        (BILLING, None),
        (f"You\n{BILLING}", f"You\n{BILLING}"),
    ],
)
def test_billing_line_at_the_head_of_the_system_prompt_is_dropped(system: Any, wanted: str | None) -> None:
    found = plain_messages(chat(system=system).messages)
    assert (found[0]["content"] if found[0]["role"] == "system" else None) == wanted


@pytest.mark.parametrize("role", ["system", "developer"])
def test_billing_line_in_a_chat_does_not_reach_the_prompt(role: str) -> None:
    turns = [{"role": role, "content": f"{BILLING}\nYou"}, {"role": "user", "content": BILLING}]
    body = parse_body(orjson.dumps({"model": "m", "messages": turns}), ChatBody)
    assert [message["content"] for message in plain_messages(body.messages)] == ["You", BILLING]


def test_thinking_choice_and_format_become_those_of_chat() -> None:
    assert chat().chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = chat(thinking=thinking, output_config={"effort": "max"}, metadata={"user_id": "u"}, stop_sequences=["a"])
    assert body.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert (body.reasoning_effort, body.user, body.stop, body.thinking_token_budget) == ("xhigh", "u", ["a"], 1024)
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    bound = chat(thinking=thinking, output_config={"format": form})
    assert bound.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert bound.thinking_token_budget is None
    assert bound.response_format is not None and bound.response_format.json_schema is not None
    assert bound.response_format.json_schema.schema_ == {"type": "object"} and bound.response_format.json_schema.strict
    one = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    assert one.parallel_tool_calls is False
    assert one.model_dump()["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    words = [chat(tools=[TOOL], tool_choice={"type": kind}).tool_choice for kind in ("auto", "any", "none")]
    assert words == ["auto", "required", "none"]


def test_errors_of_chat_are_told_in_the_names_of_this_api() -> None:
    error = invalid("x", "messages[2].content of tools[0].function.name, messages[0]: 'stop[3]', response_format")
    told = in_words_of_messages(error, [-1, 0, 4]).message
    budget = invalid("x", "thinking_token_budget: the marks are not one token each; leave it out")
    remedy = in_words_of_messages(budget, []).message
    assert remedy == "thinking.budget_tokens: the marks are not one token each; send type adaptive"
    assert told == "messages[4].content of tools[0].name, system: 'stop_sequences[3]', output_config.format"


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (503, "overloaded_error"), (500, "api_error")])
async def test_answer_of_an_error_has_the_shape_of_the_path(status: int, kind: str) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await ApiError(status, "no", retry_after_s=2.5).send(send, "/v1/messages")
    assert json.loads(sent[1]["body"]) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"retry-after"]) == (status, b"3")


def request(**changes: Any) -> GenerationSpec:
    """Return a request for a text with thinking and calls of tools."""
    given: dict[str, Any] = {"id": "msg_1", "endpoint": "chat", "prompt_tokens": 9, "reasoning": THINKING}
    return spec(**given | {"tools": ToolUse("hermes", ("add",), True)} | changes)


def told(made: GenerationSpec, pieces: list[list[int]], had: str = "", finish: int = Finish.STOP) -> list[sse.Event]:
    """Return the events of a stream with rows in these pieces, behind the event `had`."""
    sent = in_rows(pieces, finish)
    sent[0][0].cached_tokens = 4
    return streamed(made, sent, had=had, writer_of=MessageEvents)


WANTED = [
    {"type": "thinking", "thinking": "why?"},
    {"type": "text", "text": "Ah."},
    {"type": "tool_use", "name": "add", "input": {"a": [1, "é"]}},
    {"type": "text", "text": "and"},
    {"type": "tool_use", "name": "add", "input": {}},
]


@given(CUTS)
@settings(max_examples=30, deadline=None)
def test_events_add_up_to_the_message_however_tokens_came(cuts: list[int]) -> None:
    tokens = [*token_ids(SAID), EOS]
    events = told(request(), rows(tokens, cuts))
    found = sse.message_blocks(events)
    assert [{name: value for name, value in block.items() if name != "id"} for block in found] == WANTED
    assert len({block["id"] for block in found if block["type"] == "tool_use"}) == 2
    first, *_, delta, stop = (json.loads(event.data) for event in events)
    assert first["message"]["usage"] == {
        "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 0
    }  # fmt: skip
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    thought = len(token_ids("why?</think>"))
    assert thought <= delta["usage"]["output_tokens_details"]["thinking_tokens"] <= thought + 1
    assert delta["usage"]["output_tokens"] == len(tokens) and stop == {"type": "message_stop"}


@given(CUTS, CUTS, st.booleans(), st.data())
@settings(max_examples=40, deadline=None)
def test_stream_continues_behind_any_event_with_an_id(
    cuts: list[int], others: list[int], hides: bool, data: st.DataObject
) -> None:
    tokens = [*token_ids(SAID), EOS]
    made = request(hides_thinking=hides)
    events = told(made, rows(tokens, cuts))
    # Events without an id belong to the next one that has one: a reader that leaves between drops them.
    stamped = [at for at, event in enumerate(events) if event.id != (events[at - 1].id if at else "")]
    at = data.draw(st.sampled_from(stamped))
    joined = [*events[: at + 1], *told(stored(made), rows(tokens, others), had=events[at].id)]
    assert sse.message_blocks(joined) == sse.message_blocks(events)
    assert json.loads(joined[-2].data)["delta"] == json.loads(events[-2].data)["delta"]


def test_thinking_with_display_omitted_has_no_text() -> None:
    display = chat(thinking={"type": "adaptive", "display": "omitted"})
    assert display.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    tokens = [*token_ids(SAID), EOS]
    events = told(request(hides_thinking=True), [[token] for token in tokens])
    kinds = [event.json["delta"]["type"] for event in events if event.kind == "content_block_delta"]
    assert "thinking_delta" not in kinds and kinds[0] == "signature_delta"
    assert sse.message_blocks(events)[0] == {"type": "thinking"}
    running, stream, _ = generation(request(hides_thinking=True))
    stream.offer(Row(0, tokens, Finish.STOP), 0)
    body = asyncio.run(whole_message(running))
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": body["content"][0]["signature"]}
    assert body["content"][1]["text"] == "Ah." and body["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "text", "finish", "reason"),
    [
        ({}, "hm</think>x", Finish.STOP, ("end_turn", None)),
        ({"stop": ["ow", "f"]}, "hm</think>brown fox", Finish.STOP, ("stop_sequence", "ow")),
        ({}, "hm</think>x", Finish.LENGTH, ("max_tokens", None)),
        ({}, "hm", Finish.DEADLINE, ("deadline", None)),
    ],
)
async def test_whole_message_says_why_it_ended(
    changes: dict[str, Any], text: str, finish: int, reason: tuple[str, str | None]
) -> None:
    running, stream, _ = generation(request(**changes))
    stream.offer(Row(0, token_ids(text), finish), 0)
    body = await whole_message(running)
    assert (body["stop_reason"], body["stop_sequence"]) == reason
    assert (body["id"], body["role"], body["model"]) == ("msg_1", "assistant", "m")
    assert body["content"][0]["thinking"] == "hm" and body["content"][0]["signature"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [('{"a": "two wor', {"a": "two wor"}), ('{"a": nonsense}', {"arguments": '{"a": nonsense}'}), ('{"a"', {})],
)
async def test_cut_and_broken_arguments_are_not_lost(arguments: str, wanted: dict[str, Any]) -> None:
    running, stream, _ = generation(request(reasoning=""))
    said = f'<tool_call>{{"name": "add", "arguments": {arguments}'
    stream.offer(Row(0, token_ids(said), Finish.LENGTH), 0)
    body = await whole_message(running)
    assert [block["input"] for block in body["content"]] == [wanted] and body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_many_turns_of_one_role_merge_in_linear_work(role: str) -> None:
    """Joined turn by turn, these copied 200 GB."""
    turns = [{"role": role, "content": "x" * 100_000}] * 2000
    body = MessagesBody.model_validate({"model": "m", "max_tokens": 1, "messages": turns})
    assert len(places_of(body)) == 1


@pytest.mark.parametrize("index", [99, "9" * 30])
def test_an_error_may_name_a_message_that_is_not_there(index: object) -> None:
    written = f"messages[{index}]"
    assert written in refusal(tools=[TOOL], tool_choice={"type": "tool", "name": written})
    assert in_words_of_messages(invalid("model", written), [0]).message == written


def test_integers_above_64_bits_are_written_as_they_are() -> None:
    written = '{"a":[18446744073709551616,-9223372036854775809,1],"b":{"c":1}}'
    block = Block("tool_use", "t1", "add", [written])
    assert json.loads(orjson.dumps(block.body("")))["input"] == json.loads(written)


def test_batch_has_as_many_requests_as_a_body_has_room_for() -> None:
    said = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    asked = [{"custom_id": f"{number}", "params": said} for number in range(16_384)]
    assert len(parse_body(orjson.dumps({"requests": asked[1:]}), MessageBatchBody).requests) == 16_383
    with pytest.raises(ApiError, match="may have 65536 JSON objects and lists; got 65538: send less") as refused:
        parse_body(orjson.dumps({"requests": asked}), MessageBatchBody)
    assert refused.value.code == "json_too_wide"

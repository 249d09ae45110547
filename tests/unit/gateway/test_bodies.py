"""Bounds of bad bodies: checks give up early, as each fault found blocks the event loop."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from services.gateway.errors import ApiError
from services.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
    parse_json,
)
from services.gateway.openai.responses import ResponsesBody
from shared.text.bounded_json import MAX_CONTAINERS, MAX_MEMBERS

MANY = 50_000
MESSAGE = {"role": "user", "content": "x"}


LONG = {
    "messages": (ChatBody, {"model": "m", "messages": [0] * MANY}),
    "parts": (ChatBody, {"model": "m", "messages": [{**MESSAGE, "content": [{}] * MANY}]}),
    "empty parts": (
        ChatBody, {"model": "m", "messages": [{**MESSAGE, "content": [{"type": "text", "text": ""}] * MANY}]},
    ),
    "tools": (ChatBody, {"model": "m", "messages": [MESSAGE], "tools": [0] * MANY}),
    "stops": (CompletionBody, {"model": "m", "prompt": "x", "stop": [0] * MANY}),
    "stop ids": (CompletionBody, {"model": "m", "prompt": "x", "stop_token_ids": ["x"] * MANY}),
    "choices": (CompletionBody, {"model": "m", "prompt": "x", "guided_choice": [0] * MANY}),
    "tools of responses": (ResponsesBody, {"model": "m", "input": "x", "tools": [0] * MANY}),
    "to tokenize": (TokenizeBody, {"messages": [0] * MANY}),
    "to detokenize": (DetokenizeBody, {"tokens": ["x"] * MANY}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), LONG.values(), ids=LONG)
def test_long_list_of_wrong_values_is_given_up_early(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 200


WIDE = {f"a{at}": 1 for at in range(MAX_MEMBERS + 1)}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": "x", **WIDE}),
        (CompletionBody, {"prompt": "x", "logit_bias": WIDE}),
        (CompletionBody, {"prompt": "x", "stream_options": WIDE}),
        (CompletionBody, {"prompt": "x", "guided_json": {"type": "object", "properties": WIDE}}),
        (ChatBody, {"messages": [MESSAGE], "metadata": WIDE}),
        (ChatBody, {"messages": [{**MESSAGE, **WIDE}]}),
    ],
    ids=["fields", "bias", "options", "schema", "metadata", "message"],
)
def test_object_with_too_many_members_is_refused_unchecked(kind: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"may have {MAX_MEMBERS} members; got 4[01]") as refused:
        parse_body(orjson.dumps({"model": "m", **fields}), kind)
    assert (refused.value.status, refused.value.code) == (400, "json_too_wide")


def test_object_with_as_many_members_as_allowed_is_checked() -> None:
    fields = dict(list(WIDE.items())[: MAX_MEMBERS - 2])
    with pytest.raises(ApiError, match="Unrecognized request argument supplied: a0"):
        parse_body(orjson.dumps({"model": "m", "prompt": "x", **fields}), CompletionBody)


@pytest.mark.parametrize(
    "fields",
    [{"tools": [WIDE] * 9}, {"messages": [{**MESSAGE, "role": "assistant", "tool_calls": [{**CALL, **WIDE}] * 9}]}],
    ids=["tools", "calls"],
)
def test_only_the_first_of_several_wide_objects_is_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate({"model": "m", "messages": [MESSAGE], **fields})
    assert refused.value.error_count() <= len(WIDE) + 2


def test_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(ApiError, match="the body must be a JSON object, not 3"):
        parse_body(b"3", CompletionBody)


@pytest.mark.parametrize("piece", ["[],", "{},"])
def test_lists_and_objects_are_counted_outside_strings(piece: str) -> None:
    held = "[" + (piece * (MAX_CONTAINERS - 2))[:-1] + "]"
    assert len(parse_json(f'{{"a": {held}}}'.encode())["a"]) == MAX_CONTAINERS - 2
    with pytest.raises(ApiError, match=f"may have {MAX_CONTAINERS} JSON objects and lists; got {MAX_CONTAINERS + 1}"):
        parse_json(f'{{"a": [{held}]}}'.encode())
    text = '\\"[{' * MAX_CONTAINERS
    assert parse_json(orjson.dumps({"a": text})) == {"a": text}


@pytest.mark.parametrize("end", ["", "\\", '"', '\\"'])
def test_brackets_in_an_unclosed_string_are_scanned_once(end: str) -> None:
    body = ('{"a": "' + '\\"' * 500_000 + "{" * (MAX_CONTAINERS + 1) + end).encode()
    with pytest.raises(ApiError) as refused:
        parse_json(body)
    assert refused.value.status == 400

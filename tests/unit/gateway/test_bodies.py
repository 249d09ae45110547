"""Bodies of requests: faults that are counted, and multipart cut anywhere."""

from __future__ import annotations

from email import message_from_bytes
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from services.gateway.anthropic.bodies import MessagesBody
from services.gateway.errors import MAX_MESSAGE, MAX_PARAM, ApiError
from services.gateway.http.multipart import MAX_HEAD_BYTES, MAX_PARTS, MultipartReader, Part, boundary_of
from services.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ScheduledBody,
    TokenizeBody,
    check_output,
    parse_body,
    parse_json,
)
from services.gateway.openai.responses import ResponsesBody
from services.gateway.request import Limits
from shared.text.bounded_json import MAX_CONTAINERS, MAX_MEMBERS
from tests.support.gateway.generations import rows

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


GENERATING = {
    ChatBody: {"model": "m", "messages": [MESSAGE]},
    CompletionBody: {"model": "m", "prompt": "x"},
    ResponsesBody: {"model": "m", "input": "x"},
    MessagesBody: {"model": "m", "messages": [MESSAGE], "max_tokens": 9},
}


@pytest.mark.parametrize("kind", GENERATING)
def test_speculate_is_a_boolean_or_the_name_of_a_drafter(kind: type[ScheduledBody]) -> None:
    def given(speculate: Any) -> bool | None:
        return parse_body(orjson.dumps({**GENERATING[kind], "speculate": speculate}), kind).speculate

    values = [True, "auto", "suffix", False, "off", None]
    assert [given(value) for value in values] == [True, True, True, False, False, None]
    for wrong, shown in [("ngram", "'ngram'"), (1, "1"), (["off"], "['off']")]:
        with pytest.raises(ApiError) as refused:
            given(wrong)
        assert refused.value.message == f"speculate: {shown} is no drafter; use auto, off or suffix"
        assert (refused.value.param, refused.value.code) == ("speculate", "invalid_value")


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


BOUNDARY = b"x-1"
CONTENTS = st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"-", b"--", b"x-1", b"\r\n--x", b"\x00"]), max_size=8).map(
    b"".join
)


def body(parts: list[bytes]) -> bytes:
    head = b'\r\nContent-Disposition: form-data; name="p%d"; filename="f"\r\n\r\n%b\r\n--x-1'
    return b"--x-1" + b"".join(head % (number, content) for number, content in enumerate(parts)) + b"--\r\n"


def read(pieces: list[bytes]) -> tuple[list[tuple[str, bytes]], bool]:
    reader = MultipartReader(BOUNDARY)
    found: list[tuple[str, bytes]] = []
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, Part):
                found.append((event.name, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + event)
    return found, reader.is_whole


@given(st.lists(CONTENTS.filter(lambda content: b"\r\n--x-1" not in b"\r\n" + content), max_size=3), st.data())
def test_parts_are_those_of_the_standard_library_wherever_the_body_is_cut(
    parts: list[bytes], data: st.DataObject
) -> None:
    whole = body(parts)
    found, is_whole = read(rows(whole, data.draw(st.lists(st.integers(0, len(whole)), max_size=6))))
    assert is_whole
    assert found == [(f"p{number}", content) for number, content in enumerate(parts)]
    # The library ends lines by itself, so only parts without line ends of their own can be compared.
    if parts and not any(b"\r" in content or b"\n" in content for content in parts):
        oracle = message_from_bytes(b"Content-Type: multipart/form-data; boundary=x-1\r\n\r\n" + whole)
        assert [part.get_payload(decode=True) for part in oracle.get_payload()] == parts


def test_body_that_was_cut_is_not_whole() -> None:
    whole = body([b"ab"])
    assert not any(read([whole[:end]])[1] for end in range(len(whole) - 4))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"--x-1 \r\n", "followed by"),
        (b"--x-1\r\n\r\n\r\n--x-1--", "no name"),
        (b"--x-1\r\nContent-Disposition: attachment; name=a\r\n\r\n", "no name"),
        (b"--x-1\r\n" + b"a" * (MAX_HEAD_BYTES + 1), "more than"),
        (body([b""] * (MAX_PARTS + 1)), "more than"),
        (b"--x-1\r\nContent-Disposition: form-data; name=a" + 64 * b";" + b"\r\n\r\n", "more than 64 parameters"),
        (b"--x-1\r\nContent-Disposition: form-data; name=a; filename*=idna''%ff\r\n\r\n", "filename=TEXT"),
        (b"--x-1\r\nContent-Disposition: form-data; name=a; filename*=\0''b\r\n\r\n", "filename=TEXT"),
    ],
    ids=[
        "no line end",
        "no head",
        "another disposition",
        "long head",
        "many parts",
        "many parameters",
        "no encoding",
        "NUL",
    ],
)
def test_body_that_is_no_form_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as raised:
        read([content])
    assert (raised.value.status, raised.value.code) == (400, "invalid_multipart")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 415), ("", 415), ("multipart/form-data", 400), ("multipart/mixed; boundary=a", 415),
        (f"multipart/form-data; boundary={'a' * 71}", 400), ("multipart/form-data; boundary*=idna''%ff", 400),
        ('multipart/form-data; boundary=a; "' + 500 * ";", 415),
    ],
)  # fmt: skip
def test_content_type_without_a_boundary_is_refused(content_type: str, status: int) -> None:
    with pytest.raises(ApiError) as raised:
        boundary_of(content_type)
    assert raised.value.status == status


def test_boundary_and_names_are_read_with_and_without_quotes() -> None:
    assert boundary_of('Multipart/Form-Data; charset=x; boundary="a b"') == b"a b"
    reader = MultipartReader(b"b")
    head = 'content-disposition: form-data; name=file; filename="a \\" ü.jsonl"'.encode()
    assert list(reader.feed(b"--b\r\nX: y\r\n" + head + b"\r\n\r\n")) == [Part("file", 'a " ü.jsonl')]


@pytest.mark.parametrize("body", [{"x" * 9000: 1}, {"metadata": {"x" * 9000: 1}}])
def test_error_is_short_where_a_name_is_long(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(orjson.dumps({"model": "m", "messages": [MESSAGE], **body}), ChatBody)
    assert len(refused.value.param or "") <= MAX_PARAM and len(refused.value.message) <= MAX_MESSAGE
    assert len(refused.value.json()) <= 2 * MAX_MESSAGE
    assert refused.value.message.startswith(("Unrecognized request argument", "Invalid value"))


def test_output_longer_than_the_context_is_refused_behind_an_empty_prompt() -> None:
    """A template may render nothing."""
    with pytest.raises(ApiError, match="requested 11 tokens") as refused:
        check_output(11, 0, 10, Limits(max_model_len=10), "max_tokens")
    assert refused.value.status == 400

"""What reads what others wrote: JSON, ids of events, grammars, tensors, calls of tools.

Oracles: the standard library, and what was put in.
"""

from __future__ import annotations

import functools
import json
import keyword
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from protos.kserve_pb2 import ModelInferRequest
from services.gateway.anthropic.bodies import MessagesBody
from services.gateway.anthropic.bodies import chat_body as messages_chat
from services.gateway.delivery.stream import Position
from services.gateway.errors import ApiError
from services.gateway.kserve.tensors import body_of, check_outputs, fields_of, read_request
from services.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
    parse_json,
)
from services.gateway.openai.responses import ResponsesBody, chat_body
from services.gateway.request import ToolUse
from services.gateway.text.reasoning import ChannelReader
from services.gateway.text.tools.formats import BLOCKS, OPENINGS
from shared.text import bounded_json
from shared.text.bounded_json import MAX_DEPTH
from shared.text.grammars import GrammarError, Grammars
from tests.support.checkpoints.tokenizers import byte_level, write_model
from tests.support.gateway.generations import read_calls, rows

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(alphabet=st.sampled_from('ab[]{}",:\\/\n\0é🐋 '), max_size=8) | st.text(
    st.characters(codec="utf-8"), max_size=4
)
VALUES = st.recursive(
    PLAIN | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """JSON, or what is left of it behind some changes of its bytes."""
    made = bytearray(json.dumps(draw(VALUES), ensure_ascii=draw(st.booleans())).encode())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(made)))
        new = draw(
            st.sampled_from([b"", b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"\xff", b"\xc3", b"\0", b"1", b"e"])
        )
        made[at : at + draw(st.integers(0, 2))] = new
    return bytes(made)


def brackets(document: bytes) -> int:
    """Outside of strings, read byte by byte."""
    count, quoted, escaped = 0, False, False
    for byte in document:
        if quoted:
            escaped, was = byte == ord("\\") and not escaped, escaped
            quoted = was or byte != ord('"')
        else:
            quoted, escaped = byte == ord('"'), False
            count += byte in b"[{"
    return count


@given(documents(), st.integers(1, 12))
@settings(max_examples=60)
def test_json_is_read_as_by_the_standard_library(document: bytes, most: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bounded_json, "MAX_CONTAINERS", most)
        try:
            value = parse_json(document)
        except ApiError as error:
            assert error.status == 400 and error.message and error.code
            assert error.code == "json_too_wide" or brackets(document) <= most
            assert error.code != "json_too_wide" or brackets(document) > most
            return
    assert brackets(document) <= most
    assert value == json.loads(document)


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([("[", "]"), ('{"a":', "}")]))
@example(MAX_DEPTH - 1, 1, ("[", "]"))
@settings(max_examples=40)
def test_json_depth_is_bounded_at_any_place(depth: int, width: int, pair: tuple[str, str]) -> None:
    deep = pair[0] * depth + "1" + pair[1] * depth
    document = "[" + ",".join(["[1]"] * width + [deep]) + "]"
    try:
        assert parse_json(document.encode()) == json.loads(document)
        assert depth + 1 <= MAX_DEPTH
    except ApiError as error:
        assert error.code == "json_too_deep" and depth + 1 > MAX_DEPTH


WIDE = VALUES | st.integers() | st.floats(allow_nan=False)
BODIES = {
    kind: st.dictionaries(st.sampled_from(sorted(kind.model_fields)) | st.text(max_size=5), WIDE, max_size=5)
    for kind in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
}


@given(st.one_of(*(st.tuples(st.just(kind), fields) for kind, fields in BODIES.items())))
@settings(max_examples=80)
def test_any_fields_of_a_body_are_accepted_or_refused(drawn: tuple[type[Any], dict[str, Any]]) -> None:
    kind, fields = drawn
    try:
        checked = parse_body(json.dumps({"model": "m", **fields}).encode(), kind)
    except ApiError as error:
        assert error.status == 400 and error.message and error.code
    else:
        assert set(checked.model_fields_set) <= {"model", *fields}


@given(VALUES, st.sampled_from(["input", "tools", "tool_choice", "text", "stream_options", "metadata"]))
@settings(max_examples=60)
def test_any_value_of_responses_is_accepted_or_refused(value: Any, name: str) -> None:
    try:
        chat_body(parse_body(json.dumps({"model": "m", "input": "x", name: value}).encode(), ResponsesBody))
    except ApiError as error:
        assert error.status == 400 and error.message and error.code
        assert (error.param or "").split(".")[0].split("[")[0] in {name, "input", ""}


BLOCKS_OF_MESSAGES = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional={name: VALUES for name in ("text", "id", "name", "input", "tool_use_id", "content", "thinking")},
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={"content": TEXTS | st.lists(BLOCKS_OF_MESSAGES, max_size=3) | VALUES},
    ),
    max_size=4,
)


@given(VALUES | MESSAGES, st.sampled_from(["messages", "system", "tools", "tool_choice", "thinking", "output_config"]))
@settings(max_examples=60)
def test_any_value_of_messages_is_accepted_or_refused(value: Any, name: str) -> None:
    sent = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], name: value}
    try:
        messages_chat(parse_body(json.dumps(sent).encode(), MessagesBody))
    except ApiError as error:
        assert error.status == 400 and error.message and error.code
        assert (error.param or "").split(".")[0].split("[")[0] in {name, "messages", ""}


@given(st.lists(st.integers(-2, 10**9 - 1), min_size=1, max_size=5), st.booleans())
def test_event_id_round_trips(last: list[int], usage: bool) -> None:
    given_id = "cmpl-1:" + ".".join(map(str, last)) + ("+" if usage else "")
    position = Position.parse(given_id, "cmpl-1", len(last))
    assert (position.last_indices, position.usage) == (last, usage)


@given(st.text(max_size=30) | st.from_regex(r"cmpl-1:[-+.0-9]{0,20}", fullmatch=True), st.integers(1, 4))
def test_any_event_id_is_a_position_or_refused_by_name(given_id: str, choices: int) -> None:
    try:
        assert len(Position.parse(given_id, "cmpl-1", choices).last_indices) == choices
    except ApiError as error:
        assert (error.status, error.param) == (400, "Last-Event-ID")


@functools.cache
def grammars() -> Grammars:
    """Over the tokenizer of a small model, read once."""
    with TemporaryDirectory() as directory:
        found = Grammars(write_model(Path(directory)), byte_level().get_vocab_size())
        found.prepare()
        found.matcher('start: "ab" | /[0-9]+/')  # this one can be used, so others could
        return found


@given(st.text(max_size=40) | st.text(alphabet='start: abx"/()[]{}|*+?\\\n%,0', max_size=40).map("start: ".__add__))
@settings(deadline=None)
def test_any_text_is_a_grammar_or_refused(text: str) -> None:
    try:
        assert not grammars().matcher(text).is_error()
    except GrammarError as error:
        assert str(error)


@st.composite
def inference_requests(draw: st.DrawFn) -> bytes:
    request = ModelInferRequest(model_name="m", model_version=draw(st.sampled_from(["", "1", "x"])))
    for _ in range(draw(st.integers(0, 3))):
        tensor = request.inputs.add(
            name=draw(st.sampled_from(["text_input", "sampling_parameters", "stream", "x"])),
            datatype=draw(st.sampled_from(["BYTES", "BOOL", ""])),
            shape=draw(st.lists(st.integers(-1, 3), max_size=3)),
        )
        tensor.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=6) | documents(), max_size=2)))
        tensor.contents.bool_contents.extend(draw(st.lists(st.booleans(), max_size=2)))
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=12), max_size=3)))
    for name in draw(st.lists(st.sampled_from(["temperature", "priority", "timeout", "stream", "n"]), max_size=3)):
        request.parameters[name].double_param = draw(st.floats())
        if draw(st.booleans()):
            request.parameters[name].int64_param = draw(st.integers(-(2**63), 2**63 - 1))
    made = bytearray(request.SerializeToString(deterministic=True))
    for _ in range(draw(st.integers(0, 2))):
        made[draw(st.integers(0, len(made)))] = draw(st.integers(0, 255)) if made else 0
    return bytes(made)


@given(st.data())
@settings(max_examples=60)
def test_any_grpc_message_is_a_body_or_refused(data: st.DataObject) -> None:
    try:
        drawn = data.draw(inference_requests())
        expected = ModelInferRequest.FromString(drawn)
    except (DecodeError, IndexError):
        return
    request = read_request(drawn)
    assert request.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    try:
        check_outputs(request)
        fields = fields_of(request)
        assert json.loads(body_of(fields)).keys() == fields.keys()
    except ApiError as error:
        assert error.status in (400, 404) and error.message and error.code


NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
FILLERS = st.text(alphabet=st.sampled_from("ab .\n🐋"), max_size=6).map(lambda text: text and f".{text}.")


PARAMETERS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))


def texts_in(kind: str, calls: list[tuple[str, Any]]) -> tuple[str, ...]:
    """Return what the schema says of a conversation's parameters: those that hold text are text."""
    found = {f"{name}.{key}": type(value) for name, given in calls for key, value in given.items()}
    return tuple(name for name, kind_ in found.items() if kind_ is str) if kind in ("qwen3-coder", "glm-4.5") else ()


def blocks(kind: str, calls: list[tuple[str, Any]], written: Callable[[Any], str], is_older: bool) -> str:
    """Return calls as a model writes them that has blocks of them."""
    marks, texts = BLOCKS[kind], []
    for at, (name, arguments) in enumerate(calls):
        plain = {key: value if isinstance(value, str) else written(value) for key, value in arguments.items()}
        if kind == "qwen3-coder":
            pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in plain.items())
            text = f"\n<function={name}>\n{pairs}</function>\n"
        elif kind == "glm-4.5":
            pairs = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in plain.items()
            )
            text = f"{name}\n{pairs}"
        elif kind == "deepseek-v3":
            sep = "<｜tool▁sep｜>"
            text = f"{name}{sep}{written(arguments)}"
            text = f"function{sep}{name}\n```json\n{written(arguments)}\n```" if is_older else text
        else:
            text = f"functions.{name}:{at}<|tool_call_argument_begin|>{written(arguments)}"
        if kind == "channels":
            text = f"{name}<|message|>{written(arguments)}"
        texts.append(f"{marks.opening}{text}{marks.closing}")
    return marks.section + ("\n" if is_older else "").join(texts) + marks.section_end


ENDS = ["</parameter>", "</tool_call>", "</arg_value>", "</arg_key>", "</function>", "\n", " "]
MARKED = st.lists(st.sampled_from(ENDS), max_size=4).map(lambda marks: f"({'.'.join(marks)})")
"""Texts that contain the marks that end values and blocks, as code about such formats does."""


@st.composite
def said(draw: st.DrawFn, kind: str) -> tuple[str, list[tuple[str, Any]]]:
    """A text in which a model calls tools, and the calls."""
    keys = PARAMETERS if kind in ("qwen3-coder", "glm-4.5", "pythonic") else TEXTS
    names = PARAMETERS if kind == "pythonic" else NAMES
    values = VALUES | MARKED if kind in ("qwen3-coder", "glm-4.5") else VALUES
    calls = [(draw(names), draw(st.dictionaries(keys, values, max_size=3))) for _ in range(draw(st.integers(1, 3)))]
    ascii_ = draw(st.booleans())
    indent = draw(st.sampled_from([None, 1]))

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_, indent=indent)

    key = "parameters" if kind == "llama3" else "arguments"
    objects = [written({"name": name, key: arguments}) for name, arguments in calls]
    if kind in BLOCKS:
        return draw(FILLERS) + blocks(kind, calls, written, draw(st.booleans())), calls
    if kind == "pythonic":
        lists = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return f"[{', '.join(lists)}]" + draw(st.sampled_from(["", "<|python_end|>", " "])), calls
    blank = draw(st.sampled_from(["", " ", "\n"]))
    text = {
        "hermes": draw(FILLERS) + blank.join(f"<tool_call>{blank}{one}{blank}</tool_call>" for one in objects),
        "llama3": blank + f"{blank};{blank}".join(objects),
        "granite": draw(FILLERS) + f"<|tool_call|>{blank}[" + f"{blank},{blank}".join(objects) + "]",
        "mistral": draw(FILLERS) + f"[TOOL_CALLS]{blank}[" + f"{blank},{blank}".join(objects) + "]",
        "mistral-args": "".join(f"[TOOL_CALLS]{blank}{name}[ARGS]{blank}{written(given)}" for name, given in calls),
    }[kind]
    return text, calls


@pytest.mark.parametrize("kind", sorted(OPENINGS))
@given(data=st.data(), parallel=st.booleans())
@settings(max_examples=10)
def test_calls_are_read_as_written_however_cut(data: st.DataObject, kind: str, parallel: bool) -> None:
    text, calls = data.draw(said(kind))
    names = tuple({name for name, _ in calls})
    assume(not texts_in(kind, calls) or len(names) == len(calls))  # else one schema would say two things
    use = ToolUse(kind, names, parallel, texts=texts_in(kind, calls))
    found = read_calls(use, [text])
    wanted = calls if parallel else calls[:1]
    assert [(call.name, json.loads(call.arguments)) for call in found[1]] == wanted
    assert not found[2]
    assert read_calls(use, rows(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6)))) == found
    assert read_calls(use, list(text)) == found


FRAGMENTS = [
    *OPENINGS.values(), "</tool_call>", "<tool", "[ARGS]", "[CALL_ID]", "f", '{"name": "f", "arguments": {',
    '{"name": "f"',
    *(mark for marks in BLOCKS.values() for mark in (marks.opening, marks.closing, marks.section, marks.section_end)),
    "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>",
    "function<｜tool▁sep｜>f", "<｜tool▁sep｜>", "\n```json\n", "{}", "functions.f:0", "<|tool_call_argument_begin|>",
    "[f(", "a=", "1", ")", "'", "<|python_start|>", "<|python_end|>",
    '{"name": "f\\ud83d', "\\ud83d", "\\udc0b",
    '"parameters": {"a": [1, "}"]}', "}", "]", "[", ",", ";", '"', "\\", " ", "\n", " \n" * 40, "<|python_tag|>", "🐋",
]  # fmt: skip


@pytest.mark.parametrize("kind", sorted(OPENINGS))
@given(data=st.data(), parallel=st.booleans(), forced=st.booleans())
@settings(max_examples=15)
def test_fragments_of_calls_are_read_the_same_at_every_cut(
    data: st.DataObject, kind: str, parallel: bool, forced: bool
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=10)))
    use = ToolUse(kind, ("f",), parallel, forced)
    found = read_calls(use, [text])
    assert all(call.id and call.name for call in found[1])
    assert orjson.dumps([found[0], *(call.body() for call in found[1])]), "a client can read it"
    assert found[1] or not forced, "a call has to come"
    for at in range(len(text) + 1):
        assert read_calls(use, [text[:at], text[at:]]) == found
    assert read_calls(use, list(text)) == found


HEADS = [
    "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", " to=functions.f ",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>", "<|end|>", "<|return|>", "<|",
    "assistant", "a", "{}", "<|message|>", " ", "🐋", "<|channel|>" + "x" * 240, "x" * 16,
]  # fmt: skip


@given(st.lists(st.sampled_from(HEADS), max_size=10).map("".join))
@settings(max_examples=40)
def test_channels_are_read_the_same_at_every_cut(text: str) -> None:
    def read_channels(pieces: list[str]) -> tuple[str, str]:
        reader = ChannelReader()
        parts = [*map(reader.feed, pieces), reader.flush()]
        return "".join(thinking for thinking, _ in parts), "".join(content for _, content in parts)

    found = read_channels([text])
    assert all(read_channels([text[:at], text[at:]]) == found for at in range(len(text) + 1))
    assert read_channels(list(text)) == found

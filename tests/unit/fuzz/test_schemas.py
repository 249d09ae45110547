"""Hypothesis on schemas of clients that are nearly JSON schemas: each is taken or refused with a 400, never more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.errors import ApiError
from services.gateway.openai.bodies import ChatBody, parse_body
from services.gateway.openai.chat import chat_spec
from services.gateway.request import Limits
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.formats import OPENINGS
from shared.text import bounded_json
from shared.text.bounded_json import MAX_CONTAINERS
from tests.support.checkpoints.tokenizers import write_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}{{ tools or '' }}"
WORDS = (
    "type", "enum", "const", "required", "properties", "minLength", "maxLength", "minimum", "maxItems", "pattern",
    "items", "prefixItems", "anyOf", "allOf", "$ref", "$defs", "definitions", "additionalProperties", "format",
    "x-guidance", "description",
)  # fmt: skip
NAMES = st.sampled_from(("a", "b c", "é🐋", "", "class", "</parameter>", "$ref")) | st.sampled_from(WORDS)
KINDS = st.sampled_from(("string", "integer", "object", "array", "null", "number", "strange"))
PATHS = st.sampled_from(("#/$defs/a", "#/definitions/b%20c", "#", "#a", "#/properties/a", "%ff", "http://a/b", "~1"))
PLAIN = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers(-(2**63), 2**64 - 1) | KINDS | PATHS
    | st.sampled_from((1e300, 2.0, -0.5)) | st.text(st.characters(codec="utf-8"), max_size=4)
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | NAMES, inner, max_size=4),
    max_leaves=12,
)
PARAMETERS = st.fixed_dictionaries(
    {"properties": st.dictionaries(NAMES, VALUES, max_size=3) | VALUES},
    optional={word: VALUES for word in WORDS if word != "properties"},
)
MESSAGES = [{"role": "user", "content": "x"}]
LIMITS = Limits(1 << 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelText]:
    text = ModelText(write_model(tmp_path_factory.mktemp("schemas") / "m", chat_template=TEMPLATE))
    yield text
    text.close()


def answer_to(model: ModelText, body: dict[str, Any]) -> int:
    """Return the status with which a chat is taken or refused. Any other error than the API's own is a failure."""

    async def ask() -> int:
        try:
            await chat_spec(
                parse_body(orjson.dumps({"model": "m", "messages": MESSAGES, **body}), ChatBody), model, LIMITS
            )
        except ApiError as error:
            assert error.message and error.param
            return error.status
        return 200

    return asyncio.run(ask())


def forced(parameters: Any) -> dict[str, Any]:
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }


@given(st.sampled_from(list(OPENINGS)), PARAMETERS | st.dictionaries(NAMES, VALUES, max_size=4))
@example("glm-4.5", {"required": 5})
@example("qwen3-coder", {"properties": {"a": {"type": "string", "enum": 5}}})
@example("qwen3-coder", {"properties": {"a": {"type": "string", "enum": [[], 5]}}})
@example("qwen3-coder", {"properties": {"a": {"type": "string", "minLength": -1, "maxLength": True}}})
@example("pythonic", {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}})
@settings(max_examples=150)
def test_schema_of_a_forced_tool_is_taken_or_refused(model: ModelText, kind: str, parameters: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model, "tool_format", kind)
        assert answer_to(model, forced(parameters)) in (200, 400)


FORMS = st.sampled_from(("response_format", "guided_json", "structured_outputs"))


@given(FORMS, VALUES, st.booleans())
@example("guided_json", 5, True)
@settings(max_examples=100)
def test_schema_of_an_answer_is_taken_or_refused(model: ModelText, field: str, schema: Any, as_text: bool) -> None:
    value: Any = orjson.dumps(schema).decode() if as_text else schema
    form = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value, "strict": as_text}},
        "structured_outputs": {"json": value},
    }.get(field, value)
    assert answer_to(model, {field: form}) in (200, 400)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("depth", [33, 260, 600, 1000, 1015, 100_000])
def test_json_in_strings_has_the_depth_of_a_body(model: ModelText, depth: int) -> None:
    for body in in_strings(nested(depth)):
        assert answer_to(model, body) == 400


def in_strings(*texts: str) -> list[dict[str, Any]]:
    """Return bodies with the JSON of a schema or of arguments in strings."""
    calls = [{"id": "1", "function": {"name": "f", "arguments": text}} for text in texts]
    return [
        {"guided_json": "".join(texts)},
        {"structured_outputs": {"json": "".join(texts)}},
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": calls}, *MESSAGES]},
    ]


def test_json_in_strings_has_the_width_of_a_body(model: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it is parsed."""
    read: list[bytes] = []
    loads = orjson.loads

    def noted(text: bytes) -> Any:
        read.append(text[:8])
        return loads(text)

    monkeypatch.setattr(bounded_json.orjson, "loads", noted)
    half = '{"a":[' + "[]," * (MAX_CONTAINERS // 2) + "[]]}"
    wide = half.replace("[]]", "[]," * (MAX_CONTAINERS // 2) + "[]]")
    assert [answer_to(model, body) for body in in_strings(wide)] == [400] * 3
    assert answer_to(model, in_strings(half, half)[-1]) == 400, "the calls of a request together"
    assert set(read) == {b'{"model"'}, "the bodies alone"
    assert answer_to(model, in_strings(half)[-1]) == 200


def test_arguments_count_in_the_length_of_messages(model: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that cannot fit is refused before it is rendered."""
    monkeypatch.setattr(model.chat, "encode", None)
    monkeypatch.setattr(model, "longest", 1)
    body = in_strings('{"a":[' + "1," * 2 * LIMITS.max_model_len + "1]}")[-1]
    assert answer_to(model, body) == 400

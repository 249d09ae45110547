"""Any bytes that a client sends as a body, a grammar or an event id are accepted or refused by name."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from services.gateway.delivery.stream import Position
from services.gateway.errors import ApiError
from services.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from services.gateway.openai.responses import ResponsesBody
from shared.text.grammars import GrammarError, Grammars
from tests.support.checkpoints.tokenizers import byte_level, write_model

BODIES: list[type[BaseModel]] = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, ResponsesBody]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner), max_leaves=12
)

FIELDS = {
    kind: st.dictionaries(st.sampled_from(sorted(kind.model_fields)) | st.text(max_size=5), VALUES, max_size=5)
    for kind in BODIES
}


@given(st.one_of(*(st.tuples(st.just(kind), FIELDS[kind]) for kind in BODIES)))
@settings(max_examples=80)
def test_any_json_value_is_accepted_or_refused_with_a_code(drawn: tuple[type[BaseModel], dict[str, Any]]) -> None:
    kind, fields = drawn
    try:
        checked = parse_body(json.dumps({"model": "m", **fields}).encode("utf-8", "surrogatepass"), kind)
    except ApiError as error:
        assert (error.status, bool(error.message), bool(error.code)) == (400, True, True)
    else:
        assert set(checked.model_fields_set) <= {"model", *fields}


@given(st.lists(st.integers(-2, 10**9 - 1), min_size=1, max_size=5), st.booleans())
def test_event_id_round_trips(last: list[int], usage: bool) -> None:
    given_id = "cmpl-1:" + ".".join(map(str, last)) + ("+" if usage else "")
    position = Position.parse(given_id, "cmpl-1", len(last))
    assert (position.last, position.usage) == (last, usage)


@given(st.text(max_size=30) | st.from_regex(r"cmpl-1:[-+.0-9]{0,20}", fullmatch=True), st.integers(1, 4))
def test_invalid_event_id_is_refused_by_name(given_id: str, choices: int) -> None:
    try:
        position = Position.parse(given_id, "cmpl-1", choices)
    except ApiError as error:
        assert (error.status, error.param) == (400, "Last-Event-ID")
    else:
        assert len(position.last) == choices


@cache
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
        matcher = grammars().matcher(text)
    except GrammarError as error:
        assert str(error)
    else:
        assert not matcher.is_error()

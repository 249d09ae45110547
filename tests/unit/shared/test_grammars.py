"""What the fuel of grammars allows and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from shared.keys import grammar_name, is_grammar_name
from shared.text import grammars
from shared.text.grammars import LIMITS, SCHEMA_LIMITS, GrammarError, Grammars, mask_of
from tests.support.checkpoints.tokenizers import byte_level, write_model

TEXT = {"type": "string"}
AMBIGUOUS = [
    "start: s\ns: s s | /[a-z ]/",
    "start: s\ns: s s | s s s | s s s s | /[a-z ]/",
    "start: s\ns: s s | s t | t s | /[a-z ]/\nt: t s | s t | t t | /[a-z]/",
]
ARITHMETIC = """
start: sum
sum: product | sum ("+" | "-") product
product: atom | product ("*" | "/") atom
atom: /[0-9]+/ | "(" sum ")"
"""


def schema(properties: int, **fields: Any) -> str:
    return LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": {f"property_{at}": TEXT for at in range(properties)}, **fields}
    )


def nested(depth: int) -> dict[str, Any]:
    below = nested(depth - 1) if depth else TEXT
    names = [f"level_{depth}_{at}" for at in range(8)]
    return {
        "type": "object",
        "properties": {name: below if at < 2 else TEXT for at, name in enumerate(names)},
        "required": names[:4],
        "additionalProperties": False,
    }


TOOL = json.dumps({"type": "object", "properties": {"city": TEXT, "days": {"type": "integer"}}, "required": ["city"]})
TOOLS = "start: call{1,16}\ncall: " + " | ".join(f"c{at}" for at in range(64))
TOOLS += "".join(f'\nc{at}: "tool_{at}" a{at}\na{at}: %json {TOOL}' for at in range(64))
RECURSIVE = {
    "$defs": {"node": {"properties": {"v": TEXT, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}},
    "$ref": "#/$defs/node",
}
ORDINARY = {
    "object": schema(0),
    "100 optional": schema(100),
    "500 optional": schema(500),
    "500 required": schema(500, required=[f"property_{at}" for at in range(500)], additionalProperties=False),
    "nested": LLMatcher.grammar_from_json_schema(nested(4)),
    "recursive": LLMatcher.grammar_from_json_schema(RECURSIVE),
    "1000 values": LLMatcher.grammar_from_json_schema({"enum": [f"value number {at}" for at in range(1000)]}),
    "64 tools": LLMatcher.grammar_from_lark(TOOLS),
    "choices": LLMatcher.grammar_from_regex("|".join(f"choice number {at}" for at in range(1024))),
    "mail": LLMatcher.grammar_from_regex(r"[a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9.-]{1,255}\.[a-zA-Z]{2,10}"),
    "arithmetic": LLMatcher.grammar_from_lark(ARITHMETIC),
}


ENDS = np.array([byte_level().token_to_id(name) for name in ("<|eos|>", "<|im_end|>")], np.int64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("grammars") / "m")


@pytest.fixture(scope="module")
def kept(model: Path) -> Grammars:
    return Grammars(model, 400)


def walk(matcher: LLMatcher, seed: int, tokens: int = 60) -> int:
    """Draw tokens, the end of text only where nothing else may follow; return how many went before an error."""
    random = np.random.default_rng(seed)
    for at in range(tokens):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error() or matcher.is_stopped() or not mask.any():
            return at
        allowed = np.flatnonzero(mask)
        going = allowed[~np.isin(allowed, ENDS)]
        matcher.consume_token(int(random.choice(going if going.size else allowed)))
    return tokens


@pytest.mark.parametrize("name", ORDINARY)
def test_fuel_suffices_for_an_ordinary_grammar(kept: Grammars, name: str) -> None:
    for seed in range(3):
        matcher = kept.matcher(ORDINARY[name])
        walk(matcher, seed)
        assert not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_ambiguous_grammar_runs_out_of_fuel_at_one_token(kept: Grammars, grammar: str) -> None:
    """The token goes by the grammar and the text alone."""
    ends = set()
    for _ in range(2):
        try:
            matcher = kept.fresh(LLMatcher.grammar_from_lark(grammar))
        except GrammarError as error:
            ends.add((0, str(error)))
            continue
        ends.add((walk(matcher, seed=3, tokens=400), grammars.reason(matcher)))
    ((_, why),) = ends
    assert f"limit {LIMITS['step_max_items']}" in why or f"max is {LIMITS['max_items_in_row']}" in why


@pytest.mark.parametrize(
    "grammar", ["start: a\na: b\nb: a", LLMatcher.grammar_from_json_schema({"$ref": "#"})], ids=["rules", "$ref"]
)
def test_grammar_that_leads_only_to_itself_is_refused(kept: Grammars, grammar: str) -> None:
    with pytest.raises(GrammarError, match=r"allows no text; let each rule"):
        kept.matcher(grammar)


def test_schema_of_2250_properties_is_refused(kept: Grammars) -> None:
    properties = {f"p{at}": {"type": "integer"} for at in range(2250)}
    with pytest.raises(GrammarError, match=f"too big .limit for this grammar: {LIMITS['initial_lexer_fuel']}"):
        kept.fresh(LLMatcher.grammar_from_json_schema({"type": "object", "properties": properties}))


@pytest.mark.parametrize(
    ("grammar", "limits"),
    [
        (schema(1), SCHEMA_LIMITS),
        (LLMatcher.grammar_from_lark(f"start: %json {TOOL}"), LIMITS),
        (json.dumps({"grammars": [{"json_schema": {}}, {"lark_grammar": "start: /a/"}]}), LIMITS),
        (json.dumps({"grammars": [{"json_schema": {}, "lark_grammar": "start: /a/"}]}), LIMITS),
        ("no JSON", LIMITS),
        ("[" * 60_000, LIMITS),
    ],
)
def test_wide_rows_are_allowed_to_schemas_alone(grammar: str, limits: dict[str, Any]) -> None:
    assert grammars.limits_of(grammar) == limits


NAMES_A_CONTROL_TOKEN = {
    "alone": "<|im_end|>",
    "behind text": "a\n<|im_end|>",
    "twice": "<|im_end|> <|im_end|>é",
}


@pytest.mark.parametrize("name", NAMES_A_CONTROL_TOKEN)
@pytest.mark.parametrize("kind", ["lark", "schema"])
def test_text_that_names_a_control_token_is_written_in_plain_ones(kept: Grammars, name: str, kind: str) -> None:
    text = NAMES_A_CONTROL_TOKEN[name]
    schema = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"], "additionalProperties": False}
    grammar = f"start: {json.dumps(text)}\n" if kind == "lark" else LLMatcher.grammar_from_json_schema(schema)
    for seed in range(5):
        matcher, random, tokens = kept.matcher(grammar), np.random.default_rng(seed), []
        while not matcher.is_accepting():
            mask = np.unpackbits(np.frombuffer(kept.mask(matcher), np.uint8), bitorder="little")
            tokens.append(int(random.choice(np.flatnonzero(mask))))
            assert matcher.consume_token(tokens[-1]), matcher.get_error()
        assert not set(tokens) & set(ENDS.tolist())
        said = byte_level().decode(tokens, skip_special_tokens=False)
        assert (said if kind == "lark" else json.loads(said)["a"]) == text


def test_control_token_that_the_grammar_names_by_its_id_stays(model: Path, kept: Grammars) -> None:
    end = byte_level().token_to_id("<|im_start|>")
    matcher = kept.matcher(f'start: "a" <[{end}]>\n')
    assert matcher.consume_tokens(byte_level().encode("a").ids)
    tokenizer = LLTokenizer(str(model / "tokenizer.json"), n_vocab=400, eos_token=ENDS.tolist())
    mask = np.unpackbits(np.frombuffer(mask_of(matcher, tokenizer), np.uint8), bitorder="little")
    assert np.flatnonzero(mask).tolist() == [end]


def test_name_of_a_grammar_is_none(tmp_path: Path) -> None:
    """A scheduler that knows no names hands them to its worker: an answer must not come without its grammar."""
    name = grammar_name("alice", "start: /a/")
    assert is_grammar_name(name)
    assert not is_grammar_name(f"{name}\nstart: /a/") and not is_grammar_name("sha256: /a/\nstart: sha256")
    with pytest.raises(GrammarError):
        Grammars(write_model(tmp_path), 512).fresh(name)

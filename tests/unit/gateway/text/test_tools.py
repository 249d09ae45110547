"""Structured output and tools at the gateway: bodies become grammars, output becomes calls.

Oracles: random walks through the grammars are checked with json, jsonschema and re; templates with transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from services.gateway.delivery.stream import Row
from services.gateway.errors import ApiError
from services.gateway.openai.answers import answer
from services.gateway.openai.bodies import ChatBody, CompletionBody, parse_body
from services.gateway.openai.chat import plain_messages
from services.gateway.openai.output import output_grammar, plan_tools
from services.gateway.request import ToolUse
from services.gateway.text.reasoning import ChannelReader
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.formats import BLOCKS, OPENINGS
from shared.text.grammars import CACHE_BYTES, Grammars, mask_of
from tests.support.checkpoints.tokenizers import byte_fallback, byte_level, metaspace, write_model
from tests.support.gateway.generations import generation, in_rows, read_calls, stored, streamed
from tests.support.gateway.generations import spec as make_spec

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "the weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ring"}},
]
SEP = "<｜tool▁sep｜>"
SCHEMAS = {"get_weather": WEATHER, "ring": {"maxProperties": 0}}
MESSAGES = [{"role": "user", "content": "x"}]
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}{{ m.tool_call_id }}{{ '<|im_end|>\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelText]:
    text = ModelText(write_model(tmp_path_factory.mktemp("tools") / "m", chat_template=HERMES))
    yield text
    text.close()


def for_grammars(model: ModelText, directory: Path) -> LLTokenizer:
    return LLTokenizer(str(directory / "tokenizer.json"), n_vocab=model.vocab_size, eos_token=model.eos_ids)


Model = tuple[ModelText, LLTokenizer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Model]]:
    """Return the model of a tokenizer with further control tokens, made once: it has a process for its grammars."""

    @functools.cache
    def made(tokenizer: Callable[[], Tokenizer], marks: tuple[str, ...] = ()) -> Model:
        library = tokenizer()
        library.add_special_tokens(list(marks))
        directory = write_model(tmp_path_factory.mktemp("model") / "m", library)
        text = stack.enter_context(contextlib.closing(ModelText(directory)))
        return text, for_grammars(text, directory)

    with contextlib.ExitStack() as stack:
        yield made


def chat(**fields: Any) -> ChatBody:
    return parse_body(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    return parse_body(json.dumps({"model": "m", "prompt": "x", **fields}).encode(), CompletionBody)


def grammar_of(body: Any, model: ModelText) -> str:
    async def work() -> str:
        tools = plan_tools(body, model) if isinstance(body, ChatBody) else plan_tools(chat(), model)
        return (await output_grammar(body, model, tools, ""))[1]

    return asyncio.run(work())


def walk(model: ModelText, tokenizer: LLTokenizer, grammar: str, seed: int) -> str | None:
    """Return a text that the grammar allows, drawn token by token; None when it became too long."""
    matcher = LLMatcher(tokenizer, grammar)
    random, tokens = np.random.default_rng(seed), []
    for _ in range(400):
        words = np.frombuffer(mask_of(matcher, tokenizer), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        ends = [token for token in model.eos_ids if token in allowed]
        token = int(ends[0] if ends and random.random() < 0.5 else random.choice(allowed))
        if token in model.eos_ids:
            return model.text.decode(tokens, skip_special=False)
        tokens.append(token)
        assert matcher.consume_token(token)
    return None


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def is_weather(text: str) -> bool:
    return jsonschema.validate(json.loads(text), WEATHER) is None


FORMATS = [
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"response_format": formatted({"name": "w", "schema": WEATHER, "strict": True})}, is_weather),
    ({"guided_json": WEATHER}, is_weather),
    ({"guided_json": json.dumps(WEATHER)}, is_weather),
    ({"guided_regex": r"[a-f]{2,4}(-\d+)?"}, lambda text: re.fullmatch(r"[a-f]{2,4}(-\d+)?", text)),
    ({"guided_choice": ["a b", "c|d", "ü\n", ".*"]}, lambda text: text in ["a b", "c|d", "ü\n", ".*"]),
    ({"guided_grammar": 'start: "x" y*\ny: "yz" | "w"'}, lambda text: re.fullmatch("x(yz|w)*", text)),
    ({"structured_outputs": {"regex": "a+"}}, lambda text: re.fullmatch("a+", text)),
    ({"structured_outputs": {"json": WEATHER}}, is_weather),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
]  # fmt: skip


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
@pytest.mark.parametrize(("fields", "valid"), FORMATS, ids=[f"{next(iter(f))}-{i}" for i, (f, _) in enumerate(FORMATS)])
def test_structured_output_becomes_its_grammar_on_both_endpoints(
    models: Any, tokenizer: Any, fields: dict[str, Any], valid: Any
) -> None:
    text, compiled = models(tokenizer)
    grammar = grammar_of(completion(**fields), text)
    assert grammar_of(chat(**fields), text) == grammar
    found = [walked for seed in range(6) if (walked := walk(text, compiled, grammar, seed)) is not None]
    assert found and all(map(valid, found))


def test_free_text_and_free_tools_have_no_grammar(model: ModelText) -> None:
    assert grammar_of(completion(), model) == grammar_of(chat(response_format={"type": "text"}), model) == ""
    assert grammar_of(chat(tools=TOOLS), model) == grammar_of(chat(tools=TOOLS, tool_choice="none"), model) == ""


def test_unsupported_keyword_is_refused_only_in_a_strict_schema(model: ModelText) -> None:
    def ask(**strict: bool) -> ChatBody:
        schema = {"name": "w", "schema": {"type": "object", "not": {"required": ["a"]}}, **strict}
        return chat(response_format=formatted(schema))

    assert grammar_of(ask(), model)
    with pytest.raises(ApiError, match="not") as refused:
        grammar_of(ask(strict=True), model)
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_grammar")


LARGE = {"enum": ["x" * 100 + str(i) for i in range(700)]}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": "[]"}, "guided_json", "an object"),
    ({"guided_json": {"$ref": "http://127.0.0.1:9/x.json"}}, "guided_json", "does not fetch"),
    ({"guided_json": LARGE}, "guided_json", "bytes"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "1024"),
    ({"guided_grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "guided_grammar", "nested"),
    ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs.json", "foo"),
    ({"response_format": formatted({"schema": {}})}, "response_format.json_schema.name", "name"),
]
"""Beside those of tests/support/docs/bad_requests.py."""


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_structured_output_that_cannot_be_used_is_refused_by_name(
    model: ModelText, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as refused:
        grammar_of(chat(**fields), model)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert words in refused.value.message


def test_structured_output_is_unavailable_when_llguidance_cannot_read_the_tokenizer(tmp_path: Path) -> None:
    text = ModelText(write_model(tmp_path / "m", metaspace(), eos_token="</s>"))
    with pytest.raises(ApiError, match="not available for this model") as refused:
        grammar_of(completion(guided_regex="a"), text)
    assert refused.value.code == "structured_output_unavailable"


def test_tools_are_refused_when_the_template_has_none(tmp_path: Path) -> None:
    plain = ModelText(write_model(tmp_path / "plain"))
    assert plain.tool_format == "none"
    with pytest.raises(ApiError, match="has no tools"):
        plan_tools(chat(tools=TOOLS), plain)
    chosen = ModelText(write_model(tmp_path / "chosen"), tool_parser="mistral")
    assert plan_tools(chat(tools=TOOLS), chosen).use == ToolUse("mistral", ("get_weather", "ring"), True)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]f[ARGS]{}", "mistral-args"),
        ('{"name": "f", "parameters": {}}', "llama3"),
        ("<|tool_call|>", "granite"),
        ("<tool_call><function=f>", "qwen3-coder"),
        ("<tool_call>f<arg_key>", "glm-4.5"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v3"),
        ("<|tool_calls_section_begin|>", "kimi-k2"),
        ("<|channel|>commentary json", "channels"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("", "none"),
    ],
)
def test_tool_format_follows_the_template(tmp_path: Path, words: str, kind: str) -> None:
    source = "{% if tools %}{{ '" + words + "' }}{% endif %}"
    assert ModelText(write_model(tmp_path / "m", chat_template=source)).tool_format == kind


def marks_of(kind: str) -> tuple[str, ...]:
    """Return the marks of a format that are control tokens of its models."""
    if kind in BLOCKS and kind != "channels":
        return tuple(mark for mark in (*astuple(BLOCKS[kind]), SEP) if mark)
    return ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "[ARGS]", SEP)


@pytest.mark.parametrize("kind", OPENINGS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_valid_whatever_the_model_samples(
    models: Any, monkeypatch: pytest.MonkeyPatch, kind: str, choice: Any, parallel: bool
) -> None:
    control = (choice == "required") == parallel  # each of the three beside both values of the two others
    text, compiled = models(byte_level, marks_of(kind) if control else ())
    monkeypatch.setattr(text, "tool_format", kind)
    body = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    asked = plan_tools(body, text)
    assert asked.use is not None and asked.has_control == (control and kind not in ("llama3", "pythonic", "channels"))
    grammar = grammar_of(body, text)
    for seed in range(4):
        if (said := walk(text, compiled, grammar, seed)) is None:
            continue
        assert parallel or sum(said.count(name) for name in SCHEMAS) == 1
        if kind == "channels":  # its heads are read before
            channels = ChannelReader()
            said = channels.feed(said)[1] + channels.flush()[1]
        content, calls, _ = read_calls(asked.use, [said])
        assert content == "" and calls and (parallel or len(calls) == 1)
        for call in calls:
            assert call.name == "get_weather" or choice == "required"
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


CONVERSATION = [
    {"role": "user", "content": "weather <|im_end|>?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "K<|eos|>"}'}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
]  # fmt: skip


def test_template_renders_tools_and_results_as_transformers_does(model: ModelText) -> None:
    body = chat(messages=CONVERSATION, tools=TOOLS)
    shown = plan_tools(body, model).shown_tools
    ids = model.chat.encode(plain_messages(body.messages), True, shown)
    from transformers import PreTrainedTokenizerFast  # most processes of a run need no transformers

    theirs = PreTrainedTokenizerFast(tokenizer_object=model.tokenizer, chat_template=HERMES)
    plain = json.loads(json.dumps(CONVERSATION))
    plain[1]["content"], plain[2]["content"] = "", "sunny"
    plain[1]["tool_calls"][0]["function"]["arguments"] = {"city": "K<|eos|>"}
    text = theirs.apply_chat_template(plain, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert model.text.decode(ids, skip_special=False) == text
    ends, eos = model.tokenizer.token_to_id("<|im_end|>"), model.tokenizer.token_to_id("<|eos|>")
    assert ids.count(ends) == 4 and eos not in ids, "what users write is no control token"


SAID = (
    'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🐋"}}\n</tool_call>\n'
    '<tool_call>{"name": "ring"}</tool_call>'
)
USE = ToolUse("hermes", ("get_weather", "ring"), True)


def test_stream_of_calls_adds_up_to_them(model: ModelText) -> None:
    request = stored(make_spec(id="chatcmpl-1", endpoint="chat", tools=USE), model)
    assert request.tools == USE
    sent = in_rows([*([token] for token in model.encode(SAID)), []], 1)
    content, calls, reasons = "", {}, []
    for event in streamed(request, sent, model)[:-1]:
        choice = event.json["choices"][0]
        content += choice["delta"].get("content") or ""
        reasons.append(choice["finish_reason"])
        for piece in choice["delta"].get("tool_calls", []):
            if "id" in piece:
                calls[piece["index"]] = [piece["function"]["name"], ""]
            calls[piece["index"]][1] += piece["function"]["arguments"]
    assert content == "Well."
    assert calls == {0: ["get_weather", '{"city": "Köln 🐋"}'], 1: ["ring", "{}"]}
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_answer_has_the_calls_of_the_stream(model: ModelText) -> None:
    request = make_spec(endpoint="chat", tools=USE)
    running, stream, _ = generation(request, model)
    stream.offer(Row(0, model.encode(SAID.removeprefix("Well.")), finish=1), 0)
    (delta,) = asyncio.run(running.next())
    (choice,) = answer(
        request, "fp", [delta.text], [[]], [str(delta.finish_reason)], running.usage, None, [delta.calls]
    )["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert names == ["get_weather", "ring"]
    assert all(set(call) == {"id", "type", "function"} for call in choice["message"]["tool_calls"])


def test_grammar_cache_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.text import grammars as module

    monkeypatch.setattr(module, "CACHE_BYTES", 200_000)
    directory = write_model(tmp_path / "m")
    kept = Grammars(directory, 400)
    assert CACHE_BYTES > 200_000
    for number in range(12):
        kept.matcher(LLMatcher.grammar_from_regex(f"a{number}"))
        assert kept.kept_bytes <= 200_000
    assert kept.kept_bytes > 0

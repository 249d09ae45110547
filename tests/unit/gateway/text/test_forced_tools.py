"""Forced tool calls: the tools that they may name, and what a client gets when one is cut."""

from __future__ import annotations

import json
import re
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from services.gateway.delivery.stream import ChoiceText
from services.gateway.errors import ApiError, worker_error
from services.gateway.openai import output
from services.gateway.openai.bodies import ChatBody
from services.gateway.openai.chat import chat_spec
from services.gateway.openai.output import plan_tools
from services.gateway.request import Limits, ToolUse
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.reader import merge
from shared.text.grammars import MAX_GRAMMAR_BYTES, NOT_FOLLOWED
from tests.support.checkpoints.tokenizers import write_model
from tests.support.gateway.generations import read_calls, stored
from tests.support.gateway.generations import spec as make_spec
from tests.unit.gateway.text.test_tools import HERMES, TOOLS, WEATHER, chat, for_grammars, grammar_of, walk

ARGUMENTS = '{"city": "K\\u00f6ln"}'
WHOLE = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]",
    "llama3": '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}",
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]",
    "mistral-args": "[TOOL_CALLS]get_weather[ARGS]" + ARGUMENTS,
}
THREE = [*TOOLS, {"type": "function", "function": {"name": "knock", "parameters": WEATHER}}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("forced") / "m", chat_template=HERMES)


@pytest.fixture(scope="module")
def model(directory: Path) -> ModelText:
    return ModelText(directory)


def read(text: str, use: ToolUse) -> tuple[str, list[tuple[str, str]], bool]:
    """Return content, calls, and whether the last of them was cut."""
    content, calls, cut = read_calls(use, [text])
    return content, [(call.name, call.arguments) for call in calls], cut


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("kind", WHOLE)
def test_cut_call_of_a_named_tool_keeps_its_arguments(kind: str) -> None:
    use, whole = ToolUse(kind, ("get_weather",), True, forced=True), WHOLE[kind]
    behind = whole.index(ARGUMENTS) + len(ARGUMENTS)
    for end in range(len(whole) + 1):
        content, calls, cut = read(whole[:end], use)
        begun = whole[whole.index(ARGUMENTS) : end] if end > whole.index(ARGUMENTS) else ""
        assert (content, calls) == ("", [("get_weather", begun[: len(ARGUMENTS)])]), whole[:end]
        assert cut == (end < behind), whole[:end]


@pytest.mark.parametrize("kind", WHOLE)
def test_call_cut_before_its_name_is_dropped_among_several_tools(kind: str) -> None:
    use, whole = ToolUse(kind, ("get_weather", "ring"), True, forced=True), WHOLE[kind]
    for end in range(len(whole) + 1):
        content, calls, _ = read(whole[:end], use)
        assert content == "" and len(calls) <= 1, whole[:end]
        assert not calls or calls[0][0] == "get_weather"


BLOCKS = {
    "qwen3-coder": "<tool_call><function=get_weather><parameter=city>Köln</parameter></function></tool_call>",
    "glm-4.5": "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>",
    "deepseek-v3": '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>',
    "kimi-k2": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln"}<|tool_call_end|>',
    "channels": '<|channel|>functions.get_weather<|message|>{"city": "Köln"}<|call|>',
    "pythonic": "[get_weather(city='Köln')]",
}


BEGINS = {
    "qwen3-coder": "<parameter=city>",
    "glm-4.5": "<arg_key>city</arg_key><arg_value>",
    "deepseek-v3": "{",
    "kimi-k2": "{",
    "channels": "{",
}
"""What makes the block a call: the beginning of its arguments."""


def begin_of(kind: str) -> int:
    """Return the characters of a block up to which it may be text."""
    whole = BLOCKS[kind]
    return whole.index(BEGINS[kind]) + len(BEGINS[kind]) if kind in BEGINS else len(whole)


@pytest.mark.parametrize("kind", BLOCKS)
def test_cut_block_of_a_call_that_has_to_come_is_no_content(kind: str) -> None:
    whole, arguments = BLOCKS[kind], '{"city": "Köln"}'
    one = ToolUse(kind, ("get_weather",), True, forced=True, texts=("get_weather.city",))
    several = ToolUse(kind, ("get_weather", "ring"), True, forced=True, texts=("get_weather.city",))
    for end in range(len(whole)):
        content, [(name, begun)], cut = read(whole[:end], one)
        assert (content, name) == ("", "get_weather"), whole[:end]
        assert arguments.startswith(begun) and cut == (begun != arguments), whole[:end]
        assert not begun if end < begin_of(kind) else begun or end == begin_of(kind), whole[:end]
        content, calls, cut = read(whole[:end], several)
        assert content == "" and calls in ([], [("get_weather", begun)]), whole[:end]
        assert cut == (bool(calls) and begun != arguments), whole[:end]
    assert read(whole, several) == ("", [("get_weather", arguments)], False)


@pytest.mark.parametrize("kind", BLOCKS)
def test_cut_block_of_a_free_call_stays_text_before_its_arguments(kind: str) -> None:
    whole, use = BLOCKS[kind], ToolUse(kind, ("get_weather",), True)
    for end in range(1, len(whole)):
        content, calls, _ = read(whole[:end], use)
        if end < begin_of(kind):
            assert (content, calls) == (whole[:end], [])
        else:
            assert content == "" and [name for name, _ in calls] == ["get_weather"]


@pytest.mark.parametrize("kind", WHOLE)
def test_free_call_cut_before_its_name_stays_text(kind: str) -> None:
    use, whole = ToolUse(kind, ("get_weather",), True), WHOLE[kind]
    for end in range(1, whole.index("weather")):
        assert read(whole[:end], use)[:2] == (whole[:end], []), whole[:end]


@pytest.mark.parametrize(
    ("end", "reason", "stop", "told"),
    [
        (None, "stop", [], "tool_calls"),
        (None, "length", [], "length"),
        (40, "length", [], "length"),
        (None, "stop", ["city"], "stop"),
        (None, "stop", ["</tool"], "tool_calls"),
        (3, "length", [], "length"),
    ],
)
def test_finish_reason_says_whether_a_call_is_complete(
    model: ModelText, end: int | None, reason: str, stop: list[str], told: str
) -> None:
    use = ToolUse("hermes", ("get_weather",), True, forced=True)
    request = stored(make_spec(endpoint="chat", tools=use, stop=stop, grammar_field="tools"), model)
    assert (request.tools, request.grammar_field) == (use, "tools")
    choice = ChoiceText(request, model, [50])
    text, _, _ = choice.feed(model.encode(WHOLE["hermes"][:end]), reason)
    (call,) = merge(choice.calls)
    assert (text, choice.finish_reason, call.name) == ("", told, "get_weather")
    assert ARGUMENTS.startswith(call.arguments)
    assert told != "tool_calls" or call.arguments == ARGUMENTS


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_rendered_read_and_sampled(directory: Path, model: ModelText, mode: str) -> None:
    body = chat(tools=THREE, tool_choice=allowed(mode, "knock", "ring"))
    asked = plan_tools(body, model)
    assert asked.use is not None
    assert (asked.use.names, asked.use.forced) == (("ring", "knock"), mode == "required")
    assert [tool["function"]["name"] for tool in asked.shown_tools] == ["ring", "knock"]
    grammar = grammar_of(body, model)
    assert bool(grammar) == (mode == "required")
    tokenizer = for_grammars(model, directory)
    said = [walk(model, tokenizer, grammar, seed) for seed in range(8)] if grammar else []
    called = {name for text in said if text for name, _ in read(text, asked.use)[1]}
    assert called <= {"ring", "knock"} and (called or not grammar)


def test_template_renders_all_tools_when_one_is_named(model: ModelText) -> None:
    asked = plan_tools(chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "ring"}}), model)
    assert asked.use is not None and asked.use.names == ("ring",)
    assert len(asked.shown_tools) == 2 and "ring" in json.dumps(asked.shown_tools)


@pytest.mark.parametrize(
    ("why", "field", "status", "param"),
    [
        (f"{NOT_FOLLOWED}: x", "tools", 400, "tools"),
        (f"{NOT_FOLLOWED}: x", "", 400, None),
        ("burnt", "tools", 500, None),
    ],
)
def test_failure_is_400_only_when_the_grammar_cannot_be_followed(
    why: str, field: str, status: int, param: str | None
) -> None:
    error = worker_error(why, field)
    assert (error.status, error.param, why in error.message) == (status, param, True)


PAIRED = ("qwen3-coder", "glm-4.5", "pythonic")
"""Formats with a rule for each parameter."""


def with_parameters(parameters: dict[str, Any]) -> ChatBody:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return chat(tools=tools, tool_choice="required")


@pytest.mark.parametrize("kind", PAIRED)
def test_parameter_gets_the_definitions_that_it_refers_to(
    model: ModelText, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    definitions = {
        "a/b": {"type": "array", "items": {"$ref": "#/$defs/leaf"}}, "leaf": {"const": "the leaf"},
        "unused": {"const": "unused"},
    }  # fmt: skip
    plain = {f"p{at}": {"type": "integer"} for at in range(9)}
    monkeypatch.setattr(model, "tool_format", kind)
    body = with_parameters({"properties": {"x": {"$ref": "#/$defs/a~1b"}, **plain}, "$defs": definitions})
    grammar = plan_tools(body, model).grammar
    assert (grammar.count("the leaf"), grammar.count("unused")) == (1, 0)
    assert grammar_of(body, model) == grammar, "it compiles"
    named = with_parameters({"properties": {"x": {"$ref": "#mark"}}, "$defs": {"a": {"$anchor": "mark"}}})
    assert "$anchor" in plan_tools(named, model).grammar, "a reference that is no path may mean any of them"


def test_definitions_of_a_parameter_keep_their_order(model: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is a key of caches: each process writes the same for the same tools."""
    names = [f"d{at}" for at in range(16)]
    definitions = {name: {"$ref": f"#/$defs/d{(at + 5) % 16}"} for at, name in enumerate(names)}
    monkeypatch.setattr(model, "tool_format", "qwen3-coder")
    body = with_parameters({"properties": {"x": {"$ref": "#/$defs/d3"}}, "$defs": definitions})
    assert re.findall(r'"(d\d+)":', plan_tools(body, model).grammar) == names


@pytest.mark.parametrize("kind", PAIRED)
@pytest.mark.parametrize("refers", [False, True])
def test_grammar_of_large_definitions_is_refused_before_it_is_written(
    model: ModelText, monkeypatch: pytest.MonkeyPatch, kind: str, refers: bool
) -> None:
    value = {"$ref": "#/$defs/a"} if refers else {"type": "integer"}
    large = {"a": {"description": "x" * 1_000_000, "type": "integer"}}
    body = with_parameters({"properties": {f"p{at}": value for at in range(2000)}, "$defs": large})
    monkeypatch.setattr(model, "tool_format", kind)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=f"tools: .* more than {MAX_GRAMMAR_BYTES} bytes at function f; send fewer"):
            plan_tools(body, model)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"required": 5}, "required must be a list of names; got 5"),
        ({"properties": []}, "properties must be an object; got"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "a.enum must be a list with texts; got 5"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "a.enum must be a list with texts"),
        ({"properties": {"a": {"type": "string", "maxLength": 1.5}}}, "a.maxLength must be a whole number from 0"),
    ],
)
def test_wrong_keyword_of_a_parameter_is_named(
    model: ModelText, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(model, "tool_format", "qwen3-coder")
    with pytest.raises(ApiError, match=f"parameters of f: {words}") as refused:
        plan_tools(with_parameters(parameters), model)
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize("name", ["calls_grammar", "json_grammar"])
async def test_grammar_is_written_beside_the_event_loop(
    model: ModelText, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    threads, real = [], getattr(output, name)

    def noted(*given: Any, **named: Any) -> str:
        threads.append(threading.current_thread())
        return str(real(*given, **named))

    monkeypatch.setattr(output, name, noted)
    body = with_parameters(WEATHER) if name == "calls_grammar" else chat(guided_json=WEATHER)
    await chat_spec(body, model, Limits(1 << 20))
    assert threads and threading.current_thread() not in threads

"""Describe how models write tool calls: the marks of each format, and a grammar of calls for a forced choice.

The format depends on the model, so it is read from the chat template or set with --tool-parser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from services.gateway.errors import invalid, shown
from services.gateway.request import ToolUse
from services.gateway.text.grammar import OPTIONS, lark_text

PYTHON_TAG = "<|python_tag|>"
MISTRAL_ARGS = "[ARGS]"
PYTHON_START = "<|python_start|>"


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a block with one call, and those around several, which may be left out."""

    opening: str
    closing: str
    section: str = ""
    section_end: str = ""


BLOCKS = {
    "qwen3-coder": Marks("<tool_call>", "</tool_call>"),
    "glm-4.5": Marks("<tool_call>", "</tool_call>"),
    "deepseek-v3": Marks(
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    ),
    "kimi-k2": Marks(
        "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    ),
    "channels": Marks("<|channel|>functions.", "<|call|>"),  # as ChannelReader of reasoning.py writes them
}
"""Formats that are read block by block (blocks.py)."""
OPENINGS = {
    "hermes": "<tool_call>", "llama3": "", "mistral": "[TOOL_CALLS]", "mistral-args": "[TOOL_CALLS]",
    "granite": "<|tool_call|>", "pythonic": "", **{name: marks.opening for name, marks in BLOCKS.items()},
}  # fmt: skip
"""What a call begins with, by the name of its format."""
CLOSINGS = {"hermes": "</tool_call>", "llama3": "", "mistral": "]", "mistral-args": "]", "granite": "]"}
SEPARATORS = {"hermes": "", "llama3": ";", "mistral": ",", "mistral-args": ",", "granite": ","}
MOST_CALLS = 16
"""Of an answer that has to call a tool; where calls are free, the model decides."""


class Function(Protocol):
    """A function that a model may call, as `tools[i].function` describes it."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any] | None: ...

    @property
    def strict(self) -> bool | None: ...


_SIGNS = {
    "channels": "<|channel|>commentary",
    "deepseek-v3": BLOCKS["deepseek-v3"].section,
    "kimi-k2": BLOCKS["kimi-k2"].section,
    "glm-4.5": "<arg_key>",
    "qwen3-coder": "<function=",
    "granite": OPENINGS["granite"],
    "pythonic": "func_name1(",
}
"""Marks that only templates of one format have."""


def format_of(template: str) -> str:
    """Return how a model writes calls, by the content of its chat template; "none" for a template without tools."""
    if "tools" not in template:
        return "none"
    for name, mark in _SIGNS.items():
        if mark in template:
            return name
    if OPENINGS["mistral"] in template:
        return "mistral-args" if MISTRAL_ARGS in template else "mistral"
    if OPENINGS["hermes"] in template:
        return "hermes"
    return "llama3" if '"parameters"' in template or PYTHON_TAG in template else "none"


def marks_of(name: str) -> list[str]:
    """Return the marks of a format that may be control tokens."""
    block = BLOCKS.get(name)
    if block is None:
        return [OPENINGS[name], CLOSINGS.get(name, "")]
    return [block.opening, block.closing, block.section]


def has_texts(name: str) -> bool:
    """Return whether a format writes texts without quotes, as it writes numbers."""
    return name in ("qwen3-coder", "glm-4.5")


def texts_of(functions: Sequence[Function]) -> tuple[str, ...]:
    """Return the parameters that are text, as `function.parameter`."""
    return tuple(
        f"{function.name}.{name}"
        for function in functions
        for name, schema in _properties(function.parameters or {}).items()
        if _is_text(schema)
    )


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    if "type" not in schema and isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    kinds = schema.get("type")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds and "null" not in kinds)


def calls_grammar(use: ToolUse, functions: Sequence[Function], atom: Callable[[str], str]) -> str:
    """Return the grammar of one call, or of up to MOST_CALLS, in Lark. atom: the literal of a mark, which may be a
    control token. Raise ApiError(400).
    """
    kind = use.format
    between = {
        "hermes": '("\\n" call)',
        "llama3": '("; " call)',
        "qwen3-coder": '("\\n" call)',
        "glm-4.5": '("\\n" call)',
        "deepseek-v3": '("\\n"? call)',
    }.get(kind, '(", " call)' if kind in _LISTS else "call")
    many = "call" + (f" {between}{{0,{MOST_CALLS - 1}}}" if use.parallel else "")
    opening = atom(OPENINGS[kind]) if OPENINGS[kind] else ""
    match kind:
        case "mistral" | "granite":
            lines = [f'start: {opening} "[" {many} "]"']
        case "pythonic":
            lines = [f'start: "[" {many} "]"']
        case "deepseek-v3" | "kimi-k2":
            lines = [f"start: {atom(BLOCKS[kind].section)} {many} {atom(BLOCKS[kind].section_end)}"]
        case "channels":
            lines = ["start: call"]  # the mark behind a call ends the answer
        case _:
            lines = [f"start: {many}"]
    call = "(" + " | ".join(f"call_{at}" for at in range(len(functions))) + ")"
    match kind:
        case "hermes":
            lines.append(f'call: {opening} "\\n" {call} "\\n" {atom(CLOSINGS[kind])}')
        case "mistral-args":
            lines.append(f"call: {opening} {call}")
        case "qwen3-coder" | "glm-4.5" | "deepseek-v3" | "kimi-k2":
            lines.append(f"call: {opening} {call} {atom(BLOCKS[kind].closing)}")
        case _:
            lines.append(f"call: {call}")
    for at, function in enumerate(functions):
        lines += _call_lines(kind, at, function, atom)
    return "\n".join(lines) + "\n"


_LISTS = ("mistral", "granite", "pythonic")


def _call_lines(kind: str, at: int, function: Function, atom: Callable[[str], str]) -> list[str]:
    """Return the rules of the call of one function."""
    name, arguments = function.name, f"arguments_{at}"
    schema = _arguments(function)
    object_line = f"{arguments}: %json {orjson.dumps(schema).decode()}"
    match kind:
        case "mistral-args":
            return [f"call_{at}: {lark_text(name)} {atom(MISTRAL_ARGS)} {arguments}", object_line]
        case "channels":
            begin, end = f"{atom('<|channel|>')} {lark_text(f'commentary to=functions.{name} ')}", atom("<|message|>")
            return [f'call_{at}: {begin} {atom("<|constrain|>")} "json" {end} {arguments}', object_line]
        case "kimi-k2":
            begin, digits = lark_text(f"functions.{name}:"), "/[0-9]{1,3}/"
            return [f"call_{at}: {begin} {digits} {atom('<|tool_call_argument_begin|>')} {arguments}", object_line]
        case "deepseek-v3":
            mark = atom("<｜tool▁sep｜>")
            fenced = f'"function" {mark} {lark_text(name)} "\\n```json\\n" {arguments} "\\n```"'
            return [f"call_{at}: {lark_text(name)} {mark} {arguments} | {fenced}", object_line]
        case "qwen3-coder" | "glm-4.5":
            return _pair_lines(kind, at, function, schema)
        case "pythonic":
            return _keyword_lines(at, function, schema)
    key = "parameters" if kind == "llama3" else "arguments"
    before = lark_text(f'{{"name": "{name}", "{key}": ')
    return [f'call_{at}: {before} {arguments} "}}"', object_line]


def _pair_lines(kind: str, at: int, function: Function, schema: dict[str, Any]) -> list[str]:
    """Return the rules of a call with pairs as arguments, in the order of the schema."""
    is_qwen = kind == "qwen3-coder"
    end = "\n</parameter>\n" if is_qwen else "</arg_value>\n"
    pairs, lines = [], []
    for number, (name, value, is_required) in enumerate(_parameters(function, schema)):
        rule = f"value_{at}_{number}"
        key = f"<parameter={name}>\n" if is_qwen else f"<arg_key>{name}</arg_key>\n<arg_value>"
        pairs.append(f"({lark_text(key)} {rule}){'' if is_required else '?'}")
        if not _is_text(value):
            lines.append(f"{rule}: %json {orjson.dumps(value).decode()} {lark_text(end)}")
        elif "enum" in value:
            lines.append(f"{rule}: ({' | '.join(map(lark_text, value['enum']))}) {lark_text(end)}")
        else:
            lines.append(f"{rule}[suffix={lark_text(end)}]: /(?s:.{_length(value)})/")
    begin, close = (f"\n<function={function.name}>\n", "</function>\n") if is_qwen else (f"{function.name}\n", "")
    return [f"call_{at}: {' '.join([lark_text(begin), *pairs, *([lark_text(close)] if close else [])])}", *lines]


def _length(schema: dict[str, Any]) -> str:
    """Return how often a character may come, in the form of a pattern."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    if not isinstance(least, int) and not isinstance(most, int):
        return "*"
    return f"{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"


def _keyword_lines(at: int, function: Function, schema: dict[str, Any]) -> list[str]:
    """Return the rules of a call in Python: `first` for a list of arguments that has none yet, `more` for the rest."""
    parameters = _parameters(function, schema)
    lines = [f'call_{at}: {lark_text(function.name + "(")} first_{at}_0 ")"']
    for number, (name, value, is_required) in enumerate(parameters):
        if not name.isidentifier():
            raise invalid("tools", f"parameters of {function.name} must be names of Python; got {shown(name)}")
        given, then = f"{lark_text(name + '=')} value_{at}_{number}", f"more_{at}_{number + 1}"
        other = "" if is_required else f" | first_{at}_{number + 1}"
        lines += [
            f"first_{at}_{number}: {given} {then}{other}",
            f'more_{at}_{number}: (", " {given}){"" if is_required else "?"} {then}',
            f"value_{at}_{number}: %json {orjson.dumps(value).decode()}",
        ]
    return [*lines, f'first_{at}_{len(parameters)}: ""', f'more_{at}_{len(parameters)}: ""']


def _parameters(function: Function, schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return name, schema and whether it is required, of each parameter. Raise ApiError(400)."""
    for word in ("$ref", "anyOf", "oneOf", "allOf"):
        if word in schema:
            text = f"parameters of {function.name} must name their properties for this model's calls; got {word}"
            raise invalid("tools", text)
    shared: dict[str, Any] = {word: schema[word] for word in ("$defs", "definitions", "x-guidance") if word in schema}
    required = schema.get("required") or ()
    return [
        (name, {**(value if isinstance(value, dict) else {}), **shared}, name in required)
        for name, value in _properties(schema).items()
    ]


def _arguments(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments. Raise ApiError(400)."""
    schema = function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise invalid("tools", f"parameters of {function.name} must be of type object; got {shown(schema['type'])}")
    return {**schema, "type": "object", "x-guidance": {**OPTIONS, "lenient": not function.strict}}

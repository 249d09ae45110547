"""Describe how models write tool calls: the marks of each format, and a grammar of calls for a forced choice.

The format depends on the model, so it is read from the chat template or set with --tool-parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

import orjson

from services.gateway.errors import ApiError, invalid
from services.gateway.request import ToolUse
from services.gateway.text.grammar import OPTIONS, lark_text
from shared.messages import quote
from shared.text.grammars import MAX_GRAMMAR_BYTES

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
MAX_CALLS = 16
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
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    if "type" not in schema and isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    kinds = schema.get("type")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds and "null" not in kinds)


def calls_grammar(use: ToolUse, functions: Sequence[Function], atom: Callable[[str], str]) -> str:
    """Return the grammar of one call, or of up to MAX_CALLS, in Lark; blocks. atom: the literal of a mark, which may
    be a control token. Raise ApiError(400), as soon as what is written is too long.
    """
    kind = use.format
    between = {
        "hermes": '("\\n" call)',
        "llama3": '("; " call)',
        "qwen3-coder": '("\\n" call)',
        "glm-4.5": '("\\n" call)',
        "deepseek-v3": '("\\n"? call)',
    }.get(kind, '(", " call)' if kind in _LISTS else "call")
    calls_rule = "call" + (f" {between}{{0,{MAX_CALLS - 1}}}" if use.parallel else "")
    opening = atom(OPENINGS[kind]) if OPENINGS[kind] else ""
    match kind:
        case "mistral" | "granite":
            lines = [f'start: {opening} "[" {calls_rule} "]"']
        case "pythonic":
            lines = [f'start: "[" {calls_rule} "]"']
        case "deepseek-v3" | "kimi-k2":
            lines = [f"start: {atom(BLOCKS[kind].section)} {calls_rule} {atom(BLOCKS[kind].section_end)}"]
        case "channels":
            lines = ["start: call"]  # the mark behind a call ends the answer
        case _:
            lines = [f"start: {calls_rule}"]
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
    size = 0
    for at, function in enumerate(functions):
        for line in _call_lines(kind, at, function, atom):
            lines.append(line)
            if (size := size + len(line)) > MAX_GRAMMAR_BYTES:
                text = (
                    f"tools: the grammar of their calls has more than {MAX_GRAMMAR_BYTES} bytes at function "
                    f"{function.name}; send fewer or smaller parameters, or tool_choice auto"
                )
                raise invalid("tools", text, "invalid_grammar")
    return "\n".join(lines) + "\n"


_LISTS = ("mistral", "granite", "pythonic")


def _call_lines(kind: str, at: int, function: Function, atom: Callable[[str], str]) -> Iterable[str]:
    """Return the rules of the call of one function, those of several parameters as they are read."""
    name, arguments = function.name, f"arguments_{at}"
    schema = _arguments(function)
    if kind in ("qwen3-coder", "glm-4.5"):
        return _pair_lines(kind, at, function, schema)
    if kind == "pythonic":
        return _keyword_lines(at, function, schema)
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
    key = "parameters" if kind == "llama3" else "arguments"
    before = lark_text(f'{{"name": "{name}", "{key}": ')
    return [f'call_{at}: {before} {arguments} "}}"', object_line]


def _pair_lines(kind: str, at: int, function: Function, schema: dict[str, Any]) -> Iterator[str]:
    """Yield the rules of a call with pairs as arguments, in the order of the schema."""
    is_qwen = kind == "qwen3-coder"
    end = "\n</parameter>\n" if is_qwen else "</arg_value>\n"
    pairs = []
    for number, (name, value, is_required) in enumerate(_parameters(function, schema)):
        rule = f"value_{at}_{number}"
        key = f"<parameter={name}>\n" if is_qwen else f"<arg_key>{name}</arg_key>\n<arg_value>"
        pairs.append(f"({lark_text(key)} {rule}){'' if is_required else '?'}")
        if not _is_text(value):
            yield f"{rule}: %json {orjson.dumps(value).decode()} {lark_text(end)}"
        elif "enum" in value:
            yield f"{rule}: ({' | '.join(_choices(function, name, value['enum']))}) {lark_text(end)}"
        else:
            yield f"{rule}[suffix={lark_text(end)}]: /(?s:.{_length(function, name, value)})/"
    begin, close = (f"\n<function={function.name}>\n", "</function>\n") if is_qwen else (f"{function.name}\n", "")
    yield f"call_{at}: {' '.join([lark_text(begin), *pairs, *([lark_text(close)] if close else [])])}"


def _choices(function: Function, name: str, values: Any) -> list[str]:
    """Return the literals of the texts of an enum. Raise ApiError(400)."""
    texts = [lark_text(value) for value in values if isinstance(value, str)] if isinstance(values, list) else []
    if not texts:
        raise _wrong(function, f"{name}.enum", values, "a list with texts")
    return texts


def _length(function: Function, name: str, schema: dict[str, Any]) -> str:
    """Return how often a character may come, in the form of a pattern. Raise ApiError(400)."""
    bounds = []
    for word in ("minLength", "maxLength"):
        value = schema.get(word)
        is_whole = not isinstance(value, bool) and isinstance(value, int | float) and float(value).is_integer()
        if value is not None and not (is_whole and value >= 0):
            raise _wrong(function, f"{name}.{word}", value, "a whole number from 0")
        bounds.append("" if value is None else str(int(value)))
    return f"{{{bounds[0] or 0},{bounds[1]}}}" if any(bounds) else "*"


def _keyword_lines(at: int, function: Function, schema: dict[str, Any]) -> Iterator[str]:
    """Yield the rules of a call in Python: `first` for a list of arguments that has none yet, `more` for the rest."""
    yield f'call_{at}: {lark_text(function.name + "(")} first_{at}_0 ")"'
    number = 0
    for number, (name, value, is_required) in enumerate(_parameters(function, schema), 1):
        if not name.isidentifier():
            raise invalid("tools", f"parameters of {function.name} must be names of Python; got {quote(name)}")
        given, then = f"{lark_text(name + '=')} value_{at}_{number}", f"more_{at}_{number}"
        other = "" if is_required else f" | first_{at}_{number}"
        yield f"first_{at}_{number - 1}: {given} {then}{other}"
        yield f'more_{at}_{number - 1}: (", " {given}){"" if is_required else "?"} {then}'
        yield f"value_{at}_{number}: %json {orjson.dumps(value).decode()}"
    yield f'first_{at}_{number}: ""'
    yield f'more_{at}_{number}: ""'


def _parameters(function: Function, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield name, schema and whether it is required, of each parameter. A grammar has no place for definitions that
    rules share, so the schema of a parameter gets those that it refers to. Raise ApiError(400).
    """
    for word in ("$ref", "anyOf", "oneOf", "allOf"):
        if word in schema:
            text = f"parameters of {function.name} must name their properties for this model's calls; got {word}"
            raise invalid("tools", text)
    required_names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required_names, list | None):
        raise _wrong(function, "required", required_names, "a list of names")
    if not isinstance(properties, dict | None):
        raise _wrong(function, "properties", properties, "an object")
    names = {name for name in required_names or () if isinstance(name, str)}
    definitions = _Definitions(schema)
    for name, value in (properties or {}).items():
        plain = value if isinstance(value, dict) else {}
        yield name, {**plain, **definitions.find_needed(plain), "x-guidance": schema["x-guidance"]}, name in names


class _Definitions:
    """The definitions of a schema of parameters, and what each refers to."""

    def __init__(self, schema: dict[str, Any]) -> None:
        groups = ((word, schema[word]) for word in _GROUPS if isinstance(schema.get(word), dict))
        self._definitions = {(word, name): value for word, group in groups for name, value in group.items()}
        self._places = {definition: place for place, definition in enumerate(self._definitions)}
        self._references: dict[tuple[str, str], set[tuple[str, str]]] = {}

    def find_needed(self, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the definitions that a schema refers to, and those that these refer to, by group."""
        definitions: set[tuple[str, str]] = set()
        unread = self._find_in(schema)
        while unread:
            definition = unread.pop()
            if definition not in self._references:
                self._references[definition] = self._find_in(self._definitions[definition])
            definitions.add(definition)
            unread |= self._references[definition] - definitions
        groups: dict[str, dict[str, Any]] = {}
        for word, name in sorted(definitions, key=self._places.__getitem__):  # else each process writes another grammar
            groups.setdefault(word, {})[name] = self._definitions[word, name]
        return groups

    def _find_in(self, value: Any) -> set[tuple[str, str]]:
        """Return the definitions that a value names; all where a reference is no path to one, as that to an anchor."""
        definitions: set[tuple[str, str]] = set()
        unread = [value] if self._definitions else []
        while unread:
            part = unread.pop()
            if isinstance(part, list):
                unread += part
            elif isinstance(part, dict):
                unread += part.values()
                for word in _REFERENCES:
                    if isinstance(reference := part.get(word), str):
                        if (path := _PATH.match(unquote(reference))) is None:
                            return set(self._definitions)
                        definitions.add((path[1], path[2].replace("~1", "/").replace("~0", "~")))
        return definitions & self._definitions.keys()


_GROUPS = ("$defs", "definitions")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_PATH = re.compile(r"#/(\$defs|definitions)/([^/]*)")


def _wrong(function: Function, field: str, value: Any, expected: str) -> ApiError:
    return invalid("tools", f"parameters of {function.name}: {field} must be {expected}; got {quote(value)}")


def _arguments(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments. Raise ApiError(400)."""
    schema = function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise invalid("tools", f"parameters of {function.name} must be of type object; got {quote(schema['type'])}")
    return {**schema, "type": "object", "x-guidance": {**OPTIONS, "lenient": not function.strict}}

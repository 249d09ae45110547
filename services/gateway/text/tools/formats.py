"""Describe how models write tool calls: the marks of each format, and a grammar of calls for a forced choice.

The format depends on the model, so it is read from the chat template or set with --tool-parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from services.gateway.errors import invalid, shown
from services.gateway.request import ToolUse
from services.gateway.text.grammar import OPTIONS, lark_text

PYTHON_TAG = "<|python_tag|>"
MISTRAL_ARGS = "[ARGS]"
OPENINGS = {"hermes": "<tool_call>", "llama3": "", "mistral": "[TOOL_CALLS]", "mistral-args": "[TOOL_CALLS]"}
CLOSINGS = {"hermes": "</tool_call>", "llama3": "", "mistral": "]", "mistral-args": "]"}
SEPARATORS = {"hermes": "", "llama3": ";", "mistral": ",", "mistral-args": ","}
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


def format_of(template: str) -> str:
    """Return how a model writes calls, by the content of its chat template; "none" for a template without tools."""
    if "tools" not in template:
        return "none"
    if OPENINGS["mistral"] in template:
        return "mistral-args" if MISTRAL_ARGS in template else "mistral"
    if OPENINGS["hermes"] in template:
        return "hermes"
    return "llama3" if '"parameters"' in template or PYTHON_TAG in template else "none"


def calls_grammar(use: ToolUse, functions: Sequence[Function], opening: str, args: str) -> str:
    """Return the grammar of one call, or of up to MOST_CALLS, in Lark.

    opening, args: the marks before a call, and before arguments without an object around them, as atoms of Lark.
    """
    key = "parameters" if use.format == "llama3" else "arguments"
    more = f"{{0,{MOST_CALLS - 1}}}"
    between = {"hermes": '("\\n" call)', "llama3": '("; " object)', "mistral": '(", " object)', "mistral-args": "call"}
    further = between[use.format] + more if use.parallel else ""
    lines = {
        "hermes": [f"start: call {further}", f'call: {opening} "\\n" object "\\n</tool_call>"'],
        "llama3": [f"start: object {further}"],
        "mistral": [f'start: {opening} "[" object {further} "]"'],
        "mistral-args": [f"start: call {further}", f"call: {opening} object"],
    }[use.format]
    lines.append("object: " + " | ".join(f"call_{at}" for at in range(len(functions))))
    for at, function in enumerate(functions):
        if use.format == "mistral-args":
            lines.append(f"call_{at}: {lark_text(function.name)} {args} arguments_{at}")
        else:
            before = lark_text(f'{{"name": "{function.name}", "{key}": ')
            lines.append(f'call_{at}: {before} arguments_{at} "}}"')
        lines.append(f"arguments_{at}: %json {orjson.dumps(_arguments(function)).decode()}")
    return "\n".join(lines) + "\n"


def _arguments(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments. Raise ApiError(400)."""
    schema = function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise invalid("tools", f"parameters of {function.name} must be of type object; got {shown(schema['type'])}")
    return {**schema, "type": "object", "x-guidance": {**OPTIONS, "lenient": not function.strict}}

"""Tools of a chat request: what the template is shown, what binds the answer, and how calls are read from it.

The form of a call is the model's own, so it goes by the chat template, or by --tool-parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.api_types import ChatBody, ChatMessage, GenerationBody
from services.gateway.errors import ApiError, invalid, shown
from services.gateway.grammars import OPTIONS, body_grammar, lark_text
from services.gateway.structured_types import ChosenTool, FunctionTool, Tool
from services.gateway.tokenizer import ModelText
from services.gateway.tool_reader import OPENINGS, ToolUse

MOST_CALLS = 16
"""Of an answer that has to call a tool; where calls are free, the model decides."""


@dataclass(frozen=True, slots=True)
class AskedTools:
    """use: how calls are read, None where no tool may be called. shown: for the template. grammar: of an answer that
    has to call, else empty. opening_id: the control token before calls, None where that is text."""

    use: ToolUse | None = None
    shown: tuple[dict[str, Any], ...] = ()
    grammar: str = ""
    opening_id: int | None = None


def asked_tools(body: ChatBody, model: ModelText) -> AskedTools:
    """Raises ApiError(400)."""
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if not tools and choice not in ("none", "auto"):
        raise invalid("tool_choice", "tool_choice is only allowed when tools are given")
    if not tools or choice == "none":
        return AskedTools()
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise invalid("tools", f"two of the tools have one name; got {shown(list(names))}")
    if model.tool_format == "none":
        raise invalid(
            "tools",
            "the chat template of this model knows no tools; the operator can choose how calls are written with "
            "--tool-parser",
            "tools_unavailable",
        )
    parallel = body.parallel_tool_calls is not False
    use = ToolUse(model.tool_format, names, parallel)
    opening_id = _control_id(OPENINGS[use.format], model)
    grammar = ""
    if choice != "auto":
        grammar = calls_grammar(use, _callable(tools, choice), opening_id)
    return AskedTools(use, tuple(tool.model_dump(exclude_none=True) for tool in tools), grammar, opening_id)


async def output_grammar(body: GenerationBody, model: ModelText, tools: AskedTools) -> str:
    """What binds the output, compiled once; empty where nothing does. Raises ApiError."""
    grammar = await body_grammar(body, model.grammars)
    if grammar and tools.use is not None:
        raise invalid("tools", "tools cannot be combined with what binds the whole output; send tool_choice none")
    if tools.grammar:
        await model.grammars.check("tools", tools.grammar)
        grammar = tools.grammar
    for field in ("ignore_eos", "min_tokens"):
        if grammar and getattr(body, field):
            raise invalid(field, f"{field} cannot be combined with structured output, which ends where it is complete")
    return grammar


def _callable(tools: Sequence[Tool], choice: str | ChosenTool) -> list[FunctionTool]:
    """The functions that may be called where one has to be."""
    if not isinstance(choice, ChosenTool):
        return [tool.function for tool in tools]
    found = [tool.function for tool in tools if tool.function.name == choice.function.name]
    if not found:
        raise invalid("tool_choice", f"tool_choice names no tool of tools; got {shown(choice.function.name)}")
    return found


def calls_grammar(use: ToolUse, functions: Sequence[FunctionTool], opening_id: int | None) -> str:
    """Of one call, or of up to MOST_CALLS; in Lark."""
    key = "parameters" if use.format == "llama3" else "arguments"
    opening = f"<[{opening_id}]>" if opening_id is not None else lark_text(OPENINGS[use.format])
    more = f"{{0,{MOST_CALLS - 1}}}"
    further = {"hermes": '("\\n" call)', "llama3": '("; " object)', "mistral": '(", " object)'}[use.format] + more
    further = further if use.parallel else ""
    lines = {
        "hermes": [f"start: call {further}", f'call: {opening} "\\n" object "\\n</tool_call>"'],
        "llama3": [f"start: object {further}"],
        "mistral": [f'start: {opening} "[" object {further} "]"'],
    }[use.format]
    lines.append("object: " + " | ".join(f"call_{at}" for at in range(len(functions))))
    for at, function in enumerate(functions):
        before = lark_text(f'{{"name": "{function.name}", "{key}": ')
        lines.append(f'call_{at}: {before} arguments_{at} "}}"')
        lines.append(f"arguments_{at}: %json {orjson.dumps(_arguments(function)).decode()}")
    return "\n".join(lines) + "\n"


def _arguments(function: FunctionTool) -> dict[str, Any]:
    """The schema of a function's arguments. Raises ApiError(400)."""
    schema = function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise invalid("tools", f"parameters of {function.name} must be of type object; got {shown(schema['type'])}")
    return {**schema, "type": "object", "x-guidance": {**OPTIONS, "lenient": not function.strict}}


def _control_id(opening: str, model: ModelText) -> int | None:
    found = model.tokenizer.token_to_id(opening) if opening else None
    return found if found in model.text.special else None


def plain_messages(messages: Sequence[ChatMessage]) -> list[Mapping[str, Any]]:
    """As chat templates want them. Raises ApiError(400)."""
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain(name: str, message: ChatMessage) -> dict[str, Any]:
    if message.function_call:
        raise invalid(
            f"{name}.function_call", "function_call is not supported; use tool_calls", "unsupported_parameter"
        )
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{name}.tool_calls", f"only an assistant's message has tool_calls; got role {message.role!r}")
    if message.content is None and not message.tool_calls:
        raise _missing(f"{name}.content")
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{name}.tool_call_id")
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name:
        plain["name"] = message.name
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(f"{name}.tool_calls[{at}]", call.function)}
            for at, call in enumerate(message.tool_calls)
        ]
    return plain


def _called(name: str, function: Any) -> dict[str, Any]:
    """Templates want arguments as an object."""
    try:
        arguments = orjson.loads(function.arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise _bad_arguments(name, function.arguments) from error
    if not isinstance(arguments, dict):
        raise _bad_arguments(name, function.arguments)
    return {"name": function.name, "arguments": arguments}


def _bad_arguments(name: str, got: str) -> ApiError:
    field = f"{name}.function.arguments"
    return invalid(field, f"{field} must be the text of a JSON object; got {shown(got)}")


def _missing(field: str) -> ApiError:
    return invalid(field, f"you must provide the parameter {field}", "missing_required_parameter")

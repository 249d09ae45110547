"""Tools of a chat request: what the template is shown, what binds the answer, and how calls are read from it.

The form of a call is the model's own, so it goes by the chat template, or by --tool-parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.errors import ApiError, invalid, shown
from services.gateway.openai.bodies import ChatBody, ChatMessage, GenerationBody
from services.gateway.openai.structured import AllowedChoice, ChosenTool, FunctionTool, Tool, ToolChoice
from services.gateway.text.grammar import OPTIONS, body_grammar, lark_text
from services.gateway.text.tokenizer import ModelText
from services.gateway.text.tools.reader import MISTRAL_ARGS, OPENINGS, ToolUse

MOST_CALLS = 16
"""Of an answer that has to call a tool; where calls are free, the model decides."""


@dataclass(frozen=True, slots=True)
class AskedTools:
    """use: how calls are read, None where no tool may be called. shown: for the template. grammar: of an answer that
    has to call, else empty. has_control: a call begins with a control token."""

    use: ToolUse | None = None
    shown: tuple[dict[str, Any], ...] = ()
    grammar: str = ""
    has_control: bool = False


def asked_tools(body: ChatBody, model: ModelText) -> AskedTools:
    """Raises ApiError(400)."""
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if not tools and choice not in ("none", "auto"):
        raise invalid("tool_choice", "tool_choice is only allowed when tools are given")
    if not tools or choice == "none":
        return AskedTools()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", f"two of the tools have one name; got {shown(names)}")
    if model.tool_format == "none":
        raise invalid(
            "tools",
            "the chat template of this model knows no tools; the operator can choose how calls are written with "
            "--tool-parser",
            "tools_unavailable",
        )
    callable_, forced = _callable(tools, choice)
    parallel = body.parallel_tool_calls is not False
    use = ToolUse(model.tool_format, tuple(tool.function.name for tool in callable_), parallel, forced)
    opening = OPENINGS[use.format]
    grammar = ""
    if forced:
        atoms = _atom(opening, model), _atom(MISTRAL_ARGS, model)
        grammar = calls_grammar(use, [tool.function for tool in callable_], *atoms)
    # Of a named function the model is told all tools, as it has to know what it does not call.
    offered = tools if isinstance(choice, ChosenTool) else callable_
    dumped = tuple(tool.model_dump(exclude_none=True) for tool in offered)
    return AskedTools(use, dumped, grammar, _control_id(opening, model) is not None)


async def output_grammar(body: GenerationBody, model: ModelText, tools: AskedTools) -> tuple[str, str]:
    """What binds the output, compiled once, behind the field that brought it; empty where nothing does. Raises
    ApiError."""
    field, grammar = await body_grammar(body, model.grammars)
    if grammar and tools.use is not None:
        raise invalid("tools", "tools cannot be combined with what binds the whole output; send tool_choice none")
    if tools.grammar:
        await model.grammars.check("tools", tools.grammar)
        field, grammar = "tools", tools.grammar
    for name in ("ignore_eos", "min_tokens"):
        if grammar and getattr(body, name):
            raise invalid(name, f"{name} cannot be combined with structured output, which ends where it is complete")
    return field, grammar


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> tuple[list[Tool], bool]:
    """The tools that may be called, and whether one of them has to be. Raises ApiError(400)."""
    if isinstance(choice, str):
        return list(tools), choice == "required"
    chosen = [choice] if isinstance(choice, ChosenTool) else choice.allowed_tools.tools
    by_name = {tool.function.name: tool for tool in tools}
    for name in (one.function.name for one in chosen):
        if name not in by_name:
            raise invalid("tool_choice", f"tool_choice names no tool of tools; got {shown(name)}")
    names = {one.function.name for one in chosen}
    found = [tool for name, tool in by_name.items() if name in names]
    return found, not isinstance(choice, AllowedChoice) or choice.allowed_tools.mode == "required"


def calls_grammar(use: ToolUse, functions: Sequence[FunctionTool], opening: str, args: str) -> str:
    """Of one call, or of up to MOST_CALLS; in Lark. opening, args: what stands before a call, and before arguments
    where they stand alone, as atoms of Lark."""
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


def _arguments(function: FunctionTool) -> dict[str, Any]:
    """The schema of a function's arguments. Raises ApiError(400)."""
    schema = function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise invalid("tools", f"parameters of {function.name} must be of type object; got {shown(schema['type'])}")
    return {**schema, "type": "object", "x-guidance": {**OPTIONS, "lenient": not function.strict}}


def _atom(text: str, model: ModelText) -> str:
    """A literal of a Lark grammar: a control token, where the model has one of that name."""
    found = _control_id(text, model)
    return lark_text(text) if found is None else f"<[{found}]>"


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

"""`POST /v1/responses`, stateless: its body, and the conversation of `/v1/chat/completions` that it stands for.

Everything that a model computes is checked there; here only what the two say differently. Nothing is kept for a later
call, so whatever refers to one is refused by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import orjson
from pydantic import Field, WithJsonSchema

from services.gateway.errors import ApiError, invalid, shown
from services.gateway.openai.bodies import INT64, Body, ChatBody, Priority
from services.gateway.openai.parse import parse_body
from services.gateway.openai.structured import MAX_TOOLS

ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text")
# Field -> the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt_cache_options": (),
    "reasoning": ({}, {"effort": "none"}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
OF_CHAT = (
    "model", "temperature", "top_p", "parallel_tool_calls", "priority", "ttft_slo_ms", "tbt_slo_ms", "deadline_ms",
    "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos", "background",
)  # fmt: skip
"""Fields that mean the same in both."""

Input = Annotated[
    Any,
    WithJsonSchema({
        "description": "text, or messages, function calls and their outputs",
        "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}],
    }),
]  # fmt: skip


class TextOptions(Body):
    """`text`: `format` is `text` or, as `response_format` of chat, `json_object` and `json_schema`."""

    format: dict[str, Any] | None = None
    verbosity: Any = None


class ResponseStreamOptions(Body):
    """`stream_options`."""

    include_obfuscation: bool | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    model: str = Field(min_length=1, max_length=256)
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    background: bool | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    store: bool | None = None
    service_tier: str | None = Field(None, max_length=32)
    user: str | None = Field(None, max_length=1024)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_retention: str | None = Field(None, max_length=32)
    safety_identifier: str | None = Field(None, max_length=1024)

    # Orcinus' own
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 and -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    ignore_eos: bool | None = None
    priority: Priority | None = None
    ttft_slo_ms: int | None = Field(None, ge=1, lt=1 << 31)
    tbt_slo_ms: int | None = Field(None, ge=1, lt=1 << 31)
    deadline_ms: int | None = Field(None, ge=1, lt=1 << 31)

    # Known to OpenAI: accepted only where they ask for nothing
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    reasoning: Any = None
    top_logprobs: Any = None
    truncation: Any = None


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same request to `/v1/chat/completions`. Raises ApiError(400) in the words of this endpoint."""
    for name, neutral in REFUSED.items():
        sent = getattr(body, name)
        if sent is not None and not any(type(sent) is type(value) and sent == value for value in neutral):
            raise invalid(name, f"{name} is not supported; got {shown(sent)}", "unsupported_parameter")
    fields = {name: getattr(body, name) for name in OF_CHAT if getattr(body, name) is not None}
    fields["messages"] = messages(body)
    fields["stream"] = bool(body.stream)
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.text is not None:
        fields |= _text_options(body.text)
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    try:
        return parse_body(orjson.dumps(fields), ChatBody)
    except ApiError as error:
        raise in_words_of_responses(error) from None


def in_words_of_responses(error: ApiError) -> ApiError:
    """An error about the chat request as one about the response that was asked for."""
    for chat, ours in (
        (r"messages(\[\d+\][\w.\[\]]*)?", "input"),
        (r"max_completion_tokens|max_tokens", "max_output_tokens"),
        (r"response_format", "text.format"),
        (r"verbosity", "text.verbosity"),
        (r"(tools\[\d+\]|tool_choice)\.function", r"\1"),
        (r"tool_choice\.allowed_tools", "tool_choice"),
    ):
        error.message = re.sub(rf"\b(?:{chat})(?!\w)", ours, error.message)
        error.param = re.sub(rf"^(?:{chat})\b", ours, error.param) if error.param else None
    return error


def messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The conversation, the instructions first. Raises ApiError(400)."""
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list) or not body.input:
        raise invalid("input", f"input must be text or a list of items; got {shown(body.input)}", "invalid_value")
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid("input", f"{where} must be an object; got {shown(item)}", "invalid_value")
        kind = item.get("type") or "message"
        if kind not in ITEMS:
            known = ", ".join(ITEMS)
            text = f"{where}.type {shown(kind)} is not supported; known are {known}"
            raise invalid("input", text, "unsupported_parameter")
        message = ITEMS[kind](item, where)
        if kind == "function_call" and found and "tool_calls" in found[-1]:
            found[-1]["tool_calls"] += message["tool_calls"]  # calls of one turn are one message
        else:
            found.append(message)
    return found


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    _check_names(item, ("type", "role", "content", "id", "status", "phase"), where)
    if item.get("role") not in ROLES:
        raise invalid("input", f"{where}.role must be one of {', '.join(ROLES)}; got {shown(item.get('role'))}")
    return {"role": item["role"], "content": _content(item.get("content"), f"{where}.content")}


def _function_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    _check_names(item, ("type", "call_id", "name", "arguments", "id", "status"), where)
    call_id, name, arguments = (_string(item, key, where) for key in ("call_id", "name", "arguments"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _function_output(item: dict[str, Any], where: str) -> dict[str, Any]:
    _check_names(item, ("type", "call_id", "output", "id", "status"), where)
    content = _content(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content}


ITEMS = {"message": _message, "function_call": _function_call, "function_call_output": _function_output}


def _content(content: Any, where: str) -> str:
    """The text of a string or of parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid("input", f"{where} must be text or a list of parts; got {shown(content)}", "invalid_value")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS:
            text = f"{where}[{index}].type must be one of {', '.join(PARTS)}; got {shown(kind)}"
            raise invalid("input", text, "unsupported_parameter")
        _check_names(part, ("type", "text", "annotations", "logprobs"), f"{where}[{index}]")
        texts.append(_string(part, "text", f"{where}[{index}]"))
    return "".join(texts)


def _text_options(text: TextOptions) -> dict[str, Any]:
    """`response_format` and `verbosity` of chat: the schema stands one level deeper there."""
    found = {} if text.verbosity is None else {"verbosity": text.verbosity}
    form = dict(text.format or {})
    if form.get("type") == "json_schema":
        found["response_format"] = {"type": form.pop("type"), "json_schema": form}
    elif form:
        found["response_format"] = form
    return found


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        text = f"{where}.type must be 'function'; got {shown(tool.get('type'))}"
        raise invalid("tools", text, "unsupported_parameter")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any]) -> Any:
    """What chat has one level deeper."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "allowed_tools"):
        return choice
    kind = choice["type"]
    rest = {name: value for name, value in choice.items() if name != "type"}
    if kind == "allowed_tools" and isinstance(rest.get("tools"), list):
        rest["tools"] = [_tool_choice(tool) for tool in rest["tools"]]
    return {"type": kind, kind: rest}


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid("input", f"{where}.{name} must be text; got {shown(value)}", "invalid_value")
    return value


def _check_names(item: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in item:
        if name not in known:
            raise invalid("input", f"Unrecognized request argument supplied: {where}.{name}", "unknown_parameter")

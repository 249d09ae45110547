"""Serve `/v1/responses`: a conversation as OpenAI's newer clients send it.

A response is a chat request with an id that begins with `resp_`. The body becomes a body of `/v1/chat/completions`,
which is checked there. A response is stored with its conversation (delivery/response_store.py), and a later one goes on
from it by `previous_response_id`; without `store` its record can be read for five minutes. The events of a stream add
up to the whole response object.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from services.gateway.admission import MANY_REREADS, Hold, unknown_request
from services.gateway.delivery.response_store import StoredResponse, StoreOutcome
from services.gateway.delivery.stream import Delta, Generation, Usage
from services.gateway.errors import ApiError, invalid, worker_error
from services.gateway.gateway import Gateway
from services.gateway.models import ServedModel
from services.gateway.openai.answers import (
    GENERATION_ERRORS,
    KEEP_ALIVE,
    EventStream,
    answer_body,
    begin,
    collect,
    hold_conversation,
    holding_bytes,
    json_response,
    list_page,
    release_bytes,
    take_headers,
    whole_response,
)
from services.gateway.openai.bodies import (
    INT64,
    MAX_TOOLS,
    Body,
    ChatBody,
    ChatMessage,
    Metadata,
    ScheduledBody,
    choose_adapter,
    parse_body,
    read_body,
    read_in_turn,
    room_after,
    served_model,
)
from services.gateway.openai.chat import chat_spec, encode_chat
from services.gateway.openai.document import PlainRoute, body_of, errors, event_stream
from services.gateway.openai.requests import result, status
from services.gateway.request import GenerationSpec, SamplingDefaults
from services.gateway.text.tools.reader import CallPiece
from shared import ids
from shared.messages import quote
from shared.text.bounded_json import JsonError, check_width

log = logging.getLogger("orcinus.gateway")

T = TypeVar("T")

ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text")
# Field -> the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt_cache_options": (),
    "top_logprobs": (0,),
}
OF_CHAT = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", *ScheduledBody.model_fields,
    "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos", "background",
    "thinking_token_budget",
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


class ReasoningOptions(Body):
    """`reasoning`. effort: as `reasoning_effort` of chat. Thinking is returned as it is; summaries are not made."""

    effort: Any = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    """`stream_options`."""

    include_obfuscation: bool | None = None


class InputTokensBody(Body):
    """`POST /v1/responses/input_tokens`, and what it shares with `POST /v1/responses`."""

    model: str = Field(min_length=1, max_length=256)
    input: Input = None
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = Field(None, max_length=64, description="go on behind this stored response")

    # Known to OpenAI: accepted only where they ask for nothing
    conversation: Any = None


class ResponsesBody(InputTokensBody, ScheduledBody):
    """`POST /v1/responses`."""

    input: Input
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    metadata: Metadata | None = Field(None, max_length=16)
    store: bool | None = Field(None, description="false: the response is not stored; by default it is")
    service_tier: str | None = Field(None, max_length=32)
    user: str | None = Field(None, max_length=1024)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_retention: str | None = Field(None, max_length=32)
    safety_identifier: str | None = Field(None, max_length=1024)

    # Not of OpenAI
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 and -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    ignore_eos: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=1, lt=1 << 31)

    # As in InputTokensBody
    prompt: Any = None
    context_management: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    top_logprobs: Any = None


def chat_body(body: InputTokensBody, before: Sequence[dict[str, Any]] = ()) -> ChatBody:
    """Return the same request to `/v1/chat/completions`. Raise ApiError(400) in the words of this endpoint.

    before: the items of the conversation that the request goes on from.
    """
    for name, neutral in REFUSED.items():
        sent = getattr(body, name, None)
        if sent is not None and not any(type(sent) is type(value) and sent == value for value in neutral):
            raise invalid(name, f"{name} is not supported; got {quote(sent)}", "unsupported_parameter")
    fields = {name: value for name in OF_CHAT if (value := getattr(body, name, None)) is not None}
    fields["messages"] = messages(body, before)
    if isinstance(body, ResponsesBody) and body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.text is not None:
        fields |= _text_options(body.text)
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    try:
        return parse_body(orjson.dumps(fields), ChatBody)
    except ApiError as error:
        raise in_words_of_responses(error) from None


def in_words_of_responses(error: ApiError) -> ApiError:
    """Rewrite an error about the chat request in the names of `/v1/responses`."""
    for chat, replacement in (
        (r"messages(\[\d+\][\w.\[\]]*)?", "input"),
        (r"max_completion_tokens|max_tokens", "max_output_tokens"),
        (r"response_format", "text.format"),
        (r"verbosity", "text.verbosity"),
        (r"reasoning_effort", "reasoning.effort"),
        (r"(tools\[\d+\]|tool_choice)\.function", r"\1"),
        (r"tool_choice\.allowed_tools", "tool_choice"),
    ):
        error.message = re.sub(rf"\b(?:{chat})(?!\w)", replacement, error.message)
        error.param = re.sub(rf"^(?:{chat})\b", replacement, error.param) if error.param else None
    return error


def items_of(body: InputTokensBody) -> list[Any]:
    """Return the items of the input, as they came. Raise ApiError(400)."""
    if body.input is None and not isinstance(body, ResponsesBody):
        return []  # the instructions or the conversation before it are counted
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    if not isinstance(body.input, list) or not body.input:
        raise invalid("input", f"input must be text or a list of items; got {quote(body.input)}", "invalid_value")
    return body.input


def messages(body: InputTokensBody, before: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the conversation, the instructions first, then the items `before`. Raise ApiError(400)."""
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # of the last message, joined once all are there
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    placed = itertools.chain(
        ((f"previous_response_id[{index}]", item) for index, item in enumerate(before)),
        ((f"input[{index}]", item) for index, item in enumerate(items_of(body))),
    )
    for path, item in placed:
        if not isinstance(item, dict):
            raise invalid("input", f"{path} must be an object; got {quote(item)}", "invalid_value")
        kind = item.get("type") or "message"
        if kind not in ITEMS:
            text = f"{path}.type {quote(kind)} is not supported; supported are {', '.join(ITEMS)}"
            raise invalid("input", text, "unsupported_parameter")
        message = ITEMS[kind](item, path)
        if kind == "reasoning" and not message["reasoning_content"]:
            continue  # no turn: it has a summary at most
        last = messages[-1] if messages else {}
        if kind == "function_call" and "tool_calls" in last:
            last["tool_calls"] += message["tool_calls"]  # calls of one turn are one message
        elif message["role"] == "assistant" and last.keys() == {"role", "reasoning_content"}:
            thoughts.append(message.get("reasoning_content", ""))
            last.update(message | {"reasoning_content": thoughts})
        else:
            if kind == "reasoning":
                thoughts = [message["reasoning_content"]]
                message["reasoning_content"] = thoughts
            messages.append(message)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _message(item: dict[str, Any], path: str) -> dict[str, Any]:
    _check_names(item, ("type", "role", "content", "id", "status", "phase"), path)
    if item.get("role") not in ROLES:
        raise invalid("input", f"{path}.role must be one of {', '.join(ROLES)}; got {quote(item.get('role'))}")
    return {"role": item["role"], "content": _content(item.get("content"), f"{path}.content")}


def _function_call(item: dict[str, Any], path: str) -> dict[str, Any]:
    _check_names(item, ("type", "call_id", "name", "arguments", "id", "status"), path)
    call_id, name, arguments = (_string(item, key, path) for key in ("call_id", "name", "arguments"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _function_output(item: dict[str, Any], path: str) -> dict[str, Any]:
    _check_names(item, ("type", "call_id", "output", "id", "status"), path)
    content = _content(item.get("output"), f"{path}.output")
    return {"role": "tool", "tool_call_id": _string(item, "call_id", path), "content": content}


def _read_reasoning(item: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the thinking before an answer or a call, which becomes one message with it. A summary is left out."""
    _check_names(item, ("type", "content", "summary", "encrypted_content", "id", "status"), path)
    if item.get("encrypted_content") is not None:
        text = f"{path}.encrypted_content is not supported: this server encrypts none; send content"
        raise invalid("input", text, "unsupported_parameter")
    content = _content(item["content"], f"{path}.content", ("reasoning_text",)) if item.get("content") else ""
    return {"role": "assistant", "reasoning_content": content}


ITEMS = {
    "message": _message, "function_call": _function_call, "function_call_output": _function_output,
    "reasoning": _read_reasoning,
}  # fmt: skip


def _content(content: Any, path: str, kinds: tuple[str, ...] = PARTS) -> str:
    """Return the text of a string or of parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid("input", f"{path} must be text or a list of parts; got {quote(content)}", "invalid_value")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            text = f"{path}[{index}].type must be one of {', '.join(kinds)}; got {quote(kind)}"
            raise invalid("input", text, "unsupported_parameter")
        _check_names(part, ("type", "text", "annotations", "logprobs"), f"{path}[{index}]")
        texts.append(_string(part, "text", f"{path}[{index}]"))
    return "".join(texts)


def _text_options(text: TextOptions) -> dict[str, Any]:
    """`response_format` and `verbosity` of chat: the schema stands one level deeper there."""
    options = {} if text.verbosity is None else {"verbosity": text.verbosity}
    form = dict(text.format or {})
    if form.get("type") == "json_schema":
        options["response_format"] = {"type": form.pop("type"), "json_schema": form}
    elif form:
        options["response_format"] = form
    return options


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        text = f"{path}.type must be 'function'; got {quote(tool.get('type'))}"
        raise invalid("tools", text, "unsupported_parameter")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any]) -> Any:
    """Return the form that chat has, one level deeper."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "allowed_tools"):
        return choice
    kind = choice["type"]
    rest = {name: value for name, value in choice.items() if name != "type"}
    if kind == "allowed_tools" and isinstance(rest.get("tools"), list):
        rest["tools"] = [_tool_choice(tool) for tool in rest["tools"]]
    return {"type": kind, kind: rest}


def _string(item: dict[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid("input", f"{path}.{name} must be text; got {quote(value)}", "invalid_value")
    return value


def _check_names(item: dict[str, Any], names: tuple[str, ...], path: str) -> None:
    for name in item:
        if name not in names:
            raise invalid("input", f"Unrecognized request argument supplied: {path}.{name}", "unknown_parameter")


INCOMPLETE = {"length": "max_output_tokens", "deadline": "deadline"}
"""Finish reasons that leave a response incomplete -> what `incomplete_details` calls them."""


def shell(
    body: ResponsesBody, response_id: str, created_s: int, defaults: SamplingDefaults = SamplingDefaults()
) -> dict[str, Any]:
    """Return a response as it is before its first token."""
    text = body.text.model_dump(exclude_none=True) if body.text is not None else {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def finish(shell: dict[str, Any], output: list[dict[str, Any]], reason: str, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the response at its end. usage: as of chat."""
    reasoning_tokens = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    incomplete = INCOMPLETE.get(reason)
    return shell | {
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        },
    }


def of_chat(shell: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the response with the content of a chat completion."""
    choice = answer["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    calls = message.get("tool_calls") or []
    items = []
    reasoning_text = message.get("reasoning_content")
    if reasoning_text:
        is_last = not (message["content"] or calls)
        items.append(reasoning_item(shell["id"], reasoning_text, _status(reason) if is_last else "completed"))
    if message["content"] or not (calls or reasoning_text):
        items.append(message_item(shell["id"], message["content"] or "", _status(reason)))
    for index, call in enumerate(calls):
        status = _call_status(reason, is_last=index == len(calls) - 1)
        items.append(call_item(shell["id"], index, call["id"], **call["function"], status=status))
    return finish(shell, items, reason, answer["usage"])


def of_record(state: dict[str, Any], answer: dict[str, Any] | None, body: dict[str, Any]) -> dict[str, Any]:
    """Return a response as its record has it. state: as of `GET /v1/requests/{id}`. answer: the chat completion, of a
    response that ended well. body: the response before its first token.
    """
    if answer is not None:
        return of_chat(body, answer)
    if state["status"] != "finished":
        return body | {"status": "in_progress" if state["status"] == "running" else "queued"}
    if state["error"] or "error" in state["finish_reasons"]:
        error = worker_error(state["error"] or "")
        fault = {"code": error.code if error.status < 500 else "server_error", "message": error.message}
        return body | {"status": "failed", "error": fault}
    return body | {"status": "cancelled"}


def text_part(text: str) -> dict[str, Any]:
    """Return the one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(response_id: str, text: str, status: str) -> dict[str, Any]:
    """Return the one message of a response; without its part while that is not begun."""
    content = [] if status == "in_progress" else [text_part(text)]
    item_id = "msg_" + response_id.removeprefix("resp_")
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(response_id: str, text: str, status: str) -> dict[str, Any]:
    """Return the thinking of a response; without its part while that is not begun."""
    content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": text}]
    item_id = "rs_" + response_id.removeprefix("resp_")
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(response_id: str, index: int, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    """Return a call of a function."""
    item_id = f"fc_{response_id.removeprefix('resp_')}_{index}"
    return {
        "id": item_id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
        "arguments": arguments,
    }  # fmt: skip


def _status(reason: str) -> str:
    return "incomplete" if reason in INCOMPLETE else "completed"


def _call_status(reason: str, is_last: bool) -> str:
    """Whole calls end with `tool_calls`: behind a `stop` the last one was cut."""
    return "incomplete" if reason == "stop" and is_last else _status(reason)


MESSAGE, REASONING = -1, -2
"""The keys of the message and of the thinking among the items of a stream; calls have their index."""


@dataclass(slots=True)
class _Item:
    """One item of the output while it comes. pieces: of its text or arguments."""

    at: dict[str, Any]  # item_id and output_index
    start: dict[str, Any]
    pieces: list[str]


class ResponseEvents:
    """Turn deltas into typed events; the writer of an EventStream (answers.py)."""

    keep_alive = KEEP_ALIVE

    def __init__(self, generation: Generation, shell: dict[str, Any]) -> None:
        self._generation = generation
        self._shell = shell
        self._number = 0
        self._items: dict[int, _Item] = {}
        self._end: tuple[bytes, dict[str, Any]] | None = None

    def echo(self) -> bytes:
        """Return what comes before the first token."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._shell) for kind in kinds)

    def events(self, deltas: list[Delta]) -> bytes:
        """Return events of one delivery; empty when all its text is still held back."""
        parts = []
        for delta in deltas:
            if delta.reasoning:
                parts.append(self._add_thinking(delta.reasoning))
            if delta.text:
                parts.append(self._text(delta.text))
            parts += [self._call(piece) for piece in delta.calls]
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """Return each item as a whole, and the response with them."""
        events, response = self._end or self._finish(usage)
        return events + self._event(f"response.{response['status']}", response=response)

    async def store(self, keep: Callable[[dict[str, Any]], Awaitable[StoreOutcome]]) -> None:
        """Store the whole response before its last event, so that a request may go on from it at once."""
        self._end = self._finish(self._generation.usage)
        response = self._end[1]
        response["store"] = await keep(response) is not StoreOutcome.REFUSED

    def _finish(self, usage: Usage) -> tuple[bytes, dict[str, Any]]:
        """Return the events of whole items, and the whole response."""
        reason = self._generation.choices[0].finish_reason or "stop"
        events = b"" if self._items else self._message()[1]
        output = []
        for key, item in self._items.items():
            if key == REASONING:
                status = _status(reason) if len(self._items) == 1 else "completed"
            else:
                status = _status(reason) if key == MESSAGE else _call_status(reason, is_last=key == max(self._items))
            item_body, event = self._finish_item(key, item, status)
            output.append(item_body)
            events += event + self._event(
                "response.output_item.done", output_index=item.at["output_index"], item=item_body
            )
        return events, finish(self._shell, output, reason, usage.body())

    def error(self, error: ApiError) -> bytes:
        """Return an error after the first byte; the stream ends behind it."""
        fault = {"code": error.code or "server_error", "message": error.message}
        events = self._event("error", **fault, param=error.param)
        return events + self._event("response.failed", response=self._shell | {"status": "failed", "error": fault})

    def _text(self, text: str) -> bytes:
        item, events = self._message()
        item.pieces.append(text)
        return events + self._event("response.output_text.delta", **item.at, content_index=0, delta=text, logprobs=[])

    def _add_thinking(self, text: str) -> bytes:
        events = b""
        if REASONING not in self._items:
            begun, part = reasoning_item(self._shell["id"], "", "in_progress"), {"type": "reasoning_text", "text": ""}
            item, events = self._begin(REASONING, begun)
            events += self._event("response.content_part.added", **item.at, content_index=0, part=part)
        item = self._items[REASONING]
        item.pieces.append(text)
        return events + self._event("response.reasoning_text.delta", **item.at, content_index=0, delta=text)

    def _message(self) -> tuple[_Item, bytes]:
        """Return the message and its one part, begun when they are first needed."""
        if MESSAGE in self._items:
            return self._items[MESSAGE], b""
        item, events = self._begin(MESSAGE, message_item(self._shell["id"], "", "in_progress"))
        return item, events + self._event("response.content_part.added", **item.at, content_index=0, part=text_part(""))

    def _call(self, piece: CallPiece) -> bytes:
        events = b""
        if piece.index not in self._items:
            begun = call_item(self._shell["id"], piece.index, piece.id, piece.name, "", "in_progress")
            events = self._begin(piece.index, begun)[1]
        item = self._items[piece.index]
        item.pieces.append(piece.arguments)
        if piece.arguments:
            events += self._event("response.function_call_arguments.delta", **item.at, delta=piece.arguments)
        return events

    def _begin(self, key: int, item_body: dict[str, Any]) -> tuple[_Item, bytes]:
        item = _Item({"item_id": item_body["id"], "output_index": len(self._items)}, item_body, [])
        self._items[key] = item
        added = self._event("response.output_item.added", output_index=item.at["output_index"], item=item_body)
        return item, added

    def _finish_item(self, key: int, item: _Item, status: str) -> tuple[dict[str, Any], bytes]:
        """Return an item at its end, and the events with its content."""
        text = "".join(item.pieces)
        if key == REASONING:
            item_body = reasoning_item(self._shell["id"], text, status)
            events = self._event("response.reasoning_text.done", **item.at, content_index=0, text=text)
            part = item_body["content"][0]
            return item_body, events + self._event("response.content_part.done", **item.at, content_index=0, part=part)
        if key != MESSAGE:
            item_body = item.start | {"status": status, "arguments": text}
            name = item_body["name"]
            return item_body, self._event("response.function_call_arguments.done", **item.at, name=name, arguments=text)
        item_body = message_item(self._shell["id"], text, status)
        events = self._event("response.output_text.done", **item.at, content_index=0, text=text, logprobs=[])
        return item_body, events + self._event(
            "response.content_part.done", **item.at, content_index=0, part=text_part(text)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


KIND = "responses"
TOO_LONG = "context_length_exceeded"
_COUNTED = {
    "description": "how many tokens the input has",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": {"type": "integer"}},
                "required": ["object", "input_tokens"],
            }
        }
    },
}
_RESPONSE = {"description": "the response", "content": {"application/json": {"schema": {"type": "object"}}}}
MAX_ITEMS = 100
"""Of one page of `input_items`."""


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter(route_class=PlainRoute)

    def store_ends(model: ServedModel) -> None:
        model.background.on_end = Responses(model).store_end

    gateway.models.on_open = store_ends
    for model in gateway.models.models():
        store_ends(model)

    async def find_model(response_id: str, request: Request) -> ServedModel:
        return await gateway.models.find_holder(response_id, request.state.caller)

    async def find(model: ServedModel, response_id: str, request: Request) -> StoredResponse:
        """Return a response, with its bytes counted until the request is answered. Raise ApiError(404, 429, 503)."""
        return await Responses(model, holding_bytes(model, request)).find(response_id, request.state.tenant)

    async def conversation_before(name: str | None, model: ServedModel, request: Request) -> list[dict[str, Any]]:
        """Return the conversation that a request of a model goes on from, counted as `find` does. Raise
        ApiError(400, 429, 503).
        """
        if name is None:
            return []
        try:
            record = await find(await find_model(name, request), name, request)
        except ApiError as error:
            if error.code == MANY_REREADS:
                error.param = "previous_response_id"
            if error.status != 404:
                raise
            record = None
        if record is None or not record.response["store"]:
            raise invalid(
                "previous_response_id",
                f"previous_response_id {quote(name)} is not stored: it is unknown, has store false, was deleted, or is "
                f"older than {model.settings.response_retention_s} s; send the conversation as input",
                "previous_response_not_found",
            )
        if record.response["status"] not in ("completed", "incomplete"):
            status = record.response["status"]
            text = f"previous_response_id {quote(name)} has no answer: its status is {status}; wait for its end"
            raise invalid("previous_response_id", text, "invalid_value")
        return record.items

    @routes.post(
        "/v1/responses",
        responses={**event_stream("a response, or its events"), **GENERATION_ERRORS},
        openapi_extra=body_of(ResponsesBody),
    )
    async def responses(request: Request) -> Response:
        """Answer a conversation."""
        arrived_at = time.monotonic()
        body = await read_in_turn(gateway, request, ResponsesBody, arrived_at)
        model = await served_model(gateway, body.model, request.state.caller, lately=True)
        before = await conversation_before(body.previous_response_id, model, request)
        spec = await _spec(model, body, before, request.state.tenant)
        take_headers(model, request, spec)
        response = shell(body, spec.id, spec.created, model.text.defaults)
        response["store"] &= model.responses.stores
        conversation = [*before, *stored_items(items_of(body), spec.id)] if response["store"] else []
        stored_input = orjson.dumps(conversation)
        if not may_be_stored(stored_input, gateway.settings.max_body_bytes):
            response["store"], stored_input = False, b"[]"
        keep = partial(Responses(model).keep, request.state.tenant, stored_input)
        held_bytes = len(stored_input) + len(orjson.dumps(response))
        spec.conversation_bytes = 0 if spec.background else held_bytes
        del body, before, conversation  # the request may wait for long, with stored_input and response alone
        release_bytes(request)
        if response["store"]:
            hold_conversation(model, request, held_bytes)
        if spec.background:
            response["status"] = "queued"
            outcome = await keep(response, only_new=True)  # an earlier call of the same name has it already
            response["store"] = outcome is not StoreOutcome.REFUSED
            del keep, stored_input
            release_bytes(request)
            try:
                refusal = choose_adapter(model, spec)
                await model.admission.begin_background(spec, request.state.caller, arrived_at, refusal)
            except ApiError:
                if outcome is StoreOutcome.NEW:
                    await model.responses.forget(spec.id, request.state.tenant, hidden_ms=1)
                raise
            return json_response(response)
        generation, headers = await begin(model, request, spec, arrived_at)
        if spec.stream:
            events = ResponseEvents(generation, response)
            return EventStream(
                generation, events, gateway.settings.keepalive_s, headers, before_end=partial(events.store, keep)
            )

        async def answer() -> dict[str, Any]:
            chat = answer_body(generation, model.text.fingerprint)
            made = of_chat(response, await collect(generation, request, chat))
            return made | {"store": await keep(made) is not StoreOutcome.REFUSED}

        return await whole_response(answer(), headers)

    @routes.post(
        "/v1/responses/input_tokens",
        responses={200: _COUNTED, **errors(403, 404, 415, 429, 503)},
        openapi_extra=body_of(InputTokensBody),
    )
    async def input_tokens(request: Request) -> Response:
        """Return how many tokens the input of a response has, as this model's chat template writes it."""
        body = await read_body(request, InputTokensBody)
        model = await served_model(gateway, body.model, request.state.caller)
        before = await conversation_before(body.previous_response_id, model, request)

        async def count(chat: ChatBody) -> int:
            limits = model.cluster.limits
            prompt, _ = await encode_chat(chat, model.text, limits)
            room_after(len(prompt), limits, "messages")
            return len(prompt)

        tokens = await _from_chat(body, before, count)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    @routes.get("/v1/responses/{response_id}", responses={200: _RESPONSE, **errors(404, 429, 503)})
    async def response(response_id: str, request: Request) -> Response:
        """Return a stored response, or one that runs or has ended less than five minutes ago."""
        if request.query_params.get("stream", "false") not in ("false", "False", "0"):
            raise invalid(
                "stream", f"a response is returned whole here; GET /v1/requests/{response_id[:80]}/stream streams it"
            )
        model = await find_model(response_id, request)
        return json_response((await find(model, response_id, request)).response)

    @routes.delete("/v1/responses/{response_id}", responses={200: _RESPONSE, **errors(404, 503)})
    async def delete_response(response_id: str, request: Request) -> Response:
        """Cancel a response that runs, and forget it."""
        model = await find_model(response_id, request)
        await Responses(model).delete(response_id, request.state.tenant)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @routes.get("/v1/responses/{response_id}/input_items", responses={200: _RESPONSE, **errors(404, 429, 503)})
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
        order: Annotated[Literal["asc", "desc"], Query()] = "desc",
        after: Annotated[str, Query(max_length=128)] = "",
    ) -> Response:
        """Return the items of the conversation before a stored response, a page at a time."""
        model = await find_model(response_id, request)
        response = await find(model, response_id, request)
        if not response.response["store"]:
            raise unknown_request(response_id)
        return json_response(list_page(response.input, limit, after, newest_first=order == "desc"))

    @routes.post("/v1/responses/{response_id}/cancel", responses={200: _RESPONSE, **errors(404, 429, 503)})
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel a response, wherever it runs."""
        check_name(response_id)
        model = await find_model(response_id, request)
        verdict = await model.dispatcher.cancel_for(response_id, request.state.tenant)  # also where no more may be read
        response = await find(model, response_id, request)
        if response.is_running and verdict != "finished":
            response.response["status"] = "cancelled"
        return json_response(response.response)

    return routes


def check_name(response_id: str) -> None:
    """Raise ApiError(404) for what is no id of a response."""
    if not response_id.startswith(ids.ENDPOINTS[KIND].id_prefix) or len(response_id) > MAX_ID:
        raise unknown_request(response_id)


class Responses:
    """Responses of one model as the store and their records have them."""

    def __init__(self, model: ServedModel, hold: Hold | None = None) -> None:
        """hold: called with the bytes of what is read."""
        self._model = model
        self._hold = hold

    async def keep(
        self, tenant: str, conversation: bytes, response: dict[str, Any], only_new: bool = False
    ) -> StoreOutcome:
        """Store a response unless its request asked for none; return whether it is stored. conversation: as of
        ResponseStore.keep.
        """
        if not response["store"]:
            return StoreOutcome.REFUSED
        return await self._model.responses.keep(tenant, conversation, response, only_new)

    async def find(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a response; one that is not stored has no input. Raise ApiError(404, 429, 503)."""
        check_name(response_id)
        record, is_deleted = await self._model.responses.find(response_id, tenant, self._hold)
        if is_deleted:
            raise unknown_request(response_id)
        if record is not None and not record.is_running:
            return record
        now = await self._read_record(response_id, tenant, record)
        if now.response["store"] and not now.is_running:
            await self._model.responses.keep(tenant, orjson.dumps(now.input), now.response)
        return now

    async def delete(self, response_id: str, tenant: str) -> None:
        """Cancel a response that runs, and forget it, without reading it. Raise ApiError(404, 503)."""
        check_name(response_id)
        stored_bytes, is_deleted = await self._model.responses.look(response_id, tenant)
        if is_deleted:
            raise unknown_request(response_id)
        verdict = await self._model.dispatcher.cancel_for(response_id, tenant)
        if not stored_bytes and verdict in ("unknown", "forbidden"):
            raise unknown_request(response_id)
        await self._model.responses.forget(response_id, tenant)

    async def store_end(self, response_id: str) -> None:
        """Store the end of a response in the background. Redis may be away, and behind a stop string a record ends a
        little later than the text: try again as long as there is a record.
        """
        if ids.kind_of(response_id) != KIND:
            return
        store, problem = self._model.responses, ""
        for tries in range(LOOKS):
            try:
                record = await self._model.dispatcher.raw_record(response_id)
                tenant = record.get(b"tenant", b"").decode("utf-8", "replace")
                stored, _ = await store.find(response_id, tenant)
                if not record or stored is None or not stored.is_running:
                    return
                await self.find(response_id, tenant)
            except ApiError as error:
                problem = error.message
            await asyncio.sleep(min(LOOK_EVERY_S * (tries + 1), MAX_WAIT_S))
        log.warning("the end of response %s is not stored: %s", response_id, problem or "it still runs")

    async def _read_record(self, response_id: str, tenant: str, response: StoredResponse | None) -> StoredResponse:
        """Return a response as its record has it. Raise ApiError(404, 503)."""
        model = self._model
        record = await model.dispatcher.raw_record(response_id)
        if record.get(b"tenant", b"") != tenant.encode() or not record:
            if response is None:
                raise unknown_request(response_id)
            error = {"code": "server_error", "message": "the answer was not read in time; send the request again"}
            return replace(response, response=response.response | {"status": "failed", "error": error})
        answer = await result(response_id, record, model.dispatcher, model.text, hold=self._hold)
        state = model.dispatcher.decode(response_id, record, partial(status, response_id))
        if response is not None:
            return replace(response, response=of_record(state, answer, response.response))
        body = ResponsesBody(model=model.name, input="", background=state["background"], store=False)
        created_s = answer["created"] if answer else state["enqueued_ms"] // 1000
        return StoredResponse(
            tenant, of_record(state, answer, shell(body, response_id, created_s, model.text.defaults)), []
        )


MAX_ID = 64
LOOK_EVERY_S, MAX_WAIT_S = 0.25, 5.0
BODIES_OF_CONVERSATION = 2
GUESSES = 4
"""Of the turns that fit, by the tokens of a conversation that does not; then the rest is halved."""
LOOKS = 60  # about four minutes, of the five for which a record lives


def may_be_stored(conversation: bytes, most_bytes: int) -> bool:
    """Return whether a conversation is short enough to be read again: on an event loop, as often as its client asks.
    most_bytes: of a body; stored items are longer than those of a body.
    """
    try:
        check_width(conversation, "the conversation")
    except JsonError:
        return False
    return len(conversation) <= BODIES_OF_CONVERSATION * most_bytes


def stored_items(items: Sequence[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Return items as clients read them: with ids, those of the response and their place where they have none, and with
    the text of a message as a part.
    """
    suffix = response_id.removeprefix(ids.ENDPOINTS[KIND].id_prefix)
    given = [{name: value for name, value in item.items() if value is not None} for item in items]
    message_items = [{"id": f"item_{suffix}_{index}", "type": "message", **item} for index, item in enumerate(given)]
    for item in message_items:
        if item["type"] == "message" and isinstance(text := item["content"], str):
            item["content"] = [text_part(text) if item["role"] == "assistant" else {"type": "input_text", "text": text}]
    return message_items


async def _spec(
    model: ServedModel, body: ResponsesBody, before: Sequence[dict[str, Any]], tenant: str
) -> GenerationSpec:
    """Raise ApiError in the words of this endpoint."""

    async def spec_of(chat: ChatBody) -> GenerationSpec:
        return await chat_spec(chat, model.text, model.cluster.limits, ids.request_id(KIND), tenant)

    return await _from_chat(body, before, spec_of)


async def _from_chat(
    body: InputTokensBody, before: Sequence[dict[str, Any]], make: Callable[[ChatBody], Awaitable[T]]
) -> T:
    """Return what is made of the same request to chat. Raise ApiError in the words of this endpoint."""
    chat = chat_body(body, before)
    try:
        return await (truncate(chat, make) if body.truncation == "auto" else make(chat))
    except ApiError as error:
        raise in_words_of_responses(error) from None


async def truncate(chat: ChatBody, make: Callable[[ChatBody], Awaitable[T]]) -> T:
    """Return what is made of the request without as many of the first turns as it takes to fit into the context. Raise
    ApiError.

    A turn begins with a message of the user; what is before the first one, and the last turn, stay.
    """
    turns = [at for at, message in enumerate(chat.messages) if message.role == "user"]

    async def without(count: int) -> T:
        messages = [*chat.messages[: turns[0]], *chat.messages[turns[count] :]] if count else chat.messages
        return await make(chat.model_copy(update={"messages": messages}))

    chars: list[int] = []  # of each turn and those behind it
    least, most, tries, drop_count = 0, len(turns) - 1, 0, 0
    results: list[T] = []
    while least <= most or not results:
        try:
            results, most = [await without(drop_count)], drop_count - 1
            guess = most
        except ApiError as error:
            if error.code != TOO_LONG or drop_count >= len(turns) - 1:
                raise
            chars = chars or _chars_behind(chat.messages, turns)
            least = drop_count + 1
            guess = next((at for at in range(least, most) if chars[at] <= error.fits * chars[drop_count]), most)
            guess = guess if error.fits else (least + most) // 2
        tries += 1
        drop_count = max(least, guess) if tries <= GUESSES else (least + most) // 2
    return results[0]


def _chars_behind(messages: Sequence[ChatMessage], turns: Sequence[int]) -> list[int]:
    """Return how many characters each turn and those behind it have."""
    sizes = [len(message.model_dump_json(exclude_none=True)) for message in messages]
    behind = list(itertools.accumulate(reversed(sizes)))[::-1]
    return [behind[turn] for turn in turns]

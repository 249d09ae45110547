"""Serve `/v1/chat/completions`: from a conversation to a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.errors import ApiError, invalid, shown
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import ACCEPTED, GENERATION_ERRORS, serve
from services.gateway.openai.bodies import (
    ChatBody,
    ChatMessage,
    check_length,
    check_model,
    check_output,
    generation_spec,
    read_body,
    room_after,
)
from services.gateway.openai.document import body_of, event_stream
from services.gateway.openai.output import OUTPUT_FIELDS, ToolPlan, bind_output, plan_tools
from services.gateway.request import GenerationSpec, Limits
from services.gateway.text.tokenizer import ModelText


def router(gateway: Gateway) -> APIRouter:
    """Return the route over one gateway."""
    routes = APIRouter()
    served = gateway.settings.served_model_name

    @routes.post(
        "/v1/chat/completions",
        responses={**event_stream("a chat completion, or its events"), **ACCEPTED, **GENERATION_ERRORS},
        openapi_extra=body_of(ChatBody),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        started = time.monotonic()
        body = await read_body(request, ChatBody)
        spec = await chat_spec(body, gateway.model, served, gateway.cluster.limits, tenant=request.state.tenant)
        return await serve(gateway, request, spec, started)

    return routes


async def chat_spec(
    body: ChatBody, model: ModelText, served: str, limits: Limits, request_id: str | None = None, tenant: str = ""
) -> GenerationSpec:
    """Return the request that a body describes. request_id: None for a new one. tenant: for the turns of grammars.
    Raise ApiError.
    """
    check_model(body.model, served)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send only max_completion_tokens")
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens == 0:
        raise invalid("max_tokens", "max_tokens must be at least 1; got 0")
    tools = plan_tools(body, model) if body.model_fields_set & OUTPUT_FIELDS else ToolPlan()
    prompt = await encode_messages(body.messages, model, limits, tools=tools.shown)
    room = room_after(len(prompt), limits, "messages")
    if max_tokens is None:
        max_tokens = room
    check_output(max_tokens, len(prompt), room, limits, name)
    spec = generation_spec(body, model, limits, "chat", [prompt], [], max_tokens, False, request_id)
    if body.model_fields_set & OUTPUT_FIELDS:
        await bind_output(spec, body, model, tools, tenant)
    return spec


async def encode_messages(
    messages: Sequence[ChatMessage],
    model: ModelText,
    limits: Limits,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Return token ids of a conversation. tools: those that the template is to show. Raise ApiError(400)."""
    plain = plain_messages(messages)
    size = sum(len(message["content"]) for message in plain)
    check_length(size // model.longest, limits, "messages")
    # Beside the event loop however short it is: another process renders it.
    return await asyncio.to_thread(model.chat.encode, plain, add_generation_prompt, tools)


def plain_messages(messages: Sequence[ChatMessage]) -> list[Mapping[str, Any]]:
    """Return messages in the form of chat templates. Raise ApiError(400)."""
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
    """Return a call with its arguments as an object, for chat templates."""
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

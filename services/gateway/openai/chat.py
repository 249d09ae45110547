"""Serve `/v1/chat/completions`: from a conversation to a request."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.errors import ApiError, invalid, untokenizable
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import ACCEPTED, GENERATION_ERRORS, serve
from services.gateway.openai.bodies import (
    ChatBody,
    ChatMessage,
    TemplateBody,
    check_length,
    check_output,
    check_task,
    generation_spec,
    parse_json,
    read_in_turn,
    room_after,
    served_model,
)
from services.gateway.openai.document import PlainRoute, body_of, event_stream
from services.gateway.openai.output import OUTPUT_FIELDS, ToolPlan, bind_output, bind_thinking, binds_output, plan_tools
from services.gateway.request import CHANNELS, FRAMED, GenerationSpec, Limits
from services.gateway.text.chat_template import RESERVED
from services.gateway.text.reasoning import MARKERS, SWITCHES, state_behind, state_within
from services.gateway.text.tokenizer import ModelText
from shared.messages import quote
from shared.text import bounded_json
from shared.text.tokenizer import TokenizerError


def router(gateway: Gateway) -> APIRouter:
    """Return the route over one gateway."""
    routes = APIRouter(route_class=PlainRoute)

    @routes.post(
        "/v1/chat/completions",
        responses={**event_stream("a chat completion, or its events"), **ACCEPTED, **GENERATION_ERRORS},
        openapi_extra=body_of(ChatBody),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived_at = time.monotonic()
        body = await read_in_turn(gateway, request, ChatBody, arrived_at)
        model = await served_model(gateway, body.model, request.state.caller, lately=True)
        spec = await chat_spec(body, model.text, model.cluster.limits, tenant=request.state.tenant)
        del body  # the request may wait for long, with the spec alone
        return await serve(model, request, spec, arrived_at)

    return routes


async def chat_spec(
    body: ChatBody, model: ModelText, limits: Limits, request_id: str | None = None, tenant: str = ""
) -> GenerationSpec:
    """Return the request that a body describes. request_id: None for a new one. tenant: for the turns of grammars.
    Raise ApiError.
    """
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send only max_completion_tokens")
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens == 0:
        raise invalid("max_tokens", "max_tokens must be at least 1; got 0")
    prompt, tools = await encode_chat(body, model, limits)
    room = room_after(len(prompt), limits, "messages")
    if max_tokens is None:
        max_tokens = room
    check_output(max_tokens, len(prompt), room, limits, name)
    spec = generation_spec(body, model, limits, "chat", [prompt], [], max_tokens, False, request_id)
    if tools is not None:
        await bind_output(spec, body, model, tools, tenant)
    if model.reasoning in MARKERS and not spec.sampling.grammar:
        spec.reasoning = _state(body, prompt, model)
        if spec.reasoning:
            spec.markers = list(model.markers)
            if spec.reasoning != FRAMED:
                spec.skip_special_tokens &= not model.hides_markers  # thinking is found by them
    if "channels" in (model.reasoning, model.tool_format) and (spec.tools or not spec.sampling.grammar):
        spec.reasoning = "" if _continued_text(body) else CHANNELS
        spec.skip_special_tokens = False  # channels are found by control tokens
    if body.thinking_token_budget is not None:
        await bind_thinking(spec, body, body.thinking_token_budget, model, tenant)
    return spec


async def encode_chat(body: ChatBody, model: ModelText, limits: Limits) -> tuple[list[int], ToolPlan | None]:
    """Return the prompt of a chat and the effect of its tools, None where no field binds the output. Raise ApiError."""
    if model.is_encoder:  # a model without a template gets a message of its own
        check_task(model, "chat")
    # Beside the event loop however short it is: another process renders it.
    return await model.threads.run(_encode, body, model, limits)


def _encode(body: ChatBody, model: ModelText, limits: Limits) -> tuple[list[int], ToolPlan | None]:
    """Return as `encode_chat`; blocks."""
    if body.model_fields_set.isdisjoint(OUTPUT_FIELDS):
        return encoded_messages(body, body.messages, model, limits), None
    tools = plan_tools(body, model)
    is_bound = binds_output(body, tools)
    return encoded_messages(body, body.messages, model, limits, tools.shown_tools, is_bound), tools


def encoded_messages(
    body: TemplateBody,
    messages: Sequence[ChatMessage],
    model: ModelText,
    limits: Limits,
    tools: Sequence[dict[str, Any]] = (),
    is_bound: bool = False,
) -> list[int]:
    """Return token ids of a conversation; blocks. body: what else the template reads. tools: those that the template is
    to show. is_bound: a grammar leaves no room for thinking. Raise ApiError(400).
    """
    plain = plain_messages(messages)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        text = "continue_final_message cannot be combined with add_generation_prompt, which begins another message"
        raise invalid("continue_final_message", f"{text}; send one of both")
    if continues and (messages[-1].role != "assistant" or messages[-1].tool_calls):
        text = "continue_final_message needs an assistant's message without tool_calls at the end of messages"
        raise invalid("continue_final_message", f"{text}; got role {messages[-1].role!r}")
    variables = template_variables(body, is_bound)
    if model.reasoning in SWITCHES and "enable_thinking" in variables:
        variables = {SWITCHES[model.reasoning]: variables["enable_thinking"], **variables}
    size = sum(len(message["content"]) + len(message.get("reasoning_content", "")) for message in plain)
    size += sum(len(call.function.arguments) for message in messages for call in message.tool_calls or ())
    check_length(size // model.longest, limits, "messages")
    prompts = not continues and body.add_generation_prompt is not False
    return model.chat.encode(plain, prompts, tools, variables, continues)


MAX_VARIABLE_BYTES = 16 * 1024
STATE_TOKENS = 16
"""The last of a prompt, which have a marker of thinking and the white space behind it."""


def template_variables(body: TemplateBody, is_bound: bool) -> dict[str, Any]:
    """Return the variables of the chat template that a body sets: `chat_template_kwargs` above the others. Raise
    ApiError(400).
    """
    field, kwargs = "chat_template_kwargs", body.chat_template_kwargs or {}
    if taken := sorted(kwargs.keys() & RESERVED):
        raise invalid(field, f"{field} cannot set {', '.join(taken)}, which this server sets; leave it out")
    if (size := len(orjson.dumps(kwargs))) > MAX_VARIABLE_BYTES:
        raise invalid(field, f"{field} may have {MAX_VARIABLE_BYTES} bytes of JSON; got {size}")
    variables: dict[str, Any] = {}
    if body.reasoning_effort not in (None, "none"):
        variables["reasoning_effort"] = body.reasoning_effort
    if is_bound or body.reasoning_effort == "none":
        variables["enable_thinking"] = False
    return variables | kwargs


def _state(body: ChatBody, prompt: list[int], model: ModelText) -> str:
    """Return where a prompt leaves the model, before, in or behind its thinking."""
    if content := _continued_text(body):
        return state_within(content, model.markers)
    try:
        return state_behind(model.text.decode(prompt[-STATE_TOKENS:], skip_special=False), model.markers)
    except TokenizerError as error:
        raise untokenizable("messages", error) from error


def _continued_text(body: ChatBody) -> str:
    """Return the text of the message that is to be continued; empty where it has none, or none is continued."""
    content = plain_messages(body.messages[-1:])[0]["content"] if body.continue_final_message else ""
    return str(content) if content.strip() else ""


BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
"""The line at the head of a system prompt that Claude Code changes with each request."""


def without_billing(system: str) -> str:
    """Return a system prompt without BILLING, behind which the prefix cache would have nothing."""
    billing = BILLING.match(system)
    return system if billing is None else system[billing.end() :]


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates. Raise ApiError(400)."""
    arguments = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    if len(arguments) > 1:  # their bound is that of one body
        try:
            bounded_json.check_width("".join(arguments).encode(), "arguments of tool_calls, all together,")
        except bounded_json.JsonError as error:
            raise invalid("messages", str(error), error.code) from error
    plain = [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] = without_billing(plain[0]["content"])
    return plain


def _plain(name: str, message: ChatMessage) -> dict[str, Any]:
    if message.function_call:
        raise invalid(
            f"{name}.function_call", "function_call is not supported; use tool_calls", "unsupported_parameter"
        )
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{name}.tool_calls", f"only an assistant's message has tool_calls; got role {message.role!r}")
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None and message.role != "assistant":
        raise invalid(
            f"{name}.reasoning_content", f"only an assistant's message has reasoning_content; got role {message.role!r}"
        )
    if message.content is None and not message.tool_calls and reasoning is None:
        raise _missing_error(f"{name}.content")
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing_error(f"{name}.tool_call_id")
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.name:
        plain["name"] = message.name
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _decode_call(f"{name}.tool_calls[{at}]", call.function)}
            for at, call in enumerate(message.tool_calls)
        ]
    return plain


def _decode_call(name: str, function: Any) -> dict[str, Any]:
    """Return a call with its arguments as an object, for chat templates."""
    field = f"{name}.function.arguments"
    arguments = parse_json((function.arguments or "{}").encode(), field, field)
    if not isinstance(arguments, dict):
        raise invalid(field, f"{field} must be the text of a JSON object; got {quote(function.arguments)}")
    return {"name": function.name, "arguments": arguments}


def _missing_error(field: str) -> ApiError:
    return invalid(field, f"you must provide the parameter {field}", "missing_required_parameter")

"""Serve `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over chat.

A message is a chat request with an id that begins with `msg_`; openai/requests.py finds, cancels and continues it as
any other.
"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.anthropic.answers import MessageEvents, whole_message
from services.gateway.anthropic.bodies import (
    CountBody,
    MessagesBody,
    MessagesErrorAnswer,
    chat_body,
    in_words_of_messages,
    places_of,
)
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.models import ServedModel
from services.gateway.openai.answers import EventStream, begin, collect, json_response, take_headers, whole_response
from services.gateway.openai.bodies import read_body, read_in_turn, served_model
from services.gateway.openai.chat import chat_spec, encode_chat
from services.gateway.openai.document import PlainRoute, body_of, errors, event_stream
from services.gateway.openai.requests import Form
from services.gateway.request import GenerationSpec
from shared import ids

KIND = "messages"
FORM = Form(MessageEvents, whole_message)
_COUNTED = {
    "description": "how many tokens the prompt has",
    "content": {
        "application/json": {"schema": {"type": "object", "properties": {"input_tokens": {"type": "integer"}}}}
    },
}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter(route_class=PlainRoute)

    @routes.post(
        "/v1/messages",
        responses={
            **event_stream("a message, or its events"),
            **errors(403, 404, 409, 415, 429, 503, model=MessagesErrorAnswer),
        },
        openapi_extra=body_of(MessagesBody),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        arrived_at = time.monotonic()
        body = await read_in_turn(gateway, request, MessagesBody, arrived_at)
        model = await served_model(gateway, body.model, request.state.caller, lately=True)
        spec = await _spec(model, body, request.state.tenant)
        del body  # the request may wait for long, with the spec alone
        take_headers(model, request, spec)
        last_event = request.headers.get("last-event-id", "") if spec.stream else ""
        generation, headers = await begin(model, request, spec, arrived_at, last_event)
        if spec.stream:
            return EventStream(generation, MessageEvents(generation), gateway.settings.keepalive_s, headers)
        return await whole_response(collect(generation, request, whole_message(generation)), headers)

    @routes.post(
        "/v1/messages/count_tokens",
        responses={200: _COUNTED, **errors(403, 404, 415, 429, 503, model=MessagesErrorAnswer)},
        openapi_extra=body_of(CountBody),
    )
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens a conversation has, as this model's chat template writes it."""
        body = await read_body(request, CountBody)
        chat = chat_body(body)
        try:
            model = await served_model(gateway, chat.model, request.state.caller)
            tokens, _ = await encode_chat(chat, model.text, model.cluster.limits)
        except ApiError as error:
            raise in_words_of_messages(error, places_of(body)) from None
        return json_response({"input_tokens": len(tokens)})

    return routes


async def _spec(model: ServedModel, body: MessagesBody, tenant: str) -> GenerationSpec:
    """Raise ApiError in the words of this endpoint."""
    chat = chat_body(body)
    try:
        spec = await chat_spec(chat, model.text, model.cluster.limits, ids.request_id(KIND), tenant)
    except ApiError as error:
        raise in_words_of_messages(error, places_of(body)) from None
    spec.hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
    return spec

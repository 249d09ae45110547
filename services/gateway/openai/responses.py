"""`/v1/responses`: a conversation as OpenAI's newer clients ask for it. Stateless: a response refers to no other.

To Redis it is a chat request whose id begins with `resp_`; so is what can be read of it for five minutes.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.errors import ApiError, invalid
from services.gateway.gateway import Gateway, unknown_request
from services.gateway.openai.completions import (
    GENERATION_ERRORS,
    begin,
    json_response,
    read_body,
    take_headers,
    whole_response,
)
from services.gateway.openai.document import body_of, errors, event_stream
from services.gateway.openai.response import collect
from services.gateway.openai.response_object import ResponseEvents, of_chat, of_record, shell
from services.gateway.openai.responses_body import ResponsesBody, chat_body, in_words_of_responses
from services.gateway.openai.results import result, status
from services.gateway.openai.sse import EventStream
from services.gateway.openai.validate import GenerationSpec, chat_spec
from shared import ids

KIND = "responses"
_RESPONSE = {"description": "the response", "content": {"application/json": {"schema": {"type": "object"}}}}


def router(gateway: Gateway) -> APIRouter:
    """The routes over one gateway."""
    routes = APIRouter()

    @routes.post(
        "/v1/responses",
        responses={**event_stream("a response, or its events"), **GENERATION_ERRORS},
        openapi_extra=body_of(ResponsesBody),
    )
    async def responses(request: Request) -> Response:
        """Answers a conversation."""
        started = time.monotonic()
        body = await read_body(request, ResponsesBody)
        spec = await _spec(gateway, body)
        await take_headers(request, spec)
        response = shell(body, spec.id, spec.created)
        if spec.background:
            await gateway.begin_background(spec, request.state.caller, started)
            return json_response(response | {"status": "queued"})
        generation, headers = await begin(gateway, request, spec, started)
        if spec.stream:
            events = ResponseEvents(generation, response)
            return EventStream(generation, events, gateway.settings.keepalive_s, headers)

        async def answer() -> dict[str, Any]:
            return of_chat(response, await collect(generation, request, gateway.model.fingerprint))

        return await whole_response(answer(), headers)

    @routes.get("/v1/responses/{response_id}", responses={200: _RESPONSE, **errors(404, 503)})
    async def response(response_id: str, request: Request) -> Response:
        """A response that runs, in the background or not, or has ended less than five minutes ago."""
        if request.query_params.get("stream", "false") not in ("false", "False", "0"):
            raise invalid(
                "stream", f"a response is told whole here; GET /v1/requests/{response_id[:80]}/stream streams"
            )
        return json_response(await _found(gateway, response_id, request.state.tenant))

    @routes.post("/v1/responses/{response_id}/cancel", responses={200: _RESPONSE, **errors(404, 503)})
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancels a response, wherever it is."""
        found = await _found(gateway, response_id, request.state.tenant)
        if found["status"] in ("queued", "in_progress"):
            verdict = await gateway.dispatcher.cancel_for(response_id, request.state.tenant)
            found["status"] = "cancelled" if verdict != "finished" else found["status"]
        return json_response(found)

    return routes


async def _spec(gateway: Gateway, body: ResponsesBody) -> GenerationSpec:
    """Raises ApiError in the words of this endpoint."""
    chat = chat_body(body)
    served, limits = gateway.settings.served_model_name, gateway.cluster.limits
    try:
        return await chat_spec(chat, gateway.model, served, limits, ids.request_id(KIND))
    except ApiError as error:
        raise in_words_of_responses(error) from None


async def _found(gateway: Gateway, response_id: str, tenant: str) -> dict[str, Any]:
    """What is known of a response. Raises ApiError(404, 503)."""
    record = await gateway.dispatcher.raw_record(response_id)
    if not response_id.startswith(ids.BEGINNINGS[KIND]) or record.get(b"tenant", b"").decode() != tenant:
        raise unknown_request(response_id)
    answer = await result(response_id, record, gateway.dispatcher, gateway.model)
    return of_record(status(response_id, record), gateway.settings.served_model_name, answer)

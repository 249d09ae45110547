"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from services.gateway.auth import Caller
from services.gateway.delivery.generation import Generation, Usage
from services.gateway.errors import ApiError, invalid, shown
from services.gateway.gateway import Gateway
from services.gateway.openai.bodies import ChatBody, CompletionBody, parse_body
from services.gateway.openai.document import body_of, errors, event_stream
from services.gateway.openai.response import ClientLeft, answer, collect
from services.gateway.openai.sse import EventStream, EventWriter
from services.gateway.openai.validate import chat_spec, completion_spec
from services.gateway.request import GenerationSpec
from shared import ids

T = TypeVar("T", bound=BaseModel)
GENERATION_ERRORS = errors(403, 404, 409, 415, 429, 503)
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "description": "with `background`: the request waits or runs; `location` says where to ask for it",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
_IDEMPOTENCY_KEY = re.compile(r"[ -~]{1,255}")


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response, encoded by orjson."""
    return Response(orjson.dumps(value), status, media_type="application/json")


async def read_body(request: Request, kind: type[T]) -> T:
    """Return the checked body of a request. Raise ApiError(400, 413, 415)."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415, f"content-type must be application/json; got {content_type!r}", code="unsupported_media_type"
        )
    return parse_body(await request.body(), kind)


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()
    served = gateway.settings.served_model_name

    @routes.post(
        "/v1/completions",
        responses={**event_stream("a completion, or its events"), **ACCEPTED, **GENERATION_ERRORS},
        openapi_extra=body_of(CompletionBody),
    )
    async def completions(request: Request) -> Response:
        """Continues one or several prompts."""
        started = time.monotonic()
        body = await read_body(request, CompletionBody)
        spec = await completion_spec(body, gateway.model, served, gateway.cluster.limits)
        return await _serve(gateway, request, spec, started)

    @routes.post(
        "/v1/chat/completions",
        responses={**event_stream("a chat completion, or its events"), **ACCEPTED, **GENERATION_ERRORS},
        openapi_extra=body_of(ChatBody),
    )
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        started = time.monotonic()
        body = await read_body(request, ChatBody)
        spec = await chat_spec(body, gateway.model, served, gateway.cluster.limits)
        return await _serve(gateway, request, spec, started)

    @routes.get(
        "/v1/requests/{request_id}/stream",
        responses={**event_stream("the events that are still to come, or were not read"), **GENERATION_ERRORS},
    )
    async def resume(request_id: str, request: Request) -> Response:
        """Goes on with a request, also one of another gateway or one that has ended (kept for five minutes).

        `Last-Event-ID` is the id of the last event that was read; without it everything comes again.
        """
        started = time.monotonic()
        last_event = request.headers.get("last-event-id", "")
        generation = await gateway.resume(request_id, request.state.tenant, started, last_event)
        writer = EventWriter(generation, gateway.model.fingerprint)
        return EventStream(generation, writer, gateway.settings.keepalive_s, {"x-orcinus-request": request_id})

    return routes


async def take_headers(request: Request, spec: GenerationSpec) -> None:
    """Set the trace of a request, and the id that its Idempotency-Key names. Raise ApiError(400)."""
    spec.traceparent = request.headers.get("traceparent", "")[:256]
    key = request.headers.get("idempotency-key")
    if key is None:
        return
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        raise invalid(
            "Idempotency-Key", f"Idempotency-Key must be 1 to 255 printable ASCII characters; got {shown(key)}"
        )
    kind = ids.kind_of(spec.id)
    spec.id = ids.named_request_id(kind, request.state.tenant, request.state.caller.salt, key)
    spec.body_sha256 = hashlib.sha256(await request.body()).digest()


async def begin(
    gateway: Gateway, request: Request, spec: GenerationSpec, started: float, last_event: str = ""
) -> tuple[Generation, dict[str, str]]:
    """Begin a request with a waiting client; return it and the headers of its answer. Raise ApiError; it must be
    closed.
    """
    caller: Caller = request.state.caller
    generation = await gateway.begin(spec, caller, started, last_event)
    return generation, {"x-orcinus-request": spec.id, **caller.rates.headers(*generation.stream.left)}


async def _serve(gateway: Gateway, request: Request, spec: GenerationSpec, started: float) -> Response:
    fingerprint = gateway.model.fingerprint
    if spec.max_tokens == 0:  # echo only: nothing is generated
        return _echo_only(spec, fingerprint)
    await take_headers(request, spec)
    if spec.background:
        await gateway.begin_background(spec, request.state.caller, started)
        return _accepted(spec)
    last_event = request.headers.get("last-event-id", "") if spec.stream else ""
    generation, headers = await begin(gateway, request, spec, started, last_event)
    if spec.stream:
        return EventStream(generation, EventWriter(generation, fingerprint), gateway.settings.keepalive_s, headers)
    return await whole_response(collect(generation, request, fingerprint), headers)


async def whole_response(answer: Awaitable[dict[str, Any]], headers: dict[str, str]) -> Response:
    """Await the body of an answer and return the response; a client that has left gets an empty one. Raise ApiError."""
    try:
        response = json_response(await answer)
    except ClientLeft:
        return Response(status_code=499)  # the client has gone
    response.headers.update(headers)
    return response


def _accepted(spec: GenerationSpec) -> Response:
    """Return the 202 of a background request; `GET /v1/requests/{id}` has its state."""
    state = {
        "id": spec.id,
        "object": "request",
        "status": "queued",
        "background": True,
        "created": spec.created,
        "model": spec.model,
        "priority": spec.priority,
        "prompt_tokens": spec.prompt_tokens,
    }
    response = json_response(state, 202)
    response.headers.update({"x-orcinus-request": spec.id, "location": f"/v1/requests/{spec.id}"})
    return response


def _echo_only(spec: GenerationSpec, fingerprint: str) -> Response:
    if spec.background:
        raise invalid("background", "max_tokens 0 leaves nothing to do in the background; got background true")
    if spec.stream:
        raise invalid("stream", "max_tokens 0 cannot be streamed; got stream true")
    empty = [""] * spec.choices
    usage = Usage(spec.prompt_tokens, 0)
    ids: list[list[int]] = [[] for _ in empty]
    return json_response(answer(spec, fingerprint, empty, ids, ["length"] * spec.choices, usage))

"""Serve `/v1/requests/{id}`: the state, the answer, the rest of the stream and the cancelling of any request.

State and answer are made from the record in Redis, by any gateway, until five minutes after the request's end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.admission import Hold, answer_bytes, unknown_request
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.delivery.stream import Generation, RequestStream
from services.gateway.gateway import Gateway
from services.gateway.metrics import Metrics
from services.gateway.openai.answers import (
    GENERATION_ERRORS,
    EventStream,
    EventWriter,
    Writer,
    answer_body,
    holding_bytes,
    json_response,
)
from services.gateway.openai.completions import THREAD_TOKENS
from services.gateway.openai.document import FOUND, errors, event_stream
from services.gateway.request import GenerationSpec
from services.gateway.text.tokenizer import ModelText
from shared import ids
from shared.dead_letters import integer


@dataclass(frozen=True, slots=True)
class Form:
    """How the answers of another API than OpenAI's are written: as events, or whole."""

    writer: Callable[[Generation], Writer]
    make_body: Callable[[Generation], Coroutine[Any, Any, dict[str, Any]]]


def router(gateway: Gateway, forms: Mapping[str, Form] = MappingProxyType({})) -> APIRouter:
    """Return the routes over one gateway. forms: by the kind of a request's id; a kind without one has OpenAI's."""
    routes = APIRouter()

    @routes.get(
        "/v1/requests/{request_id}/stream",
        responses={**event_stream("the events that are still to come, or were not read"), **GENERATION_ERRORS},
    )
    async def resume(request_id: str, request: Request) -> Response:
        """Continue the stream of a request, also one of another gateway or one that has ended (kept for five minutes).

        `Last-Event-ID` is the id of the last event that was read; without it the stream comes from its beginning.
        """
        arrived_at = time.monotonic()
        last_event = request.headers.get("last-event-id", "")
        model = await gateway.models.find_holder(request_id, request.state.caller)
        generation = await model.admission.resume(request_id, request.state.tenant, arrived_at, last_event)
        form = _form_of(request_id, forms)
        writer = EventWriter(generation, model.text.fingerprint) if form is None else form.writer(generation)
        return EventStream(generation, writer, gateway.settings.keepalive_s, {"x-orcinus-request": request_id})

    @routes.get("/v1/requests/{request_id}", responses={200: FOUND, **errors(404, 429, 503)})
    async def request_status(request_id: str, request: Request) -> Response:
        """Return the state of a request, and its answer for five minutes after its end."""
        model = await gateway.models.find_holder(request_id, request.state.caller)
        record = await model.dispatcher.raw_record(request_id)
        if record.get(b"tenant", b"") != request.state.tenant.encode():
            raise unknown_request(request_id)
        hold = holding_bytes(model, request)
        answer = await result(request_id, record, model.dispatcher, model.text, forms, hold)
        state = model.dispatcher.decode(request_id, record, partial(status, request_id))
        return json_response(state | ({"result": answer} if answer else {}))

    @routes.delete("/v1/requests/{request_id}", responses={200: FOUND, **errors(404, 503)})
    async def cancel_request(request_id: str, request: Request) -> Response:
        """Cancel a request, wherever it runs."""
        model = await gateway.models.find_holder(request_id, request.state.caller)
        verdict = await model.dispatcher.cancel_for(request_id, request.state.tenant)
        if verdict in ("unknown", "forbidden"):
            raise unknown_request(request_id)
        return json_response({"id": request_id, "object": "request", "cancelled": verdict != "finished"})

    return routes


_NAMES = {"1": "stop", "2": "length", "3": "cancelled", "4": "deadline", "5": "error"}
_DELIVERED = frozenset({"1", "2", "4"})
_UNCOUNTED = Metrics()
"""Tokens that are returned again are not counted."""


def status(request_id: str, record: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the state of a request from `req:{id}`, without its answer."""
    fields = {name.decode(): value.decode() for name, value in record.items() if name != b"delivery"}
    state: dict[str, Any] = {
        "id": request_id,
        "object": "request",
        "status": fields.get("state"),
        "background": "background" in fields,
        "priority": fields.get("class"),
        "prompt_tokens": integer(fields.get("tokens")),
        "enqueued_ms": integer(fields.get("enqueued_ms")),
        "started_ms": integer(fields["started_ms"]) if "started_ms" in fields else None,
        "ended_ms": integer(fields["ended_ms"]) if "ended_ms" in fields else None,
        "cancel_requested": "cancelled" in fields,
    }
    if fields.get("state") == "finished":
        state["finish_reasons"] = [_NAMES.get(part) for part in fields.get("finish", "").split(",") if part]
        output = integer(fields.get("output_tokens"))
        prompt = state["prompt_tokens"]
        state["usage"] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        state["error"] = fields.get("error") or None
    return state


async def result(
    request_id: str,
    record: dict[bytes, bytes],
    dispatcher: Dispatcher,
    model: ModelText,
    forms: Mapping[str, Form] = MappingProxyType({}),
    hold: Hold | None = None,
) -> dict[str, Any] | None:
    """Return the answer in one piece, made from the record; None while there is none, and for a request that failed or
    was cancelled. forms: as of `router`. hold: called with the bytes before they are read. Raise ApiError(429, 503).
    """
    ends = record.get(b"finish", b"").decode("ascii", "replace").split(",")
    if record.get(b"state") != b"finished" or b"delivery" not in record or not _DELIVERED.issuperset(ends):
        return None
    spec = dispatcher.decode(request_id, record, partial(GenerationSpec.from_record, request_id, model.vocab_size))
    if hold is not None:
        hold(dispatcher.decode(request_id, record, partial(answer_bytes, spec)))
    stream = RequestStream(request_id, spec.choices)
    records = await dispatcher.prompt_logprobs(request_id, len(spec.prompts)) if spec.prompt_wanted else []
    generation = Generation(spec, model, stream, _SilentCommands(records), _UNCOUNTED, time.monotonic())
    await dispatcher.read(stream)
    if not stream.is_done:  # it expired just now
        return None
    if stream.failure is not None:
        raise stream.failure
    form = _form_of(request_id, forms)
    answer = answer_body(generation, model.fingerprint) if form is None else form.make_body(generation)
    if sum(stream.received_tokens) > THREAD_TOKENS:
        return await asyncio.to_thread(asyncio.run, answer)
    return await answer


def _form_of(request_id: str, forms: Mapping[str, Form]) -> Form | None:
    matches = (form for kind, form in forms.items() if request_id.startswith(ids.ENDPOINTS[kind].id_prefix))
    return next(matches, None)


class _SilentCommands:
    """Commands of a generation that repeats a finished request: none is sent."""

    def __init__(self, records: list[bytes]) -> None:
        """records: of the log-probabilities of each prompt."""
        self._records = records

    async def prompt_logprobs(self, request_id: str, prompts: int) -> list[bytes]:
        return self._records

    def stop_choice(self, request_id: str, choice: int, at_token: int, on_written: Callable[[], None]) -> None:
        on_written()

    def close(self, stream: RequestStream, cancel_reason: str = "") -> None: ...

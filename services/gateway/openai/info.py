"""Everything but generation: models, tokens, requests by id, health, version, metrics."""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.errors import ApiError, invalid
from services.gateway.gateway import Gateway, unknown_request
from services.gateway.openai.bodies import DetokenizeBody, TokenizeBody
from services.gateway.openai.completions import json_response, read_body
from services.gateway.openai.document import body_of, errors
from services.gateway.openai.response import result, status
from services.gateway.openai.validate import THREAD_TOKENS, check_model, decode, encode_messages, encode_text

VERSION = metadata.version("orcinus")

_STATUS = {"description": "what was found", "content": {"application/json": {"schema": {"type": "object"}}}}
_NOT_WELL = {"description": "not so; `reason` says why", "content": _STATUS["content"]}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()
    served = gateway.settings.served_model_name

    def model_card() -> dict[str, Any]:
        limits = gateway.cluster.limits
        return {
            "id": served,
            "object": "model",
            "created": gateway.started_s,
            "owned_by": "orcinus",
            "max_model_len": limits.max_model_len,
        }

    @routes.get("/v1/models", responses={200: _STATUS, **errors()})
    async def models() -> Response:
        """The served model."""
        return json_response({"object": "list", "data": [model_card()]})

    @routes.get("/v1/models/{model_id:path}", responses={200: _STATUS, **errors(404)})
    async def model(model_id: str) -> Response:
        """One model."""
        check_model(model_id, served)
        return json_response(model_card())

    @routes.post("/tokenize", responses={200: _STATUS, **errors(404, 415)}, openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        body = await read_body(request, TokenizeBody)
        check_model(body.model, served)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "send either prompt or messages")
        limits = gateway.cluster.limits
        if body.messages is not None:
            if body.add_special_tokens:
                raise invalid(
                    "add_special_tokens", "add_special_tokens is for prompt only; a chat template adds its own"
                )
            generation = body.add_generation_prompt is not False
            tokens = await encode_messages(body.messages, gateway.model, limits, generation)
        else:
            if body.add_generation_prompt is not None:
                raise invalid("add_generation_prompt", "add_generation_prompt is for messages only")
            tokens = await encode_text(body.prompt or "", gateway.model, limits, body.add_special_tokens is not False)
        answer = {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            many = len(tokens) > THREAD_TOKENS
            strings = gateway.model.tokens
            answer["token_strs"] = await asyncio.to_thread(strings, tokens) if many else strings(tokens)
        return json_response(answer)

    @routes.post("/detokenize", responses={200: _STATUS, **errors(404, 415)}, openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeBody)
        check_model(body.model, served)
        size = gateway.model.vocab_size
        if max(body.tokens, default=0) >= size:
            index = next(index for index, token in enumerate(body.tokens) if token >= size)
            raise invalid(
                "tokens", f"tokens[{index}] must be a token id from 0 to {size - 1}; got {body.tokens[index]}"
            )
        (text,) = await decode([body.tokens], gateway.model, bool(body.skip_special_tokens))
        return json_response({"prompt": text})

    @routes.get("/v1/requests/{request_id}", responses={200: _STATUS, **errors(404, 503)})
    async def request_status(request_id: str, request: Request) -> Response:
        """What became of a request; kept for five minutes after its end, with its answer."""
        record = await gateway.dispatcher.raw_record(request_id)
        if record.get(b"tenant", b"").decode() != request.state.tenant:
            raise unknown_request(request_id)
        answer = await result(request_id, record, gateway.dispatcher, gateway.model)
        return json_response(status(request_id, record) | ({"result": answer} if answer else {}))

    @routes.delete("/v1/requests/{request_id}", responses={200: _STATUS, **errors(404, 503)})
    async def cancel_request(request_id: str, request: Request) -> Response:
        """Cancels a request, wherever it is."""
        verdict = await gateway.dispatcher.cancel_for(request_id, request.state.tenant)
        if verdict in ("unknown", "forbidden"):
            raise unknown_request(request_id)
        return json_response({"id": request_id, "object": "request", "cancelled": verdict != "finished"})

    @routes.get("/health", responses={200: _STATUS, **errors()})
    @routes.get("/health/live", responses={200: _STATUS, **errors()})
    async def live() -> Response:
        """This process answers."""
        return json_response({"status": "live"})

    @routes.get("/ready", responses={200: _STATUS, 503: _NOT_WELL, **errors()})
    @routes.get("/health/ready", responses={200: _STATUS, 503: _NOT_WELL, **errors()})
    async def ready() -> Response:
        """New work would be served."""
        return _health("ready", gateway.reason_not_ready())

    @routes.get("/health/progress", responses={200: _STATUS, 503: _NOT_WELL, **errors()})
    async def progress() -> Response:
        """Work moves, or there is none."""
        return _health("moving", gateway.reason_stalled())

    @routes.get("/version", responses={200: _STATUS, **errors()})
    async def version() -> Response:
        """The version of this gateway."""
        return json_response({"version": VERSION})

    return routes


def ops_router(gateway: Gateway, on_public_port: bool) -> APIRouter:
    """`/metrics` and `/stats`; on the public port only where a key protects them."""
    routes = APIRouter()

    def guard() -> None:
        if on_public_port and not gateway.keyring.needed:
            raise ApiError(
                404,
                f"without a key this is only on the ops port, http://{gateway.settings.ops_host}:{gateway.settings.ops_port}",
                code="ops_port_only",
            )

    @routes.get("/metrics", include_in_schema=not on_public_port)
    async def metrics() -> Response:
        """Prometheus metrics of this gateway, and of the other processes behind its port."""
        guard()
        siblings = gateway.siblings
        text = gateway.metrics.text() if siblings is None else await siblings.metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/stats", include_in_schema=not on_public_port)
    async def stats() -> Response:
        """What this gateway knows of the stack."""
        guard()
        snapshot, siblings = gateway.cluster.snapshot, gateway.siblings
        return json_response(
            {
                "gateway": gateway.state(),
                **({"processes": await siblings.states()} if siblings is not None else {}),
                "redis": {
                    "error": gateway.cluster.redis_error or None,
                    "memory_used_bytes": snapshot.memory_used if snapshot else None,
                    "memory_most_bytes": snapshot.memory_most if snapshot else None,
                },
                "queue": snapshot.queue if snapshot else {},
                "leases": sorted(snapshot.leases) if snapshot else [],
                "shards": snapshot.stats if snapshot else {},
                "workers": list(snapshot.workers.values()) if snapshot else [],
            }
        )

    return routes


def _health(well: str, reason: str) -> Response:
    return (
        json_response({"status": f"not {well}", "reason": reason}, 503) if reason else json_response({"status": well})
    )

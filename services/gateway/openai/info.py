"""Serve what clients and operators ask about the server: models, version, health, metrics, statistics."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.gateway.adapters import AdapterRecord
from services.gateway.auth import Caller, require_operator
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.models import State
from services.gateway.openai.answers import json_response
from services.gateway.openai.document import FOUND, errors

VERSION = metadata.version("orcinus")

_NOT_WELL = {"description": "not so; `reason` says why", "content": FOUND["content"]}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()

    def adapter_card(base: str, name: str, record: AdapterRecord) -> dict[str, Any]:
        more = {"parent": base, "root": record.path, "aliases": []}
        return model_card(base) | _card(name, record.created_s) | more

    def model_card(name: str) -> dict[str, Any]:
        card: dict[str, Any] = {
            **_card(name, gateway.started_at),
            "owned_by": "orcinus",
            "state": gateway.models.state(name),
            "aliases": list(gateway.models.aliases(name)),
        }
        if (model := gateway.models.open.get(name)) is not None:  # the files of another one were not read
            # What is pooled counts as a token.
            card["max_model_len"] = model.cluster.limits.max_model_len - model.text.is_encoder
            card["tasks"] = list(model.text.tasks)
        return card

    @routes.get("/v1/models", responses={200: FOUND, **errors()})
    async def models(request: Request) -> Response:
        """List the models that the key is for, with their states."""
        caller: Caller = request.state.caller
        names = [name for name in gateway.models.names() if caller.may_use(name)]
        cards = [model_card(name) for name in names]
        adapters = await gateway.models.adapters(caller)
        cards += [adapter_card(base, name, record) for name, (base, record) in adapters.items()]
        ids = [card["id"] for card in cards] or [None]
        page = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
        return json_response({"object": "list", "data": cards, **page})

    @routes.get("/v1/models/{model_id:path}", responses={200: FOUND, **errors(404)})
    async def model(model_id: str, request: Request) -> Response:
        """Return one model by its name or an alias, or an adapter."""
        caller: Caller = request.state.caller
        if not gateway.models.has(model_id):
            adapters = await gateway.models.adapters(caller)
            if model_id in adapters:
                base, record = adapters[model_id]
                return json_response(adapter_card(base, model_id, record))
        name = gateway.models.resolve(model_id)
        if not name or not caller.may_use(name):
            raise gateway.models.unknown(model_id, caller)
        return json_response(model_card(name))

    @routes.get("/health", responses={200: FOUND, **errors()})
    @routes.get("/health/live", responses={200: FOUND, **errors()})
    async def live() -> Response:
        """Answer that the process runs."""
        return json_response({"status": "live"})

    @routes.get("/ready", responses={200: FOUND, 503: _NOT_WELL, **errors()})
    @routes.get("/health/ready", responses={200: FOUND, 503: _NOT_WELL, **errors()})
    async def ready(request: Request) -> Response:
        """Return whether a model would serve new work, and the states of the models that the caller may know."""
        states: dict[str, State] = {}
        with contextlib.suppress(ApiError):  # the route needs no key: without one that is good there are no names
            caller = gateway.keyring.identify(request.headers.get("authorization"), request.headers.get("x-api-key"))
            states = {name: state for name, state in gateway.models.states().items() if caller.may_use(name)}
        return _health("ready", gateway.reason_not_ready(), **({"models": states} if states else {}))

    @routes.get("/health/progress", responses={200: FOUND, 503: _NOT_WELL, **errors()})
    async def progress() -> Response:
        """Return whether work moves, or there is none."""
        return _health("moving", gateway.reason_stalled())

    @routes.get("/version", responses={200: FOUND, **errors()})
    async def version() -> Response:
        """Return the version of this gateway."""
        return json_response({"version": VERSION})

    return routes


def ops_router(gateway: Gateway, on_public_port: bool) -> APIRouter:
    """Return the routes of `/metrics` and `/stats`; where a port needs a key, one with the scope ops."""
    routes = APIRouter()

    def guard(request: Request) -> None:
        if on_public_port and not gateway.keyring.needs_key:
            raise ApiError(
                404,
                f"without a key this is only on the ops port, http://{gateway.settings.ops_host}:{gateway.settings.ops_port}",
                code="ops_port_only",
            )
        require_operator(request)

    @routes.get("/metrics", include_in_schema=not on_public_port)
    async def metrics(request: Request) -> Response:
        """Return Prometheus metrics of this gateway, and of the other processes behind its port."""
        guard(request)
        siblings = gateway.siblings
        text = gateway.metrics.text() if siblings is None else await siblings.metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/stats", include_in_schema=not on_public_port)
    async def stats(request: Request) -> Response:
        """Return the state of the stack as of the gateway's last look."""
        guard(request)
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


def _card(name: str, created_s: int) -> dict[str, Any]:
    """Return what every card has: OpenAI's fields, then Anthropic's."""
    created_at = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    theirs = {"type": "model", "display_name": name, "created_at": created_at, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": created_s, **theirs}


def _health(well: str, reason: str, **more: Any) -> Response:
    if reason:
        return json_response({"status": f"not {well}", "reason": reason, **more}, 503)
    return json_response({"status": well, **more})

"""Serve `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from services.gateway.auth import require_admin
from services.gateway.errors import invalid
from services.gateway.gateway import Gateway
from services.gateway.models import ServedModel
from services.gateway.openai.bodies import LoadAdapterBody, UnloadAdapterBody, read_body, served_model
from services.gateway.openai.document import body_of, errors
from shared.messages import quote

B = TypeVar("B", LoadAdapterBody, UnloadAdapterBody)

_DONE = {"description": "done", "content": {"text/plain": {"schema": {"type": "string"}}}}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()

    async def read_call(request: Request, kind: type[B]) -> tuple[ServedModel, B]:
        """Return the model and the body of a call that only operators may make. Raise ApiError."""
        require_admin(request)
        body, caller = await read_body(request, kind), request.state.caller
        if body.model is not None and not gateway.models.has(body.model):
            raise gateway.models.unknown(body.model, caller)
        return await served_model(gateway, body.model, caller), body

    @routes.post(
        "/v1/load_lora_adapter",
        responses={200: _DONE, **errors(403, 404, 415, 503)},
        openapi_extra=body_of(LoadAdapterBody),
    )
    async def load(request: Request) -> Response:
        """Load a LoRA adapter from below --adapter-dir and give it a name for `model`."""
        model, body = await read_call(request, LoadAdapterBody)
        if gateway.models.has(body.lora_name):
            text = f"lora_name: {quote(body.lora_name)} is the name or an alias of a model; choose another name"
            raise invalid("lora_name", text)
        other = gateway.models.with_adapter(body.lora_name)
        bases = [other.name] if other is not None and other is not model else []
        closed = await gateway.models.closed_with(body.lora_name)
        if bases := bases or [entry.name for entry, record in closed if not record.unloaded_s]:
            text = f"lora_name: {quote(body.lora_name)} is an adapter of {bases[0]!r}; choose another name"
            raise invalid("lora_name", text)
        if model.text.is_encoder:
            text = "lora_name: the served model is an encoder, which takes no adapters; choose another model"
            raise invalid("lora_name", text)
        await model.adapters.load(body.lora_name, body.lora_path, bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post(
        "/v1/unload_lora_adapter",
        responses={200: _DONE, **errors(403, 404, 415, 503)},
        openapi_extra=body_of(UnloadAdapterBody),
    )
    async def unload(request: Request) -> Response:
        """Take the name from a LoRA adapter; requests that have the adapter go on."""
        model, body = await read_call(request, UnloadAdapterBody)
        await model.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes

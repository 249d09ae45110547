"""Make the parts of the OpenAPI document that FastAPI cannot infer, because bodies.py parses the bodies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from services.gateway.openai.bodies import ErrorAnswer

FOUND = {"description": "what was found", "content": {"application/json": {"schema": {"type": "object"}}}}
"""The 200 of a route that answers a JSON object."""


class PlainRoute(APIRoute):
    """Call the endpoint with the request, where it takes nothing else: FastAPI would look for what to inject, which
    costs as much as the checks of a body.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if [*inspect.signature(self.endpoint).parameters] != ["request"]:
            return super().get_route_handler()
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


_REF = "#/components/schemas/{model}"
_MODELS: dict[str, type[BaseModel]] = {}
"""Bodies and errors of all routes, by the names of their schemas."""
_MEANING = {
    400: "a field is wrong; `param` names it",
    401: "no key, or a wrong one",
    403: "the key may not ask for that",
    404: "no such model, request or path",
    405: "the path does not know this method",
    408: "the request was not all there in time",
    409: "the request was cancelled",
    413: "the body is too big",
    415: "the body is not application/json",
    429: "too much waits, or a rate limit; see Retry-After",
    431: "the head is too long, or has too many fields",
    500: "the generation or the gateway failed",
    503: "not now; see Retry-After",
}


def errors(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """Return `responses` of a route: every error that it can answer, and those that any route can.

    model: the shape of all of them. It is given by reference: FastAPI would make a validator of it for each route and
    status, a tenth of the time in which a gateway starts.
    """
    content = {"application/json": {"schema": _reference(model)}}
    return {
        status: {"description": _MEANING[status], "content": content}
        for status in sorted({400, 401, 405, 408, 413, 431, 500, *statuses})
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    """Return a reference to the model's schema, which the document then holds."""
    _MODELS[model.__name__] = model
    return {"$ref": _REF.format(model=model.__name__)}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra` of a route with a body of `kind`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(kind)}}}}


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """Return the 200 of a route that answers JSON or, with `stream`, events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}, "id": {"type": "string"}}}
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": event}}
    return {200: {"description": description, "content": content}}


def install(app: FastAPI, open_paths: Collection[str]) -> None:
    """Add the schemas of bodies and errors, and the key, to the document. open_paths: paths that need no key."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            for kind in _MODELS.values():
                body_schema = kind.model_json_schema(ref_template=_REF)
                schemas.update(body_schema.pop("$defs", {}))
                schemas[kind.__name__] = body_schema
            schema["components"]["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            }
            schema["security"] = [{"key": []}, {"x_api_key": []}]
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's; a wrong parameter is a 400 here
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for path in schema["paths"].keys() & set(open_paths):
                for operation in schema["paths"][path].values():
                    operation["security"] = []
                    operation["responses"].pop("401", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]

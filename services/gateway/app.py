"""Build the public and the ops application over one Gateway: routes, what wraps them, and errors of no route.

`PageHeaders` guards the ops port, which serves pages to browsers. Without a key a port listens on loopback only, and
`OwnOrigin` guards it: a request that comes by DNS rebinding has the attacker's host name in `Host`, one that a foreign
page sends has that page's `Origin`, and both are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.anthropic import batches as message_batches
from services.gateway.anthropic import messages
from services.gateway.auth import OPEN_PATHS, OwnOrigin, RequireKey
from services.gateway.dashboard import routes as dashboard
from services.gateway.errors import ApiError, invalid
from services.gateway.gateway import Gateway
from services.gateway.http.pages import PAGE_HEADERS
from services.gateway.http.protocol import BodyLimit, CutSlow, Pages, RequestContext
from services.gateway.openai import (
    adapters,
    batches,
    chat,
    completions,
    document,
    files,
    info,
    requests,
    responses,
    retrieval,
    tokenization,
)
from services.gateway.web import routes as web
from shared.messages import quote
from shared.settings import is_loopback


def public_app(gateway: Gateway) -> FastAPI:
    """Return the application that clients reach."""
    origins = _own_origin(gateway, gateway.keyring.is_open)
    app = _app(gateway, "Orcinus", needs_key=True, extra=[origins, Middleware(Pages, files=web.FILES)])
    for endpoint in (
        completions, chat, retrieval, responses, messages, message_batches, files, batches, tokenization, adapters,
        info,
    ):  # fmt: skip
        _include(app, endpoint.router(gateway))
    _include(app, requests.router(gateway, {messages.KIND: messages.FORM}))
    _include(app, info.ops_router(gateway, on_public_port=True))
    _include(app, dashboard.router(gateway, on_public_port=True))
    document.install(app, OPEN_PATHS)
    gateway.batches.app = _lines_app(gateway)
    return app


def _lines_app(gateway: Gateway) -> FastAPI:
    """Return the application that answers the lines of batches: handlers alone, behind no server."""
    app = FastAPI(openapi_url=None, exception_handlers=EXCEPTION_HANDLERS)
    for endpoint in (completions, chat, retrieval, responses, messages):
        app.include_router(endpoint.router(gateway))
    return app


def ops_app(gateway: Gateway) -> FastAPI:
    """Return the application that operators reach, on a separate port; beyond loopback it needs a key, too."""
    settings = gateway.settings
    open_here = is_loopback(settings.ops_host)
    guards = [Middleware(PageHeaders), _own_origin(gateway, lambda: open_here)]
    app = _app(gateway, "Orcinus ops", not open_here, guards)
    _include(app, info.ops_router(gateway, on_public_port=False))
    _include(app, dashboard.router(gateway, on_public_port=False))
    return app


def _own_origin(gateway: Gateway, is_open: Callable[[], bool]) -> Middleware:
    """Return the guard of a port. is_open: whether it needs no key now."""
    names = [name.strip().lower() for name in gateway.settings.ops_names.split(",") if name.strip()]
    return Middleware(OwnOrigin, names=names, is_open=is_open)


def _include(app: FastAPI, router: APIRouter) -> None:
    app.include_router(router)
    app.state.routes = [*getattr(app.state, "routes", app.routes[:-1]), *router.routes]  # flat, for _allowed_methods


def _app(gateway: Gateway, title: str, needs_key: bool, extra: Sequence[Middleware] = ()) -> FastAPI:
    middleware = [
        Middleware(CutSlow, seconds=gateway.settings.client_write_s, metrics=gateway.metrics),
        Middleware(
            RequestContext,
            metrics=gateway.metrics,
            pages=web.FILES,
            request_log=gateway.settings.request_log,
        ),
        *extra,
        *(
            [Middleware(RequireKey, keyring=gateway.keyring, open_paths={*OPEN_PATHS, *dashboard.FILES})]
            if needs_key
            else []
        ),
        Middleware(
            BodyLimit,
            most_bytes=gateway.settings.max_body_bytes,
            larger={files.PATH: _upload_bytes(gateway)},
            hold=gateway.bodies.hold,
        ),
    ]
    return FastAPI(
        title=title,
        version=info.VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        exception_handlers=EXCEPTION_HANDLERS,
    )


def _upload_bytes(gateway: Gateway) -> int:
    """Return the most bytes of an upload: of the file and of the form around it."""
    return max(gateway.settings.max_body_bytes, gateway.settings.file_bytes + files.FORM_BYTES)


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    request.state.error_code = error.code  # for the lines of batches
    return Response(error.json(request.scope["path"]), error.status, error.headers, media_type="application/json")


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of the routes with exactly this path, or else of all routes that match it.

    starlette names only the methods of the first route that matches.
    """
    routes = [
        route
        for route in request.app.state.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    exact = [route for route in routes if route.path == request.scope["path"]]
    return sorted({method for route in exact or routes for method in route.methods or ()})


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        path = request.scope["path"][:200]
        paths = {route.path for route in request.app.state.routes if isinstance(route, Route)}
        remedy = "/openapi.json lists all paths"
        if f"/v1{path}" in paths:
            remedy = f"the API's base address ends with /v1: /v1{path}"
        refusal = ApiError(404, f"unknown path {path}; {remedy}", code="unknown_path")
    elif error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request))
        text = f"method {request.method} not allowed on {request.scope['path'][:200]}; allowed: {allowed}"
        refusal = ApiError(405, text, code="method_not_allowed", headers={"Allow": allowed})
        return await _api_error(request, refusal)
    else:
        refusal = ApiError(error.status_code, str(error.detail))
    refusal.headers.update(error.headers or {})
    return await _api_error(request, refusal)


async def _query_error(request: Request, error: RequestValidationError) -> Response:
    """Refuse a parameter of the address, as `bodies.py` does with a field of a body."""
    first = error.errors()[0]
    name = str(first["loc"][-1])
    refusal = invalid(name, f"Invalid value for '{name}': {first['msg']}; got {quote(first.get('input'))}")
    return await _api_error(request, refusal)


EXCEPTION_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    ApiError: _api_error,
    HTTPException: _http_error,
    RequestValidationError: _query_error,
}


class PageHeaders:
    """Add PAGE_HEADERS to every answer that has not set them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in PAGE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_stamped if scope["type"] == "http" else send)

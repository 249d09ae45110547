"""The public and the ops application over one Gateway."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Match, Route

from services.gateway.dashboard import routes as dashboard
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.http.middleware import (
    OPEN_PATHS,
    BodyLimit,
    CutSlow,
    HostNames,
    PageHeaders,
    RequestContext,
    RequireKey,
)
from services.gateway.openai import completions as routes_generate
from services.gateway.openai import document as schema
from services.gateway.openai import info as routes_info
from services.gateway.openai import responses as routes_responses
from services.gateway.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from services.gateway.openai.responses import ResponsesBody
from shared.settings import is_loopback

BODIES = (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, DetokenizeBody)


def public_app(gateway: Gateway) -> FastAPI:
    """Return the application that clients reach."""
    routers = (
        routes_generate.router(gateway),
        routes_responses.router(gateway),
        routes_info.router(gateway),
        routes_info.ops_router(gateway, on_public_port=True),
    )
    app = _app(gateway, "Orcinus", needs_key=True)
    for router in routers:
        _include(app, router)
    schema.install(app, BODIES, OPEN_PATHS)
    return app


def ops_app(gateway: Gateway) -> FastAPI:
    """Return the application that operators reach, on a separate port; beyond loopback it needs a key, too."""
    settings = gateway.settings
    open_here = is_loopback(settings.ops_host)
    names = [name.strip().lower() for name in settings.ops_names.split(",") if name.strip()]
    guards = [Middleware(PageHeaders), *([Middleware(HostNames, names=names)] if open_here else [])]
    app = _app(gateway, "Orcinus ops", not open_here, guards)
    _include(app, routes_info.ops_router(gateway, on_public_port=False))
    _include(app, dashboard.router(gateway))
    return app


def _include(app: FastAPI, router: APIRouter) -> None:
    app.include_router(router)
    app.state.routes = [*getattr(app.state, "routes", app.routes[:-1]), *router.routes]  # flat, for _allowed


def _app(gateway: Gateway, title: str, needs_key: bool, more: Sequence[Middleware] = ()) -> FastAPI:
    middleware = [
        Middleware(CutSlow, seconds=gateway.settings.client_write_s, metrics=gateway.metrics),
        Middleware(RequestContext, metrics=gateway.metrics, pages={*dashboard.FILES, dashboard.EVENTS}),
        *more,
        *(
            [Middleware(RequireKey, keyring=gateway.keyring, open_paths={*OPEN_PATHS, *dashboard.FILES})]
            if needs_key
            else []
        ),
        Middleware(BodyLimit, most_bytes=gateway.settings.max_body_bytes),
    ]
    return FastAPI(
        title=title,
        version=routes_info.VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )


async def _api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return Response(error.json(), error.status, error.headers, media_type="application/json")


def _allowed(request: Request) -> list[str]:
    """Methods of all routes over the path; starlette names the first route's only."""
    found: set[str] = set()
    for route in request.app.state.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        found = ApiError(
            404, f"unknown path {request.url.path[:200]}; /openapi.json lists all paths", code="unknown_path"
        )
    elif error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        text = f"method {request.method} not allowed on {request.url.path[:200]}; allowed: {allowed}"
        found = ApiError(405, text, code="method_not_allowed", headers={"Allow": allowed})
        return await _api_error(request, found)
    else:
        found = ApiError(error.status_code, str(error.detail))
    found.headers.update(error.headers or {})
    return await _api_error(request, found)

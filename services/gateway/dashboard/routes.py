"""Serve the live page and its events: on the ops port, and where a key protects them on the API port as well.

The files need no key, since they hold no figure; the events do. Without a key, `/dashboard` of the API port leads to
the ops port: both listen on loopback then.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway.auth import require_operator
from services.gateway.dashboard.feed import Feed, Viewer
from services.gateway.errors import ApiError, shutting_down
from services.gateway.gateway import Gateway
from services.gateway.http.pages import PAGE_HEADERS, page
from services.gateway.openai.answers import until_disconnect
from shared.settings import is_loopback
from shared.tasks import end
from shared.telemetry.stack_view import HISTORY_S, LONGEST_S

_HERE = Path(__file__).parent
FILES = {
    "/dashboard": "page.html",
    "/dashboard/page.css": "page.css",
    "/dashboard/page.js": "page.js",
    "/dashboard/charts.js": "charts.js",
    "/dashboard/feed.js": "feed.js",
    "/dashboard/format.js": "format.js",
    "/dashboard/replicas.js": "replicas.js",
    "/dashboard/icon.svg": "icon.svg",
    "/dashboard/uPlot.js": "vendor/uPlot.iife.min.js",
    "/dashboard/uPlot.css": "vendor/uPlot.min.css",
}
"""Path -> file."""

EVENTS = "/dashboard/events"
PAST = "/dashboard/history"


def router(gateway: Gateway, on_public_port: bool) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()
    feed = Feed(gateway.settings, gateway.id)

    async def file(request: Request) -> Response:
        if on_public_port and not gateway.keyring.needs_key:
            return _to_ops_port(gateway, request)
        return page(_HERE / FILES[request.url.path])

    for path in FILES:
        shown = path == "/dashboard" and not on_public_port
        routes.add_api_route(path, file, methods=["GET"], include_in_schema=shown)

    @routes.get(EVENTS, include_in_schema=not on_public_port)
    async def events(request: Request) -> Response:
        """Send what the page shows, as server-sent events: `past` once, `now` each second."""
        if on_public_port and not gateway.keyring.needs_key:
            return _to_ops_port(gateway, request)
        require_operator(request)
        if gateway.is_draining:
            raise shutting_down()
        return _Events(gateway, feed, feed.enter())

    @routes.get(PAST, include_in_schema=not on_public_port)
    async def history(
        request: Request, seconds: Annotated[int, Query(ge=1, le=LONGEST_S, description="how far back")] = HISTORY_S
    ) -> Response:
        """Return the columns of the page's charts by shard, at most about 600 rows, for a longer range of time."""
        if on_public_port and not gateway.keyring.needs_key:
            return _to_ops_port(gateway, request)
        require_operator(request)
        return Response(
            await feed.history(seconds), headers={"Cache-Control": "no-store"}, media_type="application/json"
        )

    return routes


def _to_ops_port(gateway: Gateway, request: Request) -> Response:
    """Redirect a browser on this machine to the page of the ops port. Raise ApiError(404) for any other request."""
    settings = gateway.settings
    host = request.url.hostname or ""
    if request.url.path == "/dashboard" and is_loopback(host) and is_loopback(settings.ops_host):
        name = host if host == "localhost" else settings.ops_host
        url = request.url.replace(hostname=name, port=settings.ops_port)
        return RedirectResponse(str(url), 307, PAGE_HEADERS)
    address = f"http://{settings.ops_host}:{settings.ops_port}"
    raise ApiError(404, f"without a key this is only on the ops port, {address}", code="ops_port_only")


class _Events(Response):
    """Send events until the viewer leaves, also between two events, or the gateway stops."""

    media_type = "text/event-stream"

    def __init__(self, gateway: Gateway, feed: Feed, viewer: Viewer) -> None:
        self.status_code = 200
        self.background = None
        self._gateway = gateway
        self._feed = feed
        self._viewer = viewer
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write_task = asyncio.create_task(self._write(send))
        disconnect_task = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait({write_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(write_task, disconnect_task)
            await self._feed.leave(self._viewer)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not self._gateway.is_draining:
            await send({"type": "http.response.body", "body": await self._viewer.take(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

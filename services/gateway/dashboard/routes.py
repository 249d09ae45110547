"""Serve the live page and its events, on the ops port alone.

The files need no key, since they hold no figure; the events do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.dashboard.feed import Feed, Viewer
from services.gateway.errors import unavailable
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import until_disconnect
from shared.tasks import end

_HERE = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
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
"""Path on the ops port -> file."""

EVENTS = "/dashboard/events"


def page(path: str) -> Response:
    """Return the file behind a path of FILES."""
    file = _HERE / FILES[path]
    return Response(file.read_bytes(), media_type=_TYPES[file.suffix])


def router(gateway: Gateway) -> APIRouter:
    """Return the routes over one gateway."""
    routes = APIRouter()
    feed = Feed(gateway.settings)

    async def file(request: Request) -> Response:
        return page(request.url.path)

    for path in FILES:
        routes.add_api_route(path, file, methods=["GET"], include_in_schema=path == "/dashboard")

    @routes.get(EVENTS)
    async def events() -> Response:
        """Send what the page shows, as server-sent events: `past` once, `now` each second."""
        if gateway.draining:
            raise unavailable("the gateway is shutting down", "shutting_down", 5)
        return _Events(gateway, feed, feed.enter())

    return routes


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
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(writing, leaving)
            await self._feed.leave(self._viewer)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not self._gateway.draining:
            await send({"type": "http.response.body", "body": await self._viewer.take(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

"""The live page and its events, on the ops port alone."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.dashboard import pages
from services.gateway.dashboard.feed import Feed, Viewer
from services.gateway.errors import unavailable
from services.gateway.gateway import Gateway
from services.gateway.openai.sse import until_disconnect
from shared.tasks import end


def router(gateway: Gateway) -> APIRouter:
    """The routes over one gateway."""
    routes = APIRouter()
    feed = Feed(gateway.settings)

    async def file(request: Request) -> Response:
        return pages.page(request.url.path)

    for path in pages.FILES:
        routes.add_api_route(path, file, methods=["GET"], include_in_schema=path == "/dashboard")

    @routes.get(pages.EVENTS)
    async def events() -> Response:
        """What the page shows, as server-sent events: `past` once, `now` each second."""
        if gateway.draining:
            raise unavailable("the gateway is shutting down", "shutting_down", 5)
        return _Events(gateway, feed, feed.enter())

    return routes


class _Events(Response):
    """Ends when the viewer has gone, also between two events, and when the gateway stops."""

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

"""Cuts connections whose client takes nothing: all that is written has a time limit, events, comments, whole answers.

What is behind that write hears of it as of a connection that broke.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.metrics import Metrics

log = logging.getLogger("orcinus.gateway")


class CutSlow:
    """Pure ASGI, around everything else."""

    def __init__(self, app: ASGIApp, seconds: float, metrics: Metrics) -> None:
        """seconds: in which a write has to find room in the connection's buffer."""
        self._app = app
        self._seconds = seconds
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        own = scope.get("extensions", {})

        async def bounded(message: Message) -> None:
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)  # waits for what was written before
                    if not message.get("more_body") and (drain := own.get("orcinus.drain")):
                        await drain["call"]()
            except TimeoutError:
                log.info("a client of %s took nothing for %.0f s and was cut", scope["path"][:80], self._seconds)
                self._metrics.slow_clients.inc()
                if abort := own.get("orcinus.abort"):
                    abort["call"]()

        await self._app(scope, receive, bounded)

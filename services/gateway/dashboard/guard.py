"""Middleware of the ops port, whose pages a browser shows: headers that confine them, names by which it may be asked.

Without a key the port listens on loopback only. A page of the web cannot ask it either: a browser that was led here by
a name of the attacker's own (DNS rebinding) says that name in `Host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import ApiError
from services.gateway.http.middleware import send_error

PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class PageHeaders:
    """Adds PAGE_HEADERS to every answer that has not set its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in PAGE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, stamped if scope["type"] == "http" else send)


class HostNames:
    """403 unless `Host` is an address, localhost or one of `names`."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset({"localhost", *names})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._known(Headers(scope=scope).get("host", "")):
            text = "the ops port is asked by an address, as localhost, or by a name of ORCINUS_OPS_NAMES"
            await send_error(ApiError(403, text, code="host_not_allowed"), send)
            return
        await self._app(scope, receive, send)

    def _known(self, host: str) -> bool:
        name = host.lower()
        if not name.endswith("]"):
            head, colon, port = name.rpartition(":")
            name = head if colon and port.isdecimal() else name
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

"""Wrap every request, in pure ASGI: id, key, size of the body, time limit of writes, a last catch for errors.

No BaseHTTPMiddleware: it hides disconnects from handlers and costs a task per request. `PageHeaders` and `HostNames`
guard the ops port, whose pages a browser shows: without a key it listens on loopback only, and a page of the web that
was reached by DNS rebinding names the attacker's host in `Host`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.auth import Keyring
from services.gateway.errors import ApiError, too_big
from services.gateway.metrics import Metrics

log = logging.getLogger("orcinus.gateway")

OPEN_PATHS = frozenset({"/health", "/ready", "/health/live", "/health/ready", "/health/progress"})
_COUNTED = OPEN_PATHS | {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize", "/version",
    "/metrics", "/stats", "/openapi.json",
}  # fmt: skip
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


async def send_error(error: ApiError, send: Send) -> None:
    """Send a whole error response in OpenAI's shape."""
    body = error.json()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequestContext:
    """Outermost: x-request-id in and out, the count of answers, errors that no handler caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics, pages: Collection[str] = ()) -> None:
        """pages: paths of the live page, counted by name."""
        self._app = app
        self._metrics = metrics
        self._counted = _COUNTED.union(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self._app(scope, receive, stamped)
        except ClientDisconnect:  # before its request was all there
            pass
        except Exception:
            log.exception("request %s failed", request_id)
            if status == 0:
                await send_error(
                    ApiError(500, "internal error; see the log of the gateway", code="internal_error"), stamped
                )
        finally:
            endpoint = self._endpoint(scope["path"])
            self._metrics.answers.labels(endpoint, str(status or 499)).inc()

    def _endpoint(self, path: str) -> str:
        """Return a label of bounded variety."""
        if path in self._counted:
            return path
        for prefix in ("/v1/models/", "/v1/requests/", "/v1/responses/"):
            if path.startswith(prefix):
                return prefix + "{id}"
        return "other"


class RequireKey:
    """Require a key on every path but `open_paths`; a gateway without configured keys requires none."""

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: Collection[str]) -> None:
        self._app = app
        self._keyring = keyring
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._keyring.identify(Headers(scope=scope).get("authorization"))
        except ApiError as error:
            await send_error(error, send)
            return
        scope["state"]["caller"] = caller
        scope["state"]["tenant"] = caller.tenant
        await self._app(scope, receive, send)


class BodyLimit:
    """413 for bodies over the limit, by their header or, chunked, while they come in."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._most_bytes:
            await send_error(too_big(self._most_bytes, f"{declared} bytes"), send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._most_bytes:
                    raise too_big(self._most_bytes, "more")
            return message

        await self._app(scope, counted, send)


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

        extensions = scope.get("extensions", {})

        async def bounded(message: Message) -> None:
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)  # waits for what was written before
                    if not message.get("more_body") and (drain := extensions.get("orcinus.drain")):
                        await drain["call"]()
            except TimeoutError:
                log.info("client of %s read nothing for %.0f s; connection closed", scope["path"][:80], self._seconds)
                self._metrics.slow_clients.inc()
                if abort := extensions.get("orcinus.abort"):
                    abort["call"]()

        await self._app(scope, receive, bounded)


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
    """Add PAGE_HEADERS to every answer that has not set its own."""

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
            text = "host not allowed on the ops port; use an IP address, localhost or a name in ORCINUS_OPS_NAMES"
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

"""What every request passes, in pure ASGI: id, key, size of the body, and a last catch for errors.

No BaseHTTPMiddleware: it hides disconnects from handlers and costs a task per request.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.dashboard import pages
from services.gateway.errors import ApiError, too_big
from services.gateway.gateway import Gateway

log = logging.getLogger("orcinus.gateway")

OPEN_PATHS = frozenset({"/health", "/ready", "/health/live", "/health/ready", "/health/progress", *pages.FILES})
_COUNTED = OPEN_PATHS | {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize", "/version",
    "/metrics", "/stats", "/openapi.json", pages.EVENTS,
}  # fmt: skip
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


async def send_error(error: ApiError, send: Send) -> None:
    """A whole answer in OpenAI's shape."""
    body = error.json()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequestContext:
    """Outermost: x-request-id in and out, the count of answers, errors that nobody caught."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

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
                await send_error(ApiError(500, "the gateway failed; its log says more", code="internal_error"), stamped)
        finally:
            endpoint = _endpoint(scope["path"])
            self._gateway.metrics.answers.labels(endpoint, str(status or 499)).inc()


class RequireKey:
    """Every path needs a key but those of OPEN_PATHS; without configured keys none is asked for."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._gateway.keyring.identify(Headers(scope=scope).get("authorization"))
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


def _endpoint(path: str) -> str:
    """A label of bounded variety."""
    if path in _COUNTED:
        return path
    for prefix in ("/v1/models/", "/v1/requests/", "/v1/responses/"):
        if path.startswith(prefix):
            return prefix + "{id}"
    return "other"

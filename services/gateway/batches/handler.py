"""Send the line of a batch through the handlers of the API, as if it had come over HTTP from its owner."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from services.gateway.auth import Caller
from services.gateway.errors import ApiError
from services.gateway.request import ARRIVAL, Arrival


@dataclass(slots=True)
class Exchange:
    """One request and its answer."""

    caller: Caller
    path: str
    content: bytes
    name: str  # Idempotency-Key: the same line is the same request at every gateway
    custom_id: str
    status: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    _headers: Headers = field(default_factory=Headers)
    _parts: list[bytes] = field(default_factory=list)
    _is_sent: bool = False

    async def run(self, app: ASGIApp) -> None:
        """Send the request and read its answer. A cancellation leaves the request in the queue, under its name."""
        ARRIVAL.set(Arrival.of({}, b"", self.caller, time.monotonic()))
        self.state |= {"caller": self.caller, "tenant": self.caller.tenant}
        headers = [(b"content-type", b"application/json"), (b"idempotency-key", self.name.encode("ascii"))]
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": self.path, "raw_path": self.path.encode(), "root_path": "", "query_string": b"",
            "headers": headers, "client": None, "server": None, "state": self.state,
        }  # fmt: skip
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._is_sent:
            await asyncio.Event().wait()  # the owner of a line never leaves
        self._is_sent = True
        return {"type": "http.request", "body": self.content, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = Headers(raw=message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def fail(self) -> None:
        """Answer in place of a handler that broke."""
        error = ApiError(500, "internal error; see the log of the gateway", code="internal_error")
        self.status, self._headers, self._parts = error.status, Headers(), [error.json(self.path)]

    @property
    def request_id(self) -> str:
        """Return the id under which the request ran; empty for one that was refused before it had one."""
        spec = self.state.get("spec")
        return "" if spec is None else str(spec.id)

    @property
    def retry_after_s(self) -> float:
        """Return the seconds in Retry-After; 0 without it."""
        text = self._headers.get("retry-after", "")
        return float(text) if text.isdecimal() else 0.0

    def body(self) -> Any:
        """Return the body of the answer."""
        return orjson.loads(b"".join(self._parts))

    @property
    def error_code(self) -> str:
        """Return the code of an error; empty for an answer."""
        if self.status < 400:
            return ""
        if code := self.state.get("error_code"):  # errors of /v1/messages have no code
            return str(code)
        body = self.body()
        error = body.get("error") if isinstance(body, dict) else None
        return str(error.get("code") or "") if isinstance(error, dict) else ""

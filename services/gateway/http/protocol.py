"""HTTP connections of the gateway: uvicorn's protocol with bounds, and refusals in OpenAI's shape.

What is bounded here never becomes a request: how many connections there are, how long a head is, how slowly a request
comes in. The rest is bounded by the middleware.
"""

from __future__ import annotations

import asyncio
import http
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.errors import ApiError
from shared.settings import GatewaySettings

MOST_HEADERS = 100
OVER_THE_LIMIT = 256
"""Connections beyond the limit that get a 503; more are dropped without an answer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one port."""

    connections: int
    head_bytes: int
    read_timeout_s: float

    @classmethod
    def of(cls, settings: GatewaySettings) -> Bounds:
        return cls(settings.max_connections, settings.max_header_bytes, settings.read_timeout_s)


class Protocol(HttpToolsProtocol):
    """One connection. Adds to the scope ways to write without waiting, to wait until its client has read, and to drop
    it."""

    def __init__(self, bounds: Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._refusal: ApiError | None = None  # sent as soon as the client has sent something
        self._late: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None  # what is answered now, or was last
        self._in_head = True
        self._head_bytes = 0  # received since the head began, without the read in which it did
        self._past_body_bytes = 0  # received behind a head since the last byte of a body: trailers, chunk extensions
        self._held = bytearray()  # what came behind a request that waits for the answer of the one before

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self._bounds.connections
        if over > OVER_THE_LIMIT:
            transport.abort()
            return
        if over > 0:
            text = f"too many connections (limit {self._bounds.connections}); retry later"
            self._refusal = ApiError(503, text, code="too_many_connections", retry_after_s=1)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)
        # uvicorn notifies the newest request only; an older one that is still answered has to hear of it, too.
        if (answered := self._answered) is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._answer(self._refusal)
            return
        if self.pipeline:
            self._hold(data)
            return
        began_before = self._in_head
        self._past_body_bytes += 0 if began_before else len(data)
        super().data_received(data)
        if self._in_head and began_before:
            self._head_bytes += len(data)
        if max(self._head_bytes, self._past_body_bytes) > self._bounds.head_bytes and not self.transport.is_closing():
            self._answer(self._too_long())
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn paused it, and a client that leaves is noticed only while it is read

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and not self.pipeline and not self.transport.is_closing():
            held = bytes(self._held)
            self._held.clear()
            self._wait()
            self.data_received(held)

    def _hold(self, data: bytes) -> None:
        """Keep it unread until all is answered that came before; beyond the bound the client may not send on."""
        self._wait_no_more()
        self._held += data
        if len(self._held) > self._bounds.head_bytes:
            self.flow.pause_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed, or was refused during parsing."""
        self._answer(self._refusal or ApiError(400, "not a valid HTTP/1.1 request", code="invalid_http"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions = {
            "orcinus.abort": {"call": self.transport.abort},
            "orcinus.drain": {"call": self.flow.drain},
            "orcinus.has_room": {"call": self._has_room},
            "orcinus.write": {"call": self._write},
        }
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        self._in_head, self._head_bytes, self._past_body_bytes = True, 0, 0
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are not used, and their number would be unbounded
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._bounds.head_bytes or len(self.headers) > MOST_HEADERS:
            self._refusal = self._too_long()
            raise self._refusal  # the parser hands it to `send_400_response`
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._past_body_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._wait_no_more()
        super().on_message_complete()

    def _has_room(self) -> bool:
        """May `_write` be called now? Only while the connection's newest request is answered in chunks."""
        cycle = self.cycle
        return not self.flow.write_paused and bool(cycle.chunked_encoding) and not cycle.disconnected

    def _write(self, body: bytes) -> None:
        """Write a chunk of the current answer, past the middleware, which costs as much as all the rest."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def _too_long(self) -> ApiError:
        text = f"request head too large: at most {self._bounds.head_bytes} bytes and {MOST_HEADERS} fields"
        return ApiError(431, text, code="head_too_large")

    def _wait(self) -> None:
        """Start the time in which a whole request has to arrive."""
        self._wait_no_more()
        self._late = self.loop.call_later(self._bounds.read_timeout_s, self._too_late)

    def _wait_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        text = f"request incomplete after {self._bounds.read_timeout_s:g} s; send it in less time"
        self._answer(ApiError(408, text, code="request_timeout"))

    def _answer(self, error: ApiError) -> None:
        """Refuse and closes; only closes where another answer to this request is on its way, or was there already."""
        self._wait_no_more()
        if self.transport.is_closing():
            return
        cycle = self.cycle  # of the request that comes in, or of the last one that was all there
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            self.transport.write(_response(error))
        self.transport.close()


def _response(error: ApiError) -> bytes:
    body = error.json()
    head = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-content-type-options": "nosniff",
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in head.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

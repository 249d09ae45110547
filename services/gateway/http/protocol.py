"""Bound and guard every HTTP exchange: the connection, its head and body, the answer and how fast its client reads.

`Protocol` is uvicorn's, with bounds on what never becomes a request: the number of connections, the length of a head,
the time in which a request has to arrive. `RequestContext`, `BodyLimit` and `CutSlow` wrap the application, in pure
ASGI: BaseHTTPMiddleware hides disconnects from handlers and costs a task per request. Refusals are in the shape of the
API that has the path.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.auth import Caller
from services.gateway.errors import MESSAGES, ApiError, too_big
from services.gateway.http.pages import page
from services.gateway.metrics import Metrics
from shared.settings import GatewaySettings

log = logging.getLogger("orcinus.gateway")
request_log = logging.getLogger("orcinus.request")

MAX_HEADERS = 100
OVER_THE_LIMIT = 256
"""Connections beyond the limit that get a 503; more are dropped without an answer."""
FIRST_REQUEST_S = 0.5
"""Time for the first request of a connection that was made as the server stops."""
HELD_BYTES = 64 * 1024
"""Bytes of a body are counted in such pieces; the first one is not."""
PIECE_BYTES = 8192
"""Parsed at a time. Requests that follow in a piece are taken at once: up to 450, in some 10 ms."""
LINGER_S, LINGER_BYTES = 2.0, 16 << 20
"""Bounds of what is read and dropped behind a last answer. Closing on bytes that were not read resets the connection,
and a reset takes from the client the answer that it has not read (RFC 9112, section 9.6)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one port. idle: its connections between two requests, the longest idle first."""

    connections: int
    head_bytes: int
    read_timeout_s: float
    idle: OrderedDict[Protocol, None] = field(default_factory=OrderedDict, compare=False, repr=False)

    @classmethod
    def of(cls, settings: GatewaySettings) -> Bounds:
        return cls(settings.max_connections, settings.max_header_bytes, settings.read_timeout_s)


class Protocol(HttpToolsProtocol):
    """One connection. Add to the scope ways to write without waiting, to wait until the client has read, and to drop
    the connection.
    """

    scope: Any  # of the newest request, as `cycle`; None before the first one and when the connection is lost
    cycle: Any

    def __init__(self, bounds: Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self.url = b""  # uvicorn's; a refusal may come before the first request
        self._refusal: ApiError | None = None  # sent as soon as the client has sent something
        self._late: asyncio.TimerHandle | None = None
        self._cycle: RequestResponseCycle | None = None  # what is answered now, or was last
        self._in_head = True
        self._head_bytes = 0  # received since the head began, without the read in which it did
        self._past_body_bytes = 0  # received behind a head since the last byte of a body: trailers, chunk extensions
        self._buffer = bytearray()  # what came behind a request that waits for the answer of the one before
        self._is_last = False  # the server stops: the connection's first request is its last
        self._lingers = False  # the last answer is written: what comes in is dropped
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self._bounds.connections
        if excess > 0 and self._bounds.idle:
            longest, _ = self._bounds.idle.popitem(last=False)
            longest.transport.close()
        elif excess > OVER_THE_LIMIT:
            transport.abort()
            return
        elif excess > 0:
            text = f"too many connections (limit {self._bounds.connections}); retry later"
            self._refusal = ApiError(503, text, code="too_many_connections", retry_after_s=1)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._bounds.idle.pop(self, None)
        super().connection_lost(exc)
        # uvicorn notifies the newest request only; an older one that is still answered has to hear of it, too.
        if (answered := self._cycle) is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        # Without its requests it is in no reference cycle, and gone with the last of them. Else a full collection has
        # to find it, which takes a second beside thousands of requests that wait.
        self._unset_keepalive_if_required()
        self.scope = self.cycle = None
        self._cycle = None
        self.pipeline.clear()

    def shutdown(self) -> None:
        """Close once the request is answered; leave a client that has only connected time to send its first."""
        if self.cycle is not None:
            super().shutdown()
            return
        self._is_last = True
        self.loop.call_later(FIRST_REQUEST_S, self._close_unused)

    def _close_unused(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), PIECE_BYTES):
            self._take(data[begin : begin + PIECE_BYTES])

    def _take(self, data: bytes) -> None:
        self._bounds.idle.pop(self, None)
        if self._lingers:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.close()
            return
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
        if not self._in_head and self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()  # for a request behind empty lines, which begin none and end the time of an idle connection
        if max(self._head_bytes, self._past_body_bytes) > self._bounds.head_bytes and not self.transport.is_closing():
            self._answer(self._too_long())
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn paused it, and a client that leaves is noticed only while it is read

    def on_response_complete(self) -> None:
        if self._lingers:
            return
        super().on_response_complete()
        if self.pipeline or self.transport.is_closing():
            return
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            self._wait()
            self.data_received(data)
        elif self._late is None:
            self._bounds.idle[self] = None
        else:  # part of a request is there: `_too_late` ends it, and not the time for an idle connection
            self._unset_keepalive_if_required()

    def _hold(self, data: bytes) -> None:
        """Keep bytes unread until all requests before them are answered; beyond the bound, stop reading."""
        self._wait_no_more()
        self._buffer += data
        if len(self._buffer) > self._bounds.head_bytes:
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
        self.scope["extensions"] = extensions
        self._in_head, self._head_bytes, self._past_body_bytes = True, 0, 0
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are not used, and their number would be unbounded
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._bounds.head_bytes or len(self.headers) > MAX_HEADERS:
            self._refusal = self._too_long()
            raise self._refusal  # the parser hands it to `send_400_response`
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()
        if self._is_last and self.cycle is not None:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._cycle = cycle
        cycle.transport = _CycleTransport(self)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._past_body_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._wait_no_more()
        super().on_message_complete()

    def _has_room(self) -> bool:
        """Return whether `_write` may be called now: while the connection's newest request is answered in chunks."""
        cycle = self.cycle
        if cycle is None or self.flow.write_paused:  # the connection is lost, or full
            return False
        return bool(cycle.chunked_encoding) and not cycle.disconnected

    def _write(self, body: bytes) -> None:
        """Write a chunk of the current answer, past the wrappers of the application, which cost as much as the rest."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def _too_long(self) -> ApiError:
        text = f"request head too large: at most {self._bounds.head_bytes} bytes and {MAX_HEADERS} fields"
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
        """Refuse and close; only close where an answer to this request is on its way, or was written already."""
        self._wait_no_more()
        if self._lingers or self.transport.is_closing():
            return
        cycle = self.cycle  # of the request that comes in, or of the last one that was all there
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            self.transport.write(_response(error, self.url.decode("latin-1").partition("?")[0]))
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        """Send no more; close when the client has closed, or at a bound of LINGER_S and LINGER_BYTES."""
        for cycle in (self.cycle, self._cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._lingers = True
        self._unset_keepalive_if_required()
        self._wait_no_more()
        self._late = self.loop.call_later(LINGER_S, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()


class _CycleTransport(asyncio.Transport):
    """The transport as one exchange sees it: closed behind an answer, it lingers while the request is not all there."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._transport = protocol.transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        protocol = self._protocol
        cycle = protocol.cycle
        if cycle is not None and cycle.response_complete and cycle.more_body and not protocol.transport.is_closing():
            protocol.linger()
        else:
            protocol.transport.close()


def _response(error: ApiError, path: str) -> bytes:
    body = error.json(path)
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


_PARAMETER = re.compile(r"\{\w+\}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestContext:
    """Set x-request-id in and out, count and log answers, answer errors that no handler caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics, pages: Collection[str] = (), request_log: bool = False) -> None:
        """pages: paths of files, which no route has. request_log: log a line for each answer under /v1."""
        self._app = app
        self._metrics = metrics
        self._log = request_log
        self._pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        at_end: list[Callable[[], None]] = []  # called when the answer is sent, or will not be
        scope.setdefault("state", {}).update(request_id=request_id, at_end=at_end)
        status = 0
        started_at = time.monotonic()

        async def send_stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith((MESSAGES, "/v1/models")):
                    headers["request-id"] = request_id  # where Anthropic's clients look for it
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self._app(scope, receive, send_stamped)
        except ClientDisconnect:  # before its request was all there
            pass
        except Exception:
            log.exception("request %s failed", request_id)
            if status == 0:
                error = ApiError(500, "internal error; see the log of the gateway", code="internal_error")
                await error.send(send_stamped, scope["path"])
        finally:
            for each in at_end:
                each()
            endpoint = self._endpoint(scope)
            self._metrics.answers.labels(endpoint, str(status or 499)).inc()
            if self._log and scope["path"].startswith("/v1/"):
                self._write_line(scope, endpoint, status or 499, time.monotonic() - started_at)
            # Else request and connection live, in a reference cycle, until a full collection.
            scope["state"].clear()
            scope.pop("extensions", None)

    @staticmethod
    def _write_line(scope: Scope, endpoint: str, status: int, seconds: float) -> None:
        """Log one answer. Only words of bounded variety: neither the path as it came, nor text of prompt or output."""
        state = scope["state"]
        fields: dict[str, str | int | float] = {
            "request": state["request_id"],
            "method": scope["method"],
            "endpoint": endpoint,
            "status": status,
            "ms": round(1000 * seconds, 1),
        }
        if (caller := state.get("caller")) is not None:
            fields["key"] = caller.bucket
        if (spec := state.get("spec")) is not None:
            fields |= {"id": spec.id, "model": spec.model, "class": spec.priority, "prompt_tokens": spec.prompt_tokens}
        elif (arrival := state.get("arrival")) is not None:  # refused before its turn, or by the checks of its body
            fields["class"] = arrival.priority
        if (generation := state.get("generation")) is not None:
            fields["output_tokens"] = generation.usage.completion_tokens
        request_log.info(" ".join(f"{name}={value}" for name, value in fields.items()), extra={"fields": fields})

    def _endpoint(self, scope: Scope) -> str:
        """Return the path of the route, or of the page: a label of bounded variety."""
        path = scope["path"]
        if path in self._pages:
            return str(path)
        for route in scope["app"].state.routes:
            if isinstance(route, Route) and route.path_regex.match(path):
                return _PARAMETER.sub("{id}", route.path_format)
        return "other"


class Pages:
    """Answer GET and HEAD of the files of pages; pass everything else on.

    `/` is a page for a client that accepts HTML, as browsers do. Any other client gets from `/` what an unknown path
    answers.
    """

    def __init__(self, app: ASGIApp, files: Mapping[str, Path]) -> None:
        """files: by path."""
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = (
            self._files.get(scope["path"]) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        )
        if file is None or (scope["path"] == "/" and "text/html" not in Headers(scope=scope).get("accept", "")):
            await self._app(scope, receive, send)
            return
        answer = page(file)
        if scope["path"] == "/":
            answer.headers["vary"] = "Accept"
        await answer(scope, receive, send)


Hold = Callable[[Caller, int, int], Callable[[], None]]
"""Count bytes of a caller until what is returned is called; the last number: those held for the same request. Raise
ApiError(429, 503).
"""


class BodyLimit:
    """Answer 413 to bodies over the limit, by their header or, chunked, while they come in; 429 or 503 where too many
    bytes are held of bodies that are not all there.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, larger: Mapping[str, int], hold: Hold) -> None:
        """larger: bounds of paths with another one, which hold no body. hold: counts bytes that are held."""
        self._app = app
        self._most_bytes = most_bytes
        self._larger = larger
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = Headers(scope=scope).get("content-length", "0")
        most_bytes = self._larger.get(scope["path"], self._most_bytes)
        digits = content_length.lstrip("0")  # the parser bounds the number, and not its zeros: int() takes 4,300 digits
        if digits.isdecimal() and int(digits) > most_bytes:
            await too_big(most_bytes, f"{digits} bytes").send(send, scope["path"])
            return
        received_bytes = held_bytes = 0
        is_held = scope["path"] not in self._larger
        caller = scope.get("state", {}).get("caller", Caller(""))
        releases: list[Callable[[], None]] = []

        def release() -> None:
            while releases:
                releases.pop()()

        async def receive_counted() -> Message:
            nonlocal received_bytes, held_bytes
            message = await receive()
            if message["type"] == "http.request":
                received_bytes += len(message.get("body", b""))
                if received_bytes > most_bytes:
                    raise too_big(most_bytes, "more")
                if not message.get("more_body"):
                    release()  # it is read at once, and then bounded where it waits
                elif is_held and (more := (received_bytes - held_bytes) // HELD_BYTES * HELD_BYTES):
                    releases.append(self._hold(caller, more, held_bytes))
                    held_bytes += more
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            release()


class CutSlow:
    """Drop a connection to a client that does not read; around everything else."""

    def __init__(self, app: ASGIApp, seconds: float, metrics: Metrics) -> None:
        """seconds: time for a write to find room in the connection's buffer."""
        self._app = app
        self._seconds = seconds
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        extensions = scope.get("extensions", {})

        async def send_bounded(message: Message) -> None:
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

        await self._app(scope, receive, send_bounded)

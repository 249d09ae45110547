"""Clients of the gateway bench: many streams in one thread over epoll, with just enough parsing to count events.

An event's id ends in the index of the last token that the client has with it (services/gateway/delivery/position.py),
which is all that is looked at while the clock runs. One stream is kept whole, so that its text can be checked
afterwards.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Sequence

from bench.serve.client import SseLines

_ID = re.compile(rb"\nid: [^\n]*?:(\d+)\n")
_OTHER_STATUS = tuple(b"HTTP/1.1 %d" % first for first in (3, 4, 5))
READ_BYTES = 1 << 18
SHORTEST_WAIT_S = 0.001
"""Epoll counts milliseconds."""


class BrokenStreamError(RuntimeError):
    """A stream that did not come as it should; the message says which and how."""


class Reader:
    """One stream's bytes in, token indices out, wherever the network cuts them."""

    __slots__ = ("_rest", "ended")

    def __init__(self) -> None:
        self._rest = b""
        self.ended = False  # by [DONE]

    def feed(self, data: bytes) -> list[int]:
        """Return the last token of each complete event. Raises BrokenStreamError for an invalid stream."""
        data = self._rest + data
        whole = data.rfind(b"\n\n") + 1  # the second newline stays: an id is looked for behind one
        found = [int(index) for index in _ID.findall(data, 0, whole + 1)]
        self._rest = data[whole:]
        self.ended |= b"\ndata: [DONE]\n" in data
        if not found and (b'\ndata: {"error"' in data or data.startswith(_OTHER_STATUS)):
            raise BrokenStreamError(f"a request failed: {data[-500:].decode('latin-1')}")
        return found


class Streams:
    """Connections that each carry one streamed request."""

    def __init__(self, port: int, bodies: Sequence[bytes], path: str) -> None:
        """Send all requests. Raises OSError."""
        self.tokens = 0  # of all streams, with text or not
        self.events = 0  # that carried tokens
        self.ended = 0
        self.waits_s: list[float] = []  # of events: from their last token's publishing to their reading
        self.published_s: list[float] | None = None  # by token index; None: waits are not kept
        self.kept = bytearray()  # all that the first stream got
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._readers: dict[int, Reader] = {}
        self._had: dict[int, int] = {}  # tokens by stream
        self._first = -1
        for body in bodies:
            self._open(port, path, body)

    def _open(self, port: int, path: str, body: bytes) -> None:
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.setblocking(False)
        number = connection.fileno()
        self._sockets[number], self._readers[number], self._had[number] = connection, Reader(), 0
        self._epoll.register(number, select.EPOLLIN)
        if self._first < 0:
            self._first = number

    def poll(self, timeout_s: float) -> None:
        """Read the available data, waiting at most this long. Raises BrokenStreamError."""
        for number, _ in self._epoll.poll(max(timeout_s, SHORTEST_WAIT_S)):
            data = self._sockets[number].recv(READ_BYTES)
            now = time.monotonic()
            if not data:
                raise BrokenStreamError("the gateway closed a stream")
            if number == self._first:
                self.kept += data
            reader = self._readers[number]
            had_ended, found = reader.ended, reader.feed(data)
            self.ended += reader.ended and not had_ended
            if found:
                self._count(number, found, now)

    def _count(self, number: int, found: list[int], now: float) -> None:
        self.events += len(found)
        self.tokens += found[-1] + 1 - self._had[number]
        self._had[number] = found[-1] + 1
        if self.published_s is not None:
            self.waits_s += [now - self.published_s[index] for index in found]

    def text(self) -> str:
        """Return the text of the recorded stream."""
        _, _, body = bytes(self.kept).partition(b"\r\n\r\n")
        parts: list[str] = []
        for payload in SseLines().feed(_dechunked(body)):
            if payload.startswith(b"{"):
                choices = json.loads(payload)["choices"]
                parts += [each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices]
        return "".join(parts)

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._epoll.close()


def _dechunked(body: bytes) -> bytes:
    """Return the joined chunks of HTTP/1.1."""
    found, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:end], 16)):
        found.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(found)

"""A Run over the Unix socket of a worker on this host, with the methods of grpc.aio's call that a link uses.

Errors are those of gRPC: a connection that breaks is UNAVAILABLE, as is a worker process that died.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from protos import worker_pb2
from shared.errors import ProtocolError
from shared.processes.listeners import is_own
from shared.wire import run_socket

QUEUED_RESULTS = 64
"""Results that wait for the link before the socket is read no further."""


class RunCall(asyncio.Protocol):
    """`connect`, then `write` steps and iterate results until the worker ends the stream."""

    def __init__(self) -> None:
        self._results: deque[worker_pb2.Result] = deque()
        self._frames = run_socket.Frames()
        self._transport: Any = None
        self._arrival: asyncio.Future[None] | None = None  # waits for a result or the end
        self._writable: asyncio.Future[None] | None = None  # not None: the socket is full
        self._reads = True
        self._has_ended = False
        self._error: Exception | None = None  # raised behind the last result

    @classmethod
    async def connect(cls, name: str) -> RunCall | None:
        """Return a call to the worker with that socket; None where it is not on this host or runs as another user."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(run_socket.address(name))  # at once, or BlockingIOError where nothing accepts
            if not is_own(connection):
                raise PermissionError
            call = cls()
            await asyncio.get_running_loop().create_unix_connection(lambda: call, sock=connection)
        except OSError:
            connection.close()
            return None
        return call

    async def write(self, step: worker_pb2.Step) -> None:
        """Send a step. Raises asyncio.InvalidStateError when the stream has ended."""
        if self._has_ended:
            raise asyncio.InvalidStateError("the stream has ended")
        self._transport.write(run_socket.message(step.SerializeToString()))
        if self._writable is not None:
            await self._writable

    def __aiter__(self) -> RunCall:
        return self

    async def __anext__(self) -> worker_pb2.Result:
        while not self._results:
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if not self._reads and len(self._results) <= QUEUED_RESULTS:
            self._reads = True
            self._transport.resume_reading()
        return self._results.popleft()

    def cancel(self) -> None:
        """End the stream from this side."""
        self._end(_error(grpc.StatusCode.CANCELLED, "the scheduler ended the stream"))

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        try:
            for kind, payload in self._frames.feed(data):
                if kind == run_socket.MESSAGE:
                    self._results.append(worker_pb2.Result.FromString(payload))
                else:
                    code, details = run_socket.read_end(payload)
                    self._end(None if code == grpc.StatusCode.OK else _error(code, details))
                    return
        except ProtocolError as error:
            self._end(error)
        except DecodeError as error:
            self._end(ProtocolError(f"result: not readable: {error}; update the worker"))
        if len(self._results) > QUEUED_RESULTS and self._reads:
            self._reads = False
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(_error(grpc.StatusCode.UNAVAILABLE, f"the worker closed the connection{f': {exc}' if exc else ''}"))

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _end(self, error: Exception | None) -> None:
        """Keep the first reason of the end; results that came before it are still read."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._transport.abort()
        self.resume_writing()
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)

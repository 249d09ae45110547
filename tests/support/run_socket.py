"""A scheduler's end of a Run over a worker's Unix socket, in plain sockets: with the methods of a gRPC call."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import grpc

from protos import worker_pb2
from shared.wire import run_socket


class EndedError(grpc.RpcError):  # type: ignore[misc]  # grpc comes without types
    """The status with which the worker ended the Run."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code


class SocketCall:
    """Sends `steps` in a thread, and says at their end that no more come; iterating gives results."""

    def __init__(self, name: str, steps: Iterator[worker_pb2.Step], timeout: float) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(timeout)
        self._connection.connect(run_socket.address(name))
        self._frames, self._arrived = run_socket.Frames(), deque[tuple[int, bytes]]()
        threading.Thread(target=self._send, args=(steps,), daemon=True).start()

    def _send(self, steps: Iterator[worker_pb2.Step]) -> None:
        with suppress(OSError):  # the worker ended the Run
            for step in steps:
                self._connection.sendall(run_socket.message(step.SerializeToString()))
            self._connection.shutdown(socket.SHUT_WR)

    def __iter__(self) -> SocketCall:
        return self

    def __next__(self) -> worker_pb2.Result:
        while not self._arrived:
            data = self._connection.recv(1 << 16)
            if not data:
                raise EndedError(grpc.StatusCode.UNAVAILABLE, "no last frame")
            self._arrived.extend(self._frames.feed(data))
        kind, payload = self._arrived.popleft()
        if kind == run_socket.MESSAGE:
            return worker_pb2.Result.FromString(payload)
        code, details = run_socket.read_end(payload)
        if code == grpc.StatusCode.OK:
            raise StopIteration
        raise EndedError(code, details)

    def cancel(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

"""The worker's Unix socket: takes a Run beside those over gRPC, from a scheduler of the same user on this host.

The thread that has a result sends it, as far as the socket takes it at once; a thread of the connection sends the rest.
What a Run is and which one counts is the business of server.py.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import grpc
from google.protobuf.message import DecodeError

from protos import worker_pb2
from services.worker.serving.pipeline import Results, RunState
from shared.errors import ProtocolError
from shared.processes.listeners import is_own
from shared.wire import run_socket

log = logging.getLogger("orcinus.worker")

CONNECTIONS = 16
HELLO_S = 5.0
SEND_S = 10
"""A scheduler that takes no result for so long has lost its Run."""
ACCEPT_AGAIN_S = 1.0
"""After a connection that could not be accepted."""
READ_BYTES = 1 << 18
Steps = Iterator[worker_pb2.Step]


class RefusedError(Exception):
    """A Run that cannot begin: a status of gRPC and why."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Outbox:
    """The results of one Run on their way: `put` sends without waiting, `send_rest` what that could not."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rest: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._behind = 0  # frames in _rest, which go first

    def put(self, result: worker_pb2.Result | None) -> None:
        """Send a result; None ends `send_rest`. For the threads of the pipeline: never blocks."""
        if result is None:
            self._rest.put(None)
            return
        frame = run_socket.message(result.SerializeToString())
        with self._lock:
            if not self._behind:
                try:
                    frame = frame[self._connection.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # the scheduler has gone: its reader ends the Run
                    return
            if frame:
                self._behind += 1
                self._rest.put(frame)

    def send_rest(self) -> None:
        """Return when the Run has ended and all was sent. Raise OSError."""
        while (frame := self._rest.get()) is not None:
            self._connection.sendall(frame)
            with self._lock:
                self._behind -= 1


class RunServer:
    """Listens from the start. begin: makes a Run the current one by its first message, or raises RefusedError; read:
    moves the later steps of a Run to the engine, and returns after the last one.
    """

    def __init__(
        self, begin: Callable[[worker_pb2.Step | None, Results], RunState], read: Callable[[RunState, Steps], None]
    ) -> None:
        """Raise OSError where abstract addresses cannot be used."""
        self.name = run_socket.new_name()
        self._begin, self._read = begin, read
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(run_socket.address(self.name))
        self._listener.listen(CONNECTIONS)
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._serving: set[threading.Thread] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="run-accept", daemon=True)
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Accept no further connection, and wait until those with an ended Run say so."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, as close does not
        self._listener.close()
        self._thread.join(grace_s)
        for thread in list(self._serving):
            thread.join(grace_s)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or self._stopping.is_set():
                    return
                log.warning("a connection to the Unix socket was not accepted: %s", error)
                self._stopping.wait(ACCEPT_AGAIN_S)  # as when no file may be opened
                continue
            if not is_own(connection) or not self._slots.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="run-results", daemon=True)
            self._serving.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Send the results of one Run, and at its end the status."""
        try:
            with connection:
                self._run(connection)
        except (OSError, ProtocolError, DecodeError) as error:
            log.debug("a Run over the Unix socket broke off: %s", error)
        finally:
            self._slots.release()
            self._serving.discard(threading.current_thread())

    def _run(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_S)
        steps, outbox = _steps(connection), Outbox(connection)
        try:
            first = next(steps, None)
            connection.settimeout(None)
            run = self._begin(first, outbox)
        except RefusedError as error:
            connection.sendall(run_socket.end(error.code, error.details))
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        reader = threading.Thread(
            target=self._read, args=(run, _until_hung_up(run, steps, connection)), name="run-reader", daemon=True
        )
        reader.start()
        try:
            outbox.send_rest()
            if run.replaced_by is not None:
                details = f"replaced by a Run of epoch {run.replaced_by}"
                connection.sendall(run_socket.end(grpc.StatusCode.ABORTED, details))
            else:
                connection.sendall(run_socket.end(grpc.StatusCode.OK, ""))
        finally:
            run.end()
            with contextlib.suppress(OSError):
                _end_reads(connection)


def _end_reads(stream: socket.socket) -> None:
    """End whatever waits for bytes of the stream."""
    stream.shutdown(socket.SHUT_RDWR)


def _steps(connection: socket.socket) -> Steps:
    """Yield what a scheduler sends, until it sends no more. Raise OSError, ProtocolError, DecodeError."""
    frames = run_socket.Frames()
    while data := connection.recv(READ_BYTES):
        for kind, payload in frames.feed(data):
            if kind == run_socket.END:
                return
            yield worker_pb2.Step.FromString(payload)


def _until_hung_up(run: RunState, steps: Steps, connection: socket.socket) -> Steps:
    """Yield the steps of a Run. A connection that broke or was closed ends the Run; one that was half closed does not:
    the steps that were sent are answered.
    """
    try:
        yield from steps
    except BaseException:
        run.end()
        raise
    poll = select.poll()
    with contextlib.suppress(ValueError):  # it was closed here meanwhile: the Run has ended
        poll.register(connection, 0)  # POLLHUP is always reported: both directions are closed
        if poll.poll(0):
            run.end()

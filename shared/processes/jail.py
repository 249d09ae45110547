"""Run a module in a process apart that a request can be ended with: both ends of the socket between them.

The process has an empty environment and one end of a socket as its standard input. Frames are multiprocessing's. It
ends when the socket is closed, and is started again by the next question. Chat templates (services/gateway/text),
grammars and long texts (shared/text) run in such processes. This module imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.25
"""Between two questions whether a process starves."""


class JailError(Exception):
    """The process died over a question, or gave no answer in time; it is started again by the next one.

    signal: that ended it; 0 where none did, as for an answer that is late or a process that could not be started.
    """

    def __init__(self, problem: str, signal: int = 0) -> None:
        super().__init__(problem)
        self.signal = signal


class StarvedError(JailError):
    """The process was ended, as other processes left it no processor time for a question."""


class Jail:
    """One process. Methods block and may be called by several threads; one at a time is served."""

    def __init__(self, module: str, first: bytes, timeout_s: float, answer_bytes: int) -> None:
        """first: the frame that begins each new process. timeout_s: for one answer, unless the question has its own.
        answer_bytes: at most of one.
        """
        self._module = module
        self._first_message = first
        self._timeout_s = timeout_s
        self._answer_bytes = answer_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self._end: weakref.finalize[..., Any] = weakref.finalize(self, _do_nothing)

    @property
    def pid(self) -> int | None:
        """Return the pid of the process, if it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process before its first question. Raise JailError."""
        with self._lock:
            try:
                self._require_connection()
            except OSError as error:
                self._end()
                raise JailError(f"did not start: {error}") from error

    def ask(
        self, payload: bytes, timeout_s: float | None = None, is_starved: Callable[[], bool] | None = None
    ) -> bytes:
        """Return the answer to one question. Raise JailError; StarvedError where `is_starved` says so, which is called
        with the question and every LOOK_S until the answer.
        """
        with self._lock:
            try:
                connection = self._require_connection()
                if timeout_s is not None:
                    _set_timeout(connection, timeout_s)
                connection.send_bytes(payload)
                if is_starved is not None:
                    self._look(connection, is_starved, timeout_s or self._timeout_s)
                return connection.recv_bytes(self._answer_bytes)
            except (EOFError, ConnectionError) as error:
                self._end()
                code = self._process.returncode if self._process is not None else 0
                raise JailError("died", max(0, -code)) from error
            except OSError as error:
                self._end()
                raise JailError(f"gave no answer: {error}") from error

    def _look(self, connection: Connection, is_starved: Callable[[], bool], timeout_s: float) -> None:
        """Wait for the answer. Raise StarvedError, TimeoutError."""
        end_at = time.monotonic() + timeout_s
        while True:
            if is_starved():
                self._leave()
                raise StarvedError("got no processor time")
            if connection.poll(LOOK_S):
                return
            if time.monotonic() > end_at:
                raise TimeoutError("none in time")

    def _leave(self) -> None:
        """End the process and do not wait for that, as it gets no processor time to end either."""
        process, connection = self._process, self.connection
        self._process = self.connection = None
        self._end.detach()
        if process is not None and connection is not None:
            connection.close()
            process.kill()
            threading.Thread(target=process.wait, name="reaper", daemon=True).start()

    def close(self) -> None:
        """End the process; a question that it works at fails."""
        if (process := self._process) is not None and process.poll() is None:
            process.kill()
        with self._lock:
            self._end()

    def _require_connection(self) -> Connection:
        if self.connection is not None and self.pid is not None:
            return self.connection
        self._end()
        own_end, child_end = socket.socketpair()
        with child_end:
            # No environment: no key or password of the service's is within reach.
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module], stdin=child_end.fileno(), cwd=_ROOT, env={}
            )
        self.connection = Connection(own_end.detach())
        _set_timeout(self.connection, self._timeout_s)
        self._end = weakref.finalize(self, _stop, self._process, self.connection)
        self.connection.send_bytes(self._first_message)
        return self.connection


def confine(memory_bytes: int) -> None:
    """Take from this process, for good, files, sockets and children that it has not yet, and memory beyond a bound."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    for nothing in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(nothing, (0, 0))


MALLINFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO)


def allocator() -> tuple[Callable[[], int], Callable[[], object]]:
    """Return a function that returns the bytes in use of malloc, from which libraries in Rust take theirs, and one that
    gives free ones back to the system. Without glibc no byte is counted.
    """
    try:
        libc = ctypes.CDLL(None)
        read, trim = libc.mallinfo2, libc.malloc_trim
    except (OSError, AttributeError):
        return lambda: 0, lambda: None
    read.restype = _MallocInfo

    def used_bytes() -> int:
        counters = read()
        return int(counters.uordblks + counters.hblkhd)

    return used_bytes, lambda: trim(0)


NICE = 10
"""A tenth of a core while other processes of the session want it."""


def yield_to_others() -> None:
    """Give this process a low priority.

    Where Linux shares processor time out among sessions first (sched(7), autogroup), it counts within the session. The
    launcher starts all services in one.
    """
    with contextlib.suppress(OSError):
        os.nice(NICE)


def run_when_idle() -> None:
    """Give this process the idle policy (sched(7)), which cannot be taken back.

    It stops when another process wakes up on its core. With a low priority alone it would finish a turn of some
    milliseconds first.
    """
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def runs_when_idle(pid: int) -> bool:
    """Return whether a process has the idle policy."""
    try:
        return os.sched_getscheduler(pid) == os.SCHED_IDLE
    except (OSError, AttributeError):
        return False


def processor_time_s(pid: int) -> float:
    """Return the processor time of the main thread of a process, as Linux counts it. Raise OSError."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _set_timeout(connection: Connection, timeout_s: float) -> None:
    time_of = struct.pack("@ll", *divmod(round(1e6 * timeout_s), 1_000_000))
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as own_end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            own_end.setsockopt(socket.SOL_SOCKET, option, time_of)


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    with contextlib.suppress(OSError):
        process.wait()


def _do_nothing() -> None:
    """There is no process yet."""

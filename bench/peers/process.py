"""The processes of one server: started in a new session, found by address, measured, and always ended.

`with Running(...)` leaves nothing behind, whether the block ends, fails or is interrupted; when the bench itself is
killed outright the kernel ends the server. Called by `bench/peers/run.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import psutil

from bench.peers.install import ROOT, last_error
from bench.peers.servers import Server, environment, request

STOP_S = 20.0
READY_S = 60.0
PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """The server did not come up; the message is what its log says."""


def free_port() -> int:
    """Return a port that is free, as is the one after it, where Orcinus has its metrics."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Running:
    """A server that answers at `url`. Raises StartError when it does not within its time."""

    def __init__(self, server: Server, model: str, log: Path) -> None:
        self.server = server
        self.model = model
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_s = 0.0
        log.unlink(missing_ok=True)

    def __enter__(self) -> Running:
        self.scratch = Path(tempfile.mkdtemp(prefix="peers-"))
        started = time.monotonic()
        try:
            self._start()
        except OSError as error:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise StartError(str(error)) from error
        try:
            self._wait(started + self.server.start_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.server.command(self.model, self.port, self.scratch),
                cwd=ROOT,
                env=environment(self.server),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the process that was started has ended. Raises subprocess.TimeoutExpired."""
        self._process.wait(timeout_s)

    def start_again(self) -> None:
        """Run the same command at the same address, after the process has ended; return without waiting."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._start()

    def _wait(self, deadline: float) -> None:
        while not self._answers():
            if (code := self._process.poll()) is not None:
                raise StartError(f"ended with {code}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise StartError(f"no answer within {self.server.start_s:.0f} s: {self._last_words()}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        """Return whether the server completes a prompt: some list their model before they can."""
        body = json.dumps(request(self.server, "ready", 1, stream=False)).encode()
        post = urllib.request.Request(  # noqa: S310 - our own address
            f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(post, timeout=READY_S) as reply:  # noqa: S310 - our own address
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise StartError(f"http {error.code}: {error.read()[:200]!r}") from error
            return False
        except OSError:
            return False

    def _last_words(self) -> str:
        return last_error(self.log.read_text(errors="replace"))

    def processes(self) -> list[psutil.Process]:
        """Return the server and all its running descendants."""
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes, user and system."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_mib(self) -> float:
        """Return the memory of all its processes; of a page that several share each has a part (PSS)."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total / 2**20

    def stop(self) -> None:
        """End the server, first by request, then by killing its remaining processes by id."""
        left = self.processes()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its own session, so the group has no other process
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            psutil.wait_procs(left, timeout=STOP_S)
            shutil.rmtree(self.scratch, ignore_errors=True)

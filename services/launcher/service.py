"""One service of a local stack: how it is started, when it counts as ready, and the process that runs it now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WRAPPER = Path(__file__).with_name("child.py")
TAIL_BYTES = 16384


class Probe(Protocol):
    """Says whether a service works. Called from the launcher's only thread: it must answer within a second."""

    def arm(self) -> None:
        """Called before each start: what is seen now belongs to the process before."""

    def ready(self) -> bool:
        """Whether the process that was started last does its work."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to run. `env` comes on top of the launcher's; `after` names services that must be ready first."""

    name: str
    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    probe: Probe | None = None
    after: tuple[str, ...] = ()
    stop_s: float = 10.0
    cwd: Path | None = None


class Service:
    """The process of one spec, and what has happened to it. States: waiting, starting, ready, backoff, stopped."""

    def __init__(self, spec: ServiceSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.state = "waiting"
        self.process: subprocess.Popen[bytes] | None = None
        self.was_ready = False  # this process
        self.ever_ready = False  # any process of this service
        self.deaths: list[float] = []  # of processes that never became ready, or of one that did and just died
        self.start_at = 0.0
        self.log_start = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def start(self, guard: bool = False) -> None:
        """Forks from the calling thread, which has to be the launcher's main one: the kernel ties the service's life
        to the thread that forked it."""
        self.was_ready = False
        if self.spec.probe:
            self.spec.probe.arm()
        wrapper = [sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid()), *(["--guard"] if guard else [])]
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                [*wrapper, *self.spec.argv],
                env={**os.environ, **self.spec.env},
                cwd=self.spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher, which stops services in order
            )
        self.state = "starting"

    def exit_code(self) -> int | None:
        """None while it runs; else its exit code, or minus the signal. Ends what it left behind in its group."""
        process = self.process
        if process is None:
            return None
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        self.signal_group(signal.SIGKILL)  # before reaping: until then no other process group can have this id
        code = process.wait()
        self.process = None
        return code

    def terminate(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGTERM)

    def signal_group(self, number: int) -> None:
        if self.process:
            try:
                os.killpg(self.process.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def tail(self, lines: int = 5) -> list[str]:
        """The last lines that the last process wrote."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                begin = self.log_start if size >= self.log_start else 0  # the log was cut
                log.seek(max(begin, size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def cut_log(self, limit_bytes: int) -> None:
        """Moves a log past its limit to `<name>.log.1`. Services append, so truncating under them is safe."""
        try:
            if self.log.stat().st_size <= limit_bytes:
                return
            with self.log.open("rb") as old, self.log.with_suffix(".log.1").open("wb") as kept:
                while chunk := old.read(1 << 20):
                    kept.write(chunk)
            os.truncate(self.log, 0)
        except OSError:
            return


def describe_exit(code: int) -> str:
    """`exit code 3`, `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"

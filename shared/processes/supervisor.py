"""Keep child processes running: start them in order, restart what dies, end what hangs, stop them all.

One thread, one loop. It wakes for signals (a child's death is one), for a beat of a child, for a restart that is due,
and to ask services that start whether they are ready. A `Supervisor` leaves to its subclasses what an exit means and
how all are stopped: services/launcher/supervisor.py runs a local stack, services/gateway/processes.py several gateways
behind one port. A service does not outlive its supervisor, whichever way that ends (child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from shared.processes.listeners import handed_on
from shared.processes.restarts import Backoff

WRAPPER = Path(__file__).with_name("child.py")
BEAT_S = 1.0
HUNG_S = 30.0
"""A service that has beaten and is silent for so long is killed."""
LAST_WORDS_S = 2.0
"""Time for a hung service to write its stacks, or to beat after all: on a machine that slept, its supervisor wakes
first."""
PROBE_S = 0.2
TAIL_BYTES = 16384
BEATS_FD = "SUPERVISOR_BEATS_FD"
"""The environment variable that names the pipe to a service's supervisor."""


async def beat() -> None:
    """Write a byte to this process's supervisor every second, as a sign that the event loop runs; until cancelled."""
    pipe = int(os.environ[BEATS_FD])
    while True:
        with contextlib.suppress(BlockingIOError):  # a supervisor that was stopped has not read for hours
            os.write(pipe, b".")
        await asyncio.sleep(BEAT_S)


class Probe(Protocol):
    """Look whether a service works. Called from the thread that starts and probes, so it must answer within a second.

    wait_reason: what a process that starts waits for, in a few words; empty when its log tells.
    """

    wait_reason: str

    def arm(self) -> None:
        """Note what the process before has left; called before each start."""

    def ready(self) -> bool:
        """Return whether the process that was started last does its work."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to run. `env` comes on top of the supervisor's; `after` names services that must be ready first.

    start_s: for a service that calls `beat`, the time to its first one, which shows that it is ready; 0 for others.
    sockets: listening ones that each of its processes gets, by the name that it gives to `listen`.
    model: the one that it is for, where there are several.
    """

    name: str
    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    probe: Probe | None = None
    after: tuple[str, ...] = ()
    stop_s: float = 10.0
    cwd: Path | None = None
    start_s: float = 0.0
    sockets: Mapping[str, socket.socket] = field(default_factory=dict)
    model: str = ""


class Service:
    """The process of one spec, and its history. States: waiting, starting, ready, backoff, stopped.

    The launcher adds asleep and stopping, for services that it stops and starts.
    """

    def __init__(self, spec: ServiceSpec, log: Path | None = None) -> None:
        """log: the file for its output; None for the supervisor's own output."""
        self.spec = spec
        self.log = log
        self.state = "waiting"
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_at: float | None = None  # of this process
        self.ever_ready = False  # any process of this service
        self.deaths: list[float] = []  # since the last process that was ready for long
        self.start_at = 0.0
        self.pipe = -1  # for beats; -1: closed
        self._heard_at = 0.0  # or the time of its start
        self._hung_at = 0.0  # when it was found silent; 0: it is not
        self._log_start = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def start(self, guard: bool = False) -> None:
        """Start a process. Raise OSError. guard: as on systems other than Linux (child.py).

        It is forked from the calling thread, which has to be the main one: the kernel ties its life to that thread.
        """
        self.ready_at = None
        if self.spec.probe:
            self.spec.probe.arm()
        wrapper = [sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid()), *(["--guard"] if guard else [])]
        with contextlib.ExitStack() as stack:
            log: IO[bytes] | None = None
            if self.log is not None:
                log = stack.enter_context(self.log.open("ab"))
                self._log_start = log.tell()
            env = {**os.environ, **handed_on(self.spec.sockets), **self.spec.env}
            pass_fds = [each.fileno() for each in self.spec.sockets.values()]
            if self.spec.start_s:
                beats = self._open_pipe(stack)
                env[BEATS_FD] = str(beats)
                pass_fds.append(beats)
            self.process = subprocess.Popen(
                [*wrapper, *self.spec.argv],
                env=env,
                cwd=self.spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
                process_group=0,  # Ctrl-C is for the supervisor, which stops services in order
            )
        self._heard_at, self._hung_at = time.monotonic(), 0.0
        self.state = "starting"

    def _open_pipe(self, stack: contextlib.ExitStack) -> int:
        """Return the end of a new pipe for the process; `stack` closes it here."""
        self._close_pipe()
        self.pipe, beats = os.pipe()
        stack.callback(os.close, beats)
        for end in (self.pipe, beats):
            os.set_blocking(end, False)
        return beats

    def _close_pipe(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def hear(self, now: float) -> None:
        """Read beats; the first of a process shows that it is ready."""
        try:
            beats = os.read(self.pipe, 4096)
        except BlockingIOError:
            return
        if not beats:
            self._close_pipe()
            return
        self._heard_at, self._hung_at = now, 0.0
        if self.state == "starting":
            self.is_ready(now)

    def is_ready(self, now: float) -> None:
        """Note that the process does its work."""
        self.state, self.ready_at, self.ever_ready = "ready", now, True

    def hung_for(self, now: float) -> float:
        """Return the seconds since the last sign of a process that should have beaten; 0 when all is well."""
        if not self.spec.start_s or self.process is None:
            return 0.0
        silent_s = now - self._heard_at
        return silent_s if silent_s > (HUNG_S if self.state == "ready" else self.spec.start_s) else 0.0

    def end_hung(self, now: float) -> bool:
        """Ask a hung process for its stacks, and kill it at a later look. Return whether this look is the first."""
        if not self._hung_at:
            self._hung_at = now
            self.signal(signal.SIGUSR1)
            return True
        if now - self._hung_at > LAST_WORDS_S:
            self.signal(signal.SIGKILL)
        return False

    def exit_code(self) -> int | None:
        """Return the exit code of a process that has ended, or minus its signal; None while it runs, and when there is
        none. Kill what it left behind in its group.
        """
        process = self.process
        if process is None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        if self.pipe >= 0:
            self.hear(time.monotonic())  # it may have been ready for a moment
        self._close_pipe()
        self.signal_group(signal.SIGKILL)  # before reaping: until then no other process group can have this id
        code = process.wait()
        self.process = None
        return code

    def signal(self, number: int) -> None:
        if self.process:
            os.kill(self.process.pid, number)  # `send_signal` would reap a process that has just ended

    def signal_group(self, number: int) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def tail(self, lines: int = 5) -> list[str]:
        """Return the last lines that the last process wrote to its log."""
        if self.log is None:
            return []
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                begin = self._log_start if size >= self._log_start else 0  # the log was cut
                log.seek(max(begin, size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def cut_log(self, limit_bytes: int) -> None:
        """Move a log past its limit to `<name>.log.1`. Services append, so truncating under them is safe."""
        if self.log is None:
            return
        with contextlib.suppress(OSError):
            if self.log.stat().st_size <= limit_bytes:
                return
            with self.log.open("rb") as old, self.log.with_suffix(".log.1").open("wb") as new_log:
                while chunk := old.read(1 << 20):
                    new_log.write(chunk)
            os.truncate(self.log, 0)


def describe_exit(code: int) -> str:
    """Return `exit code 3` or `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class Supervisor:
    """Run services until `end` is called."""

    def __init__(
        self, services: Sequence[Service], signals: Sequence[int], backoff: Backoff, guard: bool = False
    ) -> None:
        """signals: those that `on_signal` gets. guard: for all services, as on systems other than Linux."""
        self.services = list(services)
        self.is_stopping = False
        """Once set, nothing is started again."""
        self.tick_s = 1.0
        """Longest pause between two calls of `on_tick`."""
        self._by_name = {service.name: service for service in services}
        self._signals = signals
        self._backoff = backoff
        self._guard = guard
        self._exit_code: int | None = None
        self._next_probe = 0.0

    # What a subclass decides

    def say(self, text: str, kind: str = "info") -> None:
        """Report an event. kind: info, good, warning, error or log."""
        raise NotImplementedError

    def on_signal(self, number: int) -> None:
        """React to one of the signals that were named."""
        raise NotImplementedError

    def on_exit(self, service: Service, code: int, now: float) -> None:
        """React to the end of a process: `restart` it, or `end`."""
        raise NotImplementedError

    def on_change(self) -> None:
        """React to processes that were started or have ended."""

    def on_tick(self, now: float) -> None:
        """Do what is due; called whenever the loop wakes."""

    def stop_all(self) -> None:
        """End all that still runs, once `end` was called or the loop failed."""

    # What a subclass uses

    def run(self) -> int:
        """Block until `end` was called, and return its exit code.

        The process belongs to the supervisor: from the end of the stop on it ignores signals, so that another Ctrl-C
        does not keep it from cleaning up.
        """
        self._wake, waker = socket.socketpair()
        for end in (self._wake, waker):
            end.setblocking(False)
        for number in (*self._signals, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # it only has to wake the loop, which reads the signal's number
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            while self._exit_code is None:
                self._step(time.monotonic())
                if self._exit_code is None:
                    self._wait_for_work(time.monotonic())
        finally:
            self.stop_all()
            for number in self._signals:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            self._wake.close()
            waker.close()
        return 1 if self._exit_code is None else self._exit_code

    def end(self, code: int) -> None:
        """Let `run` stop all and return."""
        self._exit_code = code

    def restart(self, service: Service, reason: str, now: float, show_log: bool = True) -> None:
        """Start a service again after a pause, which grows with each end of it. reason: `died (exit code 3)`."""
        ready_s = None if service.ready_at is None else now - service.ready_at
        service.deaths = self._backoff.with_death(service.deaths, now, ready_s)
        delay_s = self._backoff.delay_s(len(service.deaths))
        service.start_at, service.state, service.ready_at = now + delay_s, "backoff", None
        self.on_change()
        self.say(f"{service.name} {reason}; restart in {delay_s:.1f} s", "warning")
        for line in service.tail() if show_log else ():
            self.say(f"  {service.name} | {line}", "log")
        if len(service.deaths) == self._backoff.loop:
            see = f"; see {service.log}" if service.log is not None else ""
            self.say(
                f"{service.name} is in a crash loop: {len(service.deaths)} deaths in {self._backoff.window_s:.0f} s "
                f"before it was ready{see}",
                "error",
            )

    def wait(self, timeout_s: float) -> None:
        """Wait for signals and beats, and handle them."""
        pipes = {service.pipe: service for service in self.services if service.pipe >= 0}
        readable, _, _ = select.select([self._wake.fileno(), *pipes], [], [], max(0.0, timeout_s))
        for end in readable:
            if end in pipes:
                pipes[end].hear(time.monotonic())
                continue
            with contextlib.suppress(BlockingIOError):
                while numbers := self._wake.recv(4096):
                    for number in numbers:
                        if number in self._signals:
                            self.on_signal(number)

    def _step(self, now: float) -> None:
        for service in self.services:
            if (code := service.exit_code()) is not None:
                self.on_exit(service, code, now)
            if self._exit_code is not None:
                return
        if not self.is_stopping:
            for service in self.services:
                self._start_if_due(service, now)
        if now >= self._next_probe:
            self._next_probe = now + PROBE_S
            for service in self.services:
                self._probe(service, now)
        for service in self.services:
            if (silent_s := service.hung_for(now)) and service.end_hung(now):
                what = "has been silent for" if service.state == "ready" else "does not serve after"
                self.say(f"{service.name} {what} {silent_s:.0f} s; killing it", "error")
        self.on_tick(now)

    def _start_if_due(self, service: Service, now: float) -> None:
        first = service.state == "waiting" and all(self._by_name[name].ever_ready for name in service.spec.after)
        is_restart = service.state == "backoff" and now >= service.start_at
        if not (first or is_restart):
            return
        try:
            service.start(guard=self._guard)
        except OSError as error:  # no memory, no process or no room for its log; the others continue
            self.restart(service, f"cannot be started ({error})", now)
            return
        self.on_change()
        if is_restart:
            self.say(f"{service.name} restarted (pid {service.pid})")

    def _probe(self, service: Service, now: float) -> None:
        if service.state != "starting" or service.spec.start_s:
            return
        if service.spec.probe is None or service.spec.probe.ready():
            if service.ever_ready:
                self.say(f"{service.name} is ready again", "good")
            service.is_ready(now)

    def _wait_for_work(self, now: float) -> None:
        due = [service.start_at - now for service in self.services if service.state == "backoff"]
        asks = any(service.state == "starting" and not service.spec.start_s for service in self.services)
        self.wait(min([PROBE_S if asks else self.tick_s, *due]))

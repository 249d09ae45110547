"""Keeps services running: starts them in order, restarts what dies, stops everything in reverse order.

One thread, one loop: it wakes for signals (a child's death is one), for a restart that is due, and to ask services
that start whether they are ready. After run() returns no process of the stack is left.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from services.launcher.rundir import RunDir
from services.launcher.service import Service, ServiceSpec, describe_exit
from shared.restarts import Backoff

LOG_LIMIT_BYTES = 64 << 20
AGAIN_S = 1.0  # make passes a signal on that its whole group got too: within this time it is the same one


class Report(Protocol):
    """Where the launcher's words go."""

    def event(self, text: str, kind: str = "info") -> None: ...

    def update(self, services: list[Service]) -> None: ...


class Supervisor:
    """Runs `specs` in the order given; stops them in the reverse order."""

    def __init__(
        self,
        run_dir: RunDir,
        specs: list[ServiceSpec],
        report: Report,
        *,
        on_ready: Callable[[], None] = lambda: None,
        backoff: Backoff | None = None,
        stop_with_parent: bool = False,
        guard: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._services = [Service(spec, run_dir.logs / f"{spec.name}.log") for spec in specs]
        self._by_name = {service.name: service for service in self._services}
        self._report = report
        self._on_ready = on_ready
        self._backoff = backoff or Backoff()
        self._parent = os.getppid() if stop_with_parent else None
        self._guard = guard
        self._stopping_since: float | None = None
        self._impatient = False
        self._announced = False
        self._exit_code: int | None = None
        self._next_probe = 0.0
        self._next_log_check = 0.0

    def run(self) -> int:
        """Blocks until a signal stops the stack (0) or a service refuses its configuration at first start (2).

        The process belongs to the launcher: from the end of the stop on it ignores signals, so that another Ctrl-C
        does not keep it from cleaning up.
        """
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        stopping = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup make run &` outlives its terminal
            stopping.append(signal.SIGHUP)
        for number in stopping:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it only has to wake the loop
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for service in self._services:
            _keep_old_log(service)
        try:
            while self._exit_code is None:
                self._tick(time.monotonic())
                if self._exit_code is None:
                    self._wait(wake)
        finally:
            self._stop(wake)
            for number in stopping:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            wake.close()
            waker.close()
        return self._exit_code if self._exit_code is not None else 1

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
        elif number == signal.SIGINT and now - self._stopping_since > AGAIN_S:
            self._impatient = True

    def _tick(self, now: float) -> None:
        if self._stopping_since is not None:
            self._exit_code = 0
            return
        if self._parent is not None and os.getppid() != self._parent:
            self._report.event("the process that started the launcher is gone: stopping", "warning")
            self._exit_code = 0
            return
        for service in self._services:
            self._reap(service, now)
            if self._exit_code is not None:
                return
        for service in self._services:
            self._start_if_due(service, now)
        if now >= self._next_probe:
            self._next_probe = now + 0.2
            for service in self._services:
                self._probe(service)
        if not self._announced and all(service.state == "ready" for service in self._services):
            self._announced = True
            self._report.update(self._services)
            self._on_ready()
        if now >= self._next_log_check:
            self._next_log_check = now + 10
            for service in self._services:
                service.cut_log(LOG_LIMIT_BYTES)
        self._report.update(self._services)

    def _reap(self, service: Service, now: float) -> None:
        code = service.exit_code()
        if code is None:
            return
        if code == 2 and not service.ever_ready:
            self._refused(service)
            return
        self._died(service, describe_exit(code), now)

    def _died(self, service: Service, how: str, now: float) -> None:
        service.deaths = self._backoff.counted(service.deaths, now, 0.0 if service.was_ready else None)
        delay = self._backoff.delay_s(len(service.deaths))
        service.start_at = now + delay
        service.state = "backoff"
        self._write_processes()
        self._report.event(f"{service.name} died ({how}); restart in {delay:.1f} s", "warning")
        for line in service.tail():
            self._report.event(f"  {service.name} | {line}", "log")
        if len(service.deaths) == self._backoff.loop:
            self._report.event(
                f"{service.name} is in a crash loop: {len(service.deaths)} deaths in {self._backoff.window_s:.0f} s "
                f"before it was ready; see {service.log}",
                "error",
            )

    def _refused(self, service: Service) -> None:
        """Exit code 2 before anything ran is a configuration error: restarting cannot help."""
        lines = service.tail(20)
        said = [line for line in lines if line.startswith("error:")] or lines[-5:]
        self._report.event(f"{service.name} refuses to start:", "error")
        for line in said:
            self._report.event(f"  {line}", "error")
        self._report.event(f"  log: {service.log}", "info")
        self._exit_code = 2

    def _start_if_due(self, service: Service, now: float) -> None:
        first = service.state == "waiting" and all(self._by_name[name].ever_ready for name in service.spec.after)
        again = service.state == "backoff" and now >= service.start_at
        if not (first or again):
            return
        try:
            service.start(guard=self._guard)
        except OSError as error:  # no memory or no room for its log; the others go on
            self._died(service, f"cannot be started: {error}", now)
            return
        self._write_processes()
        if again:
            self._report.event(f"{service.name} restarted (pid {service.pid})", "info")

    def _probe(self, service: Service) -> None:
        if service.state != "starting":
            return
        probe = service.spec.probe
        if probe is not None and not probe.ready():
            return
        service.state = "ready"
        service.was_ready = True
        if service.ever_ready:
            self._report.event(f"{service.name} is ready again", "good")
        service.ever_ready = True

    def _wait(self, wake: socket.socket) -> None:
        now = time.monotonic()
        due = [service.start_at - now for service in self._services if service.state == "backoff"]
        busy = any(service.state in ("starting", "waiting") for service in self._services)
        timeout = min([0.2 if busy else 1.0, *due])
        _sleep_until_woken(wake, max(timeout, 0.0))

    def _stop(self, wake: socket.socket) -> None:
        """In reverse order, each with its own deadline; another Ctrl-C kills at once."""
        for service in reversed(self._services):
            if service.process is None:
                service.state = "stopped"
                continue
            self._report.event(f"stopping {service.name}", "info")
            service.terminate()
            deadline = time.monotonic() + service.spec.stop_s
            while (code := service.exit_code()) is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._impatient:
                    if left <= 0:
                        text = f"{service.name} did not stop in {service.spec.stop_s:.0f} s: killed"
                        self._report.event(text, "warning")
                        deadline = float("inf")
                    service.signal_group(signal.SIGKILL)
                _sleep_until_woken(wake, min(max(left, 0.01), 0.2))
            if code not in (0, -signal.SIGTERM):
                self._report.event(f"{service.name} ended with {describe_exit(code)}", "info")
            service.state = "stopped"
            self._write_processes()

    def _write_processes(self) -> None:
        try:
            self._run_dir.write_processes({s.name: s.pid for s in self._services if s.pid is not None})
        except OSError as error:
            self._report.event(f"cannot write {self._run_dir.processes}: {error}", "warning")


def _sleep_until_woken(wake: socket.socket, timeout_s: float) -> None:
    readable, _, _ = select.select([wake], [], [], timeout_s)
    if readable:
        try:
            wake.recv(4096)
        except BlockingIOError:
            return


def _keep_old_log(service: Service) -> None:
    """Each start of the stack begins new logs and keeps the last ones."""
    if service.log.exists():
        os.replace(service.log, service.log.with_suffix(".log.1"))

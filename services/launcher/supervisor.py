"""Supervise a local stack: services restart when they die and stop in reverse order.

After `run` returns no process of the stack is left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Protocol

from services.launcher.placements import SleepingServices
from services.launcher.rundir import RunDir
from shared.processes.restarts import Backoff
from shared.processes.supervisor import Service, ServiceSpec, Supervisor, describe_exit

LOG_LIMIT_BYTES = 64 << 20
LOG_CHECK_S = 10.0
AGAIN_S = 1.0
"""make passes on a signal that its whole group got too: within this time it is the same one."""
STOP_LINE_S = 1.0
"""A service that stops has a line this often."""
PLACED_TICK_S = 0.2
"""Between two looks at what the placer wants."""


class Report(Protocol):
    """Show what the launcher says."""

    def event(self, text: str, kind: str = "info") -> None: ...

    def update(self, services: list[Service]) -> None: ...


class StackSupervisor(Supervisor):
    """Run `specs` in the order given; stop them in the reverse order."""

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
        sleeping: SleepingServices | None = None,
        has_logs: bool = True,
    ) -> None:
        """on_ready: called once, when all services are ready. stop_with_parent: also stop when the parent process of
        the launcher is gone. sleeping: services that run only while the placer wants it. has_logs: services write to
        files of the run directory, and not to the launcher's own output.
        """
        signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup make run &` outlives its terminal
            signals.append(signal.SIGHUP)
        services = [Service(spec, run_dir.logs / f"{spec.name}.log" if has_logs else None) for spec in specs]
        super().__init__(services, signals, backoff or Backoff(), guard)
        self._run_dir = run_dir
        self._report = report
        self._on_ready = on_ready
        self._parent = os.getppid() if stop_with_parent else None
        self._stopping_since: float | None = None
        self._impatient = False
        self._has_announced = False
        self._next_log_check = 0.0
        self._sleeping = sleeping
        self._is_mismatch_said = False
        self._kill_at: dict[str, float] = {}  # by name, of services that go to sleep
        if sleeping is not None:
            self.tick_s = PLACED_TICK_S
            for service in self.services:
                if service.name in sleeping.names:
                    service.state = "asleep"

    def run(self) -> int:
        """Block until a signal stops the stack (0) or a service refuses its configuration at first start (2)."""
        for service in self.services:
            _keep_old_log(service)
        return super().run()

    def say(self, text: str, kind: str = "info") -> None:
        self._report.event(text, kind)

    def on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
            self.end(0)
        elif number == signal.SIGINT and now - self._stopping_since > AGAIN_S:
            self._impatient = True

    def on_exit(self, service: Service, code: int, now: float) -> None:
        if service.name in self._kill_at:
            del self._kill_at[service.name]
            service.state, service.ready_at, service.deaths = "asleep", None, []
            self.say(f"{service.name} sleeps")
            self.on_change()
        elif code == 2 and not service.ever_ready and not self._has_announced:
            self._end_after_refusal(service)
        elif code == 0:  # as after `orcinus drain`
            self.restart(service, "has ended (exit code 0)", now, show_log=False)
        else:
            self.restart(service, f"died ({describe_exit(code)})", now)

    def on_change(self) -> None:
        try:
            self._run_dir.write_processes({one.name: one.pid for one in self.services if one.pid is not None})
        except OSError as error:
            self.say(f"cannot write {self._run_dir.processes}: {error}", "warning")

    def on_tick(self, now: float) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            self.say("the process that started the launcher is gone: stopping", "warning")
            self.end(0)
            return
        if self._sleeping is not None:
            self._place(self._sleeping, now)
        is_placed = self._sleeping is None or self._sleeping.is_read
        if not self._has_announced and is_placed and all(each.state in ("ready", "asleep") for each in self.services):
            self._has_announced = True
            self._report.update(self.services)
            self._on_ready()
        if now >= self._next_log_check:
            self._next_log_check = now + LOG_CHECK_S
            for service in self.services:
                service.cut_log(LOG_LIMIT_BYTES)
        self._report.update(self.services)

    def stop_all(self) -> None:
        """Stop in reverse order, each service with a deadline; another Ctrl-C kills at once."""
        if any(service.process for service in self.services):
            self.say("stopping everything; Ctrl-C again kills what is left")
        for service in reversed(self.services):
            if service.process is None:
                service.state = "stopped"
                continue
            self.say(f"stopping {service.name}")
            service.signal(signal.SIGTERM)
            begun = said = time.monotonic()
            deadline = begun + service.spec.stop_s
            while (code := service.exit_code()) is None:
                now = time.monotonic()
                left_s = deadline - now
                if now - said >= STOP_LINE_S:
                    said = now
                    self.say(f"stopping {service.name}: {now - begun:.0f} s of at most {service.spec.stop_s:.0f} s")
                if left_s <= 0 or self._impatient:
                    if left_s <= 0:
                        self.say(f"{service.name} did not stop in {service.spec.stop_s:.0f} s: killed", "warning")
                        deadline = float("inf")
                    service.signal_group(signal.SIGKILL)
                self.wait(min(max(left_s, 0.01), 0.2))
            if code not in (0, -signal.SIGTERM):
                self.say(f"{service.name} ended with {describe_exit(code)}")
            service.state = "stopped"
            self.on_change()

    def _place(self, sleeping: SleepingServices, now: float) -> None:
        """Do what the placer wants: stop the services of models that are to sleep; when these have ended, and their
        memory is free, start those of models that are to wake.
        """
        sleeping.look(now)
        if sleeping.problem and not self._is_mismatch_said:
            self.say(sleeping.problem, "error")
        self._is_mismatch_said = bool(sleeping.problem)
        placed = [service for service in self.services if service.name in sleeping.names]
        for service in placed:
            if (kill_at := self._kill_at.get(service.name)) is not None:  # also where it is to wake again by now
                if now >= kill_at:
                    service.signal_group(signal.SIGKILL)
            elif service.name in sleeping.asleep:
                if service.process is None:
                    service.state = "asleep"
                else:
                    service.state, self._kill_at[service.name] = "stopping", now + service.spec.stop_s
                    service.signal(signal.SIGTERM)
        if self._kill_at:
            return
        for service in placed:
            if service.state == "asleep" and service.name not in sleeping.asleep:
                service.state = "waiting"

    def _end_after_refusal(self, service: Service) -> None:
        """End all: exit code 2 before anything ran is a configuration error, which a restart cannot cure."""
        lines = service.tail(20)
        reasons = [line for line in lines if line.startswith("error:")] or lines[-5:]
        self.say(f"{service.name} refuses to start:", "error")
        for line in reasons:
            self.say(f"  {line}", "error")
        self.say(f"  log: {service.log or 'the lines above'}")
        self.end(2)


def _keep_old_log(service: Service) -> None:
    """Begin a new log with each start of the stack, and keep the last one."""
    if service.log is not None and service.log.exists():
        os.replace(service.log, service.log.with_suffix(".log.1"))

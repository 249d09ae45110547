"""Show what the launcher does: one changing line a service on a terminal, plain lines elsewhere, all on stderr.

Where the services write to the same output, all lines go to a log: changing lines would erase theirs.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from shared.processes.supervisor import Service

LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}
STYLES = {"warning": "yellow", "error": "bold red", "good": "green", "log": "dim", "info": ""}
LINE_S = 3.0
"""Without a terminal, a service that starts has a line this often: the last one of its log."""
BAR_CELLS = 24
_PREFIX = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+ [\w.]+: ")  # shared/telemetry/logs.py
_PERCENT = re.compile(r"\b(\d{1,3}) %")


class _Console(Console):
    """A console on a terminal that may end before the stack does: closed, or `| head`. The stack stops in order."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Screen:
    """The report of a supervisor. `settle` ends the changing lines once the stack is ready."""

    def __init__(self, log: logging.Logger | None = None) -> None:
        """log: takes all lines where the services write to the same output; None means a screen."""
        self._log = log
        self._console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._has_settled = False
        self._states: dict[str, str] = {}
        self._said_at: dict[str, float] = {}
        self._changed_at: dict[str, float] = {}
        self._started_at = time.monotonic()
        self._spinner = Spinner("dots")

    def event(self, text: str, kind: str = "info") -> None:
        if self._log is not None:
            self._log.log(LEVELS.get(kind, logging.INFO), "%s", text)
            return
        with contextlib.suppress(OSError):
            self._console.print(escape(text), style=STYLES[kind] or None)

    def update(self, services: list[Service]) -> None:
        if self._has_settled:
            return
        with contextlib.suppress(OSError):
            if self._log is not None or not self._console.is_terminal:
                self._lines(services)
                return
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(self._table(services), refresh=True)

    def settle(self) -> None:
        """Print only events from now on."""
        self._has_settled = True
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def result(self, lines: list[str]) -> None:
        """Print lines that a program may read, on stdout."""
        with contextlib.suppress(OSError):
            print("\n".join(lines), flush=True)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    def _lines(self, services: list[Service]) -> None:
        for service in services:
            if self._states.get(service.name) != service.state:
                self._states[service.name] = service.state
                self._said_at[service.name] = self._changed_at[service.name] = time.monotonic()
                self.event(f"{_title(service)}: {describe(service)}")
            elif service.state == "starting" and time.monotonic() - self._said_at[service.name] >= LINE_S:
                self._said_at[service.name] = time.monotonic()
                seconds = self._said_at[service.name] - self._changed_at[service.name]
                words = f"{_title(service)}: {describe(service)}, {seconds:.0f} s"
                self.event(": ".join(filter(None, (words, _doing(service)))))

    def _table(self, services: list[Service]) -> Table:
        table = Table.grid(padding=(0, 1))
        for service in services:
            mark = "[green]✓[/]" if service.state in ("ready", "asleep") else self._spinner
            row: list[RenderableType] = [mark, escape(_title(service)), describe(service)]
            if service.state == "starting":
                row.append(self._bar(_doing(service)))
            table.add_row(*row)
        return table

    def _bar(self, line: str) -> RenderableType:
        """Return what a starting service does, behind a bar if it says how much is done."""
        text = Text(line[: max(20, self._console.width - 75)], "dim", no_wrap=True)
        percent = _PERCENT.search(line)
        if percent is None:
            return text
        table = Table.grid(padding=(0, 1))
        table.add_row(ProgressBar(100, min(100, int(percent[1])), width=BAR_CELLS), text)
        return table


def _title(service: Service) -> str:
    """Return a service's name, with its model where there are several."""
    return f"{service.name} of {service.spec.model}" if service.spec.model else service.name


def _doing(service: Service) -> str:
    """Return what a starting service does or waits for: the end of its log, unless its probe knows better."""
    wait_reason = service.spec.probe.wait_reason if service.spec.probe else ""
    return f"waiting for {wait_reason}" if wait_reason else last_line(service)


def last_line(service: Service) -> str:
    """Return the last line of a service's log without time, level and name; empty if there is none."""
    lines = service.tail(1)
    return _PREFIX.sub("", lines[0], count=1) if lines else ""


def describe(service: Service) -> str:
    """Return what a service does or waits for, in a few words."""
    if service.state == "waiting":
        return f"waiting for {', '.join(service.spec.after)}" if service.spec.after else "waiting"
    if service.state == "starting":
        return f"starting (pid {service.pid})"
    return service.state

"""Show a transfer on stderr: a bar with size and time left on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

LINE_S = 4.0  # between two lines where there is no terminal


class Report(Protocol):
    """Where the words and the progress of a transfer go."""

    def note(self, text: str) -> None:
        """Say something that stays."""

    def begin(self, task: str, done: int, total: int) -> None:
        """Start the progress of a task, in bytes."""

    def advance(self, count: int) -> None:
        """Add bytes to it; a negative count takes some back."""

    def end(self) -> None:
        """End the task that began last, if one is under way."""


class Bars:
    """Report to people."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task, self._done, self._total = "", 0, 0
        self._started, self._first, self._next = 0.0, 0, 0.0

    def note(self, text: str) -> None:
        self._console.print(escape(text))

    def begin(self, task: str, done: int, total: int) -> None:
        self._task, self._done, self._total = task, done, total
        self._started, self._first = time.monotonic(), done
        self._next = self._started + LINE_S
        if self._console.is_terminal:
            amount, speed, left = (Column(no_wrap=True) for _ in range(3))  # the bar alone gets narrower
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(None), DownloadColumn(True, table_column=amount),
                TransferSpeedColumn(speed), TimeRemainingColumn(table_column=left), TextColumn("left"),
                console=self._console, transient=True,
            )  # fmt: skip
            self._progress.start()
            self._progress.add_task(escape(task), completed=done, total=total)

    def advance(self, count: int) -> None:
        if not self._task:  # of a small file, which is not worth a bar
            return
        self._done += count
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._done)
        elif (now := time.monotonic()) >= self._next:
            self._next = now + LINE_S
            rate = max(1.0, (self._done - self._first) / (now - self._started))
            left = duration((self._total - self._done) / rate)
            percent = 100 * self._done // max(1, self._total)
            print(f"{self._task}: {percent} % of {size(self._total)}, {left} left", file=sys.stderr, flush=True)

    def end(self) -> None:
        self._task = ""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def size(count: float) -> str:
    """Return a number of bytes for people: 1.4 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Return a time for people: 35 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

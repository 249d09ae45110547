"""Run pip and say what it does, at least every three seconds: `python -m services.launcher.pip_progress ARGUMENTS`.

Called by the Makefile before anything is installed, so it needs the standard library alone. On a terminal one line
moves; elsewhere, as in a log, lines follow each other. When pip fails, the end of its output is shown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from shared.messages import quantity

EVERY_S = 3.0
ON_TERMINAL_S = 0.2
KEPT_LINES = 40
_WORK = re.compile(
    r"\s*(Collecting|Downloading|Using cached|Processing|Building wheel for|Preparing metadata)\b\s*(\S*)(.*)"
)
_SIZE = re.compile(r"\(([\d.]+ [kMG]?B)\)")
_NAME = re.compile(r"[A-Za-z0-9]+(?:[._-][A-Za-z][A-Za-z0-9]*)*")
_REASONS = (
    (re.compile(r"No space left on device"), ": the disk is full; free some of it and run the same command again"),
    (
        re.compile(r"Failed to establish a new connection|NameResolutionError|name resolution|ConnectTimeoutError"),
        ": no package index was reached; check the network, or name a mirror in PIP_INDEX_URL",
    ),
)


class Progress:
    """The progress of pip, read from its output."""

    def __init__(self, packages: Path) -> None:
        """packages: the site-packages folder into which pip installs."""
        self._packages = packages
        self._started_at = time.monotonic()
        self._names: set[str] = set()
        self._doing = "starting"
        self._to_install: list[str] = []  # in the order in which pip writes them
        self._before = 0
        self.last: deque[str] = deque(maxlen=KEPT_LINES)

    def read(self, line: str) -> None:
        """Take one line of pip's output."""
        self.last.append(line.rstrip())
        if line.startswith("Installing collected packages:"):
            self._to_install, self._before = line.partition(":")[2].split(","), self._count_installed()
        elif match := _WORK.match(line):
            verb, word, rest = match.groups()
            name = _NAME.match(Path(word).name)
            if name is None:
                return
            if verb == "Collecting":
                self._names.add(name[0].lower())
            size = _SIZE.search(rest)
            self._doing = f"{verb.lower()} {name[0]}{f' ({size[1]})' if size else ''}"

    def text(self) -> str:
        """Return the state in one line."""
        seconds = time.monotonic() - self._started_at
        if self._to_install:
            count = len(self._to_install)
            done = min(max(self._count_installed() - self._before, 0), count)
            now = f", now {self._to_install[done].strip()}" if done < count else ", compiling their modules"
            return f"installing: {done} of {quantity(count, 'package')} written{now}, {seconds:.0f} s"
        return f"installing: {self._doing}, {quantity(len(self._names), 'package')} found, {seconds:.0f} s"

    def failure(self, code: int) -> str:
        """Return a sentence on the failure that the last lines tell of, with the remedy where it is known."""
        said = "\n".join(self.last)
        why = next((why for sign, why in _REASONS if sign.search(said)), "; the lines above say why")
        return f"error: pip ended with {code}{why}"

    def _count_installed(self) -> int:
        try:
            return sum(name.endswith(".dist-info") for name in os.listdir(self._packages))
        except OSError:
            return 0


def run(command: list[str], packages: Path, out: TextIO) -> int:
    """Run pip's `command` and write its progress to `out`; return its exit code."""
    progress = Progress(packages)
    terminal = out.isatty()
    pip = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    ended = threading.Event()

    def show() -> None:
        while True:
            out.write(f"\r\x1b[K{progress.text()[:100]}" if terminal else f"{progress.text()}\n")
            out.flush()
            if ended.wait(ON_TERMINAL_S if terminal else EVERY_S):
                return

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        for line in pip.stdout or ():
            progress.read(line)
        code = pip.wait()
    finally:
        ended.set()
        shower.join()
        if terminal:
            out.write("\r\x1b[K")
    if code:
        out.write("\n".join([*progress.last, progress.failure(code)]) + "\n")
    out.flush()
    return code


def main() -> int:
    """Run pip of this interpreter with the arguments of the command line."""
    from sysconfig import get_path

    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *sys.argv[1:]]
    try:
        return run(command, Path(get_path("purelib")), sys.stdout)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with what is left", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

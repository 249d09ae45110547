"""What the launcher's tests share: a clean environment, `orcinus up`, and the stand-in stack as a real process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import free_port, until

ROOT = Path(__file__).resolve().parents[2]
STACK = Path(__file__).parent / "stand_ins" / "stand_in_stack.py"


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def clean_env(**extra: str) -> dict[str, str]:
    """This process's environment without settings of Orcinus."""
    return {key: value for key, value in os.environ.items() if not key.startswith("ORCINUS_")} | extra


def settings_env(**settings: Any) -> dict[str, str]:
    """This process's environment with these settings of Orcinus alone, named as on the command line with `_`."""
    return clean_env(**{f"ORCINUS_{name.upper()}": str(value) for name, value in settings.items()})


@contextlib.contextmanager
def up(directory: Path, *options: str, **env: str) -> Iterator[tuple[str, Path]]:
    """Run `orcinus up` with the run directory `directory / "run"`; yield its address and its log. It must end well."""
    port, log = free_port(), directory / "up.txt"
    ports = ["--port", str(port), "--ops-port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", "--run-dir", str(directory / "run"), *ports, *options],
            cwd=ROOT, env=clean_env(**env), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        return "Orcinus serves" in log.read_text()

    try:
        until(f"the stack is ready: {log}", is_ready, 200)
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


class Stack:
    """A launcher process that runs small scripts as services. `services`: name -> shell-free python source."""

    def __init__(self, tmp_path: Path, services: dict[str, str], **options: Any) -> None:
        self.tmp_path = tmp_path
        self.run_dir = tmp_path / "run"
        self.output = tmp_path / "launcher.txt"
        self.plan = tmp_path / "plan.json"
        specs = []
        for name, source in services.items():
            script = tmp_path / f"{name}.py"
            script.write_text(PREAMBLE.format(dir=str(tmp_path), name=name) + source)
            specs.append(
                {"name": name, "argv": [sys.executable, str(script)], "ready": str(tmp_path / f"{name}.ready")}
            )
        self.plan.write_text(json.dumps({"run_dir": str(self.run_dir), "specs": specs, **options}))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def argv(self) -> list[str]:
        return [sys.executable, str(STACK), str(self.plan)]

    def __enter__(self) -> Stack:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.argv, stdout=output, stderr=output, cwd=ROOT, env=clean_env(), start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def pids(self) -> dict[str, int]:
        try:
            return dict(json.loads((self.run_dir / "processes.json").read_text()))
        except FileNotFoundError:
            return {}

    def wait_ready(self) -> dict[str, int]:
        until("the stack is ready", lambda: "STACK READY" in self.text())
        return self.pids()

    def wait_text(self, part: str) -> str:
        until(f"the launcher says {part!r}", lambda: part in self.text())
        return self.text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process is None:
            raise AssertionError("not started")
        self.process.send_signal(number)
        return self.process.wait(60)

    def notes(self) -> list[str]:
        """What the scripts noted, in the order in which they noted it."""
        path = self.tmp_path / "notes"
        return path.read_text().splitlines() if path.exists() else []


PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
DIR, NAME = Path({dir!r}), {name!r}
def note(text):
    with open(DIR / "notes", "a") as notes:
        notes.write(text + "\\n")
def ready():
    (DIR / (NAME + ".ready")).write_text(str(os.getpid()))
def starts():
    path = DIR / (NAME + ".starts")
    count = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(count))
    return count
def serve():
    def stop(*_):
        note("stop " + NAME)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    ready()
    while True:
        signal.pause()
"""

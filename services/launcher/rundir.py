"""Keep the state of a local stack in one private directory (`.run/`): pids, logs, Redis' data.

One launcher has the directory at a time, by flock: the kernel drops the lock of a dead one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from shared.command_line.options import Shown
from shared.errors import ConfigurationError

ANOTHER_UP = 'orcinus up --run-dir .run2 --port 8010, or make run PORT=8010 ARGS="--run-dir .run2"'


@dataclass(frozen=True, slots=True)
class StackFacts:
    """Facts of a running stack for other commands. No secrets."""

    model: str  # served model name
    shard: str
    url: str  # of the API, without /v1
    ops_url: str  # of the live page and the metrics
    redis_url: str  # without its password; empty for the stack's own server


class RunDir:
    """`with RunDir(path):` takes the directory. Raise ConfigurationError while another launcher has it."""

    def __init__(self, path: Path, another: str = ANOTHER_UP) -> None:
        """another: the command that the error of a directory in use gives, for one with its own directory."""
        self.path = path.expanduser().absolute()
        self.logs = self.path / "logs"
        self.processes = self.path / "processes.json"
        self.facts = self.path / "stack.json"
        self.settings = self.path / "settings.json"
        self.states = self.path / "states.json"
        self.lock = self.path / "lock"
        self._another = another
        self._lock_fd = -1

    def __enter__(self) -> RunDir:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)  # prompts lie in Redis' files
            self.logs.mkdir(exist_ok=True)
            self._lock_fd = self._acquire()
        except OSError as error:
            raise ConfigurationError(
                f"cannot use the run directory {self.path}: {error}; choose another with --run-dir"
            ) from error
        self._remove_files()  # of a launcher that was killed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove_files()
        self.lock.unlink(missing_ok=True)  # while it is held: see _acquire
        os.close(self._lock_fd)
        self._lock_fd = -1

    def begin_file(self, service: str) -> Path:
        """Return the file by which a service shows that it has begun."""
        return self.path / f"{service}.begun"

    def write_processes(self, pids: dict[str, int]) -> None:
        """Write names and pids."""
        _write(self.processes, pids)

    def pids(self) -> dict[str, int]:
        """Return the pids of what runs, by name; empty if no launcher has the directory."""
        try:
            return {str(name): int(pid) for name, pid in json.loads(self.processes.read_text()).items()}
        except (OSError, ValueError):
            return {}

    def write_facts(self, facts: StackFacts) -> None:
        """Write what other commands need to know of this stack."""
        _write(self.facts, asdict(facts))

    def write_settings(self, settings: Mapping[str, Shown]) -> None:
        """Write the settings of each process of this stack, by its name, without secrets."""
        _write(self.settings, settings)

    def write_states(self, states: Mapping[str, str]) -> None:
        """Write the state of each model, for the health check of a container."""
        _write(self.states, states)

    def running_settings(self) -> dict[str, Shown] | None:
        """Return the settings of the stack that runs here; None if none does, or an older version started it."""
        if not self.owner():
            return None
        try:
            stored = json.loads(self.settings.read_text())
            return {
                service: {field: (value, source) for field, (value, source) in rows.items()}
                for service, rows in stored.items()
            }
        except (OSError, ValueError, AttributeError):
            return None

    def running(self) -> StackFacts | None:
        """Return the facts of the stack that runs here; None if none does, or an older version started it."""
        if not self.owner():
            return None
        try:
            return StackFacts(**json.loads(self.facts.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def owner(self) -> int | None:
        """Return the pid of the launcher that has the directory now; None when there is none."""
        try:
            fd = os.open(self.lock, os.O_RDWR)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(fd, 32, 0) or b"0")
        finally:
            os.close(fd)
        return None

    def _remove_files(self) -> None:
        for file in (self.processes, self.facts, self.settings, self.states, *self.path.glob("*.begun")):
            file.unlink(missing_ok=True)

    def _acquire(self) -> int:
        while True:
            fd = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode().strip() or "unknown"
                os.close(fd)
                raise ConfigurationError(
                    f"Orcinus runs here already (pid {pid}, {self.path}); stop it with `kill {pid}`, "
                    f"or start another with its own directory: {self._another}"
                ) from None
            # The launcher before may have unlinked the file between this open and this lock.
            if _same_file(fd, self.lock):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
            os.close(fd)


def _write(file: Path, value: object) -> None:
    """Write JSON atomically: a reader sees the old file or the new one."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(new, file)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False

"""Services as processes that have their modules already: forks of one process that imported them once.

A gateway needs 0.9 s of a core to import its modules, and the integration tests start some fifty. `orcinus gateway` as
a command is for tests/stack. Nothing but modules is shared: the process they are forked from runs no service.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from services.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "services.gateway.main", "services.hub.store", "services.scheduler.main"])


class Forked:
    """`orcinus SERVICE` with this environment, used like a subprocess.Popen. Both outputs are appended to `log`."""

    def __init__(self, service: str, environment: Mapping[str, str], log: Path) -> None:
        log.touch()  # it may be read at once
        self.args = ["orcinus", service]
        self._process = CONTEXT.Process(target=_run, args=(service, dict(environment), log), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(service: str, environment: Mapping[str, str], log: Path) -> None:
    with log.open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = ["orcinus", service]
    sys.orig_argv = [sys.executable, "-m", "services.cli", service]  # with it a gateway starts further processes
    main()

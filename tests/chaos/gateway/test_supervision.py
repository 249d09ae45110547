"""A parent of gateway processes and what it does about one that hangs, one that dies at once, and its own death."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints.models import Reference
from tests.support.gateway.process import GatewayProcess
from tests.support.stack import PLAIN, ROOT, Stack
from tests.support.waiting import free_port, until

IMPATIENT = """
import dataclasses, sys
from services.cli.app import main
from services.gateway import processes
from shared.processes import supervisor

supervisor.HUNG_S, supervisor.LAST_WORDS_S = 10.0, 2.0
# However slow starts are.
processes.RESTARTS = dataclasses.replace(processes.RESTARTS, window_s=3600.0, settled_s=3600.0)
sys.argv = ["orcinus", "gateway"]
main()
"""
START_S = 30
"""Much more than a start takes on a busy machine, and as long as a test of this waits."""
MODEL = {"requests": 1, "output_tokens": 16, "seed": 20261207}


class Parent:
    """Two processes without a Redis."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        gateway = GatewayProcess(
            directory, model, f"redis://127.0.0.1:{free_port()}/0", processes=2, drain_s=1, **settings
        )
        self._stats = f"{gateway.ops_url}/stats"
        self._log = directory / "log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", IMPATIENT], env=gateway.environment, cwd=ROOT, stdout=log, stderr=log
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """In the order of their starts."""
        return sorted(psutil.Process(self.process.pid).children(), key=lambda child: (child.create_time(), child.pid))

    def answers(self, child: psutil.Process) -> bool:
        """Over a connection of its own, which may be another's."""
        with contextlib.suppress(httpx.TransportError):
            gateway = httpx.get(self._stats, timeout=60, verify=PLAIN).json()["gateway"]["id"]
            return int(gateway.split("-")[-2]) == child.pid
        return False

    def serving(self, times: int) -> None:
        until(f"one serves for the {times}th time", lambda: self.log().count("serving tiny") >= times, 120)


@contextlib.contextmanager
def parent(directory: Path, model: Path, **settings: Any) -> Iterator[Parent]:
    """Where it still runs at the end, it ends cleanly at SIGTERM."""
    one = Parent(directory, model, **settings)
    try:
        yield one
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            assert one.process.wait(60) == 0
    except BaseException:
        print(one.log()[-4000:], file=sys.stderr)
        raise
    finally:
        one.process.kill()
        one.process.wait(60)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("a-key\n")
    return file


def hang(keys: Path) -> None:
    """A reader of the keys waits for ever from now on: nothing is written into this pipe."""
    keys.unlink()
    os.mkfifo(keys)


def test_a_process_that_hangs_is_ended_and_started_again(reference: Reference, tmp_path: Path) -> None:
    with parent(tmp_path, reference.path) as gateway:
        gateway.serving(2)
        first, second = gateway.children()
        first.send_signal(signal.SIGSTOP)
        gateway.serving(3)
        assert "process 0 has been silent" in gateway.log()
        assert second.is_running() and not first.is_running()


def test_process_hanging_before_it_serves_is_restarted(reference: Reference, tmp_path: Path, keys: Path) -> None:
    with parent(tmp_path, reference.path, api_key_file=keys, process_start_s=START_S) as gateway:
        gateway.serving(2)
        first, second = gateway.children()
        hang(keys)
        first.kill()
        until("it is given up", lambda: "process 0 does not serve after" in gateway.log(), 120)
        keys.unlink()
        keys.write_text("a-key\n")
        gateway.serving(3)
        assert second.is_running()


def test_gateway_ends_when_its_first_process_hangs_before_serving(
    reference: Reference, tmp_path: Path, keys: Path
) -> None:
    hang(keys)
    with parent(tmp_path, reference.path, api_key_file=keys, process_start_s=2) as gateway:
        assert gateway.process.wait(60) == 1
        assert "process 0 does not serve after" in gateway.log()


def test_each_service_waits_for_what_it_needs_and_says_so(reference: Reference, tmp_path: Path) -> None:
    """All start without Redis; scheduler and worker then stand still, so that each finds only those before it.

    The launcher's own order is that of every other test.
    """
    stack = Stack(tmp_path, reference.path, dtype="float32", threads=1)

    def says(reason: str) -> None:
        until(f"the gateway says: {reason}", lambda: reason in reason_of(stack))

    try:
        stack.start("gateway")
        says("Redis does not answer")
        for service in ("scheduler", "worker"):
            stack.start(service)
            until(f"{service} waits", lambda service=service: "waiting for Redis" in stack.log(service))
            stack.signal(service, signal.SIGSTOP)
        stack.redis.start()
        says("no scheduler is alive")
        stack.signal("scheduler", signal.SIGCONT)
        until("the scheduler waits", lambda: "waiting for a ready worker" in stack.log("scheduler"))
        says("no worker is registered")
        stack.signal("worker", signal.SIGCONT)
        until("the stack is ready", stack.ready)
        assert stack.complete(reference.prompts[0], 16) == reference.outputs[0]
    finally:
        stack.__exit__(None, None, None)


def reason_of(stack: Stack) -> str:
    """Return why the gateway is not ready; empty while it does not answer."""
    try:
        return str(httpx.get(f"{stack.url}/health/ready", timeout=60, verify=PLAIN).json().get("reason", "it is ready"))
    except httpx.TransportError:
        return ""

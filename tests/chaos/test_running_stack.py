"""The stack that `orcinus up` runs: its clients while its gateway is started again, and `orcinus chaos`, which finds it
by its run directory, hurts it, and waits until it is whole again.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from protos import kserve_pb2, kserve_pb2_grpc
from services.launcher.rundir import RunDir
from tests.chaos.harness.main import main, running_stack
from tests.support.launcher import ROOT, clean_env, up
from tests.support.waiting import free_port, until

FAULTS = ("worker_drain", "scheduler_kill", "gateway_kill")
GRPC_PORT = free_port()
CLIENTS = 4


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack of the demo model that is ready."""
    directory = tmp_path_factory.mktemp("stack")
    with up(directory, "--threads", "1", "--kv-blocks", "512", "--grpc-port", str(GRPC_PORT)):
        yield directory / "run"


class Connecting(threading.Thread):
    """A client that opens a connection for each request, until it is stopped."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.requests: list[tuple[float, str]] = []
        """Of each: when it began, its status or error."""
        self.is_over = threading.Event()
        self._port = port

    def answered(self, since: float) -> int:
        """Return how many requests that began since then have ended."""
        return sum(begin >= since for begin, _ in self.requests)

    def run(self) -> None:
        while not self.is_over.is_set():
            self.requests.append((time.monotonic(), self._ask()))

    def _ask(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.connect()
        except OSError as error:
            return f"not connected: {error!r}"
        try:
            connection.request("GET", "/v1/models")
            return str(connection.getresponse().status)
        except (OSError, http.client.HTTPException) as error:
            return f"no answer: {error!r}"
        finally:
            connection.close()


@pytest.mark.timeout(300)
def test_clients_wait_while_a_killed_gateway_starts_again(run_dir: Path) -> None:
    stack = running_stack(run_dir)
    assert stack is not None
    clients = [Connecting(int(stack.urls[0].rpartition(":")[2])) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    until("every client is answered", lambda: all(client.answered(0) for client in clients))
    gateway = psutil.Process(RunDir(run_dir).pids()["gateway-0"])
    gateway.send_signal(signal.SIGKILL)
    until("it has ended", lambda: not gateway.is_running() or gateway.status() == psutil.STATUS_ZOMBIE)
    ended = time.monotonic()  # before that it may have taken a connection, which ended with it
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(kserve_pb2.ServerLiveRequest(), wait_for_ready=True, timeout=60).live
    until("every client is answered again", lambda: all(client.answered(ended) > 1 for client in clients))
    for client in clients:
        client.is_over.set()
        client.join(60)
    requests = [request for client in clients for request in client.requests]
    assert [answer for _, answer in requests if answer.startswith("not connected")] == []
    assert [answer for begin, answer in requests if begin >= ended and answer != "200"] == []
    assert sum(answer != "200" for _, answer in requests) <= CLIENTS, "those that were at the gateway"


@pytest.mark.timeout(420)
def test_nothing_is_lost_on_the_running_stack(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pids = RunDir(run_dir).pids()
    arguments = ["--clients", "4", "--tokens", "60", "--gap", "1", "--seconds", "300", "--seed", "7", "--json"]
    kinds = ["--faults", str(len(FAULTS)), "--kinds", ",".join(FAULTS)]
    code = main(["--run-dir", str(run_dir), "--yes", *arguments, *kinds])
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert code == 0, printed.err
    assert figures["faults"] == dict.fromkeys(sorted(FAULTS), 1)
    assert figures["finished"] > len(FAULTS)
    now = RunDir(run_dir).pids()
    changed = {name for name in pids if pids[name] != now.get(name)}
    assert changed == {"worker-0", "scheduler-0", "gateway-0"}
    stack = running_stack(run_dir)
    assert stack is not None
    url = stack.urls[0]
    until("the gateway is ready", lambda: httpx.get(f"{url}/health/ready", timeout=60).is_success)
    body = {"model": "demo-model", "prompt": "x", "max_tokens": 500, "n": 4, "ignore_eos": True, "speculate": False}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()  # is still counted then
    again = ["--clients", "2", "--tokens", "80", "--seconds", "60", "--faults", "1", "--seed", "8"]
    again += ["--kinds", FAULTS[0], "--run-dir", str(run_dir), "--yes"]
    assert main(again) == 0, "no key means a request of the first run"


def test_stack_that_wants_a_key_is_not_hurt_without_one(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = running_stack(run_dir)
    assert stack is not None
    url = stack.urls[0]
    add = [sys.executable, "-m", "services.cli", "keys", "add", "first", "--run-dir", str(run_dir)]
    subprocess.run(add, cwd=ROOT, env=clean_env(), check=True, capture_output=True)
    until("requests need a key", lambda: httpx.get(f"{url}/v1/models", timeout=60).status_code == 401)
    pids = RunDir(run_dir).pids()
    assert main(["--run-dir", str(run_dir), "--yes"]) == 1
    assert f"{url} wants a key (401); set ORCINUS_API_KEY" in capsys.readouterr().err
    assert RunDir(run_dir).pids() == pids

"""`make run` as a user types it: readiness, restarts, errors, and that it leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints.models import make_llama
from tests.support.launcher import ROOT, alive, clean_env
from tests.support.stack import PLAIN, RedisServer
from tests.support.waiting import free_port, until

READY_S = 200.0
SERVICES = {"redis", "worker-0", "scheduler-0", "gateway-0"}


class MakeRun:
    """One `make run` with its own run directory. Further settings are environment variables."""

    def __init__(self, directory: Path, model: Path, args: str = "", **env: str) -> None:
        self.run_dir = directory / "run"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "make.txt"
        self.argv = [
            "make", "run", f"MODEL={model}", f"PORT={self.port}", "DEVICE=cpu",
            f"ARGS=--run-dir '{self.run_dir}' --ops-port {free_port()} --threads 2 --kv-blocks 512 {args}",
        ]  # fmt: skip
        # An outer `make test` hands its own flags and variables down through these.
        drop = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
        self.env = {name: value for name, value in clean_env(**env).items() if name not in drop}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> MakeRun:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv, cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def ready(self) -> MakeRun:
        until("make run is ready", self._answers, READY_S)
        return self

    def _answers(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"make run ended with {self.process.returncode}:\n{self.text()}")
        return f"{self.url}/v1/completions" in self.text()

    def refused(self) -> str:
        """Run until it ends with an error. Return its output."""
        self.start()
        if self.process is None:
            raise AssertionError
        assert self.process.wait(READY_S) == 2
        assert not (self.run_dir / "lock").exists()
        assert not (self.run_dir / "processes.json").exists()
        return self.text()

    def text(self) -> str:
        return self.log.read_text()

    def pids(self) -> dict[str, int]:
        return dict(json.loads((self.run_dir / "processes.json").read_text()))

    def launcher(self) -> int:
        return int((self.run_dir / "lock").read_text())

    def complete(self, **body: Any) -> httpx.Response:
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0, **body}
        model = httpx.get(f"{self.url}/v1/models", timeout=60, verify=PLAIN).json()["data"][0]["id"]
        return httpx.post(f"{self.url}/v1/completions", json={"model": model, **body}, timeout=60, verify=PLAIN)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)

    def __enter__(self) -> MakeRun:
        try:
            return self.start().ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_llama(path, seed=7, requests=1)
    return path


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[MakeRun]:
    with MakeRun(tmp_path_factory.mktemp("shared"), model) as run:
        yield run


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_nothing_is_left(run: MakeRun, pids: list[int]) -> None:
    until("every process is gone", lambda: not any(map(alive, pids)))
    assert not listening(run.port)
    assert sorted(path.name for path in run.run_dir.iterdir()) == ["files", "logs", "redis"]


def test_printed_curl_line_works(shared_run: MakeRun) -> None:
    curl = next(line for line in shared_run.text().splitlines() if line.startswith("curl "))
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["choices"][0]["finish_reason"] in ("length", "stop")


def test_documented_redis_cli_line_reads_the_stack(shared_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / ".run").symlink_to(shared_run.run_dir)
    page = (ROOT / "docs" / "redis.md").read_text()
    (line,) = [line.strip() for line in page.splitlines() if "redis-cli -s " in line]
    asked = subprocess.run(
        ["bash", "-c", f"{line} --raw keys '*:lease:*'"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert asked.stdout.strip().endswith(":lease:shard-0"), asked.stderr


def test_password_is_on_no_command_line_and_in_no_log_or_record(shared_run: MakeRun) -> None:
    record = shared_run.run_dir / "socket-dir"
    private = Path(record.read_text().strip()) if record.exists() else shared_run.run_dir / "socket"
    password = re.search(r'requirepass "([^"]+)"', (private / "redis.conf").read_text())
    assert password is not None
    for pid in [shared_run.launcher(), *shared_run.pids().values()]:
        assert password[1] not in " ".join(psutil.Process(pid).cmdline())
    for file in [*(shared_run.run_dir / "logs").iterdir(), *shared_run.run_dir.glob("*.json")]:
        assert password[1] not in file.read_text(errors="replace")
    assert shared_run.run_dir.stat().st_mode & 0o077 == 0


def test_sigterm_to_make_stops_everything_and_data_stays(shared_run: MakeRun) -> None:
    """The last test of the shared run, which then starts again with two workers behind one scheduler."""
    for workers in (["worker-0"], ["worker-0", "worker-1"]):
        if len(workers) > 1:
            shared_run.argv.append(f"REPLICAS={len(workers)}")
            shared_run.start().ready()
        assert set(shared_run.pids()) == SERVICES | set(workers)
        for name in workers:
            log = shared_run.run_dir / "logs" / f"{name}.log"
            until(f"{name} is led", lambda log=log: "from shard shard-0 begins" in log.read_text())
        assert shared_run.complete().status_code == 200
        pids = [shared_run.launcher(), *shared_run.pids().values()]
        shared_run.stop(signal.SIGTERM)  # to the pid of make, not to its group
        assert_nothing_is_left(shared_run, pids)


def test_redis_and_key_of_the_operator_are_used(tmp_path: Path, model: Path) -> None:
    """The Redis is left alone afterwards; the key is asked for, never printed, and the printed line presents it."""
    with RedisServer(tmp_path / "redis") as server:
        with MakeRun(tmp_path, model, ORCINUS_REDIS_URL=server.url, ORCINUS_API_KEY="key-of-a-client") as run:
            assert set(run.pids()) == SERVICES - {"redis"}
            assert httpx.get(f"{run.url}/v1/models", timeout=60, verify=PLAIN).status_code == 401
            assert "key-of-a-client" not in run.text()
            curl = next(line for line in run.text().splitlines() if line.startswith("curl "))
            answer = subprocess.run(["bash", "-c", curl], env=run.env, capture_output=True, text=True, timeout=60)
            assert json.loads(answer.stdout)["choices"]
            assert server.client.dbsize() > 0
        assert server.client.ping()


def test_port_in_use_is_an_error_with_a_remedy(tmp_path: Path, model: Path) -> None:
    run = MakeRun(tmp_path, model)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", run.port))
        taken.listen()
        said = run.refused()
    assert f"port {run.port}" in said and "in use" in said and "PORT=" in said


def test_setting_that_the_worker_refuses_is_named(tmp_path: Path, model: Path) -> None:
    said = MakeRun(tmp_path, model, args="--max-output-tokens 1000000").refused()
    assert re.search("max_output_tokens|max-output-tokens|MAX_OUTPUT_TOKENS", said)

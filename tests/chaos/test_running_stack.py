"""`orcinus chaos` on the stack that `orcinus up` runs: found by its run directory, hurt, and whole again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.launcher.rundir import RunDir
from tests.chaos.harness.main import main, running_stack
from tests.support.launcher import ROOT, clean_env, up
from tests.support.waiting import until

FAULTS = ("worker_drain", "scheduler_kill", "gateway_kill")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack of the demo model that is ready."""
    directory = tmp_path_factory.mktemp("stack")
    with up(directory, "--threads", "1", "--kv-blocks", "512"):
        yield directory / "run"


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

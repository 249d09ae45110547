"""Which stack `orcinus chaos` hurts, and when it asks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from services.launcher.rundir import RunDir, StackFacts
from shared.errors import ConfigurationError
from tests.chaos.harness.main import main, running_stack

FACTS = StackFacts("a/model", "shard-3", "http://127.0.0.1:7", "http://127.0.0.1:8", "redis://127.0.0.1:9/0")
PIDS = {"redis": 1, "worker-0": 1, "worker-1": 1, "scheduler-0": 1, "gateway-0": os.getpid()}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a launcher that runs."""
    for name in [name for name in os.environ if name.startswith("ORCINUS_")]:
        monkeypatch.delenv(name)
    with RunDir(tmp_path / "run") as directory:
        directory.write_facts(FACTS)
        directory.write_processes(PIDS)
        yield directory.path


def test_running_stack_is_found_with_all_its_services(run_dir: Path, tmp_path: Path) -> None:
    stack = running_stack(run_dir)
    assert stack is not None and running_stack(tmp_path / "none") is None
    assert (stack.name, stack.shard, stack.urls) == ("a/model", "shard-3", ["http://127.0.0.1:7"])
    assert (stack.gateways, stack.schedulers, stack.worker, stack.replicas) == (
        ["gateway-0"], ["scheduler-0"], "worker-0", "2",
    )  # fmt: skip
    assert stack.processes["gateway-0"].pid == os.getpid() and "redis" not in stack.processes
    for pids, pid in (({**PIDS, "worker-0": 12}, 12), ({"redis": 1}, 0)):  # it was started again; it is gone
        RunDir(run_dir).write_processes(pids)
        assert stack.processes["worker-0"].pid == pid
    with pytest.raises(ConfigurationError, match="names no gateway, scheduler or worker"):
        running_stack(run_dir)


def test_running_stack_is_not_hurt_without_a_yes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    monkeypatch.setattr("tests.chaos.harness.main.chaos_here", lambda *_: pytest.fail("it was hurt"))
    with pytest.raises(typer.Abort):
        main(["--run-dir", str(run_dir)])


def test_fault_of_an_own_stack_is_refused_where_one_runs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(run_dir), "--kinds", "worker_kill,redis_full,step_hang", "--yes"]) == 2
    assert "redis_full, step_hang: a fault of a stack of its own; give --own" in capsys.readouterr().err

"""Workers that are told to end, or cannot start, while they load: real processes, of one rank and of several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from shared.settings import ROOT
from tests.support.launcher import settings_env
from tests.support.models import Reference, make_llama
from tests.support.waiting import until

GONE_S = 60.0
WAITS = "waiting for 1 other rank"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_llama(tmp_path_factory.mktemp("stopping") / "tiny", seed=29, requests=1)


@contextmanager
def worker(model: Path, log: Path, **environment: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that knows of no Redis; killed at the end of the block if it is there still."""
    told = settings_env(model=model, device="cpu", listen="127.0.0.1:0", threads=1)
    told |= {name: str(value) for name, value in environment.items()}
    with log.open("wb") as lines:
        process = subprocess.Popen([sys.executable, "-m", "services.cli", "worker"], cwd=ROOT, env=told, stderr=lines)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGTERM)])
def test_rank_waiting_for_others_ends_when_told_to(
    reference: Reference, tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    """Its main thread is inside torch's store, for ten minutes."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    told = {"RANK": rank, "WORLD_SIZE": 2, "ORCINUS_TP": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    log = tmp_path / "log"
    with worker(reference.path, log, TORCHELASTIC_USE_AGENT_STORE="True", **told) as process:
        until("it waits", lambda: WAITS in log.read_text(), 60)
        process.send_signal(number)
        assert process.wait(GONE_S) == 0
    assert f"{number.name} while loading: stopping" in log.read_text()


def test_loading_replica_ends_with_all_ranks_even_a_stopped_one(tmp_path: Path) -> None:
    log, model = tmp_path / "log", tmp_path / "model"
    model.mkdir()
    os.mkfifo(model / "config.json")  # into which nothing writes
    with worker(model, log, ORCINUS_TP=2) as process:
        until("they have started", lambda: all(f"rank {rank}: {WAITS}" in log.read_text() for rank in (0, 1)), 60)
        (other,) = psutil.Process(process.pid).children()
        other.suspend()
        process.terminate()
        assert process.wait(GONE_S) == 0
        until("rank 1 is gone", lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)


def test_what_all_ranks_find_wrong_is_said_once(reference: Reference, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with worker(reference.path, log, ORCINUS_TP=3) as process:
        assert process.wait(60) == 2
    said = [line for line in log.read_text().splitlines() if "INFO" not in line]
    assert said == ["error: --tp 3 does not divide the model's num_attention_heads 4; --tp 2 does"]

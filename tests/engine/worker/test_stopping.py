"""Workers that are told to end, or cannot start, while they load: real processes, of one rank and of several."""

from __future__ import annotations

import contextlib
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.engine.worker.processes import WorkerProcess
from tests.support.checkpoints.models import Reference
from tests.support.waiting import until

MODEL = {"seed": 9, "requests": 2}

WAITS = "waiting for 1 other rank"


def worker(model: Path, environment: dict[str, Any]) -> WorkerProcess:
    """A worker that knows of no Redis."""
    return WorkerProcess(environment=environment, MODEL=model, LISTEN="127.0.0.1:0")


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_rank_waiting_for_others_ends_when_told_to(reference: Reference, rank: int, number: signal.Signals) -> None:
    """Its main thread is inside torch's store, for ten minutes."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    told = {"RANK": rank, "WORLD_SIZE": 2, "ORCINUS_TP": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    with worker(reference.path, {**told, "TORCHELASTIC_USE_AGENT_STORE": "True"}) as one:
        until("it waits", lambda: one.says(WAITS))
        one.process.send_signal(number)
        assert one.ends() == 0
        assert one.says(f"{number.name} while loading: stopping")


def test_loading_replica_ends_with_all_ranks_even_stopped_ones(tmp_path: Path) -> None:
    with worker(tmp_path, {"ORCINUS_TP": 3}) as one:
        last = until("rank 2 has started", lambda: rank_of(one, 2))
        last.suspend()  # long before it meets the others, which wait for it
        try:
            waits = [f"rank {rank}: waiting for 2 other ranks" for rank in (0, 1)]
            until("the others wait", lambda: all(map(one.says, waits)))
            other = until("rank 1 is found", lambda: rank_of(one, 1))
            other.suspend()
            one.process.terminate()
            assert one.process.wait(60) == 0
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                last.resume()
        until("the ranks are gone", lambda: has_ended(other) and has_ended(last))


def rank_of(worker: WorkerProcess, rank: int) -> psutil.Process | None:
    """The process that the worker started as this rank; None if there is none yet."""
    for child in psutil.Process(worker.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if child.environ().get("RANK") == str(rank):
                return child
    return None


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_all_ranks_find_wrong_is_said_once(reference: Reference) -> None:
    with worker(reference.path, {"ORCINUS_TP": 3}) as one:
        assert one.ends() == 2
        said = [line for line in one.lines if "INFO" not in line]
    assert said == ["error: --tp 3 does not divide the model's num_attention_heads 4; --tp 2 does\n"]

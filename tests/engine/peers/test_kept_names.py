"""The launcher removes what workers of its stack have kept, and nothing else, in a folder that was given to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from services.launcher import up
from services.worker.kv.host_tier import HostTier
from services.worker.parallel.state import ParallelState
from shared.settings import WorkerSettings

BLOCK_BYTES = 4096


def keep(folder: Path, model: str) -> None:
    settings = WorkerSettings(model=Path("/nowhere"), kv_share_dir=folder, served_model_name=model, host_blocks=2)
    tier = HostTier(settings, ParallelState())
    tier.take(2, BLOCK_BYTES)
    tier.serve("shard-0", [])
    assert tier.keep(np.zeros(1, np.int32)) == 1


def test_file_that_a_worker_kept_goes_with_its_stack(tmp_path: Path) -> None:
    folder, stack = tmp_path / "kv", up.ModelStack.of(up.ModelOptions({"served_model_name": "one"}))
    with up.shared_folder(tmp_path / "run", folder, [stack], sleeps=True):
        keep(folder, "one")
        keep(folder, "two")
        assert len(list(folder.glob("*.kept"))) == 2
    (left,) = folder.glob("*.kept")
    other = up.ModelStack.of(up.ModelOptions({"served_model_name": "two"}))
    with up.shared_folder(tmp_path / "run", folder, [other], sleeps=True):
        assert left.exists()
    assert not left.exists()

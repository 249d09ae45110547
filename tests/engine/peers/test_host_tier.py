"""A worker's own host tier in a shared folder: its size beside others, what its ranks agree on, and its format."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from services.worker import engine as engine_module
from services.worker.kv.host_tier import HostTier
from services.worker.kv.share_folder import ID
from services.worker.parallel.state import ParallelState
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from tests.engine.driver import make_engine
from tests.support.checkpoints.models import Reference, make_llama

MODEL = {"seed": 11, "requests": 1, "output_tokens": 1}

BLOCK_BYTES = 4096
TIMEOUT_S = 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def tiers(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != ID)


def narrow(monkeypatch: pytest.MonkeyPatch, most: int, ends_with: str = "") -> None:
    """No file of the name may have more bytes than `most`: others were there in the moment before."""
    real = os.posix_fallocate

    def take(file: int, start: int, size: int) -> None:
        if size > most and os.readlink(f"/proc/self/fd/{file}").endswith(ends_with):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", take)


def test_tier_that_is_not_set_is_smaller_where_others_were_quicker(
    reference: Reference, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"host_blocks": None, "kv_share_dir": folder, "worker_role": "prefill"}
    first, others = make_engine(reference.path, **given), tiers(folder)
    planned, size = first.info().host_blocks, first.info().block_bytes
    assert "instead of" not in caplog.text
    narrow(monkeypatch, planned * size // 3)
    second = make_engine(reference.path, **given)
    assert second.info().host_blocks == planned // 4
    assert f"room for {planned // 4} blocks of the host tier instead of {planned}" in caplog.text
    assert [path.stat().st_size for path in tiers(folder) if path not in others] == [planned // 4 * (size + 8) + 8]
    narrow(monkeypatch, 0)
    with pytest.raises(ConfigurationError, match=r"prefill worker.*would be empty: raise --host-blocks"):
        make_engine(reference.path, **given)


def test_a_file_system_without_limit_bounds_no_tier(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs of size 0 says that no block of none is free."""
    unlimited = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "fstatvfs", lambda file: unlimited)
    tier = HostTier(settings(folder), ParallelState())
    blocks, memory = tier.take(10, BLOCK_BYTES)
    assert blocks == 10 and memory is not None and memory.numel() == 10 * BLOCK_BYTES


@pytest.mark.parametrize(("role", "is_for_memory"), [("both", True), ("both", False), ("decode", True)])
def test_tier_for_sequences_without_room_is_private_where_the_folder_is_small(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: str, is_for_memory: bool
) -> None:
    """As in a container, the /dev/shm of which has 64 MiB."""
    small = SimpleNamespace(f_blocks=9, f_bavail=8, f_frsize=BLOCK_BYTES, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "fstatvfs", lambda file: small)
    tier = HostTier(settings(folder, worker_role=role), ParallelState())
    blocks, memory = tier.take(100, BLOCK_BYTES, is_for_memory)
    if role == "both" and is_for_memory:
        assert (blocks, memory) == (100, None) and not tiers(folder)
        assert "no KV outlives it" in caplog.text and "room for 4 blocks instead of 100" in caplog.text
    else:
        assert blocks == 4 and memory is not None and memory.numel() == 4 * BLOCK_BYTES


def settings(folder: Path | None, **values: Any) -> WorkerSettings:
    return WorkerSettings(model=Path("/nowhere"), kv_share_dir=folder, **values)


def on_two_ranks(given: list[WorkerSettings]) -> list[tuple[HostTier, tuple[int, Any]]]:
    """Both tiers with what they took; raises what either raised."""
    leader = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)

    def start(rank: int) -> tuple[HostTier, tuple[int, Any]]:
        store = dist.TCPStore("127.0.0.1", leader.port, None, False, timedelta(seconds=TIMEOUT_S))
        tier = HostTier(given[rank], ParallelState.join(2, 1, rank, store, TIMEOUT_S))
        return tier, tier.take(100, BLOCK_BYTES)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def test_ranks_have_as_many_blocks_as_one_with_least_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch, 60 * BLOCK_BYTES, "-1")
    made = on_two_ranks([settings(folder)] * 2)
    assert [blocks for _, (blocks, _) in made] == [50, 50] and made[0][0].name == made[1][0].name
    assert [path.stat().st_size for path in tiers(folder)] == [50 * (BLOCK_BYTES + 8) + 8] * 2


@pytest.mark.parametrize(
    ("name", "other"), [("", {}), ("another", {}), ("kv", {"host_blocks": 5}), ("kv", {"worker_role": "decode"})]
)
def test_ranks_with_different_settings_are_refused_at_once(folder: Path, name: str, other: dict[str, Any]) -> None:
    """In no call of the ranks does one wait for another that makes a different one."""
    there = folder.parent / name if name else None
    with pytest.raises(ConfigurationError, match="rank 1 of the replica has another --worker-role"):
        on_two_ranks([settings(folder), settings(there, **other)])


def test_fault_of_the_folder_is_found_before_weights_are_read(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "open_weights", lambda *given: pytest.fail("the weights are opened"))
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="--kv-share-dir"):
        make_engine(reference.path, kv_share_dir=tmp_path)


def test_what_changes_the_bytes_of_a_block_changes_the_format(reference: Reference, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "tuned", seed=12, requests=1, output_tokens=1)
    assert (other.path / "config.json").read_bytes() == (reference.path / "config.json").read_bytes()
    formats = [
        make_engine(model, **settings).info().kv_format
        for model, settings in (
            (reference.path, {"kernels": "cpu", "block_size": 16}),
            (other.path, {"kernels": "cpu", "block_size": 16}),
            (reference.path, {"kernels": "reference", "block_size": 16}),
            (reference.path, {"kernels": "cpu", "block_size": 32}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "dtype": "bfloat16"}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "quantize": "int8"}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "deterministic": True}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "kv_dtype": "int8"}),
            (reference.path, {"kernels": "cpu", "block_size": 16, "kv_dtype": "fp8"}),
        )
    ]
    assert len(set(formats)) == len(formats)


def test_computing_backend_is_part_of_the_format(reference: Reference) -> None:
    """Kernels that lay a block out alike, and ranks that hold a part of it."""
    engine = make_engine(reference.path, kernels="reference")
    formats = [engine.info().kv_format]
    for kernels, tp, pp in (("reference", 1, 1), ("cuda", 1, 1), ("reference", 2, 1), ("reference", 1, 2)):
        parallel = ParallelState()
        tier = HostTier(WorkerSettings(model=reference.path, kernels="reference"), parallel)
        parallel.tp, parallel.pp = tp, pp
        formats.append(tier.describe(engine.cache, kernels, engine.model_hash)["kv_format"])
    assert formats[0] == formats[1] and len(set(formats)) == 4

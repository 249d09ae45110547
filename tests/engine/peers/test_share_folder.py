"""The folder of host tiers: what comes, goes and is amiss in it while workers start and stop."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.launcher import up
from services.worker.kv import share_folder
from services.worker.kv.host_tier import HostTier
from services.worker.kv.share_folder import ID, NoRoomError, PeerError, ShareFolder
from services.worker.parallel.state import ParallelState
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings

SIZE = 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def tier() -> str:
    return f"{secrets.token_hex(16)}-0"


def opened(path: Path) -> list[str]:
    """The files that this process has open, of the folder and itself."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or one of another thread
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in found if name.startswith(str(path)))


@pytest.mark.parametrize("call", ["open", "unlink"])
def test_a_worker_starts_while_another_ones_file_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """A process that ends takes no lock: its file may go between any two calls of one that starts."""
    folder, left = ShareFolder(path), [tier(), tier()]
    for name in left:
        (path / name).touch(0o600)
    real = getattr(os, call)

    def after_it_went(name: Any, *rest: Any, **named: Any) -> Any:
        if name == left[0]:
            (path / name).unlink()
        return real(name, *rest, **named)

    monkeypatch.setattr(os, call, after_it_went)
    assert ShareFolder(path).id == folder.id
    assert os.listdir(path) == [ID] and not caplog.records


def test_file_that_cannot_be_removed_is_named_and_start_continues(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, link, directory, left = ShareFolder(path), tier(), tier(), tier()
    (path / link).symlink_to("/nowhere")
    (path / directory).mkdir()
    (path / left).touch(0o600)
    assert ShareFolder(path).id == folder.id
    assert sorted(os.listdir(path)) == sorted([ID, link, directory])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(any(name in line for line in said) for name in (link, directory))


def test_folder_that_vanishes_is_an_error_that_names_the_setting(path: Path) -> None:
    folder = ShareFolder(path)
    shutil.rmtree(path)
    with pytest.raises(ConfigurationError, match=rf"--kv-share-dir {path}: No such file.*name a folder"):
        folder.make(tier(), SIZE)


@pytest.mark.parametrize("call", ["open", "posix_fallocate"])
def test_no_room_is_told_with_need_and_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Of bytes, or of files."""
    folder, real = ShareFolder(path), getattr(os, call)
    held = opened(path)

    def full(*given: Any, **named: Any) -> Any:
        if call == "open" and given[0] == ID:
            return real(*given, **named)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(NoRoomError, match=r"no room .*No space left.*needs 1 MiB .*lower --host-blocks"):
            folder.make(tier(), SIZE)
    assert os.listdir(path) == [ID] and opened(path) == held


def test_a_folder_is_refused_with_what_to_do(path: Path, tmp_path: Path) -> None:
    path.mkdir(0o700)
    (path / ID).write_text("x/y\n")
    with pytest.raises(ConfigurationError, match=f"{ID} holds no name of a folder; remove it"):
        ShareFolder(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigurationError, match=r"--kv-share-dir .*/link: .*a symbolic link is not followed"):
        ShareFolder(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"--kv-share-dir .*Not a directory"):
        ShareFolder(tmp_path / "file")
    with pytest.raises(ConfigurationError, match=r"--kv-share-dir .*No such file"):
        ShareFolder(tmp_path / "no" / "such")
    for mode in (0o710, 0o703, 0o755):
        tmp_path.chmod(mode)
        with pytest.raises(ConfigurationError, match=rf"mode {mode:o}.*name a folder inside it.*mode 700"):
            ShareFolder(tmp_path)


def test_kept_file_is_on_disk_before_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = ShareFolder(path), tier()
    memory, synced = folder.make(name, SIZE), os.fsync
    at_sync: list[list[str]] = []

    def sync(file: int) -> None:
        assert os.readlink(f"/proc/self/fd/{file}") == str(path / name)
        at_sync.append(os.listdir(path))
        synced(file)

    monkeypatch.setattr(os, "fsync", sync)
    memory.fill_(7)
    folder.keep(name, "a" * 16, [])
    assert [sorted(names) for names in at_sync] == [sorted([ID, name])]
    assert (path / f"{name}.{'a' * 16}.kept").read_bytes() == bytes([7]) * SIZE


def test_halted_holder_of_the_lock_is_not_waited_for_forever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_folder, "LOCK_S", 0.0)
    ShareFolder(path)
    with (path / ID).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match=f"another process has held the lock of {ID}"):
            ShareFolder(path)


def test_only_files_of_the_own_user_are_mapped(path: Path) -> None:
    folder, pipe, good = ShareFolder(path), tier(), tier()
    os.mkfifo(path / pipe)
    (path / good).write_bytes(bytes(SIZE))
    assert folder.map(good, [SIZE])[0].numel() == SIZE
    with pytest.raises(PeerError, match="is no file of this user"):
        folder.map(pipe, [1])
    with pytest.raises(PeerError, match="has no blocks"):
        folder.map(good, [8, 0])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_not_mapped(path: Path) -> None:
    folder, strange = ShareFolder(path), tier()
    (path / strange).write_bytes(bytes(SIZE))
    os.chown(path / strange, 65534, 65534)
    with pytest.raises(PeerError, match="is no file of this user"):
        folder.map(strange, [SIZE])


def test_empty_setting_is_no_folder_and_relative_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def settings(value: str, **others: Any) -> WorkerSettings:
        monkeypatch.setenv("ORCINUS_KV_SHARE_DIR", value)
        return WorkerSettings(model=tmp_path, **others)

    assert settings("").kv_share_dir is None
    assert settings(str(tmp_path)).kv_share_dir == tmp_path
    with pytest.raises(ValueError, match="worker role prefill: needs ORCINUS_KV_SHARE_DIR"):
        settings("", worker_role="prefill")
    for relative in ("kv", ".", "../kv"):
        with pytest.raises(ValueError, match=f"ORCINUS_KV_SHARE_DIR={relative}: relative.*begin it with /"):
            settings(relative)


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

"""What `orcinus up` gives each of several workers, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from services.launcher import up
from shared.errors import ConfigurationError
from shared.settings import LauncherSettings, WorkerSettings


def test_workers_on_a_cpu_have_names_and_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    made = [up.replica_env(WorkerSettings(worker_metrics_port=9000), number, 3) for number in range(3)]
    assert [env["ORCINUS_WORKER_ID"] for env in made] == ["worker-0", "worker-1", "worker-2"]
    assert [env["ORCINUS_WORKER_METRICS_PORT"] for env in made] == ["9000", "9001", "9002"]
    assert {env["ORCINUS_THREADS"] for env in made} == {"2"}
    given = up.replica_env(WorkerSettings(threads=4, kv_memory_fraction=0.1, worker_id="here"), 1, 2)
    assert given == {"ORCINUS_WORKER_ID": "here-1"}


def test_workers_on_gpus_see_those_that_no_other_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: True)
    made = [up.replica_env(WorkerSettings(tp=2), number, 2)["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert made == ["0,1", "2,3"] and up.replica_env(WorkerSettings(), 0, 1) == {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp": 2}, "each needs 2 GPUs of its own, this machine shows 3"),
        ({"listen": "127.0.0.1:5000"}, "127.0.0.1:5000 is one port"),
        ({"advertise": "10.0.0.1:5000"}, "10.0.0.1:5000 is one worker"),
    ],
)
def test_what_two_workers_cannot_both_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(up, "on_gpu", lambda worker: True)
    monkeypatch.setattr(up, "device_count", lambda: 3)
    with pytest.raises(ConfigurationError, match=said):
        up.check_device(2, WorkerSettings(**settings))
        up.check_addresses(2, WorkerSettings(**settings))


def test_workers_do_both_or_are_told_their_roles_and_the_folder_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LauncherSettings(replicas=2).roles() == ["both", "both"]
    roles = LauncherSettings(prefill=1, decode=2).roles()
    assert roles == ["prefill", "decode", "decode"]
    assert up.share_env("both", tmp_path, False) == {}
    both = {"ORCINUS_WORKER_ROLE": "decode", "ORCINUS_KV_SHARE_DIR": str(tmp_path)}
    assert up.share_env("decode", tmp_path, False) == both
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    folders = [up.share_folder(Path(path)) for path in ("/a/.run", "/a/.run", "/b/.run")]
    assert folders[0] == folders[1] != folders[2] and folders[0].parent == tmp_path
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path / "none")
    assert up.share_folder(Path("/a/.run")) == Path("/a/.run/kv")


def test_workers_of_models_that_sleep_share_a_folder_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    assert up.share_env("both", tmp_path / "kv", True) == {"ORCINUS_KV_SHARE_DIR": str(tmp_path / "kv")}
    assert up.share_env("both", tmp_path / "kv", False) == {}
    assert up.share_env("both", Path("/disk/kv"), True) == {}, "it would write to a disk"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert up.share_folder(Path("/a/.run")) == Path("/a/.run/kv"), "a container may not let it write there"


def test_what_workers_left_goes_with_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    own, given = up.share_folder(Path("/a/.run")), tmp_path / "given"
    own.mkdir()
    (own / "of-a-killed-stack.kept").touch()
    with up.shared_folder(Path("/a/.run"), None) as folder:
        assert folder == own and not own.exists()
        own.mkdir()
    assert not own.exists()
    given.mkdir()
    (given / "folder-id").touch()
    with up.shared_folder(Path("/a/.run"), given) as folder:
        assert folder == given
        (given / "tier-0.owner.kept").touch()
    assert os.listdir(given) == ["folder-id"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefill": 1}, "PREFILL=1 DECODE=0: at least one of each"),
        ({"decode": 2}, "PREFILL=0 DECODE=2"),
        ({"prefill": 1, "decode": 1, "replicas": 2}, "REPLICAS=2: excludes PREFILL and DECODE"),
    ],
)
def test_roles_that_make_no_stack_are_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        LauncherSettings(**given).roles()

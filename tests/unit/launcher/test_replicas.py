"""What `orcinus up` gives each of several workers, and what it refuses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.launcher import up
from shared.errors import ConfigurationError
from shared.kept_files import owner_of
from shared.settings import LauncherSettings, WorkerSettings

STACK = [up.ModelStack.of(up.ModelOptions({}))]


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
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "another-container")
        assert up.share_folder(Path("/a/.run")) not in folders, "both may share /dev/shm"
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path / "none")
    assert up.share_folder(Path("/a/.run")) == Path("/a/.run/kv")


def test_workers_of_models_that_sleep_share_a_folder_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    assert up.share_env("both", tmp_path / "kv", True) == {"ORCINUS_KV_SHARE_DIR": str(tmp_path / "kv")}
    assert up.share_env("both", tmp_path / "kv", False) == {}
    assert up.share_env("both", Path("/disk/kv"), True) == {}, "it would write to a disk"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert up.share_folder(Path("/a/.run")) == Path("/a/.run/kv"), "a container may not let it write there"


@pytest.mark.parametrize("made", ["of another user", "a file", "a link"])
def test_folder_that_was_made_first_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    memory, run_dir, user = tmp_path / "memory", tmp_path / "run", os.geteuid()
    memory.mkdir()
    run_dir.mkdir()
    monkeypatch.setattr(up, "SHARED_MEMORY", memory)
    assert not up.share_problem(run_dir)
    if made == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        up.share_folder(run_dir).mkdir()
    elif made == "a file":
        up.share_folder(run_dir).touch()
    else:
        up.share_folder(run_dir).symlink_to(memory)
    assert "is no folder of user" in up.share_problem(run_dir)
    folder = up.share_folder(run_dir)
    assert folder == run_dir / "kv" and up.share_env("both", folder, True) == {}
    with up.shared_folder(run_dir, None, STACK, True) as used:
        assert used == folder


def test_what_workers_left_goes_with_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    own, given = up.share_folder(Path("/a/.run")), tmp_path / "given"
    own.mkdir()
    (own / "of-a-killed-stack.kept").touch()
    with up.shared_folder(Path("/a/.run"), None, STACK, True) as folder:
        assert folder == own and not os.listdir(own)
    assert not own.exists()
    given.mkdir()
    (given / "folder-id").touch()
    stacks = [up.ModelStack.of(up.ModelOptions({"served_model_name": name})) for name in ("one", "two")]
    kept = {name: f"tier-0.{owner_of(name, 'shard-0')}.kept" for name in ("one", "two", "of another stack")}
    with contextlib.ExitStack() as files, up.shared_folder(Path("/a/.run"), given, stacks, True) as folder:
        assert folder == given
        for name in kept.values():
            (given / name).touch()
        (given / f"tier.{owner_of('one', 'shard-0')}.64.reserved").touch()
        living = given / f"other.{owner_of('one', 'shard-0')}.64.reserved"
        file = files.enter_context(living.open("w"))
        fcntl.flock(file, fcntl.LOCK_EX)
    assert sorted(os.listdir(given)) == sorted(["folder-id", kept["of another stack"], living.name])


HOLDER = """
import sys, time
from pathlib import Path
from services.launcher import up
up.SHARED_MEMORY = Path(sys.argv[1])
with up.shared_folder(Path("/killed/.run"), None, [up.ModelStack.of(up.ModelOptions({}))], True) as folder:
    (folder / "a.kept").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folder_of_a_killed_launcher_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has another run directory. The folder stays while its launcher lives."""
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().strip())
        with up.shared_folder(Path("/another/.run"), None, STACK, True):
            assert os.listdir(folder) == ["a.kept"]
        launcher.kill()
        launcher.wait()
        with up.shared_folder(Path("/another/.run"), None, STACK, True) as other:
            assert os.listdir(tmp_path) == [other.name]


@pytest.mark.parametrize("kind", ["of another user", "a link", "with a worker", "with another name", "a file"])
def test_folder_in_use_or_of_no_stack_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(up, "SHARED_MEMORY", memory)
    user, folder = os.geteuid(), memory / f"orcinus-{os.geteuid()}-{'a' * 12}"
    if kind == "with another name":
        folder = folder.with_name(f"{folder.name}b")
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
        (folder / "tier").touch()
    if kind == "of another user":
        monkeypatch.setattr(up, "folder_prefix", lambda: f"orcinus-{user}-")
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with (folder / "tier" if kind == "with a worker" else memory / "none").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        up.remove_abandoned()
    assert os.path.lexists(folder)
    if kind == "a link":
        assert (tmp_path / "elsewhere").exists()
    if kind == "with a worker":
        up.remove_abandoned()
        assert not folder.exists()


def test_folder_of_a_stack_that_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers may have one host name, one path and one /dev/shm."""
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(up, "OWN_FOLDER_S", 0.0)
    with (
        up.shared_folder(Path("/a/.run"), None, STACK, True) as folder,
        pytest.raises(ConfigurationError, match=f"{folder}: another stack uses it; choose another --run-dir"),
        up.shared_folder(Path("/a/.run"), None, STACK, True),
    ):
        pass


@pytest.mark.parametrize("swap", ["of another user", "a link"])
def test_folder_that_is_swapped_while_it_opens_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    user, hold, target = os.geteuid(), up.lock_own, tmp_path / "target"
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    target.mkdir()
    (target / "file").touch()
    folder = up.share_folder(Path("/a/.run"))
    folder.mkdir()
    (folder / "file").touch()

    def swap_after(path: str | Path, parent: int | None = None) -> int | None:
        descriptor = hold(path, parent)
        if path == folder and swap == "a link":
            folder.rename(tmp_path / "before")
            folder.symlink_to(target)
        elif path == folder:
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        return descriptor

    monkeypatch.setattr(up, "lock_own", swap_after)
    monkeypatch.setattr(up, "remove_abandoned", lambda: None)
    refused = pytest.raises(ConfigurationError, match="is no folder of user")
    with (
        refused if swap == "of another user" else contextlib.nullcontext(),
        up.shared_folder(Path("/a/.run"), None, STACK, True),
    ):
        pass
    assert (target / "file").exists()
    assert (folder / "file").exists()


def test_stack_without_use_for_the_folder_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers without it may have one host name, one path and one /dev/shm."""
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    with up.shared_folder(Path("/a/.run"), None, STACK, False) as folder:
        assert folder.parent == tmp_path and not folder.exists()
    roles = [up.ModelStack.of(up.ModelOptions({"prefill": 1, "decode": 1}))]
    with up.shared_folder(Path("/a/.run"), None, roles, False) as folder:
        assert folder.is_dir()


def test_folder_of_killed_launcher_is_emptied_but_for_living_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path)
    folder = up.share_folder(Path("/a/.run"))
    (folder / "subfolder").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "link").symlink_to("/nowhere")
    (folder / "tier").touch()
    with (folder / "living").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with up.shared_folder(Path("/a/.run"), None, STACK, True):
            assert os.listdir(folder) == ["living"]
            assert folder.stat().st_mode & 0o777 == 0o700


def test_folder_on_disk_that_is_a_link_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "SHARED_MEMORY", tmp_path / "none")
    (tmp_path / "kv").symlink_to(tmp_path)
    roles = [up.ModelStack.of(up.ModelOptions({"prefill": 1, "decode": 1}))]
    with (
        pytest.raises(ConfigurationError, match=f"{tmp_path}/kv: is no folder of user .*; remove it"),
        up.shared_folder(tmp_path, None, roles, False),
    ):
        pass


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

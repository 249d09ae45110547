"""Files on disk: names, owners, quotas and expiry."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.gateway.batches import files as module
from services.gateway.batches.files import FileStore, open_plain
from services.gateway.errors import ApiError
from shared.errors import ConfigurationError
from shared.settings import GatewaySettings
from tests.unit.gateway.batches.disk import TENANT, stores, upload


def test_file_is_kept_under_a_name_of_ours_alone(tmp_path: Path) -> None:
    files, _ = stores(tmp_path)
    begun = files.begin(TENANT)
    begun.write(b"abc")
    begun.close()
    stored = files.commit(TENANT, begun, "../../etc/\x00passwd\n", "batch")
    assert stored.filename == "../../etc/?passwd?"
    assert files.find(TENANT, stored.id) == stored
    with files.open(TENANT, stored.id)[1] as content:
        assert content.read() == b"abc"
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {stored.id, f"{stored.id}.json", "lock"}
    modes = {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")}
    assert modes == {0}


@pytest.mark.parametrize("name", ["", "..", "file-", "file-" + "0" * 30, "../x", "file-" + "g" * 30, "lock"])
def test_name_of_no_file_is_unknown(tmp_path: Path, name: str) -> None:
    files, _ = stores(tmp_path)
    for ask in (files.find, files.open, files.delete):
        with pytest.raises(ApiError) as raised:
            ask(TENANT, name)
        assert (raised.value.status, raised.value.code) == (404, "file_not_found")


def test_file_of_another_tenant_is_unknown(tmp_path: Path) -> None:
    files, _ = stores(tmp_path)
    stored = upload(files, b"abc")
    with pytest.raises(ApiError):
        files.find("tenant-2", stored.id)
    assert files.of_tenant("tenant-2") == []
    assert files.of_tenant(TENANT) == [stored]


def test_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    files, _ = stores(tmp_path / "files")
    stored = upload(files, b"abc")
    path = files.path(TENANT, stored.id)
    path.unlink()
    (tmp_path / "secret").write_text("secret")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        files.open(TENANT, stored.id)
    with pytest.raises(OSError):
        open_plain(path)


def test_number_and_bytes_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    files, _ = stores(tmp_path, tenant_files=2, tenant_file_bytes=4096, file_bytes=2048)
    first = upload(files, b"a")
    upload(files, b"b")
    with pytest.raises(ApiError, match="2 of at most 2") as raised:
        upload(files, b"c")
    assert (raised.value.status, raised.value.code) == (413, "file_quota_exceeded")
    upload(files, b"c", "tenant-2")
    files.delete(TENANT, first.id)
    with pytest.raises(ApiError, match="more than 2048 bytes") as raised:
        upload(files, b"c" * 2049)
    assert (raised.value.status, raised.value.code) == (413, "file_too_large")
    upload(files, b"c" * 2048)
    files, _ = stores(tmp_path, tenant_file_bytes=2048)
    with pytest.raises(ApiError, match="of at most 2048 bytes"):
        upload(files, b"d")
    assert not [path for path in tmp_path.rglob(".upload-*")]


def test_expired_and_left_files_are_swept(tmp_path: Path) -> None:
    files, _ = stores(tmp_path)
    begun = files.begin(TENANT)
    begun.close()
    gone = files.commit(TENANT, begun, "a", "batch", kept_s=-1)
    kept, owner = upload(files, b"b"), files.owner(TENANT)
    left = files.begin(TENANT)
    left.close()
    folder = files.folder(owner)
    (folder / ("file-" + "1" * 30)).write_bytes(b"without a record")
    with pytest.raises(ApiError):
        files.find(TENANT, gone.id)
    files.sweep(owner)
    assert left.part.exists() and len(os.listdir(folder)) == 7  # young ones may be under way
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    files.sweep(owner)
    assert sorted(os.listdir(folder)) == sorted([kept.id, f"{kept.id}.json", "lock"])


def test_gateway_without_a_directory_says_how_to_get_one() -> None:
    files = FileStore(GatewaySettings())
    assert not files.is_enabled and files.owners() == []
    with pytest.raises(ApiError, match="set ORCINUS_FILES_DIR") as raised:
        files.of_tenant(TENANT)
    assert (raised.value.status, raised.value.code) == (404, "files_off")


def test_models_that_share_a_directory_share_no_file(tmp_path: Path) -> None:
    one, two = (stores(tmp_path, served_model_name=name)[0] for name in ("one", "two"))
    stored = upload(one, b"abc")
    with pytest.raises(ApiError):
        two.find(TENANT, stored.id)


def test_directory_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used: Not a directory"):
        stores(tmp_path / "file")


def test_folder_that_another_gateway_holds_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_S", 0.05)
    files, _ = stores(tmp_path)
    other, _ = stores(tmp_path)
    with other.lock(other.folder(other.owner(TENANT))):
        with pytest.raises(ApiError, match=r"held this tenant's folder for 0\.05 s; retry") as raised:
            upload(files, b"a")
        upload(files, b"a", "tenant-2")
    assert (raised.value.status, raised.value.code) == (503, "files_busy")
    upload(files, b"a")


async def test_blocked_files_leave_the_shared_threads_free(tmp_path: Path) -> None:
    files, _ = stores(tmp_path)
    is_over = threading.Event()
    blocked = [asyncio.create_task(files.in_thread(is_over.wait)) for _ in range(2 * module.THREADS)]
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as one:
        loop.set_default_executor(one)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(lambda: threading.current_thread().name) != "files_0"
        held = asyncio.create_task(asyncio.to_thread(is_over.wait))
        is_over.set()
        async with asyncio.timeout(20):
            assert await asyncio.gather(*blocked, held) == [True] * (2 * module.THREADS + 1)
    names = await asyncio.gather(*(files.in_thread(lambda: threading.current_thread().name) for _ in range(50)))
    assert len(set(names)) <= module.THREADS and all(name.startswith("files") for name in names)
    files.close()

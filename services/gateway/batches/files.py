"""Keep the files of `/v1/files` below one directory, which all gateways of a model share.

Each tenant has a folder, named by a digest. A file is its content and a record in JSON beside it, both named by an id
that is made here: no name of a client is ever opened. A file without a record does not exist; `sweep` removes it. The
functions block, so handlers call them with `in_thread`: in threads that nothing else shares, so that a slow disk delays
files alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from services.gateway.errors import RETRY, ApiError, unavailable
from shared.dead_letters import printable
from shared.errors import ConfigurationError
from shared.keys import hash_tag
from shared.settings import GatewaySettings

FILE_ID = re.compile(r"file-[0-9a-f]{30}")
OWNER = re.compile(r"[0-9a-f]{32}")
MAX_NAME_CHARS = 255
STALE_S = 3600.0
"""Age at which what no record names is a rest of a process that died."""
THREADS = 8
"""For all files and batches of a gateway process."""
LOCK_S = 5.0
"""A tenant's folder that another gateway holds for longer is refused: that gateway is stopped, or the disk is."""
LOCK_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def body(self) -> dict[str, Any]:
        """Return the file object of OpenAI's API."""
        return {"object": "file", **dataclasses.asdict(self), "status": "processed", "status_details": None}


_STORED = TypeAdapter(StoredFile)
P = ParamSpec("P")
T = TypeVar("T")


def new_id(prefix: str) -> str:
    """Return a new id of 30 digits, the milliseconds first, so that ids sort by age. Only its tenant can use it."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(9)}"


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading, and no link. Raise FileNotFoundError."""
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except NotADirectoryError as error:
        raise FileNotFoundError(path) from error


def create(path: Path) -> BinaryIO:
    """Create a file that is not there, for its owner alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, also after a loss of power, finds the old content or the new one."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with create(part) as out:
            out.write(content)
            flush(out)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush(file: BinaryIO) -> None:
    """Write a file through to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Write the names of a folder through to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Upload:
    """A file that comes in; `FileStore.commit` makes it one that exists."""

    def __init__(self, part: Path, most_bytes: int) -> None:
        self.part = part
        self.bytes = 0
        self._most_bytes = most_bytes
        self._file = create(part)

    def write(self, data: bytes) -> None:
        """Append bytes. Raise ApiError(413)."""
        self.bytes += len(data)
        if self.bytes > self._most_bytes:
            text = f"file: more than {self._most_bytes} bytes; split it, or raise ORCINUS_FILE_BYTES"
            raise ApiError(413, text, param="file", code="file_too_large")
        self._file.write(data)

    def close(self) -> None:
        """Write the bytes through to the disk."""
        with self._file:
            flush(self._file)

    def discard(self) -> None:
        """Forget the file; once it is committed this does nothing."""
        self._file.close()
        self.part.unlink(missing_ok=True)


class FileStore:
    """The files of all tenants."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raise ConfigurationError for a directory that cannot be used."""
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS, "files")
        self.root: Path | None = None
        if settings.files_dir is None:
            return
        self.root = settings.files_dir.absolute() / f"model-{hash_tag(settings.served_model_name)}"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(self.root)
        except OSError as error:
            problem = f"cannot be used: {error.strerror}; name a folder that the gateway may write"
            raise ConfigurationError(f"ORCINUS_FILES_DIR={settings.files_dir}: {problem}") from error

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function that blocks returns. Connections and ORCINUS_BATCH_REQUESTS bound how many wait."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    def close_later(self, content: BinaryIO) -> None:
        """Close a file behind what a thread still does with it."""
        with contextlib.suppress(RuntimeError):  # the threads have ended, and the process ends
            self._threads.submit(content.close)

    def close(self) -> None:
        """End the threads; what they have begun goes on to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def is_enabled(self) -> bool:
        """Return whether there is a directory for files."""
        return self.root is not None

    def owner(self, tenant: str) -> str:
        """Return the name of a tenant's folder."""
        return hashlib.sha256(tenant.encode()).hexdigest()[:32]

    def folder(self, owner: str) -> Path:
        """Return a tenant's folder, made where it is missing. Raise ApiError(404) while files are off."""
        if self.root is None:
            text = "files: this gateway has no directory for them; set ORCINUS_FILES_DIR, the same for all gateways"
            raise ApiError(404, text, code="files_off")
        folder = self.root / owner
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def owners(self) -> list[str]:
        """Return the folders of all tenants."""
        if self.root is None:
            return []
        return [name for name in sorted(os.listdir(self.root)) if OWNER.fullmatch(name)]

    def begin(self, tenant: str) -> Upload:
        """Begin an upload. Raise ApiError(404, 413)."""
        folder = self.folder(self.owner(tenant))
        self._check_room(folder, 0)
        return Upload(folder / f".upload-{secrets.token_hex(15)}", self._settings.file_bytes)

    def commit(self, tenant: str, upload: Upload, filename: str, purpose: str, kept_s: int | None = None) -> StoredFile:
        """Keep an upload that is closed. kept_s: until it expires; None uses the setting. Raise ApiError(413, 503)."""
        folder = self.folder(self.owner(tenant))
        with self.lock(folder):
            self._check_room(folder, 0)  # the upload is in the folder already
            return self._keep(folder, upload.part, new_id("file-"), filename, purpose, kept_s)

    def publish(
        self, owner: str, part: Path, file_id: str, filename: str, purpose: str, kept_s: int | None
    ) -> StoredFile:
        """Keep a file that the gateway wrote: its work is done, so no quota refuses it."""
        folder = self.folder(owner)
        return self._keep(folder, part, file_id, filename, purpose, kept_s)

    def _keep(
        self, folder: Path, part: Path, file_id: str, filename: str, purpose: str, kept_s: int | None
    ) -> StoredFile:
        now = int(time.time())
        name = printable(filename, MAX_NAME_CHARS)
        retention_s = self._settings.file_retention_s
        expires_at = now + min(retention_s if kept_s is None else kept_s, retention_s)
        file = StoredFile(file_id, part.stat().st_size, now, expires_at, name, purpose)
        part.rename(folder / file_id)
        write_whole(folder / f"{file_id}.json", orjson.dumps(file))
        return file

    def find(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file of a tenant. Raise ApiError(404)."""
        file = self._read(self.folder(self.owner(tenant)), file_id) if FILE_ID.fullmatch(file_id) else None
        if file is None:
            raise unknown_file(file_id)
        return file

    def path(self, tenant: str, file_id: str) -> Path:
        """Return the path of a file's content. Raise ApiError(404)."""
        self.find(tenant, file_id)
        return self.folder(self.owner(tenant)) / file_id

    def open(self, tenant: str, file_id: str) -> tuple[StoredFile, BinaryIO]:
        """Return a file of a tenant and its content, open. Raise ApiError(404)."""
        try:
            return self.find(tenant, file_id), open_plain(self.path(tenant, file_id))
        except FileNotFoundError:  # it was deleted just now
            raise unknown_file(file_id) from None

    def of_tenant(self, tenant: str) -> list[StoredFile]:
        """Return the files of a tenant, the oldest first."""
        folder = self.folder(self.owner(tenant))
        names = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
        files = [self._read(folder, name) for name in names if FILE_ID.fullmatch(name)]
        return sorted((file for file in files if file is not None), key=lambda file: (file.created_at, file.id))

    def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raise ApiError(404)."""
        self.find(tenant, file_id)
        self._remove(self.folder(self.owner(tenant)), file_id)

    def sweep(self, owner: str) -> None:
        """Remove files of a tenant that have expired, and what processes that died have left."""
        folder = self.folder(owner)
        now = time.time()
        for name in os.listdir(folder):
            path = folder / name
            if FILE_ID.fullmatch(name.removesuffix(".json")):
                file_id = name.removesuffix(".json")
                is_old = _age_s(path, now) > STALE_S
                if is_old and self._read(folder, file_id) is None:
                    self._remove(folder, file_id)
            elif name.startswith(".") and path.is_file() and _age_s(path, now) > STALE_S:
                path.unlink(missing_ok=True)

    def room(self, owner: str) -> int:
        """Return the bytes that a tenant may still keep; below zero when outputs took more."""
        return self._settings.tenant_file_bytes - used_bytes(self.folder(owner))

    @contextlib.contextmanager
    def lock(self, folder: Path) -> Iterator[None]:
        """Let one gateway at a time add to a tenant's folder. Raise ApiError(503) after LOCK_S seconds."""
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(lock)
            yield
        finally:
            os.close(lock)

    def _check_room(self, folder: Path, more_bytes: int) -> None:
        settings = self._settings
        total_bytes = used_bytes(folder) + more_bytes
        if total_bytes > settings.tenant_file_bytes:
            text = (
                f"files: {total_bytes} of at most {settings.tenant_file_bytes} bytes; delete files that are not needed"
            )
            raise ApiError(413, text, code="file_quota_exceeded")
        count = sum(1 for name in os.listdir(folder) if FILE_ID.fullmatch(name))
        if count >= settings.tenant_files:
            text = f"files: {count} of at most {settings.tenant_files}; delete files that are not needed"
            raise ApiError(413, text, code="file_quota_exceeded")

    def _read(self, folder: Path, file_id: str) -> StoredFile | None:
        """Return a file that exists and has not expired; None also for a record that cannot be read."""
        try:
            with open_plain(folder / f"{file_id}.json") as record:
                file = _STORED.validate_json(record.read())
        except (FileNotFoundError, ValidationError):
            return None
        is_here = file.id == file_id and (folder / file_id).is_file()
        return file if is_here and file.expires_at > time.time() else None

    @staticmethod
    def _remove(folder: Path, file_id: str) -> None:
        (folder / f"{file_id}.json").unlink(missing_ok=True)
        (folder / file_id).unlink(missing_ok=True)


def _lock(lock: int) -> None:
    """Take the lock of a folder. Raise ApiError(503)."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                text = f"files: another gateway has held this tenant's folder for {LOCK_S:g} s; {RETRY}"
                raise unavailable(text, "files_busy", 5) from None
            time.sleep(LOCK_EVERY_S)
        else:
            return


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, each once however many names it has."""
    bytes_of: dict[int, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(place, name))
                bytes_of[status.st_ino] = status.st_size
    return sum(bytes_of.values())


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def unknown_file(file_id: str) -> ApiError:
    """Return the 404; the same for a file of another tenant."""
    text = f"file {file_id[:80]!r} not found; GET /v1/files lists those of the key's tenant"
    return ApiError(404, text, param="file_id", code="file_not_found")

"""The folder in which the workers of a host keep their host tiers, a file each, so that each can copy from the others'.

A file belongs to one process: made by it under a random name, mode 0600, locked while it lives. What a killed process
left behind is not locked any more, and the next one that starts removes it, except a tier that was kept: a worker that
leaves gives it a longer name, and frees the memory of the blocks that no sequence needs. It reserves the room before,
in an empty file, as several workers may leave at one time. Workers of the same model and shard remove a kept file when
the scheduler needs it no more, those of other models when they need its room. All room is taken at the start: a write
into a file that the system has no room for would be SIGBUS. Only files of this process's user are mapped, for the same
reason: a process that shortens a file kills every process that reads it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.errors import ConfigurationError

ID = "folder-id"
"""The file with the folder's id. Locked while files come and go."""

FULL = (errno.ENOSPC, errno.EDQUOT)

LOCK_S, LOCK_AGAIN_S = 20.0, 0.01
"""How long its lock is waited for, which is held for milliseconds unless a process was halted; and between tries."""

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_ID = re.compile(r"[0-9a-f]{32}")
_TIER = re.compile(r"[0-9a-f]{32}-[0-9]{1,4}")
_KEPT = re.compile(r"([0-9a-f]{32})-[0-9]{1,4}\.([0-9a-f]{16})\.kept")
_RESERVED = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})\.([0-9]{1,18})\.reserved")
KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Of linux/falloc.h: take memory out of a file and leave its size."""

log = logging.getLogger("orcinus.worker")


class PeerError(Exception):
    """Why the host tier of another worker cannot be read."""


class NoRoomError(ConfigurationError):
    """The file system is full."""


class KeptFile(NamedTuple):
    """A file that outlived its process. tier: its name without the rank; size_bytes: the memory that it takes."""

    name: str
    tier: str
    owner: str
    size_bytes: int
    kept_ns: int


class Reservation(NamedTuple):
    """The bytes that all ranks of a replica that leaves may keep, in files of their own. tier: their name."""

    tier: str
    owner: str
    size_bytes: int


class ShareFolder:
    """The folder, and at most one file of this process in it, beside that of its reservation."""

    def __init__(self, path: Path) -> None:
        """Make it if it is not there. Raise ConfigurationError where other users may write there, or no process can."""
        self.path = path
        try:
            with suppress(FileExistsError):
                path.mkdir(0o700)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        except OSError as error:
            raise self._refusal(error) from error
        weakref.finalize(self, os.close, self._folder)
        status = os.fstat(self._folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigurationError(
                f"--kv-share-dir {path} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}, where "
                f"others would read prompts; name a folder inside it, to be made for user {os.geteuid()} with mode 700"
            )
        try:
            with self.locked() as file:
                if not (said := os.pread(file, 64, 0)):
                    os.pwrite(file, said := secrets.token_hex(16).encode(), 0)
                self.id = said.decode("ascii", "replace")
                self._sweep()
        except OSError as error:
            raise self._refusal(error) from error
        if not _ID.fullmatch(self.id):
            raise ConfigurationError(f"--kv-share-dir {path}: its file {ID} holds no name of a folder; remove it")

    def free_bytes(self) -> int:
        """Return the bytes left in the file system; sys.maxsize in one without limit, such as a tmpfs of size 0."""
        status = os.fstatvfs(self._folder)
        return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize

    def make(self, name: str, size: int) -> Tensor:
        """Return [size] uint8 of zeros that the others can read under this name; the file goes when this process ends.

        Raise NoRoomError or another ConfigurationError.
        """
        with ExitStack() as undo:
            try:
                with self.locked():
                    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._folder)
                    undo.callback(self._remove, name, file)  # which keeps the folder open until then
                    fcntl.flock(file, fcntl.LOCK_EX)
                os.posix_fallocate(file, 0, size)
                area = mmap.mmap(file, size)
            except OSError as error:
                raise self._no_room(error, size) if error.errno in FULL else self._refusal(error) from error
            memory = np.frombuffer(area, np.uint8)
            weakref.finalize(memory, undo.pop_all().close)
        return torch.from_numpy(memory)

    def map(self, name: str, sizes: Sequence[int]) -> tuple[Tensor, bool]:
        """Map another process's file of one of these sizes, read only, until its last holder is gone; return it
        (uint8), and whether it was kept: it then has the first size. Raise PeerError."""
        if not _TIER.fullmatch(name):
            raise PeerError(f"{name!r} is no name of a host tier")
        if min(sizes) < 1:
            raise PeerError(f"{name} has no blocks")
        try:
            file, is_kept = self._open(name)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    raise PeerError(f"{name} is no file of this user")
                if status.st_size not in (sizes[:1] if is_kept else sizes):
                    raise PeerError(f"{name} has {status.st_size} bytes instead of {sizes[0]}")
                area = mmap.mmap(file, status.st_size, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except OSError as error:
            raise PeerError(f"{name}: {error.strerror}") from error
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch has no memory that cannot be written, and this memory is never written
            return torch.from_numpy(np.frombuffer(area, np.uint8)), is_kept

    def keep(self, name: str, owner: str, unused: Iterable[tuple[int, int]]) -> None:
        """Let a file of this process outlive it, without the memory of `unused` (offset, bytes). Raise OSError.

        owner: 16 hex digits, equal for workers that may remove it.
        """
        file = os.open(name, os.O_RDWR | _OPEN, dir_fd=self._folder)
        try:
            for offset, size in unused:
                free_part(file, offset, size)
            os.utime(file)  # KeptFile.kept_ns
            os.fsync(file)  # a file with a kept name is whole, also on a disk after a crash of the host
        finally:
            os.close(file)
        os.rename(name, f"{name}.{owner}.kept", src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def kept_files(self) -> list[KeptFile]:
        """Return the files that were kept, of all owners, oldest first."""
        files = []
        for match in filter(None, map(_KEPT.fullmatch, os.listdir(self._folder))):
            with suppress(OSError):  # another worker removes it just now
                stat_of = os.stat(match[0], dir_fd=self._folder, follow_symlinks=False)
                files.append(KeptFile(match[0], match[1], match[2], stat_of.st_blocks * 512, stat_of.st_mtime_ns))
        return sorted(files, key=lambda file: file.kept_ns)

    def reserve(self, room: Reservation) -> Callable[[], None]:
        """Reserve room until this process ends or calls what is returned. For use under `locked`. Raise OSError."""
        name = f"{room.tier}.{room.owner}.{room.size_bytes}.reserved"
        file = os.open(name, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._folder)
        release = weakref.finalize(self, _remove, self._folder, name, file)  # runs before the folder is closed
        fcntl.flock(file, fcntl.LOCK_EX)
        return release

    def reservations(self) -> list[Reservation]:
        """Return the room that processes which live have reserved."""
        rooms = []
        for match in filter(None, map(_RESERVED.fullmatch, os.listdir(self._folder))):
            with suppress(FileNotFoundError):  # its process ends just now
                if self._is_held(match[0]):
                    rooms.append(Reservation(match[1], match[2], int(match[3])))
        return rooms

    def remove_kept(self, files: Iterable[KeptFile]) -> None:
        """Remove files that were kept, those that are there."""
        for file in files:
            with suppress(OSError):
                os.unlink(file.name, dir_fd=self._folder)

    def _open(self, name: str) -> tuple[int, bool]:
        """Open the file of a host tier to read; return also whether it is one that was kept. Raise OSError."""
        flags = os.O_RDONLY | os.O_NONBLOCK | _OPEN
        try:
            return os.open(name, flags, dir_fd=self._folder), False
        except FileNotFoundError:
            kept = (each for each in filter(_KEPT.fullmatch, os.listdir(self._folder)) if each.startswith(f"{name}."))
            if (file_name := next(kept, None)) is None:
                raise
            return os.open(file_name, flags, dir_fd=self._folder), True

    @contextmanager
    def locked(self, wait_s: float | None = None) -> Iterator[int]:
        """Hold the folder's lock: only a process that ends may remove a file meanwhile. Yield the open file `ID`.

        wait_s: for the lock, LOCK_S where it is None. Raise OSError.
        """
        wait_s = LOCK_S if wait_s is None else wait_s
        file = os.open(ID, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._folder)
        try:
            by = time.monotonic() + wait_s
            while not _locks(file):
                if time.monotonic() > by:
                    raise TimeoutError(errno.ETIMEDOUT, f"another process has held the lock of {ID} for {wait_s:.0f} s")
                time.sleep(LOCK_AGAIN_S)
            yield file
        finally:
            os.close(file)

    def _sweep(self) -> None:
        """Remove what processes that are gone left behind."""
        for name in os.listdir(self._folder):
            if not (_TIER.fullmatch(name) or _RESERVED.fullmatch(name)):
                continue
            try:
                if not self._is_held(name):
                    os.unlink(name, dir_fd=self._folder)
            except FileNotFoundError:
                continue  # its process ends just now
            except OSError as error:
                log.warning("--kv-share-dir %s: %s is not removed: %s", self.path, name, error.strerror)

    def _is_held(self, name: str) -> bool:
        """Return whether the process of a file lives. Raise OSError."""
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
        try:
            return not _locks(file)
        finally:
            os.close(file)

    def _remove(self, name: str, file: int) -> None:
        _remove(self._folder, name, file)

    def _refusal(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"--kv-share-dir {self.path}: {error.strerror}; name a folder of this user with mode 700, or one to be "
            "made in a folder that is there, best in /dev/shm (a symbolic link is not followed)"
        )

    def _no_room(self, error: OSError, size: int) -> NoRoomError:
        status, free = os.fstatvfs(self._folder), self.free_bytes() >> 20
        files = status.f_favail or not status.f_files  # some file systems count none
        return NoRoomError(
            f"--kv-share-dir {self.path} has no room for the host tier ({error.strerror}): it needs "
            f"{-(-size >> 20)} MiB and {free} MiB{'' if files else ', but no further file,'} are free; lower "
            "--host-blocks or give it more"
        )


def _remove(folder: int, name: str, file: int) -> None:
    """Remove an open file of a folder, and close it.

    Take no lock: this may run in the middle of anything else of this process, which may have it.
    """
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
    os.close(file)


def free_part(file: int, offset: int, size: int) -> None:
    """Give back the memory of a part of an open file; it reads as zeros. Raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate(file, KEEP_SIZE | PUNCH_HOLE, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _locks(file: int) -> bool:
    """Return whether the lock of an open file was free; it is this process's now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

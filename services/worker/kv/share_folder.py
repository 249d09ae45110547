"""The folder in which the workers of a host keep their host tiers, a file each, so that each can copy from the others'.

A file belongs to one process: made by it under a random name, mode 0600, locked while it lives. What a killed process
left behind is not locked any more, and the next one that starts removes it. All room is taken at the start: a write
into a file that the system has no room for would be SIGBUS. Only files of this process's user are mapped,
for the same reason: a process that shortens a file kills every process that reads it.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

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

log = logging.getLogger("orcinus.worker")


class PeerError(Exception):
    """Why the host tier of another worker cannot be read."""


class NoRoomError(ConfigurationError):
    """The file system is full."""


class ShareFolder:
    """The folder, and at most one file of this process in it."""

    def __init__(self, path: Path) -> None:
        """Make it if it is not there. Raise ConfigurationError where other users may write there, or no process can."""
        self.path = path
        try:
            with suppress(FileExistsError):
                path.mkdir(0o700)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        except OSError as error:
            raise self._refused(error) from error
        weakref.finalize(self, os.close, self._folder)
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigurationError(
                f"--kv-share-dir {path} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}, where "
                f"others would read prompts; name a folder inside it, to be made for user {os.geteuid()} with mode 700"
            )
        try:
            with self._locked() as file:
                if not (said := os.pread(file, 64, 0)):
                    os.pwrite(file, said := secrets.token_hex(16).encode(), 0)
                self.id = said.decode("ascii", "replace")
                self._sweep()
        except OSError as error:
            raise self._refused(error) from error
        if not _ID.fullmatch(self.id):
            raise ConfigurationError(f"--kv-share-dir {path}: its file {ID} holds no name of a folder; remove it")

    def free_bytes(self) -> int:
        """Return the bytes left in the file system; sys.maxsize in one without limit, such as a tmpfs of size 0."""
        found = os.fstatvfs(self._folder)
        return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize

    def make(self, name: str, size: int) -> Tensor:
        """Return [size] uint8 of zeros that the others can read under this name; the file goes when this process ends.

        Raise NoRoomError or another ConfigurationError.
        """
        with ExitStack() as undo:
            try:
                with self._locked():
                    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._folder)
                    undo.callback(self._remove, name, file)
                    fcntl.flock(file, fcntl.LOCK_EX)
                os.posix_fallocate(file, 0, size)
                area = mmap.mmap(file, size)
            except OSError as error:
                raise self._no_room(error, size) if error.errno in FULL else self._refused(error) from error
            memory = np.frombuffer(area, np.uint8)
            weakref.finalize(memory, undo.pop_all().close)
        return torch.from_numpy(memory)

    def map(self, name: str, size: int, more: int = 0) -> Tensor:
        """Map [size] uint8 of another process's file, or [size + more] if it has so many, read only, until its last
        holder is gone. Raise PeerError."""
        if not _TIER.fullmatch(name):
            raise PeerError(f"{name!r} is no name of a host tier")
        if size < 1:
            raise PeerError(f"{name} has no blocks")
        try:
            file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    raise PeerError(f"{name} is no file of this user")
                if found.st_size == size + more:
                    size += more
                elif found.st_size != size:
                    raise PeerError(f"{name} has {found.st_size} bytes instead of {size}")
                area = mmap.mmap(file, size, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except OSError as error:
            raise PeerError(f"{name}: {error.strerror}") from error
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch has no memory that cannot be written, and this memory is never written
            return torch.from_numpy(np.frombuffer(area, np.uint8))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock: only a process that ends may remove a file meanwhile. Yield the open file `ID`."""
        file = os.open(ID, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._folder)
        try:
            by = time.monotonic() + LOCK_S
            while not _locks(file):
                if time.monotonic() > by:
                    raise TimeoutError(errno.ETIMEDOUT, f"another process has held the lock of {ID} for {LOCK_S:.0f} s")
                time.sleep(LOCK_AGAIN_S)
            yield file
        finally:
            os.close(file)

    def _sweep(self) -> None:
        """Remove what processes that are gone left behind."""
        for name in filter(_TIER.fullmatch, os.listdir(self._folder)):
            try:
                file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
                try:
                    if _locks(file):  # else its process lives
                        os.unlink(name, dir_fd=self._folder)
                finally:
                    os.close(file)
            except FileNotFoundError:
                continue  # its process ends just now
            except OSError as error:
                log.warning("--kv-share-dir %s: %s is not removed: %s", self.path, name, error.strerror)

    def _remove(self, name: str, file: int) -> None:
        """Take no lock: this may run in the middle of anything else of this process, which may have it."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._folder)
        os.close(file)

    def _refused(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"--kv-share-dir {self.path}: {error.strerror}; name a folder of this user with mode 700, or one to be "
            "made in a folder that is there, best in /dev/shm (a symbolic link is not followed)"
        )

    def _no_room(self, error: OSError, size: int) -> NoRoomError:
        found, free = os.fstatvfs(self._folder), self.free_bytes() >> 20
        files = found.f_favail or not found.f_files  # some file systems count none
        return NoRoomError(
            f"--kv-share-dir {self.path} has no room for the host tier ({error.strerror}): it needs "
            f"{-(-size >> 20)} MiB and {free} MiB{'' if files else ', but no further file,'} are free; lower "
            "--host-blocks or give it more"
        )


def _locks(file: int) -> bool:
    """Return whether the lock of an open file was free; it is this process's now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

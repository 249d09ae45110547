"""The folder in which the workers of a host keep their host tiers, a file each, so that each can copy from the others'.

A file belongs to one process: made by it under a random name, mode 0600, locked while it lives. What a killed process
left behind is not locked any more, and the next one that starts removes it. All room is taken at the start: a write
into a file that the system has no room for would be SIGBUS. Only files of the own user are mapped, for the same reason:
whoever may shorten a file kills those who read it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.errors import ConfigurationError

ID = "folder-id"
"""The file with the folder's own name. Locked while files come and go."""

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_TIER = re.compile(r"[0-9a-f]{32}-[0-9]{1,4}")


class PeerError(Exception):
    """Why the host tier of another worker cannot be read."""


class ShareFolder:
    """The folder, and at most one file of this process in it."""

    def __init__(self, path: Path) -> None:
        """Makes it if it is not there. Raises ConfigurationError where others might write there, or nobody can."""
        self.path = path
        try:
            with suppress(FileExistsError):
                path.mkdir(0o700)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        except OSError as error:
            raise ConfigurationError(f"--kv-share-dir {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._folder)
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigurationError(
                f"--kv-share-dir {path} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}; it "
                f"must be of user {os.geteuid()} with mode 700, as a new one is made: others would read prompts there"
            )
        try:
            with self._locked() as file:
                if not (said := os.pread(file, 64, 0)):
                    os.pwrite(file, said := secrets.token_hex(16).encode(), 0)
                self.id = said.decode("ascii", "replace")
                self._sweep()
        except OSError as error:
            raise ConfigurationError(f"--kv-share-dir {path}: {error.strerror}") from error

    def free_bytes(self) -> int:
        """Room that is left in the file system."""
        found = os.fstatvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def make(self, name: str, size: int) -> Tensor:
        """[size] uint8 of zeros that the others can read under this name; the file goes when this process ends.

        Raises ConfigurationError where there is no room.
        """
        with self._locked():
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            os.posix_fallocate(file, 0, size)
            area = mmap.mmap(file, size)
        except OSError as error:
            free = self.free_bytes()
            os.unlink(name, dir_fd=self._folder)
            os.close(file)
            raise ConfigurationError(
                f"--kv-share-dir {self.path} has no room for the host tier ({error.strerror}): it needs "
                f"{size / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free; lower --host-blocks or give it more"
            ) from error
        memory = np.frombuffer(area, np.uint8)
        weakref.finalize(memory, self._remove, name, file)
        return torch.from_numpy(memory)

    def map(self, name: str, size: int) -> Tensor:
        """[size] uint8 of another process's file, to be read alone; unmapped when nobody holds it. Raises PeerError."""
        if not _TIER.fullmatch(name):
            raise PeerError(f"{name!r} is no name of a host tier")
        try:
            file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    raise PeerError(f"{name} is no file of this user")
                if found.st_size != size:
                    raise PeerError(f"{name} has {found.st_size} bytes instead of {size}")
                area = mmap.mmap(file, size, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except OSError as error:
            raise PeerError(f"{name}: {error.strerror}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no memory that cannot be written, and nobody writes here
            return torch.from_numpy(np.frombuffer(area, np.uint8))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Nobody else makes or removes files; the open file `ID`."""
        file = os.open(ID, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _sweep(self) -> None:
        """Removes what processes that are gone left behind."""
        for name in os.listdir(self._folder):
            if not _TIER.fullmatch(name):
                continue
            file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its process lives
            else:
                os.unlink(name, dir_fd=self._folder)
            finally:
                os.close(file)

    def _remove(self, name: str, file: int) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._folder)
        os.close(file)

"""The folder in which the processes behind one port find each other: their parent's, and gone with it.

A parent that is killed cannot remove it, so the next one does: a folder belongs to somebody while it is locked, and the
kernel lets go of a lock when the last process that has it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ConfigurationError

PREFIX = "orcinus-gateway-"
MOST_PATH_BYTES = 90
"""The address of a unix socket has 108."""


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A new one that only this user may enter; removes those of the dead. Children that are forked hold it, too.

    Raises ConfigurationError where the system's temporary folder has too long a name for sockets.
    """
    with contextlib.ExitStack() as held:
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            held.callback(shutil.rmtree, path, ignore_errors=True)
            if len(os.fsencode(path)) > MOST_PATH_BYTES:
                raise ConfigurationError(f"{path} is too long a path for sockets; set TMPDIR to a shorter one")
            if held.enter_context(_locked(path)):
                break  # else another one that starts took it for a dead one's, in the moment before the lock
        for other in path.parent.glob(f"{PREFIX}*"):
            with _locked(other) as dead:
                if dead:
                    shutil.rmtree(other, ignore_errors=True)
        yield path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this is a folder of this user that was nobody's and is ours within the block."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield _taken(folder) and _still(path, folder)
    finally:
        os.close(folder)


def _taken(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody's, or on a file system without locks
        return False
    return True


def _still(path: Path, folder: int) -> bool:
    """It may have been removed between its opening and its lock."""
    found = os.fstat(folder)
    try:
        return found.st_uid == os.getuid() and os.path.samestat(found, os.lstat(path))
    except FileNotFoundError:
        return False

"""A wall clock of Redis that a test sets: a library in front of libc adds to the machine's what a file says.

Time namespaces of Linux leave the wall clock alone, and the machine's own is not a test's to set.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

from shared.errors import ConfigurationError

SOURCE = Path(__file__).with_suffix(".c")


class RedisClock:
    """The clock of the processes that are started with `environment`."""

    def __init__(self, directory: Path) -> None:
        """Compile the library into the directory. Raise ConfigurationError without a compiler."""
        compiler = shutil.which("gcc") or shutil.which("g++")
        if compiler is None:
            raise ConfigurationError("no gcc found to compile a clock for Redis; install one (`apt-get install gcc`)")
        library, offset = directory / "redis_clock.so", directory / "redis_clock"
        command = [compiler, "-x", "c", "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        offset.write_bytes(struct.pack("@q", 0))
        self.environment = {"LD_PRELOAD": str(library), "REDIS_CLOCK_OFFSET": str(offset)}
        with offset.open("r+b") as file:
            self._offset = mmap.mmap(file.fileno(), 8)

    @property
    def offset_s(self) -> int:
        """Return by how much this clock is ahead of the machine's."""
        return int(struct.unpack("@q", self._offset)[0])

    def step(self, seconds: int) -> None:
        """Set the clock forward, or back."""
        self._offset[:] = struct.pack("@q", self.offset_s + seconds)

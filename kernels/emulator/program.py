"""A .cu source compiled for the CPU, and its kernels launched by name. Tests and the `emulator` backend call this.

The launch is that of kernels.cuda.loader, so that the code above works with either. Libraries are kept in
.cache/kernels/emulator under a hash of sources, flags and compiler.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import tempfile
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernels.cpu import build as cpu_build
from kernels.cpu.build import BuildError
from kernels.emulator.ptx import translated

FORWARD, REVERSE = 0, 1
"""Orders in which threads and blocks run; every other number from 2 on is the seed of a random one."""

INCLUDE = Path(__file__).parent / "include"
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-DCUDA_EMULATOR"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-parameter"),
)
SANITIZERS = (
    "-g1",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "--param=asan-instrumentation-with-call-threshold=0",
)
"""Out-of-bounds accesses end the process, so it must be one that was started with libasan in LD_PRELOAD.

Two thirds of the time to compile: accesses are checked by calls, and AddressSanitizer sees those that the three checks
of pointers would refuse before they are made.
"""

PTX = ("-DPTX", "-w", "-O1", "-ffp-contract=off")
"""What NVRTC makes of a source in place of the source; see ptx.py."""

BANKS = (*PTX, "-DBANKS")
"""Count wavefronts of shared memory and sectors of global memory as well; see include/banks.h."""

RACES = (
    "-g1",
    "-O1",  # no loop becomes a memset, which would write without a word to the checker
    "-fsanitize=thread",
    *("-nodefaultlibs", "-Wl,--no-as-needed", "-lstdc++", "-lm", "-lgcc_s", "-lc"),  # all but ThreadSanitizer's runtime
)
"""Check the order of all accesses to memory: a race is an EmulatorError. CHECKER takes the place of that runtime."""
CHECKER = Path(__file__).with_name("races.cpp")

KEPT = 64
"""Libraries in the cache; the oldest go."""

ERROR_BYTES = 2048
Sizes = tuple[int, int, int]


class Banks(NamedTuple):
    """The cost of an instruction in a launch.

    space: where it reads or writes, at: line of the source, requests: of warps, taken: wavefronts or sectors, least:
    how many it could be.
    """

    at: str
    space: str
    requests: int
    taken: int
    least: int


class _Banks(ctypes.Structure):
    _fields_ = (("at", c_char_p), *((name, c_uint64) for name in ("space", "requests", "taken", "least")))


SPACES = ("shared", "shared atomics", "global", "global atomics")


class EmulatorError(Exception):
    """A kernel did what a GPU leaves undefined; the text names the block and the source lines."""


class Program:
    """The kernels of one source. `order` is that of every launch that does not say otherwise."""

    def __init__(
        self, source: Path, order: int = FORWARD, include: tuple[Path, ...] = (), flags: tuple[str, ...] = ()
    ) -> None:
        """Compile unless that was done before; see `compiled`. Raise BuildError."""
        self.source, self.order = source, order
        self._path = compiled(source, include, flags)
        self._library = ctypes.CDLL(str(self._path))

    def params_bytes(self, name: str) -> int:
        """Return the size of a kernel's Params. Raise KeyError when the source has no such kernel."""
        try:
            return c_uint.in_dll(self._library, f"{name}_params").value
        except ValueError as error:
            raise KeyError(f"{self.source.name} has no kernel {name!r}") from error

    def launch(
        self,
        name: str,
        grid: Sizes,
        block: Sizes,
        shared: int,
        params: np.ndarray[Any, np.dtype[np.void]],
        stream: int = 0,
        order: int | None = None,
    ) -> None:
        """Run the kernel to its end. shared: bytes of dynamic shared memory; params: one item of a structured dtype.

        Nothing runs beside it, so `stream` means nothing. Raise KeyError, ValueError when params is not as large as
        the kernel's, and EmulatorError.
        """
        expected = self.params_bytes(name)
        if params.size != 1 or params.nbytes != expected:
            raise ValueError(f"{name} takes {expected} bytes of parameters, not {params.nbytes}")
        function = getattr(self._library, f"{name}_launch")
        function.restype = c_int
        function.argtypes = (c_void_p, POINTER(c_uint), c_size_t, c_int, c_char_p, c_size_t)
        error = ctypes.create_string_buffer(ERROR_BYTES)
        order = self.order if order is None else order
        if function(params.ctypes.data, (c_uint * 6)(*grid, *block), shared, order, error, ERROR_BYTES):
            text = re.sub(r"@(0x[0-9a-f]+)", self._line_of, error.value.decode(errors="replace"))
            raise EmulatorError(f"{name}, order {order}, {text}")

    def banks(self) -> list[Banks]:
        """Return what the instructions of the last launch took, in the order of the code; of a program with BANKS."""
        function = self._library.banks_found
        function.restype = c_size_t
        function.argtypes = (POINTER(_Banks), c_size_t)
        count = function(None, 0)
        made = (_Banks * count)()
        function(made, count)
        return [Banks(one.at.decode(), SPACES[one.space], one.requests, one.taken, one.least) for one in made]

    def _line_of(self, code: re.Match[str]) -> str:
        """Return the source line of an address: of the function that was inlined there, unless it is the emulator's."""
        found = cpu_build.run_command(["addr2line", "-i", "-e", str(self._path), code[1]]).splitlines()
        lines = [line for line in found if not line.startswith(str(INCLUDE))]
        return Path((lines or found)[0].partition(" (discriminator")[0]).name


@cache
def compiled(source: Path, include: tuple[Path, ...] = (), flags: tuple[str, ...] = ()) -> Path:
    """Compile the shared library of a source; headers: in `include` or beside it; flags: of g++, such as SANITIZERS, or
    PTX.

    Raise BuildError with what the compiler says; its warnings are errors.
    """
    if "-DPTX" in flags:
        source = translated(source)
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ is installed to compile the emulated kernels with; run sudo apt-get install g++")
    folders = (INCLUDE, *include, source.parent)
    headers = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".h", ".cuh"))
    flags = (*FLAGS, *flags, *((str(compiled(CHECKER)),) if "-fsanitize=thread" in flags else ()))
    version = cpu_build.run_command([compiler, "-dumpfullversion", "-dumpmachine"])
    digest = cpu_build.source_digest([source, *headers], flags, version)
    target = cpu_build.CACHE / "emulator" / f"{source.stem}-{digest}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with cpu_build.alone(target.with_suffix(".lock")):
        if not target.is_file():
            _compile([compiler, *flags, *(f"-I{folder}" for folder in folders), "-x", "c++", str(source)], target)
    return target


def _compile(command: list[str], target: Path) -> None:
    """Other processes see the whole library or none."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        made = Path(name) / "made.so"
        cpu_build.run_command([*command, "-o", str(made)])
        made.replace(target)
    for old in sorted(target.parent.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)

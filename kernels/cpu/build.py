"""Find or compile the shared library of the CPU kernels that fits this machine.

Images carry one library per VARIANT, made by `python -m kernels.cpu.build --all`; the best that the CPU can run is
taken. A checkout compiles the sources for the very CPU at first use and keeps the result in .cache/kernels (or, where
that cannot be written, in a place of the user's) under a hash of sources, flags, compiler and CPU, so that a change of
any of them compiles again. Processes that start together compile once.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "lib"
CACHE = Path(__file__).parents[2] / ".cache" / "kernels"

log = logging.getLogger("orcinus.kernels")

FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wextra")
COMPILE_S = 300
PROGRESS_S = 3.0  # between two lines of progress at most
KEPT = 32
"""Libraries in the cache; those that were not used for the longest time go."""


class BuildError(Exception):
    """There is no library for this machine and none can be made; the text says why."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise BuildError for what the system refuses: missing sources, a full disk."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"the CPU kernels cannot be compiled: {error}; check the room and the rights there") from error


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set that images carry a library for."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]  # as /proc/cpuinfo calls them


# What -march of these names lets the compiler use, by the words of /proc/cpuinfo.
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
TILE_FLAGS = frozenset(("amx_tile", "amx_bf16"))

VARIANTS = (
    Variant(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512"),
        _V4 | {"avx512_vnni", "avx512_bf16"} | TILE_FLAGS,
    ),
    Variant(
        "avx512bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mprefer-vector-width=512"),
        _V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Variant(
        "avx512",
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        _V4,
    ),
    Variant("avx2", ("-march=x86-64-v3",), _V3),
)
"""Best first."""


def cpu_flags() -> frozenset[str]:
    """Return what this CPU can do, by the kernel's words; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@cache
def tiles_refusal() -> str:
    """Ask the system for the tile registers of AMX, once for this process and its threads.

    Return why it refuses them; empty where it grants them or the CPU has none.
    """
    if not cpu_flags() >= TILE_FLAGS:
        return ""
    error = request_tiles()
    if not error:
        return ""
    return f"the system refuses tile registers: arch_prctl(ARCH_REQ_XCOMP_PERM): {os.strerror(error)}"


def request_tiles() -> int:
    """Return 0, or the error number of arch_prctl: of a seccomp filter, or of Linux before 5.16."""
    arch_prctl, request, tile_data = 158, 0x1023, 18  # Linux on x86-64: arch/x86/include/uapi/asm/prctl.h
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(arch_prctl, request, tile_data) else 0


def usable_flags() -> frozenset[str]:
    """Return what this process may use of the CPU: its flags without those that the system refuses."""
    return cpu_flags() - TILE_FLAGS if tiles_refusal() else cpu_flags()


@_refusals()
def find_library() -> tuple[Path, str]:
    """Return the library for this machine and what it was made for; compiled now if need be. Raise BuildError."""
    flags = usable_flags()
    if refusal := tiles_refusal():
        log.warning("AVX-512 kernels serve instead of AMX: %s", refusal)
    for variant in VARIANTS:
        path = prebuilt_path(variant)
        if variant.needs <= flags and path.is_file():
            return path, variant.name
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ is installed to compile the CPU kernels with; run sudo apt-get install g++")
    return compile_cached(compiler, native_flags(), " ".join(sorted(flags))), "native"


def native_flags() -> list[str]:
    """Return the compiler's flags for all that this process may use of the CPU."""
    native = ["-mcpu=native" if platform.machine() == "aarch64" else "-march=native"]
    if "avx512f" in usable_flags():
        native.append("-mprefer-vector-width=512")
    if tiles_refusal():
        native.append("-mno-amx-tile")
    return native


def prebuilt_path(variant: Variant) -> Path:
    """Return where an image has the library of a variant, made of these very sources."""
    return PREBUILT / f"{variant.name}-{source_digest(source_files(), variant.flags)}.so"


@_refusals()
def compile_cached(compiler: str, flags: Sequence[str], machine: str) -> Path:
    """Compile unless that was done before. `machine` goes into the name. Raise BuildError."""
    version = run_command([compiler, "-dumpfullversion", "-dumpmachine"])
    target = _cache_path(f"{source_digest(source_files(), flags, version, machine)}.so")
    if not target.is_file():
        with alone(target.parent / "lock"):
            if not target.is_file():
                begun = time.monotonic()
                log.info("compiling the CPU kernels for this machine, once; about a minute on two cores")
                compile_to(target, compiler, flags)
                log.info("compiled the CPU kernels in %.0f s: %s", time.monotonic() - begun, target)
                for old in sorted(target.parent.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
                    old.unlink(missing_ok=True)
    with suppress(OSError):  # a place that may only be read
        os.utime(target)
    return target


def _cache_path(name: str) -> Path:
    """Return where the library of this name is or may be written. Raise BuildError when there is no such place.

    The last one lies among other users' files, so it counts only while no other user can have written into it.
    """
    user = os.getuid()
    places = [CACHE, Path(tempfile.gettempdir()) / f"orcinus-kernels-{user}"]
    with suppress(RuntimeError):  # a user without a home
        places.insert(1, Path.home() / ".cache" / "orcinus" / "kernels")
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700 if place is places[-1] else 0o777)
            state = place.lstat()
            if place is places[-1] and (state.st_uid != user or state.st_mode & 0o22):
                continue
            if (place / name).is_file():
                return place / name
            with tempfile.TemporaryFile(dir=place):
                return place / name
        except OSError:
            continue
    names = ", ".join(map(str, places))
    raise BuildError(f"no place to keep compiled kernels in: {names} cannot be written to; make one of them writable")


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Let one process at a time in; the end of a process ends its turn."""
    try:
        file = lock.open("w")
    except OSError as error:  # another user's
        log.info("%s cannot be locked: %s", lock, error)
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process compiles the CPU kernels: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # without locks the worst is that several compile the same
            log.info("%s cannot be locked: %s", lock, error)
        yield


def compile_to(target: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile and link every source. Other processes see the whole file or none. Raise BuildError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        sources = [path for path in source_files() if path.suffix == ".cpp"]
        objects = [work / f"{path.stem}.o" for path in sources]
        commands = [
            [compiler, *FLAGS, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        begun = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            waiting = {pool.submit(run_command, command) for command in commands}
            while waiting:
                compiled, waiting = wait(waiting, PROGRESS_S, FIRST_COMPLETED)
                for one in compiled:
                    one.result()
                percent = 100 * (len(commands) - len(waiting)) // len(commands)
                log.info("compiling the CPU kernels: %d %%, %.0f s", percent, time.monotonic() - begun)
        linked = work / "all.so"
        extra = [flag for flag in flags if flag.startswith("-fsanitize")]
        run_command([compiler, "-shared", "-fopenmp", *extra, *map(str, objects), "-o", str(linked)])
        linked.replace(target)


@_refusals()
def build_all(compiler: str) -> list[Path]:
    """Return every variant, for an image; none but on x86-64, where all of them are for. Raise BuildError."""
    PREBUILT.mkdir(parents=True, exist_ok=True)
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    made = []
    for variant in VARIANTS:
        made.append(prebuilt_path(variant))
        compile_to(made[-1], compiler, variant.flags)
    return made


def source_files() -> list[Path]:
    if not SOURCES.is_dir():
        raise FileNotFoundError(SOURCES)
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))


def source_digest(sources: Sequence[Path], *more: str | Sequence[str]) -> str:
    digest = hashlib.sha256(repr((FLAGS, more)).encode())
    for path in sources:
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def run_command(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}; install it again") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


class _MovingLine(logging.StreamHandler[TextIO]):
    """Write each message over the one before, on a terminal."""

    terminator = ""
    is_used = False

    def format(self, record: logging.LogRecord) -> str:
        self.is_used = True
        return f"\r\x1b[K{record.getMessage()}"

    def close(self) -> None:
        if self.is_used:
            self.stream.write("\n")
        self.is_used = False
        super().close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the library for this machine, or with --all those of an image."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="every variant, into kernels/cpu/lib")
    parser.add_argument("--for-run", action="store_true", help="print progress only; without a compiler go on, too")
    options = parser.parse_args(arguments)
    moving = _MovingLine() if options.for_run and sys.stderr.isatty() else None
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[moving] if moving else None)
    try:
        if options.all:
            for path in build_all(shutil.which("g++") or "g++"):
                print(path)
        elif options.for_run:
            find_library()
        else:
            print(*find_library())
    except BuildError as error:
        if options.for_run:
            if moving:
                moving.close()
            print(f"slower kernels will serve: {error}", file=sys.stderr)
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

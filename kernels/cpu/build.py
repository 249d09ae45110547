"""Finds or makes the shared library of the CPU kernels that fits this machine.

Images carry one library per VARIANT, made by `python -m kernels.cpu.build --all`; the best that the CPU can run is
taken. A checkout compiles the sources for the very CPU at first use and keeps the result in .cache/kernels under a
hash of sources, flags, compiler and CPU, so that a change of any of them compiles again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "lib"
CACHE = Path(__file__).parents[2] / ".cache" / "kernels"

FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wextra")
COMPILE_S = 300
KEPT = 8
"""Libraries in the cache; the oldest go."""


class BuildError(Exception):
    """There is no library for this machine and none can be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set that images carry a library for."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]  # as /proc/cpuinfo calls them


VARIANTS = (
    Variant(
        "avx512bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
        frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma")),
    ),
    Variant(
        "avx512",
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")),
    ),
    Variant("avx2", ("-march=x86-64-v3",), frozenset(("avx2", "fma", "bmi2"))),
)
"""Best first."""


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, by the kernel's words; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def find_library() -> tuple[Path, str]:
    """The library for this machine and what it was made for; compiled now if need be. Raises BuildError."""
    flags = cpu_flags()
    for variant in VARIANTS:
        path = prebuilt_path(variant)
        if variant.needs <= flags and path.is_file():
            return path, variant.name
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ is installed to compile the CPU kernels with (sudo apt-get install g++)")
    native = ["-mcpu=native" if platform.machine() == "aarch64" else "-march=native"]
    if "avx512f" in flags:
        native.append("-mprefer-vector-width=512")
    return compile_cached(compiler, native, " ".join(sorted(flags))), "native"


def prebuilt_path(variant: Variant) -> Path:
    """Where an image has the library of a variant, made of these very sources."""
    return PREBUILT / f"{variant.name}-{_digest(_sources(), variant.flags)}.so"


def compile_cached(compiler: str, flags: Sequence[str], machine: str) -> Path:
    """Compiles unless that was done before. `machine` goes into the name. Raises BuildError."""
    version = _run([compiler, "-dumpfullversion", "-dumpmachine"])
    target = CACHE / f"{_digest(_sources(), flags, version, machine)}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made_in = target.parent
        with tempfile.TemporaryFile(dir=made_in):
            pass
    except OSError:  # a checkout that is not ours to write to
        made_in = Path(tempfile.mkdtemp(prefix="orcinus-kernels-"))
        target = made_in / target.name
    compile_to(target, compiler, flags)
    for old in sorted(made_in.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def compile_to(target: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compiles and links every source. Other processes see the whole file or none. Raises BuildError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        sources = [path for path in _sources() if path.suffix == ".cpp"]
        objects = [work / f"{path.stem}.o" for path in sources]
        commands = [
            [compiler, *FLAGS, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = work / "all.so"
        extra = [flag for flag in flags if flag.startswith("-fsanitize")]
        _run([compiler, "-shared", "-fopenmp", *extra, *map(str, objects), "-o", str(linked)])
        linked.replace(target)


def build_all(compiler: str) -> list[Path]:
    """Every variant, for an image; none but on x86-64, where all of them are for. Raises BuildError."""
    PREBUILT.mkdir(parents=True, exist_ok=True)
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    made = []
    for variant in VARIANTS:
        made.append(prebuilt_path(variant))
        compile_to(made[-1], compiler, variant.flags)
    return made


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _digest(sources: Sequence[Path], *more: str | Sequence[str]) -> str:
    digest = hashlib.sha256(repr((FLAGS, more)).encode())
    for path in sources:
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m kernels.cpu.build [--all]`: the library for this machine, or those of an image."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="every variant, into kernels/cpu/lib")
    options = parser.parse_args(arguments)
    try:
        if options.all:
            for path in build_all(shutil.which("g++") or "g++"):
                print(path)
        else:
            print(*find_library())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

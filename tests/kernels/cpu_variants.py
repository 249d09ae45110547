"""The CPU kernels compiled for every instruction set that this machine can run.

`native` is the library that this checkout serves with. It stands for the best variant: the sources are the same.
`amx-twin` is that for AMX with the twin of the tile instructions (src/tiles.h), so that it runs on CPUs without AMX.
Images carry neither it nor `plain`, so both are compiled with fewer optimizations, sooner.
`--kernels-variant NAME` keeps to one of them; `sanitized`, which only `make sanitizers` asks for, has AddressSanitizer
and UBSan in it. They see no access of a tile instruction, so the tiles are the twin's: in `sanitized` itself where the
CPU has AMX, else in `sanitized-amx-twin`, which then runs the tests of the tiles.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from kernels.cpu import library as loaded
from kernels.cpu.build import TILE_FLAGS, VARIANTS, BuildError, compile_cached, find_library, native_flags, usable_flags
from kernels.cpu.library import Library

_AMX = next(variant for variant in VARIANTS if variant.name == "amx")
_TWIN = (*(flag for flag in _AMX.flags if "amx" not in flag), "-DTILES_TWIN")
_HAS_TWIN = _AMX.needs - TILE_FLAGS <= usable_flags()
_USABLE = [variant for variant in VARIANTS if variant.needs <= usable_flags()]
SETS: dict[str, tuple[str, ...]] = {
    "plain": ("-O1",),
    **({"native": tuple(native_flags())} if _USABLE else {}),
    **{variant.name: variant.flags for variant in _USABLE[1:]},
    **({"amx-twin": (*_TWIN, "-O1")} if _HAS_TWIN else {}),
}
# Fewer checks, and these by calls, take less time to compile: see kernels.emulator.program.SANITIZERS. Alignment alone
# takes 40 % of the time of attention.cpp. x86 reads a number at any address, and the moves of vectors that need an
# aligned address end the process at another one without a check.
_SANITIZERS = (
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow,alignment",
    "-fno-sanitize-recover=all",
    "--param=asan-instrumentation-with-call-threshold=0",
)
_SANITIZED: dict[str, tuple[str, ...]] = (
    {"sanitized": (*_TWIN, *_SANITIZERS)}
    if _AMX in _USABLE
    else {
        "sanitized": (*native_flags(), *_SANITIZERS),
        **({"sanitized-amx-twin": (*_TWIN, *_SANITIZERS)} if _HAS_TWIN else {}),
    }
)
_only = ""


def keep_to(name: str) -> None:
    """From now on there is this one only; "" for all."""
    global _only
    if name not in ("", "sanitized", *SETS):
        raise ValueError(f"--kernels-variant {name}: unknown; choose one of {', '.join(SETS)} and sanitized")
    _only = name


def is_one_named() -> bool:
    return bool(_only)


def names() -> list[str]:
    return [_only] if _only else list(SETS)


def widths() -> list[str]:
    """One for each width of vectors: what computes in float32 alone has the same sources in the others."""
    return [name for name in names() if name == _only or name in ("plain", "native", "avx2")]


def best() -> str:
    """The one with the most instructions, or the only one."""
    return _only or [*SETS, "plain"][1]


def sanitized() -> list[str]:
    """Those that `--kernels-variant sanitized` runs."""
    return list(_SANITIZED)


def with_tiles() -> list[str]:
    """Those that multiply bfloat16 by tiles, or their twin."""
    found = sanitized() if _only == "sanitized" else names()
    return [name for name in found if "-DTILES_TWIN" in flags(name) or (name == "native" and _AMX in _USABLE)]


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def path(name: str) -> Path:
    """One of SETS, or SANITIZED; compiled when it is first asked for and kept in the cache of libraries."""
    if name == "native":
        return find_library()[0]
    found = compiler()
    if found is None:
        raise BuildError("no g++")
    return compile_cached(found, flags(name), name)


def flags(name: str) -> tuple[str, ...]:
    """Return what the compiler is given for one of them."""
    return _SANITIZED[name] if name in _SANITIZED else (*SETS[name], "-Werror")


@contextmanager
def serving(name: str) -> Iterator[None]:
    """Let the backend `cpu` run this one; "" for the one that this machine gets."""
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setattr(loaded, "find_library", lambda: (path(name), name))
            loaded.load.cache_clear()
        yield
    loaded.load.cache_clear()


@cache
def library(name: str) -> Library:
    return Library(path(name), name)

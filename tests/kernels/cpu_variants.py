"""The CPU kernels compiled for every instruction set that this machine can run.

`amx-twin` is that for AMX with the twin of the tile instructions (src/tiles.h), so that it runs on CPUs without AMX.
`--kernels-variant NAME` keeps to one of them; `sanitized` and `sanitized-amx-twin`, which only `make sanitizers` asks
for, have AddressSanitizer and UBSan in them.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

from kernels.cpu.build import TILE_FLAGS, VARIANTS, BuildError, compile_cached, native_flags, usable_flags
from kernels.cpu.library import Library

_AMX = next(variant for variant in VARIANTS if variant.name == "amx")
_TWIN = (*(flag for flag in _AMX.flags if "amx" not in flag), "-DTILES_TWIN")
_HAS_TWIN = _AMX.needs - TILE_FLAGS <= usable_flags()
SETS: dict[str, tuple[str, ...]] = {
    "plain": (),
    **{variant.name: variant.flags for variant in VARIANTS if variant.needs <= usable_flags()},
    **({"amx-twin": _TWIN} if _HAS_TWIN else {}),
}
_SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_SANITIZED: dict[str, tuple[str, ...]] = {
    "sanitized": (*native_flags(), *_SANITIZERS),
    **({"sanitized-amx-twin": (*_TWIN, *_SANITIZERS)} if _HAS_TWIN else {}),
}
_only = ""


def keep_to(name: str) -> None:
    """From now on there is this one only; "" for all."""
    global _only
    if name not in ("", *SETS, *_SANITIZED):
        raise ValueError(f"--kernels-variant {name}: unknown; choose one of {', '.join((*SETS, *_SANITIZED))}")
    _only = name


def names() -> list[str]:
    return [_only] if _only else list(SETS)


def best() -> str:
    """The one with the most instructions, or the only one."""
    return _only or [*SETS, "plain"][1]


def with_tiles() -> list[str]:
    """Those that multiply bfloat16 by tiles, or their twin."""
    return [name for name in names() if "amx" in name]


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def path(name: str) -> Path:
    """One of SETS, or SANITIZED; compiled when it is first asked for and kept in the cache of libraries."""
    found = compiler()
    if found is None:
        raise BuildError("no g++")
    return compile_cached(found, flags(name), name)


def flags(name: str) -> tuple[str, ...]:
    """Return what the compiler is given for one of them."""
    return _SANITIZED[name] if name in _SANITIZED else (*SETS[name], "-Werror")


@cache
def library(name: str) -> Library:
    return Library(path(name), name)

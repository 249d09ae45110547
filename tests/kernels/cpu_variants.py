"""The CPU kernels compiled for every instruction set that this machine can run.

`--kernels-variant NAME` keeps to one of them; `sanitized`, which only `make sanitizers` asks for, has AddressSanitizer
and UBSan in it.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

from kernels.cpu.build import VARIANTS, BuildError, compile_cached, cpu_flags
from kernels.cpu.library import Library

SANITIZED = "sanitized"
SETS: dict[str, tuple[str, ...]] = {
    "plain": (),
    **{variant.name: variant.flags for variant in VARIANTS if variant.needs <= cpu_flags()},
}
_SANITIZERS = ("-march=native", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_only = ""


def keep_to(name: str) -> None:
    """From now on there is this one only; "" for all."""
    global _only
    if name not in ("", SANITIZED, *SETS):
        raise ValueError(f"--kernels-variant {name}: there are {', '.join(SETS)} and {SANITIZED}")
    _only = name


def names() -> list[str]:
    return [_only] if _only else list(SETS)


def best() -> str:
    """The one with the most instructions, or the only one."""
    return _only or [*SETS, "plain"][1]


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def path(name: str) -> Path:
    """One of SETS, or SANITIZED; compiled when it is first asked for and kept in the cache of libraries."""
    found = compiler()
    if found is None:
        raise BuildError("no g++")
    flags = _SANITIZERS if name == SANITIZED else (*SETS[name], "-Werror")
    return compile_cached(found, flags, name)


@cache
def library(name: str) -> Library:
    return Library(path(name), name)

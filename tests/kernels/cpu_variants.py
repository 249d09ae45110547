"""The CPU kernels compiled for every instruction set that this machine can run.

`--kernels-variant NAME` (conftest.py) keeps to one of them; `sanitized`, which only `make sanitizers` asks for, has
AddressSanitizer and UBSan in it.
"""

from __future__ import annotations

import shutil
from functools import cache

from kernels.cpu.build import VARIANTS, compile_cached, cpu_flags
from kernels.cpu.library import Library

SANITIZED = "sanitized"
SETS: dict[str, tuple[str, ...]] = {
    "plain": (),
    **{variant.name: variant.flags for variant in VARIANTS if variant.needs <= cpu_flags()},
}
_SANITIZERS = ("-march=native", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def library(name: str) -> Library:
    """One of SETS, or SANITIZED; compiled when it is first asked for and kept in the cache of libraries."""
    found = compiler()
    if found is None:
        raise RuntimeError("no g++: ask compiler() first")
    flags = _SANITIZERS if name == SANITIZED else SETS[name]
    return Library(compile_cached(found, flags, name), name)

"""Compile all kernels that tests run: `python -m tests.kernels.build`; with `sanitized`, those of `make sanitizers`.

Make calls it before the tests of kernels. On a slow or busy machine a test that compiles could reach its time limit,
and the compiler its own.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from kernels.cpu import build
from kernels.cuda import loader
from kernels.emulator.program import RACES, SANITIZERS, compiled
from tests.kernels import cpu_variants

COMPILE_S = 1800
"""For one source, in place of build.COMPILE_S; the stage of CI has a limit, too."""


def main() -> None:
    """Compile what no earlier run has left in the cache. Raise BuildError."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    build.COMPILE_S = COMPILE_S
    sanitized = sys.argv[1:] == ["sanitized"]
    for name in cpu_variants.sanitized() if sanitized else cpu_variants.names():
        cpu_variants.path(name)
    begun = time.monotonic()
    emulated = product((SANITIZERS,) if sanitized else (RACES, ()), loader.sources())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda each: compiled(each[1], (loader.SOURCES,), each[0]), emulated))
    print(f"the emulated kernels are compiled, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()

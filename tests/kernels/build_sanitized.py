"""Compile all kernels with sanitizers: `python -m tests.kernels.build_sanitized`, before `make sanitizers` tests them.

On a slow or busy machine a test that compiles could reach its time limit, and the compiler its own: CI runs this at low
priority.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

from kernels.cpu import build
from kernels.cuda import loader
from kernels.emulator.program import SANITIZERS, compiled
from tests.kernels import cpu_variants

COMPILE_S = 1800
"""For one source, in place of build.COMPILE_S; the stage of CI has a limit, too."""


def main() -> None:
    """Compile what no earlier run has left in the cache. Raise BuildError."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    build.COMPILE_S = COMPILE_S
    cpu_variants.keep_to("sanitized")
    for name in cpu_variants.sanitized():
        cpu_variants.path(name)
    begun = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: compiled(source, (loader.SOURCES,), SANITIZERS), loader.sources()))
    print(f"the emulated kernels are compiled, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()

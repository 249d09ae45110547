"""`python -m kernels.cuda.prebuilt`: compiles every source for every architecture that images carry, into lib/.

The loader takes such a cubin before it compiles. Sources and options are in a cubin's name, so one of other sources is
never taken; the compiler is not, since the machine that runs an image need not have one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.cuda import loader
from kernels.cuda.loader import ARCHITECTURES, CudaError, compiled, prebuilt_path, sources


def build_all() -> list[Path]:
    """Compile, and remove what other sources left. Raise CudaError."""
    wanted = {prebuilt_path(source, arch): (source, arch) for arch in ARCHITECTURES for source in sources(arch)}
    loader.PREBUILT.mkdir(parents=True, exist_ok=True)
    for old in set(loader.PREBUILT.glob("*.cubin")) - wanted.keys():
        old.unlink()
    with ThreadPoolExecutor(2) as pool:
        for path, made in zip(wanted, pool.map(lambda job: compiled(*job), wanted.values()), strict=True):
            loader.write_whole(path, made.image)
    return sorted(wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile all and print what an image then carries."""
    argparse.ArgumentParser(prog="python -m kernels.cuda.prebuilt", description=__doc__).parse_args(arguments)
    try:
        for path in build_all():
            print(path)
    except (CudaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.simulation --seeds 200`: prepare the process, then play (`run.py`)."""

from __future__ import annotations

import os
import sys

from tests.simulation import clock


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of names depends on the hashes of texts
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    clock.install()
    from tests.simulation.run import main as run  # behind `install`: services keep functions of `time` as defaults

    return run()


if __name__ == "__main__":
    sys.exit(main())

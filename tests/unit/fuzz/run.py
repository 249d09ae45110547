"""`make fuzz`: every generated test of this folder, with new examples until the time is over (SECONDS=60).

The tests take turns, each of as many examples as it has in `make test`. A test that fails is out; what it fails with is
printed, with the smallest example, and kept in .hypothesis, where the next run of it begins. Exit 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

# Before the tests are imported: what they do not say themselves is taken from here.
settings.register_profile(
    "fuzz", derandomize=False, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("fuzz")


def targets() -> dict[str, Callable[[], None]]:
    """The generated tests by name."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.unit.fuzz.{file.stem}")
        found |= {name: test for name, test in vars(module).items() if hasattr(test, "hypothesis")}
    return found


def counting(test: Any, counts: dict[str, int], name: str) -> None:
    """Has a test count its examples."""
    inner = test.hypothesis.inner_test

    def counted(*given: Any, **named: Any) -> None:
        counts[name] += 1
        inner(*given, **named)

    test.hypothesis.inner_test = counted


def fuzz(seconds: float) -> tuple[dict[str, int], list[str]]:
    """Examples of each test, and those that failed."""
    tests: dict[str, Any] = targets()
    counts = dict.fromkeys(tests, 0)
    for name, test in tests.items():
        counting(test, counts, name)
    until, failed, running = time.monotonic() + seconds, [], list(tests)
    while running and time.monotonic() < until:
        for name in list(running):
            if time.monotonic() >= until:
                break
            try:
                tests[name]()
            except Exception:
                traceback.print_exc()
                failed.append(name)
                running.remove(name)
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    random.seed()
    counts, failed = fuzz(options.seconds)
    for name, count in counts.items():
        print(f"{count:8} {'FAILED ' if name in failed else ''}{name}", file=sys.stderr)
    print(json.dumps({"seconds": options.seconds, "examples": sum(counts.values()), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

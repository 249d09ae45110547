"""Count what each CUDA kernel asks of the banks of shared memory and of sectors of global memory, beside goals.

    python -m tests.kernels.cuda.banks              all kernels; exit code 1 where one is over its goal
    python -m tests.kernels.cuda.banks KERNEL ...   some, and which lines take more than they must
    python -m tests.kernels.cuda.banks --changed    those of sources that changed since they were counted, and whether
                                                    the PTX of all kernels there is right in several orders of threads
    python -m tests.kernels.cuda.banks --write      put what is counted into kernels/cuda/banks.json

What is counted is NVRTC's PTX, emulated; see kernels/emulator/include/banks.h. Of kernels for two types only those of
bfloat16 run: the others have the same addresses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kernels.emulator.ptx
from kernels.cuda import check, loader
from kernels.emulator.program import BANKS, FORWARD, SPACES, Banks, Program
from tests.kernels.cuda import programs
from tests.kernels.cuda.operations.test_quantized import Case
from tests.kernels.cuda.test_races import KERNELS, ORDERS, Sizes, launch_from, run

RECORDED = Path(loader.__file__).with_name("banks.json")
COUNTED = [name for name in KERNELS if "_f16" not in name]
EVEN = Sizes(4096, 4096, 8192, 2048, 64, 512, (5120,), ((0, 64), (150, 9)), 4, Case(32, 64, 4096))
"""As models have them: rows begin with a sector."""
NEW_GOAL = 1.0


class Count(NamedTuple):
    """Wavefronts or sectors of a kernel."""

    taken: int
    least: int


class Counting(Program):
    """A program that keeps what its launches took: `counted`, by kernel."""

    def __init__(self, source: Path, include: tuple[Path, ...] = (loader.SOURCES,)) -> None:
        super().__init__(source, include=include, flags=BANKS)
        self.counted: list[tuple[str, Banks]] = []

    def launch(self, name: str, *given: Any, **named: Any) -> None:
        super().launch(name, *given, **named)
        self.counted += ((name, one) for one in self.banks())


@cache
def counting(source: Path) -> Counting:
    return Counting(source)


def count(kernel: str, program_of: Callable[[str], Counting] | None = None) -> list[Banks]:
    """Run a kernel as its test does, and return what its instructions took."""
    program_of = program_of or (lambda name: counting(programs.source_of(name)))
    with pytest.MonkeyPatch.context() as patch:
        launch_from(patch, program_of)
        run(kernel, FORWARD, EVEN)
    program = program_of(kernel)
    counted, program.counted = program.counted, []
    return [one for name, one in counted if name == kernel]


def prove(kernel: str) -> None:
    """Run what was compiled for counting in several orders of threads, as the kernel's test does.

    The test compares with float64. Raise AssertionError or EmulatorError.
    """
    for order in ORDERS:
        with pytest.MonkeyPatch.context() as patch:
            launch_from(patch, lambda name: counting(programs.source_of(name)))
            run(kernel, order)
    counting(programs.source_of(kernel)).counted.clear()


def by_space(banks: Sequence[Banks]) -> dict[str, Count]:
    """Return the sums of each kind of memory that is used at all."""
    sums = {space: [one for one in banks if one.space == space] for space in SPACES}
    return {
        space: Count(sum(one.taken for one in ones), sum(one.least for one in ones))
        for space, ones in sums.items()
        if ones
    }


def by_line(banks: Sequence[Banks]) -> list[tuple[str, str, Count]]:
    """Return the lines that take more than they must, the worst first."""
    taken, least = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in banks:
        taken[one.at, one.space] += one.taken
        least[one.at, one.space] += one.least
    lines = [(at, space, Count(taken[at, space], least[at, space])) for at, space in taken]
    return sorted(
        (line for line in lines if line[2].taken > line[2].least), key=lambda line: line[2].least - line[2].taken
    )


def recorded() -> dict[str, dict[str, dict[str, float]]]:
    """Return `taken`, `least` and `goal` of each kernel and kind of memory, as recorded."""
    kernels: dict[str, dict[str, dict[str, float]]] = json.loads(RECORDED.read_text())["kernels"]
    return kernels


def digests() -> dict[str, str]:
    """Return a digest for each source of the kernels that are counted, and of what counts them."""
    folder = Path(kernels.emulator.ptx.__file__).parent
    counts = (folder / "ptx.py").read_bytes() + (folder / "include" / "banks.h").read_bytes()
    sources = sorted({programs.source_of(kernel) for kernel in COUNTED})
    return {one.name: hashlib.sha256(check.digest_of(one).encode() + counts).hexdigest() for one in sources}


def changed() -> list[str]:
    """Return the kernels, those that are not counted too, of sources that are not as they were when these were."""
    before, now = json.loads(RECORDED.read_text())["sources"], digests()
    return [one for one in KERNELS if before.get(name := programs.source_of(one).name) != now[name]]


def over_goal(kernel: str, counts: Mapping[str, Count]) -> list[str]:
    """Return what is over the recorded goals, or has none."""
    goals = {space: row["goal"] for space, row in recorded().get(kernel, {}).items()}
    return [
        f"{kernel}, {space}: {found.taken} for {found.least} at least, the goal is {goals.get(space, 'not recorded')}"
        for space, found in counts.items()
        if space not in goals or found.taken > goals[space] * found.least
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when no kernel is over its goal."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.cuda.banks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="only these, line by line")
    parser.add_argument("--changed", action="store_true", help="only those that changed since they were counted")
    parser.add_argument("--write", action="store_true", help="record what is counted; goals stay, and a new one is 1")
    options = parser.parse_args(arguments)
    counts, complaints = {}, []
    before = recorded()
    chosen = changed() if options.changed else options.kernels or COUNTED
    for kernel in chosen if options.changed else ():
        prove(kernel)
        print(f"{kernel:28} right in {len(ORDERS)} orders of threads", flush=True)
    for kernel in [one for one in COUNTED if one in chosen] if options.changed else chosen:
        banks = count(kernel)
        counts[kernel] = by_space(banks)
        for space, found in counts[kernel].items():
            goal = before.get(kernel, {}).get(space, {}).get("goal", NEW_GOAL)
            print(
                f"{kernel:28} {space:15} {found.taken:7} for {found.least:7} "
                f"{found.taken / found.least:6.2f}   goal {goal:.2f}",
                flush=True,
            )
        for at, space, line in by_line(banks) if options.kernels else ():
            print(f"    {at:28} {space:15} {line.taken:7} for {line.least:7}")
    if options.write:
        made = before if options.kernels or options.changed else {}
        for kernel, spaces in counts.items():
            made[kernel] = {
                space: found._asdict() | {"goal": before.get(kernel, {}).get(space, {}).get("goal", NEW_GOAL)}
                for space, found in spaces.items()
            }
        ordered = {kernel: made[kernel] for kernel in COUNTED if kernel in made}
        sources = json.loads(RECORDED.read_text())["sources"] if options.kernels else digests()
        RECORDED.write_text(json.dumps({"sources": sources, "kernels": ordered}, indent=1) + "\n")
    for kernel, spaces in counts.items():
        complaints += over_goal(kernel, spaces)
    for complaint in complaints:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

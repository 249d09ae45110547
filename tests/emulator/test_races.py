"""The race checker finds each order of memory that is missing, in every order of threads, and no race where none is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kernels.emulator.program import FORWARD, RACES, REVERSE, EmulatorError, Program
from tests.support.compiler import needs_compiler

SOURCE = Path(__file__).with_name("races.cu")
KERNELS = re.findall(r"^CASE\((\w+),", SOURCE.read_text(), re.MULTILINE)
PARAMS = np.dtype([("in", "u8"), ("out", "u8")])
GLOBAL = ("atomics_read_too_early", "no_atomics", "not_released", "not_acquired", "blocks_overlap")
BLOCKS, THREADS = 3, 64
MATRIX_BYTES = 2048  # of dynamic shared memory

pytestmark = [needs_compiler, pytest.mark.parametrize("order", (FORWARD, REVERSE, 2, 3))]


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(SOURCE, flags=RACES)


def run(program: Program, name: str, order: int) -> None:
    given, made = np.zeros(4, np.int32), np.zeros(BLOCKS * THREADS + 1, np.int32)
    params = np.array([(given.ctypes.data, made.ctypes.data)], PARAMS)
    program.launch(name, (BLOCKS, 1, 1), (THREADS, 1, 1), MATRIX_BYTES, params, order=order)


@pytest.mark.parametrize("name", [name for name in KERNELS if name.endswith("_right")])
def test_accesses_in_order_are_no_race(program: Program, name: str, order: int) -> None:
    run(program, name, order)


@pytest.mark.parametrize("name", [name for name in KERNELS if not name.endswith("_right")])
def test_accesses_in_no_order_are_a_race(program: Program, name: str, order: int) -> None:
    memory = "global" if name in GLOBAL else "shared"
    with pytest.raises(EmulatorError, match=rf"{name}, order {order}, block .*: a race in {memory} memory"):
        run(program, name, order)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("no_barrier", "write by thread [0-9]+ at <written>", "read by thread [0-9]+ at <read>"),
        ("copy_waited_for_too_late", "write by a copy of thread [0-9]+ at <copied>", "read by thread [0-9]+ at <used>"),
    ],
)
def test_a_race_is_named_with_threads_and_lines(program: Program, name: str, one: str, other: str, order: int) -> None:
    """<mark> is the line of races.cu that is marked so."""
    lines = SOURCE.read_text().splitlines()
    marks = {line.split("// <- ")[1]: number for number, line in enumerate(lines, 1) if "// <- " in line}
    first, second = (re.sub("<(.+?)>", lambda mark: rf"races\.cu:{marks[mark[1]]}", text) for text in (one, other))
    with pytest.raises(EmulatorError, match=f"{first}, and in no order with it {second}|{second}, .* {first}"):
        run(program, name, order)

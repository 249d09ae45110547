"""Wavefronts of shared memory and sectors of global memory are counted as a GPU's documentation has them.

Four bytes a lane or fewer go in one wavefront, 8 in two and 16 in four, and as many more as lanes of one of these want
other words of a bank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernels.cuda.loader import SOURCES
from kernels.emulator.program import BANKS, FORWARD, REVERSE, Program
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

SOURCE = Path(__file__).with_name("banks.cu")
PARAMS = np.dtype([("in", "u8"), ("out", "u8"), ("n", "i4")], align=True)
RESULT = ("global", 1, 4, 4)
"""What each lane leaves at the end."""
READ_BACK = ("shared", 1, 1, 1)

TAKES = {  # requests, what they take, and the least
    "words_beside_each_other": [("shared", 1, 1, 1), READ_BACK, RESULT],
    "words_in_any_order": [("shared", 1, 1, 1), READ_BACK, RESULT],
    "a_column": [("shared", 1, 32, 1), READ_BACK, RESULT],
    "a_padded_column": [("shared", 1, 1, 1), READ_BACK, RESULT],
    "every_other_word": [("shared", 1, 2, 1), READ_BACK, RESULT],
    "half_words": [("shared", 1, 1, 1), READ_BACK, RESULT],
    "pairs_of_words": [("shared", 1, 2, 2), READ_BACK, RESULT],
    "every_other_pair": [("shared", 1, 4, 2), READ_BACK, RESULT],
    "four_words": [("shared", 1, 4, 4), READ_BACK, RESULT],
    "every_other_four_words": [("shared", 1, 8, 4), READ_BACK, RESULT],
    "sectors_beside_each_other": [("global", 1, 4, 4), RESULT],
    "one_word_for_all": [("global", 1, 1, 1), RESULT],
    "across_a_sector": [("global", 1, 5, 4), RESULT],
    "a_column_of_global_memory": [("global", 1, 32, 4), RESULT],
    "sums_of_lanes": [("shared", 1, 1, 1), ("shared atomics", 1, 1, 1), READ_BACK, RESULT],
    "one_sum": [("shared", 1, 1, 1), ("shared atomics", 1, 32, 1), READ_BACK, RESULT],
    "matrices": [("shared", 1, 4, 4), RESULT],
    "matrices_in_a_column": [("shared", 1, 32, 4), RESULT],
    "copies": [("shared", 1, 4, 4), ("global", 1, 16, 16)],
    "copies_of_nothing": [("shared", 1, 4, 4)],
    "lanes_leave_one_by_one": [("global", 2, 5, 5), RESULT],
    "lanes_take_turns": [("global", 2, 8, 4)],
}


@pytest.fixture(scope="module")
def program() -> Program:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    return Program(SOURCE, include=(SOURCES,), flags=BANKS)


def room(words: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return zeros that begin with a sector."""
    whole = np.zeros(words + 8, np.int32)
    return whole[-whole.ctypes.data % 32 // 4 :][:words]


@pytest.mark.parametrize("order", [FORWARD, REVERSE, 2])
@pytest.mark.parametrize("name", TAKES)
def test_accesses_take_what_a_gpu_takes(program: Program, name: str, order: int) -> None:
    given, made = room(1024), room(32)
    params = np.array([(given.ctypes.data, made.ctypes.data, 0)], PARAMS)
    program.launch(name, (1, 1, 1), (32, 1, 1), 0, params, order=order)
    found = [(one.space, one.requests, one.taken, one.least) for one in program.banks()]
    assert sorted(found) == sorted(TAKES[name])


def test_counts_are_those_of_the_last_launch_and_name_its_lines(program: Program) -> None:
    given, made = room(1024), room(32)
    params = np.array([(given.ctypes.data, made.ctypes.data, 0)], PARAMS)
    for _ in range(2):
        program.launch("a_column_of_global_memory", (3, 1, 1), (32, 1, 1), 0, params)
    lines = SOURCE.read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "p.in[place(" in text)
    assert sorted({one.at for one in program.banks()}) == [f"banks.cu:{line}"]
    assert sorted(one.taken for one in program.banks()) == [12, 96], "of three blocks"

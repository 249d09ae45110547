"""The wrappers for compute capability 9.0 and their twins: matrices in shared memory, barriers of some threads.

The layouts are transcribed from the PTX ISA ("Asynchronous warpgroup level matrix instructions", 128-byte swizzling).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda import cubin, loader
from kernels.cuda.loader import SOURCES, compiled
from kernels.emulator.program import FORWARD, PTX, REVERSE, EmulatorError, Program
from kernels.emulator.ptx import PtxError
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

SOURCE = Path(__file__).with_name("ptx_sm90.cu")
PARAMS = np.dtype([("a", "u8"), ("b", "u8"), ("out", "u8"), ("n", "i4")], align=True)
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
ROWS, DEPTH = 64, 128
Array = np.ndarray[Any, np.dtype[Any]]
CASES = [(order, flags) for flags in ((), PTX) for order in (FORWARD, REVERSE, 2)]


@pytest.fixture(scope="module", params=CASES)
def program(request: pytest.FixtureRequest) -> Program:
    """The source with the twins, and what NVRTC makes of the source with the assembly."""
    order, flags = request.param
    if flags == PTX:
        pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    return Program(SOURCE, order, include=(SOURCES,), flags=flags)


def run(program: Program, name: str, a: Array, b: Array, out: Array, n: int, block: int = 128) -> None:
    params = np.array([(a.ctypes.data, b.ctypes.data, out.ctypes.data, n)], PARAMS)
    program.launch(name, (1, 1, 1), (block, 1, 1), 1024 * 48, params)


def panels(matrix: Array) -> Array:
    """Return 64 columns after another; the 16-byte chunks of each line of 128 bytes at chunk ^ line % 8."""
    lines = matrix.reshape(len(matrix), -1, 8, 8).swapaxes(0, 1)  # [panel, line, chunk, 8]
    made = np.empty_like(lines)
    for line in range(lines.shape[1]):
        made[:, line, np.arange(8) ^ line % 8] = lines[:, line]
    return np.ascontiguousarray(made)


def fragments(matrix: Array) -> Array:
    """Return what the threads of a warpgroup hold of [64, 16 k], [k, thread, 8]."""
    held = np.empty((matrix.shape[1] // 16, 128, 8), matrix.dtype)
    for thread in range(128):
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i in range(8):
            held[:, thread, i] = matrix[row + i // 2 % 2 * 8, column + i // 4 * 8 + i % 2 :: 16]
    return held


def check(program: Program, dtype: str, where: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    wide_a, wide_b = torch.randn(ROWS, DEPTH, generator=generator), torch.randn(columns, DEPTH, generator=generator)
    a, b = (each.to(TYPES[dtype]) for each in (wide_a, wide_b))
    bits_a, bits_b = (each.view(torch.int16).numpy() for each in (a, b))
    in_registers = where == "registers"
    found = np.full((ROWS, columns), np.nan, np.float32)
    left = fragments(bits_a) if in_registers else panels(bits_a)
    right = panels(np.ascontiguousarray(bits_b.T) if in_registers else bits_b)
    run(program, f"{dtype}_{where}_{columns}", left, right, found, 3)
    assert np.allclose(found, (a.double() @ b.double().T).numpy() + 3, rtol=0, atol=1e-4)


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("where", ["shared", "registers"])
@pytest.mark.parametrize("dtype", TYPES)
def test_wgmma_multiplies_swizzled_matrices(program: Program, dtype: str, where: str, columns: int) -> None:
    check(program, dtype, where, columns)


def test_named_barriers_hand_a_place_over_and_back(program: Program) -> None:
    given, found = np.arange(7, 12, dtype=np.int32), np.zeros(128, np.int32)
    run(program, "hand_over_", given, given, found, len(given), block=256)
    expected = np.zeros(128, np.int32)
    for number in given:
        expected = 3 * expected + number + np.arange(127, -1, -1)
    assert np.array_equal(found, expected)


def test_wrappers_are_taken_by_the_assembler_without_warning() -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    made = compiled(SOURCE, "sm_90")
    assert cubin.warnings(made.log) == []
    assert made.usage().keys() == made.params_bytes().keys() and len(made.usage()) == 9


PLANTED = {
    "a line across k for one along it": ('"}, " b ", 1, 1, 1, 1;"', '"}, " b ", 1, 1, 1, 0;"'),
    "another swizzle": ("uint64_t(1) << 62", "uint64_t(2) << 62"),
    "words of the left side": ('"r"(left[0]), "r"(left[1])', '"r"(left[1]), "r"(left[0])'),
    "sums that are not cleared": ('setp.ne.b32 %%p, " more ", 0;', 'setp.ne.b32 %%p, " more ", 7;'),
    "panels": ("static_cast<uint64_t>(next >> 4) << 16", "static_cast<uint64_t>(next >> 5) << 16"),
}
"""Of the assembly alone."""


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_assembly_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    right, wrong = PLANTED[name]
    header = (SOURCES / "ptx.cuh").read_text()
    assert right in header
    (tmp_path / "ptx.cuh").write_text(header.replace(right, wrong))
    others = r"^PRODUCTS\(f16_.*\n|^.*KERNEL\(name##_64.*\n|^.*KERNEL\(hand_over_.*\n"  # not launched below
    (tmp_path / SOURCE.name).write_text(re.sub(others, "", SOURCE.read_text(), flags=re.MULTILINE))
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    with pytest.raises((AssertionError, EmulatorError, PtxError)):
        program = Program(tmp_path / SOURCE.name, include=(SOURCES,), flags=PTX)
        for where in ("shared", "registers"):
            check(program, "bf16", where, 128)

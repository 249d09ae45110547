"""Each PTX wrapper and its twin, each warp function and atomic, against plain loops and numpy.

The same source compiles for GPUs in tests/kernels/cuda/loading/test_loader.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda import loader
from kernels.cuda.loader import SOURCES
from kernels.emulator.program import FORWARD, PTX, REVERSE, EmulatorError, Program
from kernels.emulator.ptx import PtxError, translated
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

PARAMS = np.dtype([("a", "u8"), ("b", "u8"), ("out", "u8"), ("n", "i4")], align=True)
ORDERS = (FORWARD, REVERSE, 2)
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module", params=[*((order, ()) for order in ORDERS), *((order, PTX) for order in ORDERS)])
def program(request: pytest.FixtureRequest) -> Program:
    """The source with the twins, and what NVRTC makes of the source with the assembly."""
    order, flags = request.param
    if flags == PTX:
        pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    return Program(Path(__file__).with_name("ptx.cu"), order, include=(SOURCES,), flags=flags)


def run(
    program: Program, name: str, a: Array, b: Array | None, out: Array, n: int = 0, grid: int = 1, block: int = 32
) -> None:
    params = np.array([(a.ctypes.data, 0 if b is None else b.ctypes.data, out.ctypes.data, n)], PARAMS)
    program.launch(name, (grid, 1, 1), (block, 1, 1), 0, params)


def halves(dtype: torch.dtype, *shape: int, seed: int = 0) -> tuple[Array, Array]:
    """Random 16-bit numbers: their bits, and what they are."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.view(torch.int16).numpy().view(np.uint16), made.double().numpy()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_mma_multiplies_the_fragments_of_the_instruction_set_manual(
    program: Program, name: str, dtype: torch.dtype
) -> None:
    (a, wide_a), (b, wide_b) = halves(dtype, 16, 16), halves(dtype, 16, 8, seed=1)
    # Transcribed from the PTX ISA, "Matrix Fragments for mma.m16n8k16": group = lane >> 2, pair = lane % 4 * 2.
    held_a, held_b = np.zeros((32, 8), np.uint16), np.zeros((32, 4), np.uint16)
    expected = np.zeros((32, 4))
    for lane in range(32):
        group, pair = lane >> 2, lane % 4 * 2
        for i in range(8):
            held_a[lane, i] = a[group + 8 * (i % 4 >= 2), pair + (i & 1) + 8 * (i >= 4)]
        for i in range(4):
            held_b[lane, i] = b[pair + (i & 1) + 8 * (i >= 2), group]
            expected[lane, i] = 3 + (wide_a @ wide_b)[group + 8 * (i >= 2), pair + (i & 1)]
    found = np.full((32, 4), np.nan, np.float32)
    run(program, f"mma_{name}_fragments", held_a, held_b, found, n=3)
    assert np.allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_deals_four_matrices_to_the_lanes(program: Program, trans: bool) -> None:
    a = np.arange(256, dtype=np.uint16).reshape(16, 16)
    # Lanes 0 .. 7 name the rows of the first matrix, 8 .. 15 of the second: one below the other; then to their right.
    blocks = [a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]]
    expected = np.zeros((32, 4, 2), np.uint16)
    for lane in range(32):
        for matrix, block in enumerate(blocks):
            for k in range(2):
                i, j = lane // 4, lane % 4 * 2 + k
                expected[lane, matrix, k] = block[j, i] if trans else block[i, j]
    found = np.zeros((32, 4, 2), np.uint16)
    run(program, "matrices_trans" if trans else "matrices_plain", a, None, found)
    assert np.array_equal(found, expected)


def test_copies_ldmatrix_and_mma_make_a_matrix_product(program: Program) -> None:
    (a, wide_a), (b, wide_b) = halves(torch.bfloat16, 16, 16), halves(torch.bfloat16, 16, 8, seed=1)
    found = np.full((2, 16, 8), np.nan, np.float32)
    run(program, "product_", a, b, found)
    assert np.allclose(found[0], wide_a @ wide_b, rtol=0, atol=1e-5)
    assert (found[1] == 0).all(), "copies that are not valid write zeros"


def test_float32_is_rounded_to_16_bits_as_torch_rounds(program: Program) -> None:
    generator = np.random.default_rng(0)
    ties = (generator.integers(0, 1 << 16, 2000, dtype=np.uint32) << 16) | 0x8000
    half_ties = np.arange(1, 2000, dtype=np.float32) * np.float32(2**-25)  # between f16's smallest numbers
    bits = np.concatenate(
        [generator.integers(0, 1 << 32, 4000, dtype=np.uint32), ties, ties + 1, half_ties.view(np.uint32)]
    )
    numbers = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, 65504, 65519, 65520, 1e-8])])
    numbers = np.ascontiguousarray(numbers[~np.isnan(numbers)])
    found = np.zeros((6, len(numbers)), np.uint16)
    run(program, "narrow_", numbers, None, found, n=len(numbers), grid=-(-len(numbers) // 256), block=256)
    pairs = found[2:].ravel().view(np.uint32).reshape(2, -1)
    for dtype, bits_found, packed in zip((torch.bfloat16, torch.float16), found[:2], pairs, strict=True):
        expected = torch.from_numpy(numbers).to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits_found, expected)
        assert np.array_equal(packed, expected | np.roll(expected, -1).astype(np.uint32) << 16)


def test_nan_stays_nan_in_16_bits(program: Program) -> None:
    numbers = np.float32([np.nan, -np.nan])
    found = np.zeros((6, 2), np.uint16)
    run(program, "narrow_", numbers, None, found, n=2)
    assert (found == 0x7FFF).all()


def test_every_16_bit_number_is_widened_exactly(program: Program) -> None:
    exponents = np.float32([-200, -126, -1.5, 0, 0.5, 1, 127, np.inf, -np.inf])
    found = np.zeros(131072 + len(exponents), np.float32)
    run(program, "widen_", exponents, None, found, n=len(exponents), grid=256, block=256)
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).roll(32768)
    for dtype, part in ((torch.bfloat16, found[:65536]), (torch.float16, found[65536:131072])):
        expected = every.view(dtype).float().numpy()
        assert np.array_equal(part, expected, equal_nan=True)
    assert np.allclose(found[131072:], 2.0 ** exponents.astype(np.float64), rtol=1e-6, atol=1e-38)


def test_pairs_of_halves_are_multiplied_and_added_with_one_rounding(program: Program) -> None:
    """The first 500 results are whole numbers that the types hold."""
    dtypes, generator = (torch.bfloat16, torch.float16), torch.Generator().manual_seed(4)
    whole = torch.randint(-11, 12, (2, 500), generator=generator).double()
    a, b = torch.cat([whole, torch.randn((2, 500), generator=generator).double()], 1)
    given = [np.concatenate([one.to(dtype).view(torch.int16).numpy() for dtype in dtypes]) for one in (a, b)]
    found = np.zeros(2000, np.int16)
    run(program, "multiply_add_", *given, found, n=500, grid=2, block=256)
    for dtype, part in zip(dtypes, (found[:1000], found[1000:]), strict=True):
        x, y = a.to(dtype).double(), b.to(dtype).double()
        got, expected = torch.from_numpy(part).view(dtype).double(), x * y + x
        assert torch.equal(got[:500], expected[:500])
        assert ((got - expected).abs() <= expected.abs() * torch.finfo(dtype).eps * 0.501 + 2.0**-25).all()


def test_shuffles_and_votes_are_those_of_the_programming_guide(program: Program) -> None:
    x = np.random.default_rng(1).integers(0, 100, 32, dtype=np.int32)
    found = np.zeros((8, 32), np.int32)
    run(program, "warp_", x, None, found)
    lanes = np.arange(32)
    assert np.array_equal(found[0], x[(lanes * 7 + 3) % 32])
    assert np.array_equal(found[1], x[lanes // 8 * 8 + 5])
    assert np.array_equal(found[2], x[lanes ^ 17])
    assert np.array_equal(found[3], [x[i - 3] if i % 16 >= 3 else x[i] for i in lanes])
    assert np.array_equal(found[4], [x[i + 5] if i % 16 + 5 < 16 else x[i] for i in lanes])
    assert (found[5].view(np.uint32) == sum(1 << int(i) for i in lanes if x[i] % 3 == 0)).all()
    assert (found[6] == int((x == 7).any()) * 2 + 1).all()
    assert np.array_equal(found[7], np.repeat([x[:16].sum(), x[16:].sum()], 16))


def test_atomics_and_counting_barriers_see_every_thread(program: Program) -> None:
    x = np.random.default_rng(2).integers(0, 1000, 192, dtype=np.int32)
    x[70] = 3
    found = np.zeros(32, np.int32)
    found[2] = 5000
    run(program, "counters_", x, None, found, grid=3, block=64)
    assert list(found[:3]) == [x.sum(), x.max(), x.min()]
    assert found[3:4].view(np.uint32)[0] == np.bitwise_or.reduce(np.uint32(1) << (x & 31).astype(np.uint32))
    assert (found[4], found[6]) == (0, 1), "the last ticket sets the counter back"
    assert found[5:6].view(np.float32)[0] == 96
    assert found[8:10].view(np.uint64)[0] == 192 << 33
    assert (found[7], found[10]) == (1, 77)
    for block in range(3):
        own = x[block * 64 : block * 64 + 64]
        assert found[16 + block] == (own % 2 == 0).sum() * 4 + (own == 3).any() * 2 + 1


PLANTED = {
    "operands of a product": ('"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)'),
    "rows for columns": ("m8n8.x4.trans.shared", "m8n8.x4.shared"),
    "words of a matrix": ("x4.shared.b16 {%0, %1, %2, %3}", "x4.shared.b16 {%0, %2, %1, %3}"),
    "halves of a word": ('"=r"(both) : "f"(high), "f"(low)', '"=r"(both) : "f"(low), "f"(high)'),
    "another type": ("cvt.rn.bf16.f32", "cvt.rn.f16.f32"),
    "a late wait": ('"cp.async.wait_group %0;" ::"n"(pending)', '"cp.async.wait_group %0;" ::"n"(pending + 1)'),
    "zeros that are not written": ("valid ? 16 : 0", "16"),
    "another power": ("ex2.approx.ftz.f32 %0, %1;", "neg.f32 %0, %1;"),
}
"""Of the assembly alone: the twins, and so all other tests, do not see them."""


@pytest.fixture(params=PLANTED)
def planted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source beside headers with a bug."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    right, wrong = PLANTED[request.param]
    header = (SOURCES / "ptx.cuh").read_text()
    assert right in header
    (tmp_path / "ptx.cuh").write_text(header.replace(right, wrong))
    for source in (SOURCES / "numbers.cuh", Path(__file__).with_name("ptx.cu")):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    return tmp_path / "ptx.cu"


def test_wrong_assembly_is_seen(planted: Path) -> None:
    program = Program(planted, include=(SOURCES,), flags=PTX)
    tests = (
        lambda: test_mma_multiplies_the_fragments_of_the_instruction_set_manual(program, "bf16", torch.bfloat16),
        lambda: test_ldmatrix_deals_four_matrices_to_the_lanes(program, False),
        lambda: test_ldmatrix_deals_four_matrices_to_the_lanes(program, True),
        lambda: test_copies_ldmatrix_and_mma_make_a_matrix_product(program),
        lambda: test_float32_is_rounded_to_16_bits_as_torch_rounds(program),
        lambda: test_every_16_bit_number_is_widened_exactly(program),
    )

    def fails(test: Callable[[], None]) -> bool:
        try:
            test()
        except AssertionError:
            return True
        return False

    assert any(fails(test) for test in tests)


@pytest.mark.parametrize(
    "assembly",
    [
        'popc.b32 %0, %1;" : "=r"(p.whole[0]) : "r"(p.whole[1])',
        'mul.sat.f32 %0, %1, %1;" : "=f"(p.real[0]) : "f"(p.real[1])',
        'mad.hi.s32 %0, %1, %1, %1;" : "=r"(p.whole[0]) : "r"(p.whole[1])',
        'cvt.rz.f32.s32 %0, %1;" : "=f"(p.real[0]) : "r"(p.whole[1])',
        'max.ftz.f32 %0, %1, %1;" : "=f"(p.real[0]) : "f"(p.real[1])',
        'barrier.arrive 1, 32;" ::',
    ],
)
def test_instruction_without_a_rule_is_named(tmp_path: Path, assembly: str) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    source = tmp_path / "unknown.cu"
    source.write_text(
        '#include "ptx.cuh"\nstruct Params { int* whole; float* real; };\n'
        f'__device__ void run(const Params& p) {{\n  asm volatile("{assembly});\n}}\n'
        "KERNEL(unknown, Params, 32, run)\n"
    )
    with pytest.raises(PtxError, match=rf"unknown\.ptx:\d+: no rule for '{re.escape(assembly.split()[0])}"):
        translated(source)


def test_addresses_outside_of_shared_memory_and_odd_ones_are_named(tmp_path: Path) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    source = tmp_path / "stray.cu"
    source.write_text(
        '#include "ptx.cuh"\nstruct Params { int64_t at, out; };\n'
        "__device__ void read(const Params& p) {\n  SHARED(int, held, 32);\n"
        "  *reinterpret_cast<int*>(p.out) = held[p.at];\n}\nKERNEL(stray, Params, 32, read)\n"
    )
    program, out = Program(source, include=(SOURCES,), flags=PTX), np.zeros(2, np.int32)
    for at, address, problem in ((32, 0, r"4 bytes at 128 of an array of 128"), (31, 2, "no multiple of 4")):
        params = np.array([(at, out.ctypes.data + address)], np.dtype([("at", "i8"), ("out", "i8")]))
        with pytest.raises(EmulatorError, match=rf"stray\.ptx:\d+: .*{problem}"):
            program.launch("stray", (1, 1, 1), (1, 1, 1), 0, params)

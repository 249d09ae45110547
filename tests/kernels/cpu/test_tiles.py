"""Products by the tile registers of AMX, or by their twin; matrices have the bits of the order that docs/cpu.md states.

tiles.bin holds 40 products that a CPU with AMX computed: rows, pairs and columns as int32, then a[16][32] and b[16][32]
in bfloat16, and c[16][16] in float32 before and after. Their numbers are normal, far apart, denormal, near the
smallest, or any finite ones, in turn.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.cpu.backend import CpuOps
from kernels.cpu.build import SOURCES
from kernels.cpu.commands import BFLOAT16, FLOAT32
from kernels.ops import Groups
from tests.kernels import cpu_variants
from tests.kernels.cpu.test_attention import written
from tests.kernels.cpu.test_gemm import GROUPS, Gemm, from_bf16, groups, to_bf16

HERE = Path(__file__).parent
RECORDED = np.dtype(
    [("shape", "<i4", 3), ("a", "<u2", (16, 32)), ("b", "<u2", (16, 32)), ("before", "<f4", 256), ("after", "<f4", 256)]
)
STEP = 32  # inputs of a tile
SHAPES = ((1, 1), (31, 7), (33, 64), (70, 65), (64, 95), (40, 2048))
"""Outputs, inputs."""

Floats = NDArray[np.float32]

pytestmark = [
    pytest.mark.sanitized,
    pytest.mark.skipif(
        cpu_variants.compiler() is None or not cpu_variants.with_tiles(),
        reason="no g++, or no AVX-512, which the twin computes in",
    ),
]


@pytest.fixture(params=cpu_variants.with_tiles())
def tiled(request: pytest.FixtureRequest) -> str:
    """A variant that multiplies by tiles."""
    name: str = request.param
    return name


@pytest.fixture
def gemm(tiled: str) -> Gemm:
    return Gemm(cpu_variants.library(tiled))


def flushed(x: Floats) -> Floats:
    """Denormal numbers as zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def by_tiles(x: Floats, w: Floats) -> Floats:
    """x @ w.T in the order of TDPBF16PS.

    Products of bfloat16 are exact in float32, those of denormal numbers too where weights are 0.5 and more, so an
    addition rounds once.
    """
    x, sums = flushed(x), np.zeros((len(x), len(w)), np.float32)
    for first in range(0, x.shape[1], STEP):
        chains = np.zeros((2, len(x), len(w)), np.float32)
        for k in range(first, min(first + STEP, x.shape[1])):
            chains[k % 2] = flushed(chains[k % 2] + np.outer(x[:, k], w[:, k]))
        sums = flushed(sums + flushed(chains[0] + chains[1]))
    return sums


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a * b + c with one rounding to float32.

    float64 holds the product exactly. The sum in float64 is rounded to odd, so that the second rounding is right.
    """
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & (bits % 2 == 0)
    return (bits + np.where(inexact, away, 0)).view(np.float64).astype(np.float32)


def lanes_sum(x: Floats) -> Floats:
    """The sum of each row of a group as the kernels have it: 16 chains, then halves onto halves."""
    lanes = np.zeros((len(x), 16), np.float32)
    for first in range(0, x.shape[1], 16):
        lanes += x[:, first : first + 16]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def by_groups(x: Floats, part: Groups) -> Floats:
    """x times a matrix in groups: the products of each by tiles, scaled and added in float32."""
    none = None if part.mins is None else torch.zeros_like(part.mins)
    one = Groups(part.bits, part.group, part.numbers, torch.ones_like(part.scales), none, table=part.table)
    numbers = one.plain().numpy()
    wide, sums = np.pad(x, ((0, 0), (0, -x.shape[1] % part.group))), np.zeros((len(x), len(numbers)), np.float32)
    for group, first in enumerate(range(0, x.shape[1], part.group)):
        these = slice(first, first + part.group)
        sums = fused(by_tiles(x[:, these], numbers[:, these]), part.scales[:, group].numpy()[None], sums)
        if part.mins is not None:
            sums = fused(lanes_sum(wide[:, these]), -part.mins[:, group].numpy()[None], sums)
    return sums


def test_tile_product_equals_recorded_results_of_the_instruction(tiled: str, tmp_path: Path) -> None:
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{SOURCES}", *cpu_variants.flags(tiled)]
    made = tmp_path / "tiles.so"
    subprocess.run(["g++", *flags, str(HERE / "tiles.cpp"), "-o", str(made)], check=True)
    product = ctypes.CDLL(str(made)).product
    records = np.fromfile(HERE / "tiles.bin", RECORDED)
    assert len(records) == 40
    compared = 0
    for record in records:
        rows, pairs, columns = map(int, record["shape"])
        found = record["before"].copy()
        a, b = record["a"].copy(), record["b"].copy()
        product(*(ctypes.c_void_p(part.ctypes.data) for part in (found, a, b)), rows, pairs, columns)
        ours, theirs = (part.reshape(16, 16)[:rows, :columns] for part in (found, record["after"]))
        assert np.array_equal(np.isnan(ours), np.isnan(theirs))
        numbers = ~np.isnan(ours)
        assert np.array_equal(ours.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])
        compared += int(numbers.sum())
    assert compared > 2000


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_bfloat16_product_has_the_bits_of_the_stated_order(gemm: Gemm, outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(11)
    w, x = (to_bf16(rng.standard_normal((rows, inputs), np.float32)) for rows in (outputs, 300))
    bias = rng.standard_normal(outputs, np.float32)
    weight = gemm.pack("bfloat16", [w], BFLOAT16)
    expected = by_tiles(from_bf16(x), from_bf16(w)) + bias
    for rows in (*range(1, 41), 64, 129, 300):
        first = int(rng.integers(0, 301 - rows))
        found = gemm.linear(x[first : first + rows], BFLOAT16, weight, bias, FLOAT32, 1 + rows % 2)
        assert np.array_equal(found, expected[first : first + rows]), rows


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_int8_product_has_the_bits_of_the_stated_order(gemm: Gemm, outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(12)
    w = rng.standard_normal((outputs, inputs), np.float32)
    x = to_bf16(rng.standard_normal((40, inputs), np.float32))
    scale = np.abs(w).max(1) / np.float32(127)
    rounded = np.rint(w * (1 / scale)[:, None]).clip(-127, 127)
    expected = by_tiles(from_bf16(x), rounded) * scale
    weight = gemm.pack("int8", [w], FLOAT32)
    for rows in range(1, 41):
        found = gemm.linear(x[:rows], BFLOAT16, weight, None, FLOAT32, 1 + rows % 2)
        assert np.array_equal(found, expected[:rows]), rows


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: "-".join(map(str, kind)))
def test_group_product_has_the_bits_of_the_stated_order(gemm: Gemm, kind: tuple[int, int, str]) -> None:
    rng = np.random.default_rng(13)
    for outputs, inputs in ((1, 1), (33, 40), (70, 600)):
        part = groups(rng, kind, (outputs, inputs))
        part.scales.add_(torch.from_numpy(rng.random(part.scales.shape, np.float32) * np.float32(2**-12)))
        x = to_bf16(rng.standard_normal((70, inputs), np.float32))
        expected = by_groups(from_bf16(x), part)
        packed = gemm.pack_groups([part])
        for rows in (*range(1, 41), 70):
            found = gemm.linear(x[-rows:], BFLOAT16, packed, None, FLOAT32, 1 + rows % 2)
            assert np.array_equal(found, expected[-rows:]), rows


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: "-".join(map(str, kind)))
def test_group_product_of_one_row_has_its_bits_in_a_batch(gemm: Gemm, kind: tuple[int, int, str]) -> None:
    """Of rows in turn with activations that are denormal or near the smallest normal number, normal, and far apart."""
    rng = np.random.default_rng(14)
    for outputs, inputs in ((65, 424), (200, 1111)):
        part = groups(rng, kind, (outputs, inputs))
        part.scales.copy_(torch.from_numpy(np.exp2(rng.integers(-3, 4, part.scales.shape)).astype(np.float32)))
        bits = rng.integers(0, 1 << 16, (17, inputs), np.uint16) & 0x807F
        ends = np.array([(0, 4), (120, 130), (0, 200)])[np.arange(17) % 3]
        x = (bits | rng.integers(ends[:, :1], ends[:, 1:], bits.shape) << 7).astype(np.uint16)
        packed = gemm.pack_groups([part])
        whole = gemm.linear(x, BFLOAT16, packed, None, FLOAT32)
        assert np.isfinite(whole).all()
        near = from_bf16(x[::3])
        assert (np.abs(near) < np.finfo(np.float32).tiny).any()
        assert np.array_equal(whole[::3], by_groups(near, part))
        for rows in range(1, 17):
            for first in range(0, 18 - rows, rows):
                found = gemm.linear(x[first : first + rows], BFLOAT16, packed, None, FLOAT32, 1 + rows % 2)
                assert np.array_equal(found.view(np.uint32), whole[first : first + rows].view(np.uint32)), (rows, first)


def test_denormal_numbers_count_as_zero_in_bfloat16_products(gemm: Gemm) -> None:
    denormal, small = to_bf16(np.float32([[2.0**-127], [2.0**-70]]))
    one, large = to_bf16(np.float32([[1.0], [2.0**60]]))
    for x, w, expected in (
        (denormal, large, 0.0),
        (small, small, 0.0),
        (small, one, 2.0**-70),
        (small, large, 2.0**-10),
    ):
        weight = gemm.pack("bfloat16", [w[None]], BFLOAT16)
        assert gemm.linear(x[None], BFLOAT16, weight, None, FLOAT32)[0, 0] == np.float32(expected)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("window", [0, 100])
def test_attention_is_the_formula_where_other_keys_are_nan(tiled: str, head_dim: int, window: int) -> None:
    ops = CpuOps(cpu_variants.library(tiled), 1)
    world = written(ops, [200, 64, 131], torch.bfloat16, heads=(10, 2), head_dim=head_dim, window=window)
    for chunks in ([(0, 0, 200), (1, 63, 64), (2, 60, 131)], [(0, 127, 128), (1, 0, 64), (2, 130, 131)]):
        world.check(chunks)

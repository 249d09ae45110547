"""Packed matrices: the kernels, emulated in three orders of threads, against float64, and what calls them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.backend import CudaOps
from kernels.cuda.calls import BF16
from kernels.cuda.operations import quantized
from kernels.cuda.operations.quantized import Quantized
from kernels.ops import Groups
from tests.kernels.cuda.programs import (
    ORDERS,
    SEEDS,
    TYPES,
    assert_fences,
    device_of,
    fenced,
    launch,
    numbers,
    untouched,
)
from tests.kernels.sequences import near, random, wide
from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.sanitized]

orders = pytest.mark.parametrize("order", ORDERS)
dtypes = pytest.mark.parametrize("dtype", TYPES)


class Kind(NamedTuple):
    """A format: inputs of a group, whether it has minima, and whether it is fp8."""

    group: int
    mins: bool = False
    fp8: bool = False

    @property
    def packing(self) -> calls.Packing:
        return calls.FP8 if self.fp8 else calls.Q4


FORMATS = [Kind(128), Kind(128, True), Kind(32), Kind(32, True), Kind(128, fp8=True), Kind(32, fp8=True)]


def groups(outputs: int, inputs: int, group: int, mins: bool = False, fp8: bool = False, seed: int = 0) -> Groups:
    """Zero points of a third of the groups are no whole numbers, as GGUF has them. fp8: any code but those of NaN."""
    rng = np.random.default_rng(seed)
    if fp8:
        codes = rng.integers(0, 0x7F, (outputs, inputs), np.uint8) | rng.choice(np.uint8([0, 0x80]), (outputs, inputs))
        exact = torch.from_numpy(rng.uniform(0.05, 0.2, (outputs, -(-inputs // group)))).float() / 100
        return Groups(8, group, torch.from_numpy(codes), exact, table="float8")
    made = torch.from_numpy(rng.integers(0, 16, (outputs, inputs), np.uint8))
    scales = torch.from_numpy(rng.uniform(0.05, 0.2, (outputs, -(-inputs // group)))).half().float()
    zeros = torch.from_numpy(rng.integers(0, 48, scales.shape) // 3 + rng.choice([0, 0, 0.37], scales.shape)).float()
    return Groups(4, group, made, scales, scales * zeros if mins else None)


def held(part: Groups, bias: Tensor | None = None) -> Quantized:
    """The matrix as the kernels have it, each part of it fenced."""
    made = quantized.pack(device_of(), [part], *part.numbers.shape, bias)
    mins, rounded = (None if one is None else fenced(one.cpu()) for one in (made.mins, made.bias))
    words, scales = fenced(made.words.cpu()), fenced(made.scales.cpu())
    return Quantized(made.packing, made.outputs, made.inputs, made.group, words, scales, mins, rounded)


def product(
    weight: Quantized, x: Tensor, dtype: str, order: int, shape: tuple[int, int] | None = None, stride: int = 0
) -> Tensor:
    """x times the matrix, in rows of `stride` numbers, of which nothing else is written."""
    rows = x.shape[0]
    out = untouched(rows, stride or weight.outputs, dtype=x.dtype)
    present = [one for one in (weight.mins, weight.bias) if one is not None]
    call = calls.linear_packed(
        weight.packing,
        dtype,
        rows,
        weight.inputs,
        weight.outputs,
        weight.group,
        x.data_ptr(),
        weight.words.data_ptr(),
        weight.scales.data_ptr(),
        0 if weight.mins is None else weight.mins.data_ptr(),
        0 if weight.bias is None else weight.bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        shape,
    )
    launch(call, order)
    assert_fences(x, out, weight.scales, *present)
    assert (out[:, weight.outputs :] == out.new_full((), -77)).all(), "numbers beside the rows"
    return out[:, : weight.outputs]


class Case(NamedTuple):
    """Outputs: less than a tile, tiles that are not full, none or one behind the last of a block.

    Inputs: a vector, less than a unit, units for some of the warps, and more than a warp's ring holds."""

    rows: int
    outputs: int
    inputs: int


CASES = [Case(1, 8, 8), Case(3, 24, 136), Case(8, 80, 1544), Case(11, 40, 264), Case(37, 72, 328), Case(2, 16, 5256)]


def check(order: int, dtype: str, case: Case, kind: Kind, shape: tuple[int, int] | None = None) -> None:
    """Compare with float64."""
    part, bias = groups(case.outputs, case.inputs, *kind), numbers(case.outputs, seed=3)
    x = numbers(case.rows, case.inputs, dtype=TYPES[dtype])
    found = product(held(part, bias), x, dtype, order, shape, case.outputs + 5)
    expected = wide(x) @ wide(part.plain()).T + wide(bias)
    near(found, expected, 1e-5 * float(np.abs(expected).max()))


@orders
@dtypes
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_float64(order: int, dtype: str, case: Case, kind: Kind) -> None:
    check(order, dtype, case, kind)


@orders
@dtypes
def test_every_code_is_multiplied_as_the_number_it_stands_for(order: int, dtype: str) -> None:
    """Rows of ones and zeros give the weights: numbers of e4m3fn, exact in both types."""
    codes = torch.arange(256).repeat(2)[torch.arange(48)[:, None] * 5 + torch.arange(256)].to(torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    weight, ones = held(Groups(8, 128, codes, torch.full((48, 2), 0.5), table="float8")), torch.eye(256)
    for first in range(0, 256, 64):
        x = fenced(ones[first : first + 64].to(TYPES[dtype]))
        found = product(weight, x, dtype, order).float()
        assert torch.equal(found, codes.view(torch.float8_e4m3fn).float().t()[first : first + 64] / 2)


@orders
@pytest.mark.parametrize("kind", FORMATS)
def test_row_has_the_same_bits_in_any_batch_and_shape(order: int, kind: Kind) -> None:
    weight, x = held(groups(48, 1160, *kind)), numbers(40, 1160, dtype=TYPES[BF16])
    alone = product(weight, fenced(x[5:6]), BF16, order)[0]
    for rows in (8, 16, 40):
        for shape in kind.packing.shapes:
            assert torch.equal(product(weight, fenced(x[:rows]), BF16, order, shape)[5], alone), (rows, shape)


@orders
def test_broken_rows_leave_the_others_alone(order: int) -> None:
    weight, x = held(groups(16, 136, 32, True)), numbers(8, 136, dtype=TYPES[BF16])
    good = product(weight, x, BF16, order)
    x[3], x[6, 7] = torch.nan, torch.inf
    found = product(weight, x, BF16, order)
    kept = [0, 1, 2, 4, 5, 7]
    assert torch.equal(found[kept], good[kept])
    assert found[3].isnan().all() and not found[6].isfinite().any()


def check_unpacked(order: int, dtype: str, kind: Kind, inputs: int) -> None:
    part = groups(21, inputs, *kind)
    weight, out = held(part), untouched(21, inputs, dtype=TYPES[dtype])
    mins = 0 if weight.mins is None else weight.mins.data_ptr()
    addresses = (weight.words.data_ptr(), weight.scales.data_ptr(), mins, out.data_ptr())
    launch(calls.unpack(kind.packing, dtype, inputs, 21, kind.group, *addresses), order)
    assert_fences(out)
    assert torch.equal(out, part.plain().to(out.dtype))


@orders
@dtypes
@pytest.mark.parametrize("kind", FORMATS)
def test_unpacked_weights_have_the_bits_of_their_groups(order: int, dtype: str, kind: Kind) -> None:
    check_unpacked(order, dtype, kind, 2312)


def cut(part: Groups, *at: int) -> list[Groups]:
    """Its rows in pieces."""
    bounds = [0, *at, len(part.numbers)]
    return [
        replace(
            part,
            numbers=part.numbers[some],
            scales=part.scales[some],
            mins=None if part.mins is None else part.mins[some],
        )
        for some in (slice(first, last) for first, last in pairwise(bounds))
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_pieces_are_packed_as_one(kind: Kind) -> None:
    part = groups(50, 200, *kind)
    device = device_of()
    whole = quantized.pack(device, [part], 50, 200, None)
    pieces = quantized.pack(device, iter(cut(part, 3, 19, 20)), 50, 200, None)
    assert torch.equal(whole.words, pieces.words) and torch.equal(whole.scales, pieces.scales)
    assert (whole.mins is None) == (not kind.mins)
    if whole.mins is not None and pieces.mins is not None:
        assert torch.equal(whole.mins, pieces.mins)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows", [1, 64, 65])
def test_work_that_is_put_off_multiplies_its_own_rows(seed: int | None, rows: int) -> None:
    """Both ways of multiplying, beside a matrix in 16 bits and in rows that lie apart; nothing is waited for."""
    ops = CudaOps(device_of(seed))
    part, plain = groups(40, 64, 32, True), random((7, 64), 5, torch.bfloat16)
    bias = random((47,), 6, torch.bfloat16).float()  # torch adds it rounded
    packed = ops.pack_groups(iter(cut(part, 9)), 40, 64, bias[:40])
    stack = ops.stack([packed, ops.pack_linear(iter([plain]), 7, 64, bias[40:])])
    weights = np.concatenate([wide(part.plain()), wide(plain)])
    expected, found = [], []
    for turn in range(3):
        x = random((rows, 64), turn, torch.bfloat16)
        there = ops.gpu.empty((rows, 64), torch.bfloat16)
        ops.gpu.main.run(partial(there.copy_, x))
        found += [ops.linear(there, stack), ops.linear(there, packed)]
        exact = wide(x) @ weights.T + wide(bias)
        expected += [exact, exact[:, :40]]
    ops.mark().wait()
    for one, exact in zip(found, expected, strict=True):
        assert one.shape == exact.shape
        # From 65 rows on the weights are rounded to bfloat16; a GPU's own product may be, before the bias is added.
        once, twice = 1e-5 * float(np.abs(exact).max()), 4e-3 * float(np.abs(exact).max())
        near(one[:, :40].cpu(), exact[:, :40], once if rows <= quantized.MAX_ROWS else twice)
        near(one[:, 40:].cpu(), exact[:, 40:], twice)


def test_no_rows_are_no_launch() -> None:
    ops = CudaOps(device_of())
    packed = ops.pack_groups([groups(16, 64, 32, False)], 16, 64, None)
    assert ops.linear(ops.gpu.empty((0, 64), torch.bfloat16), packed).shape == (0, 16)


def test_what_does_not_fit_is_refused() -> None:
    device, part = device_of(), groups(16, 64, 32, False)
    with pytest.raises(ValueError, match="16 rows were given for a weight of 24"):
        quantized.pack(device, [part], 24, 64, None)
    with pytest.raises(ValueError, match="32 rows were given for a weight of 24"):
        quantized.pack(device, [part, part], 24, 64, None)
    with pytest.raises(ValueError, match="rows of 64 numbers in int4-32-mins were given after others"):
        quantized.pack(device, [part, groups(16, 64, 32, True)], 32, 64, None)
    with pytest.raises(ValueError, match="weights in int8-32: the cuda backend has no kernels for it"):
        quantized.pack(device, [Groups(8, 32, part.numbers, part.scales)], 16, 64, None)
    with pytest.raises(ValueError, match="a row of 60 numbers"):
        quantized.pack(device, [groups(16, 60, 32, False)], 16, 60, None)

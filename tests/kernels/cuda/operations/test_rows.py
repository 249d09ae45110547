"""CUDA kernels that read and write rows, emulated in three orders of threads, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.calls import BF16
from kernels.ops import Norm
from tests.kernels.cuda.programs import (
    ORDERS,
    TYPES,
    UNTOUCHED,
    assert_fences,
    fenced,
    int32,
    launch,
    numbers,
    untouched,
)
from tests.kernels.sequences import FORMULAS, near, normed, wide
from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.sanitized, pytest.mark.parametrize("order", ORDERS)]

dtypes = pytest.mark.parametrize("dtype", TYPES)
# One vector; less than a warp; whole warps; rows of which a thread has more than one vector, or none.
widths = pytest.mark.parametrize("width", [8, 136, 768, 4096, 8200])


def norm(
    dtype: str,
    order: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    layer_norm: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    out = untouched(*x.shape, dtype=x.dtype) if out is None else out
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (x, out, weight, bias, residual)]
    call = calls.norm(dtype, *x.shape, *addresses[:3], 1e-5, *addresses[3:], layer_norm=layer_norm)
    launch(call, order)
    assert_fences(out, *(tensor for tensor in (x, residual) if tensor is not None))
    return out


@pytest.mark.parametrize("layer_norm", [False, True])
@dtypes
@widths
def test_norms_are_those_of_float64(order: int, width: int, dtype: str, layer_norm: bool) -> None:
    x, weight = numbers(3, width, dtype=TYPES[dtype]), numbers(width, seed=1)
    x += 3
    bias = numbers(width, seed=2) if layer_norm else None
    found = norm(dtype, order, x, weight, bias, layer_norm=layer_norm)
    near(found, normed(wide(x), Norm(weight, bias, 1e-5, layer_norm)), absolute=5e-6)


@pytest.mark.parametrize("layer_norm", [False, True])
@dtypes
def test_a_norm_sees_the_residual_as_it_was_stored(order: int, dtype: str, layer_norm: bool) -> None:
    x, residual = numbers(3, 136, dtype=TYPES[dtype]), numbers(3, 136, dtype=TYPES[dtype], seed=1)
    weight = numbers(136, seed=2)
    added = residual + x  # torch rounds once
    found = norm(dtype, order, x, weight, residual=residual, layer_norm=layer_norm)
    assert torch.equal(residual, added)
    near(found, normed(wide(added), Norm(weight, None, 1e-5, layer_norm)), absolute=5e-6)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_the_widest_row_that_is_taken_is_right_in_place(order: int, layer_norm: bool) -> None:
    width = calls.MAX_NORM_HIDDEN
    x, weight = numbers(1, width, dtype=TYPES[BF16]), numbers(width, seed=1)
    expected = normed(wide(x), Norm(weight, None, 1e-5, layer_norm))
    near(norm(BF16, order, x, weight, layer_norm=layer_norm, out=x), expected, absolute=5e-6)


def test_layer_norm_keeps_its_digits_beside_a_large_mean(order: int) -> None:
    x, weight = numbers(2, 768, dtype=torch.float16), fenced(torch.ones(768))
    x += 500
    near(norm("f16", order, x, weight, layer_norm=True), normed(wide(x), Norm(weight, None, 1e-5, True)), absolute=2e-4)


@dtypes
def test_a_row_is_the_same_alone_and_in_a_batch(order: int, dtype: str) -> None:
    x, weight = numbers(5, 520, dtype=TYPES[dtype]), numbers(520, seed=1)
    together = norm(dtype, order, x, weight)
    for row in range(5):
        alone = norm(dtype, order, fenced(x[row : row + 1]), weight)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("width", [520, 8200])
def test_norm_has_the_same_bits_in_a_step_of_many_rows(
    order: int, width: int, layer_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = numbers(2, width, dtype=TYPES[BF16]), numbers(width, seed=1)
    few = norm(BF16, order, x, weight, layer_norm=layer_norm)
    monkeypatch.setattr(calls, "ROW_MANY_VECTORS", 1)
    assert torch.equal(norm(BF16, order, x, weight, layer_norm=layer_norm), few)


kinds = pytest.mark.parametrize("kind", calls.ACTIVATIONS)


@kinds
@dtypes
@pytest.mark.parametrize("width", [8, 136, 2312])
def test_activations_are_those_of_float64(order: int, width: int, dtype: str, kind: str) -> None:
    x = numbers(3, width, dtype=TYPES[dtype], scale=3)
    expected = FORMULAS[kind](wide(x))
    launch(calls.activate(dtype, 3, width, x.data_ptr(), x.data_ptr(), kind), order)
    near(x, expected)
    assert_fences(x)


@kinds
@dtypes
@pytest.mark.parametrize("width", [8, 136, 2312])
def test_gated_multiplies_the_activated_half_with_the_other(order: int, width: int, dtype: str, kind: str) -> None:
    x, out = numbers(3, 2 * width, dtype=TYPES[dtype], scale=3), untouched(3, width, dtype=TYPES[dtype])
    launch(calls.gated(dtype, 3, width, x.data_ptr(), out.data_ptr(), kind), order)
    near(out, FORMULAS[kind](wide(x[:, :width])) * wide(x[:, width:]), absolute=3e-6)
    assert_fences(x, out)


@kinds
def test_activations_of_huge_and_broken_numbers(order: int, kind: str) -> None:
    x = fenced(torch.tensor([1e30, -1e30, 3e38, -200.0, math.nan, math.inf, 0.0, -90.0], dtype=torch.bfloat16))
    out = untouched(8, dtype=torch.bfloat16)
    launch(calls.activate(BF16, 1, 8, x.data_ptr(), out.data_ptr(), kind), order)
    assert torch.equal(out[[0, 2, 5, 6]], x[[0, 2, 5, 6]])
    assert out[1] == 0 and out[3] == 0 and out[4].isnan() and abs(out[7]) < 1e-30


@dtypes
@pytest.mark.parametrize("width", [8, 136, 2312])
def test_add_is_in_place_and_rounds_once(order: int, width: int, dtype: str) -> None:
    residual, x = numbers(3, width, dtype=TYPES[dtype]), numbers(3, width, dtype=TYPES[dtype], seed=1)
    expected = residual + x
    launch(calls.add(dtype, 3, width, x.data_ptr(), residual.data_ptr()), order)
    assert torch.equal(residual, expected)
    assert_fences(residual, x)


@pytest.mark.parametrize("places", [False, True])
@dtypes
@pytest.mark.parametrize("width", [8, 136, 2312])
def test_embed_scales_adds_places_and_reads_last_tokens(order: int, width: int, dtype: str, places: bool) -> None:
    table, learned = numbers(50, width, dtype=TYPES[dtype]), numbers(20, width, dtype=TYPES[dtype], seed=1)
    tokens, positions = int32(49, 0, ~2, calls.PADDING, 7, ~0), int32(0, 19, 3, -1, 4, 1)
    last_tokens, out = int32(48, -77, 7), untouched(6, width, dtype=TYPES[dtype])
    where = {"places": learned.data_ptr(), "positions": positions.ctypes.data} if places else {}
    addresses = (table.data_ptr(), out.data_ptr(), tokens.ctypes.data)
    launch(calls.embed(dtype, 6, width, *addresses, 1.5, **where, last_tokens=last_tokens.ctypes.data), order)
    expected = wide(table)[[49, 0, 7, 0, 7, 48]] * 1.5 + (wide(learned)[positions] if places else 0)
    real = [0, 1, 2, 4, 5]
    near(out[real], expected[real])
    assert (out[3] == UNTOUCHED).all()
    assert_fences(out)


@pytest.mark.parametrize("width", [8, 136, 2312])
def test_select_takes_the_rows_that_sample_and_leaves_padding_alone(order: int, width: int) -> None:
    x, chosen = numbers(9, width, dtype=torch.bfloat16), int32(8, 0, -1, 0, 5)
    out = untouched(5, width, dtype=torch.bfloat16)
    launch(calls.select(5, width, x.data_ptr(), out.data_ptr(), chosen.ctypes.data), order)
    assert torch.equal(out[[0, 1, 3, 4]], x[[8, 0, 0, 5]])
    assert (out[2] == UNTOUCHED).all()
    assert_fences(out)

"""Row-wise operations of the C++ library against float64: every type, odd widths, any number of threads."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.commands import (
    ACTIVATIONS,
    BFLOAT16,
    FLOAT32,
    ROWS_SAMPLES,
    ROWS_TOKENS,
    ActivateArgs,
    AddArgs,
    EmbedArgs,
    GatedArgs,
    NormArgs,
    SelectArgs,
    Step,
    command,
)
from kernels.cpu.library import Library
from tests.kernels.cpu_variants import library

LIBRARY: Library


@pytest.fixture(autouse=True, scope="module")
def _library(variant: str) -> None:
    global LIBRARY
    LIBRARY = library(variant)


CODES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
DTYPES = list(CODES)
WIDTHS = (1, 3, 16, 31, 64, 129, 512, 5000)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Half a unit in the last place, relative."""


def run(args: ctypes.Structure, rows: int, step: Step | None = None, threads: int = 1) -> None:
    made, step = command(rows, args), step or Step()
    LIBRARY.run(ctypes.addressof(made), 1, ctypes.addressof(step), threads)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape) * scale
    return torch.from_numpy(values).to(dtype)


def wide(x: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return x.to(torch.float64).numpy()


def close(found: Tensor, expected: Any, absolute: Any = 1e-6, relative: float = 2e-6) -> None:
    """Equal but for `absolute`, `relative` and one rounding to the type that was stored."""
    limit = absolute + (relative + ROUNDING[found.dtype]) * np.abs(expected)
    error = np.abs(wide(found) - expected)
    assert (error <= limit).all(), f"{(error - limit).max()} too far, shape {tuple(found.shape)}"


def activated(x: Any, kind: str) -> Any:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu":
        return x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)) / 2
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.maximum(x, 0)


def normed(x: Any, weight: Any, bias: Any, eps: float, layer_norm: bool) -> Any:
    if layer_norm:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return x if bias is None else x + bias


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    layer_norm: bool = False,
    threads: int = 1,
) -> Tensor:
    out = torch.empty_like(x)
    args = NormArgs(
        x=x.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        hidden=x.shape[1],
        dtype=CODES[x.dtype],
        layer_norm=layer_norm,
        eps=1e-5,
    )
    run(args, x.shape[0], threads=threads)
    return out


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_float64(dtype: torch.dtype, layer_norm: bool) -> None:
    for width in WIDTHS:
        x, weight = numbers(7, width, dtype=dtype) + 3, numbers(width, seed=1)
        bias = numbers(width, seed=2) if layer_norm else None
        found = norm(x, weight, bias, layer_norm=layer_norm)
        wide_bias = None if bias is None else wide(bias)
        # A single number has no variance: what is left of it is divided by sqrt(eps), about 300 times larger.
        close(found, normed(wide(x), wide(weight), wide_bias, 1e-5, layer_norm), absolute=5e-6)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_sees_the_residual_as_it_was_stored(dtype: torch.dtype, layer_norm: bool) -> None:
    x, residual = numbers(5, 130, dtype=dtype), numbers(5, 130, dtype=dtype, seed=1)
    weight = numbers(130, seed=2)
    added = residual + x  # torch rounds once to dtype
    found = norm(x, weight, residual=residual, layer_norm=layer_norm)
    assert torch.equal(residual, added)
    close(found, normed(wide(added), wide(weight), None, 1e-5, layer_norm), absolute=2e-6)


def test_layer_norm_keeps_its_digits_beside_a_large_mean() -> None:
    x = numbers(3, 768) + 1000
    weight = torch.ones(768)
    close(norm(x, weight, layer_norm=True), normed(wide(x), 1.0, None, 1e-5, True), absolute=2e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_row_is_same_alone_in_batch_and_with_any_threads(threads: int) -> None:
    x, weight = numbers(41, 515), numbers(515, seed=1)
    together = norm(x, weight, layer_norm=True, threads=threads)
    alone = torch.cat([norm(x[i : i + 1].clone(), weight, layer_norm=True, threads=1) for i in range(41)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_those_of_float64(dtype: torch.dtype, kind: str) -> None:
    for width in WIDTHS:
        x = numbers(5, width, dtype=dtype, scale=3)
        expected = activated(wide(x), kind)
        run(ActivateArgs(x.data_ptr(), width, CODES[dtype], ACTIVATIONS[kind]), 5)
        close(x, expected)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_multiplies_the_activated_half_with_the_other(dtype: torch.dtype, kind: str) -> None:
    for width in WIDTHS:
        x, out = numbers(5, 2 * width, dtype=dtype, scale=3), torch.empty(5, width, dtype=dtype)
        run(GatedArgs(x.data_ptr(), out.data_ptr(), width, CODES[dtype], ACTIVATIONS[kind]), 5)
        close(out, activated(wide(x[:, :width]), kind) * wide(x[:, width:]), absolute=3e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_hold_few_units_in_last_place_over_all_magnitudes(kind: str) -> None:
    # Every 2,003rd float32 of either sign up to 80.
    bits = np.arange(0, np.float32(80).view(np.uint32), 2003, dtype=np.uint32)
    x = torch.from_numpy(np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32))
    expected = activated(wide(x), kind)
    run(ActivateArgs(x.data_ptr(), len(x), FLOAT32, ACTIVATIONS[kind]), 1)
    normal = np.abs(expected) > 1e-35
    error = np.abs(wide(x) - expected) / np.maximum(np.abs(expected), 1e-35)
    # tanh's own definition cancels in float64, and exp multiplies the rounding of its argument, which grows to 80.
    limit = {"silu": 4e-7 + 6e-8 * 80, "gelu": 5e-6, "gelu_tanh": 1e-5}[kind]
    reached = normal & (np.abs(expected) > 1e-9) if kind == "gelu_tanh" else normal
    assert error[reached].max() < limit
    assert error[np.abs(expected) > 0.01].max() < 1e-6


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_huge_and_broken_numbers(kind: str) -> None:
    x = torch.tensor([1e30, -1e30, 3e38, -200.0, math.nan, math.inf])
    run(ActivateArgs(x.data_ptr(), 6, FLOAT32, ACTIVATIONS[kind]), 1)
    assert x[0] == np.float32(1e30) and x[2] == np.float32(3e38) and x[5] == math.inf
    assert x[1] == 0 and x[3] == 0 and x[4].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_is_in_place(dtype: torch.dtype) -> None:
    for width in WIDTHS:
        residual, x = numbers(6, width, dtype=dtype), numbers(6, width, dtype=dtype, seed=1)
        expected = residual + x
        run(AddArgs(residual.data_ptr(), x.data_ptr(), width, CODES[dtype]), 6)
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_takes_the_rows_that_sample(dtype: torch.dtype) -> None:
    x, chosen = numbers(9, 77, dtype=dtype), np.array([8, 0, 0, 5], np.int32)
    out = torch.empty(4, 77, dtype=dtype)
    step = Step(tokens_count=9, samples_count=4, sample_rows=chosen.ctypes.data)
    run(SelectArgs(x.data_ptr(), out.data_ptr(), 77, CODES[dtype]), ROWS_SAMPLES, step)
    assert torch.equal(out, x[torch.from_numpy(chosen).long()])


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64, 130])
def test_embed_scales_and_adds_places(width: int, dtype: torch.dtype, table_dtype: torch.dtype, places: bool) -> None:
    table, position_table = numbers(50, width, dtype=table_dtype), numbers(20, width, dtype=dtype, seed=1)
    tokens, positions = np.array([49, 0, 7, 7], np.int32), np.array([0, 19, 3, 4], np.int32)
    out = torch.empty(4, width, dtype=dtype)
    step = Step(tokens_count=4, tokens=tokens.ctypes.data, positions=positions.ctypes.data)
    args = EmbedArgs(
        table=table.data_ptr(),
        places=position_table.data_ptr() if places else None,
        out=out.data_ptr(),
        hidden=width,
        vocab=50,
        dtype=CODES[dtype],
        table_dtype=CODES[table_dtype],
        scale=1.5,
    )
    run(args, ROWS_TOKENS, step)
    expected = wide(table)[tokens] * 1.5 + (wide(position_table)[positions] if places else 0)
    close(out, expected)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "width"), [(50, 5), (131, 64), (70, 130)])
def test_embed_reads_rows_of_a_packed_matrix(vocab: int, width: int, dtype: torch.dtype, int8: bool) -> None:
    table, code = numbers(vocab, width, dtype=dtype), LIBRARY.weight_formats["int8"] if int8 else CODES[dtype]
    packed = torch.empty(LIBRARY.packed_bytes(code, vocab, width), dtype=torch.uint8)
    LIBRARY.pack(code, packed.data_ptr(), (vocab, width), 0, vocab, table.data_ptr(), CODES[dtype])
    tokens, out = np.array([vocab - 1, 0, 33, 17], np.int32), torch.empty(4, width, dtype=dtype)
    args = EmbedArgs(packed.data_ptr(), None, out.data_ptr(), width, vocab, CODES[dtype], code, True, 2.0)
    run(args, ROWS_TOKENS, Step(tokens_count=4, tokens=tokens.ctypes.data))
    expected = wide(table)[tokens]
    # int8 is the nearest of 255 levels of its row.
    step = np.abs(expected).max(-1, keepdims=True) / 127 if int8 else 0
    close(out, expected * 2, absolute=1e-6 + 1.001 * step)


def test_nothing_is_written_beyond_the_last_number() -> None:
    for width in (1, 7, 33):
        x, weight = numbers(1, width), numbers(width)
        out = torch.full((width + 64,), 7.0)
        args = NormArgs(x.data_ptr(), None, out.data_ptr(), weight.data_ptr(), None, width, FLOAT32, False, 1e-5)
        run(args, 1)
        assert (out[width:] == 7).all()

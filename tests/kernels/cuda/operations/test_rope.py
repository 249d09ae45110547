"""Bias, norms, rotary positions and the write into paged KV, emulated in three orders of threads, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda import calls
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
    part_of,
    take,
    untouched,
)
from tests.kernels.sequences import HARD_VECTORS, coded, e4m3_neighbours, near, normed, wide
from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.sanitized, pytest.mark.parametrize("order", ORDERS)]

POSITIONS = 100
LAYERS, LAYER = 3, 1
BLOCKS = 7


@dataclass(frozen=True, slots=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int = 0
    norms: bool = False
    bias: bool = False
    block_size: int = 16
    layer_major: bool = False
    fp8: bool = False


CASES = {
    "llama": Case(8, 2, 128, 128),
    "qwen2, with bias": Case(7, 1, 64, 64, bias=True),
    "qwen3, norms": Case(4, 2, 128, 128, norms=True),
    "all of it, blocks of 32": Case(4, 1, 64, 64, norms=True, bias=True, block_size=32),
    "neox, a quarter turns": Case(3, 3, 64, 16, bias=True),
    "phi, heads of 80": Case(2, 2, 80, 32),
    "stablelm, an odd half": Case(2, 2, 80, 20),
    "heads of 96": Case(6, 2, 96, 96),
    "gemma, heads of 256": Case(2, 1, 256, 256),
    "sixteen heads share one": Case(16, 1, 64, 64),
    "the smallest head, layer by layer": Case(1, 1, 8, 4, layer_major=True),
    "opt, nothing turns": Case(4, 4, 64, bias=True),
    "fp8, blocks of 32": Case(4, 2, 128, 128, norms=True, bias=True, block_size=32, fp8=True),
    "fp8, an odd half": Case(3, 1, 64, 20, layer_major=True, fp8=True),
}


def expected_head(x: Any, case: Case, weight: Any, eps: float, angles: Any) -> Any:
    """x [rows, heads, head_dim] float64; angles [rows, rotary]."""
    if weight is not None:
        x = normed(x, Norm(weight, None, eps))
    half = case.rotary // 2
    if half:
        cos, sin = angles[:, None, :half], angles[:, None, half:]
        a, b = x[..., :half], x[..., half : 2 * half]
        x = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)
    return x


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_q_is_returned_and_kv_lies_in_its_slots(order: int, name: str, dtype: str) -> None:
    case, kind = CASES[name], TYPES[dtype]
    rows, size, all_heads = 6, case.block_size, case.heads + 2 * case.kv_heads
    qkv = numbers(rows, all_heads, case.head_dim, dtype=kind)
    positions = int32(0, 99, 1, 17, 16, 3)
    slots = int32(5 * size + 3, 0, 6 * size + size - 1, 5 * size + 4, -1, 2 * size)
    table = numbers(POSITIONS, max(2, case.rotary), seed=3).clamp_(-1, 1)
    bias = numbers(all_heads, case.head_dim, seed=4)
    q_weight, k_weight = numbers(case.head_dim, seed=5), numbers(case.head_dim, seed=6)
    part = part_of(case.kv_heads, size, case.head_dim, kind, case.fp8)
    slab = part.shape
    if case.layer_major:
        pool = untouched(LAYERS, 2, BLOCKS, *slab, dtype=part.dtype)
        keys, values, stride = pool[LAYER, 0], pool[LAYER, 1], pool.stride(2)
    else:
        pool = untouched(BLOCKS, LAYERS, 2, *slab, dtype=part.dtype)
        keys, values, stride = pool[:, LAYER, 0], pool[:, LAYER, 1], pool.stride(0)
    q = untouched(rows, case.heads, case.head_dim, dtype=kind)

    given: dict[str, Any] = {}
    if case.bias:
        given |= {"bias": bias.data_ptr()}
    if case.norms:
        given |= {"q_norm": q_weight.data_ptr(), "k_norm": k_weight.data_ptr(), "eps": (1e-5, 1e-2)}
    if case.rotary:
        given |= {"angles": table.data_ptr(), "rotary": case.rotary, "positions": positions.ctypes.data}
    sizes = (rows, case.heads, case.kv_heads, case.head_dim, size, stride)
    tensors = (qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr())
    launch(calls.rope_and_write(dtype, *sizes, *tensors, slots.ctypes.data, **given, fp8=case.fp8), order)

    x = wide(qkv) + (wide(bias) if case.bias else 0)
    angles = wide(table)[positions]
    first_v = case.heads + case.kv_heads
    expected_q = expected_head(x[:, : case.heads], case, q_weight if case.norms else None, 1e-5, angles)
    expected_k = expected_head(x[:, case.heads : first_v], case, k_weight if case.norms else None, 1e-2, angles)
    near(q, expected_q, absolute=3e-6)
    for row, slot in enumerate(slots):
        if slot >= 0 and case.fp8:
            found_k, found_v = (take(one, slot // size, slot % size, case.head_dim) for one in (keys, values))
            limit = 2**-4 * np.abs(expected_k[row]) + 2**-18 * np.abs(expected_k[row]).max(-1, keepdims=True)
            assert (np.abs(wide(found_k) - expected_k[row]) <= limit).all()
            exact = torch.from_numpy(x[row, first_v:]).float()
            assert torch.equal(found_v, coded(exact, "fp8"))
        elif slot >= 0:
            near(keys[slot // size, :, slot % size], expected_k[row], absolute=3e-6)
            near(values[slot // size, :, slot % size], x[row, first_v:])
            keys[slot // size, :, slot % size] = values[slot // size, :, slot % size] = UNTOUCHED
    assert (pool == UNTOUCHED).all(), "and nowhere else"
    assert_fences(pool, q, qkv)


def test_fp8_holds_the_formulas_codes_of_hard_vectors(order: int) -> None:
    """Vectors come by the bias, in float32. Beside e4m3's numbers lies 448, so that their scale is 1."""
    codes = e4m3_neighbours(17 * 63).view(17, 63)
    vectors = torch.cat([
        torch.nn.functional.pad(HARD_VECTORS, (0, 60)),
        torch.nn.functional.pad(codes, (1, 0), value=448),
    ])  # fmt: skip
    heads, slot, slots = len(vectors), 5, int32(5)
    bias = fenced(torch.cat([torch.zeros(1, 64), vectors, -vectors]))
    qkv, q = fenced(torch.zeros(1, 1 + 2 * heads, 64, dtype=torch.bfloat16)), untouched(1, 1, 64, dtype=torch.bfloat16)
    pool = untouched(2, *part_of(heads, 16, 64, torch.bfloat16, True).shape, dtype=torch.int8)
    addresses = (qkv.data_ptr(), q.data_ptr(), pool[0].data_ptr(), pool[1].data_ptr(), slots.ctypes.data)
    sizes = (1, 1, heads, 64, 16, pool.stride(0))
    launch(calls.rope_and_write("bf16", *sizes, *addresses, bias=bias.data_ptr(), fp8=True), order)

    expected = torch.stack([vectors, -vectors])
    scales = pool[..., 16 * 64 + 4 * slot :][..., :4].contiguous().view(torch.float32)[:, :, 0, 0]
    held = pool[:, :, 0, 64 * slot : 64 * (slot + 1)].contiguous().view(torch.float8_e4m3fn).float()
    assert held.isfinite().all() and not held[scales == 0].any()
    found = torch.stack([take(part[None], 0, slot, 64) for part in pool])
    broken = ~expected.isfinite().all(-1)
    assert broken.sum() == 2 * 3 and found[broken].isnan().all()
    assert torch.equal(found[~broken], coded(expected[~broken], "fp8"))
    assert (pool == UNTOUCHED).all(), "and nowhere else"
    assert_fences(pool, q, qkv, bias)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_changed_is_copied_bit_by_bit(order: int, dtype: str) -> None:
    qkv = numbers(3, 3, 64, dtype=TYPES[dtype])
    pool, q = untouched(2, 1, 16, 64, dtype=TYPES[dtype]), untouched(3, 64, dtype=TYPES[dtype])
    slots = int32(7, 6, 5)
    addresses = (qkv.data_ptr(), q.data_ptr(), pool[0].data_ptr(), pool[1].data_ptr(), slots.ctypes.data)
    launch(calls.rope_and_write(dtype, 3, 1, 1, 64, 16, pool.stride(0), *addresses), order)
    assert torch.equal(q, qkv[:, 0])
    assert torch.equal(pool[:, 0, 5:8].flip(1), qkv[:, 1:].transpose(0, 1))


def test_a_row_is_the_same_alone_and_in_a_batch(order: int) -> None:
    qkv, table = numbers(9, 4, 64, dtype=torch.bfloat16), numbers(POSITIONS, 64, seed=1)
    positions, nowhere = int32(*range(9)), int32(*[-1] * 9)
    weight, q = numbers(64, seed=2), untouched(9, 2, 64, dtype=torch.bfloat16)

    def run(first: int, count: int, out: torch.Tensor) -> None:
        addresses = (qkv[first].data_ptr(), out.data_ptr(), 0, 0, nowhere.ctypes.data)
        call = calls.rope_and_write(
            "bf16", count, 2, 1, 64, 16, 0, *addresses,
            angles=table.data_ptr(), rotary=64, positions=positions[first:].ctypes.data, q_norm=weight.data_ptr(),
        )  # fmt: skip
        launch(call, order)

    run(0, 9, q)
    for row in range(9):
        alone = untouched(1, 2, 64, dtype=torch.bfloat16)
        run(row, 1, alone)
        assert torch.equal(alone[0], q[row])

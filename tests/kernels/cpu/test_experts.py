"""A mixture of experts on the CPU: the bits of a row are those of its experts' linear layers, whatever else runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuOps, CpuPrepared
from kernels.ops import CacheShape, Groups, Routing
from tests.kernels.cpu_variants import library
from tests.kernels.sequences import chunk

pytestmark = pytest.mark.sanitized

HIDDEN, INNER, EXPERTS = 96, 64, 9
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
Pack = Callable[[CpuOps, Tensor, torch.dtype], Any]


def plain(ops: CpuOps, weight: Tensor, dtype: torch.dtype) -> Any:
    return ops.pack_linear([weight.to(dtype)], *weight.shape, None)


def biased(ops: CpuOps, weight: Tensor, dtype: torch.dtype) -> Any:
    return ops.pack_linear([weight.to(dtype)], *weight.shape, weight[:, 0].clone())


def int8(ops: CpuOps, weight: Tensor, dtype: torch.dtype) -> Any:
    return ops.pack_linear([weight.to(dtype)], *weight.shape, None, "int8")


def int4(ops: CpuOps, weight: Tensor, dtype: torch.dtype) -> Any:
    numbers = (weight * 20).round().clamp(-7, 7).add(8).to(torch.uint8)
    part = Groups(4, 32, numbers.contiguous(), torch.full((len(weight), weight.shape[1] // 32), 0.05))
    return ops.pack_groups([part], *weight.shape, None)


def float4(ops: CpuOps, weight: Tensor, dtype: torch.dtype) -> Any:
    numbers = (weight * 20).round().clamp(-7, 7).remainder(16).to(torch.uint8)
    part = Groups(4, 32, numbers, torch.full((len(weight), weight.shape[1] // 32), 0.125), table="float4")
    return ops.pack_groups([part], *weight.shape, weight[:, 1].clone())


def w8a8(ops: CpuOps, weight: Tensor, dtype: torch.dtype) -> Any:
    numbers = (weight * 127).round().clamp(-128, 127).add(128).to(torch.uint8)
    part = Groups(8, weight.shape[1], numbers, weight[:, :1].abs() / 64, rounds_rows=True)
    return ops.pack_groups([part], *weight.shape, weight[:, 1].clone())


def half_int4(ops: CpuOps, weight: Tensor, dtype: torch.dtype) -> Any:
    middle = len(weight) // 2
    return ops.stack([int4(ops, weight[:middle], dtype), plain(ops, weight[middle:], dtype)])


class Layer:
    """Random experts in one format."""

    def __init__(self, ops: CpuOps, dtype: torch.dtype, pack: Pack, top_k: int, seed: int = 1) -> None:
        random = torch.Generator().manual_seed(seed)
        self.gate_up, self.down = (
            [pack(ops, torch.randn(shape, generator=random) / shape[1] ** 0.5, dtype) for _ in range(EXPERTS)]
            for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        )
        self.ops, self.packed = ops, ops.pack_experts(self.gate_up, self.down)
        self.routing = Routing(top_k, True, "silu")

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.ops.experts(x, logits, self.packed, self.routing)


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    return torch.randn(rows, HIDDEN, generator=random).to(dtype), torch.randn(rows, EXPERTS, generator=random)


@TYPES
@pytest.mark.parametrize("pack", [plain, biased, int8, int4, float4, half_int4, w8a8])
def test_a_row_with_one_expert_has_the_bits_of_its_linear_layers(variant: str, pack: Pack, dtype: torch.dtype) -> None:
    ops = CpuOps(library(variant), 1)
    layer = Layer(ops, dtype, pack, top_k=1)
    x, logits = inputs(150, dtype)
    found = layer(x, logits)
    experts = logits.argmax(-1).tolist()
    for row in range(0, 150, 13):
        expert = experts[row]
        alone = ops.linear(x[row : row + 1].clone(), layer.gate_up[expert])
        assert torch.equal(found[row], ops.linear(ops.act_and_mul(alone, "silu"), layer.down[expert])[0]), row


@TYPES
@pytest.mark.parametrize("top_k", [2, EXPERTS])
def test_a_row_is_equal_to_the_bit_in_any_batch(variant: str, top_k: int, dtype: torch.dtype) -> None:
    x, logits = inputs(200, dtype)
    layers = [Layer(CpuOps(library(variant), threads), dtype, plain, top_k) for threads in (1, 2, 5)]
    whole = layers[0](x, logits)
    rng = np.random.default_rng(1)
    for layer in layers[1:]:
        assert torch.equal(layer(x, logits), whole)
    for rows in (1, 2, 3, 14, 29, 113):
        some = torch.from_numpy(rng.permutation(200)[:rows])
        assert torch.equal(layers[rows % 3](x[some].contiguous(), logits[some].contiguous()), whole[some]), rows


def test_a_recorded_pass_equals_its_operations_one_by_one(variant: str) -> None:
    """Before and after the rows that sample are selected, at sizes that fall and rise."""
    ops = CpuOps(library(variant), 2)
    first, second = (Layer(ops, torch.float32, plain, top_k, seed=top_k) for top_k in (3, 2))
    table = ops.pack_embedding([torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))], 50, HIDDEN)
    router = plain(ops, torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(3)), torch.float32)
    cache = ops.new_cache(CacheShape(4, 0, 1, 1, 16, 16, torch.float32))

    def forward(prepared: CpuPrepared) -> Tensor:
        rows = ops.embed(prepared, table)
        rows = first(rows, ops.logits(rows, router))
        rows = ops.select(rows, prepared)
        return second(rows, ops.logits(rows, router))

    compiled = ops.compile(forward, cache, 40, 12)
    rng = np.random.default_rng(4)
    for tokens, samples in ((40, 12), (1, 1), (7, 3), (33, 11), (2, 2)):
        sample_rows = np.sort(rng.choice(tokens, samples, replace=False)).tolist()
        prepared = ops.prepare(chunk(rng.integers(0, 50, tokens).tolist(), sample_rows), cache)
        expected = forward(prepared)
        assert expected.shape == (samples, HIDDEN)
        assert torch.equal(compiled(prepared), expected)


def test_experts_that_are_not_cut_alike_are_refused(best_variant: str) -> None:
    ops = CpuOps(library(best_variant), 1)
    a, b, down = torch.randn(2 * INNER, HIDDEN), torch.randn(2 * INNER - 2, HIDDEN), torch.randn(HIDDEN, INNER)
    downs = [plain(ops, down, torch.float32)] * 2
    with pytest.raises(ValueError, match="experts of 2 shapes"):
        ops.pack_experts([plain(ops, a, torch.float32), plain(ops, b, torch.float32)], downs)

"""Every operation against float64 numpy, through the interface alone, on every backend that this machine can run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import ops as kernel_ops
from kernels.cuda.backend import CudaOps
from kernels.ops import (
    ACTIVATIONS,
    STATUS_FINE,
    STATUS_NOT_FINITE,
    AnyOps,
    Attention,
    CacheShape,
    Groups,
    LowRankPairs,
    LowRankShape,
    Norm,
    Routing,
)
from services.worker.quantization.base import Part
from tests.kernels.sequences import (
    FORMULAS,
    HARD_VECTORS,
    Float64,
    Sequences,
    chunk,
    close,
    in_every_variant,
    in_its_types,
    in_types_of_kernels,
    near,
    new_cache,
    normed,
    random,
    wide,
    widths_of,
)
from tests.kernels.sequences import ops as ops  # the fixture
from tests.support.checkpoints.w8a8 import product

pytestmark = pytest.mark.sanitized

PLAIN = Attention(heads=4, scale=0.25)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN too: unwritten memory may hold anything."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def make_norm(kind: str, size: int) -> Norm:
    weight, bias = random((size,), 3, torch.float32), random((size,), 4, torch.float32)
    return Norm(weight, bias if kind == "layer" else None, 1e-5, kind == "layer")


@in_every_variant
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_are_their_formulas_and_residual_is_added_in_place(ops: AnyOps, kind: str, dtype: torch.dtype) -> None:
    for width in widths_of(ops, dtype, (1, 3, 16, 31, 64, 129, 520, 5000)):
        x, residual, norm = random((7, width), 1, dtype) + 3, random((7, width), 2, dtype), make_norm(kind, width)
        # A single number has no variance: what is left of it is divided by sqrt(eps), about 300 times larger.
        near(ops.norm(x.clone(), norm), normed(wide(x), norm), 5e-6)
        kept, added = residual.clone(), residual + x  # torch rounds once
        near(ops.add_norm(x.clone(), kept, norm), normed(wide(added), norm), 5e-6)
        ops.add(x, residual)
        assert torch.equal(kept, added) and torch.equal(residual, added)


@in_its_types
@pytest.mark.parametrize("size", [(24, 32), (130, 65), (1, 3)])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_linear_and_logits_are_products_however_the_weight_comes(
    ops: AnyOps, rows: int, size: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = random((rows, size[1]), 1, dtype), random(size, 2, dtype), random(size[:1], 3, torch.float32)
    exact = wide(x) @ wide(weight).T
    for parts in ([weight], [weight[first : first + 7] for first in range(0, size[0], 7)]):
        close(ops.linear(x, ops.pack_linear(iter(parts), *size, None)), exact, dtype)
        packed = ops.pack_linear(iter(parts), *size, bias)
        close(ops.linear(x, packed), exact + wide(bias), dtype)
        found = ops.logits(x, packed)
        assert found.dtype == torch.float32
        close(found, exact + wide(bias), dtype)


@pytest.mark.parametrize("likely", [0, 3])
def test_scores_are_log_softmax_rank_and_best(ops: AnyOps, likely: int) -> None:
    logits = 4 * random((9, 64), 3, torch.float32)
    logits[4] = 1.0  # all alike
    logits[7, 20] = torch.nan
    tokens = np.arange(9, dtype=np.int32) * 7
    scored = ops.score(logits.clone().to(ops.device), tokens, likely)
    fine, every = [row for row in range(9) if row != 7], wide(logits)
    every -= np.log(np.exp(every).sum(1, keepdims=True))
    np.testing.assert_allclose(scored.logprobs[fine], every[fine, tokens[fine]], atol=1e-5)
    np.testing.assert_allclose(scored.best[fine], -np.sort(-every[fine])[:, :likely], atol=1e-5)
    assert scored.ids.shape == scored.best.shape == (9, likely)
    assert scored.ranks[fine].tolist() == [int((logits[row] >= logits[row, tokens[row]]).sum()) for row in fine]
    assert scored.status.tolist() == [STATUS_FINE] * 7 + [STATUS_NOT_FINITE, STATUS_FINE]


def test_a_weight_of_too_few_rows_is_refused(ops: AnyOps) -> None:
    rows = torch.ones(3, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"3 rows.* 4|4 rows.* 3"):
        ops.pack_linear(iter([rows]), 4, 8, None)
    with pytest.raises(ValueError, match=r"3 rows.* 4|4 rows.* 3"):
        ops.pack_embedding(iter([rows]), 4, 8)


def test_groups_and_stacks_are_multiplied_or_refused(ops: AnyOps) -> None:
    numbers = torch.from_numpy(np.random.default_rng(4).integers(0, 16, (40, 64), np.uint8))
    part = Groups(4, 32, numbers, random((40, 2), 5, torch.float32))
    x, plain, bias = (random(shape, at, torch.float32) for at, shape in enumerate([(5, 64), (7, 64), (47,)]))
    if part.group_format not in ops.group_formats:
        with pytest.raises(ValueError, match=f"{ops.name} backend has no kernels"):
            ops.pack_groups(iter([part]), 40, 64, None)
        return
    dtype = torch.float32 if ops.name == "cpu" else torch.bfloat16
    x, plain = x.to(dtype), plain.to(dtype)
    grouped = ops.pack_groups(iter([part]), 40, 64, bias[:40])
    stack = ops.stack([grouped, ops.pack_linear(iter([plain]), 7, 64, bias[40:])])
    exact = wide(x) @ np.concatenate([wide(part.plain()), wide(plain)]).T + wide(bias)
    close(ops.linear(x, stack), exact, dtype)
    close(ops.linear(x, grouped), exact[:, :40], dtype)
    with pytest.raises(ValueError, match="no kernels for it"):
        ops.pack_linear(iter([plain]), 7, 64, None, "int4-32")


@in_its_types
def test_w8a8_is_its_formula_to_the_bit_or_refused(ops: AnyOps, dtype: torch.dtype) -> None:
    rng, size = np.random.default_rng(5), (40, 2104)
    numbers, scales = rng.integers(0, 256, size, np.uint8), rng.uniform(0.01, 2, (40, 1)).astype(np.float32)
    part = Groups(8, size[1], torch.from_numpy(numbers), torch.from_numpy(scales), rounds_rows=True)
    if part.group_format not in ops.group_formats:
        with pytest.raises(ValueError, match="has no kernels"):
            ops.pack_groups(iter([part]), *size, None)
        with pytest.raises(ValueError, match="has no kernels"):
            Part(ops, 40, iter([part]), dtype)  # unpacked, it would have other tokens
        return
    x = torch.cat([random((7, size[1]), 1, dtype), HARD_VECTORS.repeat(1, size[1] // 4).to(dtype)])
    plain, bias = random((7, size[1]), 2, dtype), random((47,), 3, torch.float32)
    parts = [replace(part, numbers=part.numbers[some], scales=part.scales[some]) for some in (slice(25), slice(25, 40))]
    for added in (bias[:40], None):
        packed = ops.pack_groups(iter(parts), *size, added)
        given = None if added is None else added.numpy()
        exact = product(x.float().numpy(), numbers.astype(np.int64) - 128, scales[:, 0], given)
        found = ops.linear(x, packed)
        assert found.dtype == dtype
        assert np.array_equal(wide(found), wide(torch.from_numpy(exact).to(dtype)), equal_nan=True)
    stack = ops.stack([packed, ops.pack_linear(iter([plain]), 7, size[1], bias[40:])])
    both = ops.linear(x[:7], stack)
    assert torch.equal(both[:, :40], found[:7])
    close(both[:, 40:], wide(x[:7]) @ wide(plain).T + wide(bias[40:]), dtype)


@in_every_variant
@pytest.mark.parametrize("hidden", [5, 64, 130])
def test_embeddings_are_looked_up_scaled_and_placed(ops: AnyOps, hidden: int, dtype: torch.dtype) -> None:
    for width in widths_of(ops, dtype, (hidden,)):
        weight, places = random((24, width), 1, dtype), random((9, width), 2, dtype)
        tokens = [3, 0, 3, 23]
        prepared = ops.prepare(chunk(tokens, [3], first=5), new_cache(ops, CacheShape(1, 0, 1, 1, 16, 64, dtype)))
        for table in (
            ops.pack_embedding(iter([weight[:10], weight[10:]]), 24, width),
            tied := ops.pack_tied(iter([weight[:10], weight[10:]]), 24, width, None),
        ):
            assert torch.equal(ops.embed(prepared, table), weight[tokens])
            near(ops.embed(prepared, table, 5.5), wide(weight[tokens]) * 5.5)
            near(ops.embed(prepared, table, position_embeddings=places), wide(weight[tokens]) + wide(places[5:]))
            near(ops.embed(prepared, table, 0.5, places), wide(weight[tokens]) * 0.5 + wide(places[5:]))
        x = random((5, width), 3, dtype)
        close(ops.logits(x, tied), wide(x) @ wide(weight).T, dtype)


@in_every_variant
def test_select_takes_the_rows_that_sample_in_their_order(ops: AnyOps, dtype: torch.dtype) -> None:
    cache, x = new_cache(ops, CacheShape(1, 0, 1, 1, 16, 64, dtype)), random((6, 24), 1, dtype)
    for rows in ([5], [0, 2, 3], [0, 1, 2, 3, 4, 5], []):
        assert torch.equal(ops.select(x, ops.prepare(chunk([1] * 6, rows), cache)), x[rows])


@in_every_variant
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_their_formulas(ops: AnyOps, activation: str, dtype: torch.dtype) -> None:
    for width in widths_of(ops, dtype, (1, 3, 16, 31, 64, 129, 520, 5000)):
        x = random((5, 2 * width), 1, dtype) * 3
        exact = FORMULAS[activation](wide(x))
        near(ops.activate(x.clone(), activation), exact)
        found, exact = ops.act_and_mul(x.clone(), activation), exact[:, :width] * wide(x)[:, width:]
        close(found, exact, dtype)
        if ops.name != "reference":  # which rounds twice
            near(found, exact, 3e-6)


def clamped_swiglu(gate: Float64, up: Float64) -> Float64:
    """As gpt-oss has it (transformers, models/gpt_oss/modeling_gpt_oss.py)."""
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


@in_its_types
def test_clamped_swiglu_is_its_formula(ops: AnyOps, dtype: torch.dtype) -> None:
    x = random((5, 80), 1, dtype) * 6
    if isinstance(ops, CudaOps):
        with pytest.raises(ValueError, match=f"clamped_swiglu: the {ops.name} backend has no kernel for it"):
            ops.act_and_mul(x, "clamped_swiglu")
        return
    close(ops.act_and_mul(x.clone(), "clamped_swiglu"), clamped_swiglu(wide(x[:, :40]), wide(x[:, 40:])), dtype)
    x[0, 0], x[1, 41], x[2, 2], x[3, 43] = math.nan, math.nan, math.inf, -math.inf
    found = ops.act_and_mul(x.clone(), "clamped_swiglu")
    assert found.isnan().nonzero().tolist() == [[0, 0], [1, 1]]
    assert found[2, 2].isfinite() and found[3, 3].isfinite()


def test_capped_logits_are_their_formula(ops: AnyOps) -> None:
    x = random((5, 37), 1, torch.float32) * 40
    x[0, :3] = torch.tensor([3e38, -3e38, 0.0])
    if isinstance(ops, CudaOps):
        with pytest.raises(ValueError, match=f"capped logits: the {ops.name} backend has no kernels for it"):
            ops.softcap(x, 30.0)
        return
    close(ops.softcap(x.clone(), 30.0), 30 * np.tanh(wide(x) / 30), torch.float32)


class Mixture:
    """Eight experts of hidden size 48 and intermediate size 40, packed, and what they give in float64."""

    def __init__(self, ops: AnyOps, dtype: torch.dtype, biases: bool = False) -> None:
        self.gate_up = [random((80, 48), 10 + expert, dtype) / 7 for expert in range(8)]
        self.down = [random((48, 40), 30 + expert, dtype) / 6 for expert in range(8)]
        self.gate_up_biases, self.down_biases = (
            [random((size,), seed + expert, dtype).float() * biases for expert in range(8)]
            for size, seed in ((80, 50), (48, 70))
        )
        self.packed = ops.pack_experts(
            [
                ops.pack_linear([w], 80, 48, b if biases else None)
                for w, b in zip(self.gate_up, self.gate_up_biases, strict=True)
            ],
            [
                ops.pack_linear([w], 48, 40, b if biases else None)
                for w, b in zip(self.down, self.down_biases, strict=True)
            ],
        )

    def expected(self, x: Tensor, logits: Tensor, routing: Routing) -> Float64:
        """The experts of a row are found by sorting pairs, the sum is in any order."""
        out = np.zeros(x.shape)
        for row, scores in enumerate(wide(logits)):
            shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            chosen = sorted(range(8), key=lambda expert: (-scores[expert], expert))[: routing.top_k]
            total = shares[chosen].sum() if routing.normalize else 1.0
            for expert in chosen:
                gate, up = np.split(wide(self.gate_up[expert]) @ wide(x[row]) + wide(self.gate_up_biases[expert]), 2)
                clamped = routing.activation == "clamped_swiglu"
                inner = clamped_swiglu(gate, up) if clamped else FORMULAS[routing.activation](gate) * up
                found = wide(self.down[expert]) @ inner + wide(self.down_biases[expert])
                out[row] += shares[expert] / total * found
        return out


def refuses_experts_of_gpt_oss(ops: AnyOps, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"experts with biases: the {ops.name} backend has no kernels for them"):
        Mixture(ops, dtype, biases=True)
    mixture, x = Mixture(ops, dtype), random((1, 48), 1, dtype)
    with pytest.raises(ValueError, match=f"clamped_swiglu: the {ops.name} backend has no kernel for it"):
        ops.experts(x, torch.zeros(1, 8), mixture.packed, Routing(1, True, "clamped_swiglu"))


@in_its_types
@pytest.mark.parametrize(
    "routing",
    [
        Routing(2, True, "silu"),
        Routing(1, False, "gelu"),
        Routing(8, False, "relu"),
        Routing(3, True, "clamped_swiglu"),
    ],
)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_experts_of_the_largest_logits_are_weighted_and_summed(
    ops: AnyOps, rows: int, routing: Routing, dtype: torch.dtype
) -> None:
    of_gpt_oss = routing.activation == "clamped_swiglu"
    if of_gpt_oss and isinstance(ops, CudaOps):
        refuses_experts_of_gpt_oss(ops, dtype)
        return
    mixture = Mixture(ops, dtype, biases=of_gpt_oss)
    x, logits = random((rows, 48), 1, dtype), random((rows, 8), 2, torch.float32) * 2
    exact = mixture.expected(x, logits, routing)
    close(ops.experts(x, logits, mixture.packed, routing), exact, dtype)
    shared, gate = random((rows, 48), 3, dtype), random((rows, 1), 4, torch.float32) * 3
    exact += wide(shared) / (1 + np.exp(-wide(gate)))
    close(ops.experts(x, logits, mixture.packed, routing, shared, gate), exact, dtype)


def most_exact_type(ops: AnyOps) -> torch.dtype:
    return torch.float16 if isinstance(ops, CudaOps) else torch.float32


def test_of_equal_logits_the_expert_with_the_lower_index_is_taken(ops: AnyOps) -> None:
    dtype = most_exact_type(ops)
    mixture, x = Mixture(ops, dtype), random((300, 48), 1, dtype)
    logits = torch.from_numpy(np.random.default_rng(3).integers(-1, 2, (300, 8)).astype(np.float32))
    logits[::2] *= -0.5  # of which zeros have a sign
    for routing in (Routing(1, True, "silu"), Routing(3, False, "silu")):
        exact = mixture.expected(x, logits, routing)
        close(ops.experts(x, logits, mixture.packed, routing), exact, dtype)


def test_a_row_without_finite_logits_spoils_no_other_row(ops: AnyOps) -> None:
    dtype = most_exact_type(ops)
    mixture, routing = Mixture(ops, dtype), Routing(2, True, "silu")
    x, logits = random((6, 48), 1, dtype), random((6, 8), 2, torch.float32)
    exact = mixture.expected(x, logits, routing)
    logits[1], logits[3, 4], logits[4, 2] = math.nan, math.nan, math.inf
    found = ops.experts(x, logits, mixture.packed, routing)
    assert [row.isnan().all().item() for row in found] == [False, True, False, True, True, False]
    close(found[[0, 2, 5]], exact[[0, 2, 5]], dtype)


class Adapters:
    """Adapters beside a weight of three parts, two of which read the same down matrix, and what they add in float64."""

    ranks: ClassVar = {1: (1, 1), 2: (8, 3), 3: (16, 16), 5: (64, 8), 6: (0, 7)}
    """Of both down matrices, by number; 0: this adapter leaves the first part as it is. There is no adapter 4."""

    def __init__(self, ops: AnyOps, dtype: torch.dtype, inputs: int, outputs: tuple[int, int, int]) -> None:
        self.ops, self.dtype, self.outputs = ops, dtype, outputs
        self.shape = LowRankShape(inputs, outputs, (0, 1, 1), dtype)
        self.pairs: LowRankPairs = ops.new_low_rank_pairs(self.shape)
        self.pairs.reserve(6, 64, 200)
        self.rows = ops.new_rows_by_adapter()
        self.rows.reserve(200, 6)
        self.added: dict[int, Float64] = {}  # [outputs, inputs]
        for number, ranks in self.ranks.items():
            self.set(number, ranks, number)

    def set(self, number: int, ranks: tuple[int, int], seed: int) -> None:
        inputs, reads = self.shape.inputs, self.shape.reads
        downs = {
            at: random((rank, inputs), 100 * seed + at, self.dtype) / math.sqrt(inputs)
            for at, rank in enumerate(ranks)
            if rank
        }
        ups = {
            part: random((outputs, ranks[reads[part]]), 100 * seed + 50 + part, torch.float32)
            for part, outputs in enumerate(self.outputs)
            if ranks[reads[part]]
        }
        self.pairs.set(number, downs, ups)
        ups = {part: up.to(self.ops.up_dtype(self.dtype)) for part, up in ups.items()}
        self.added[number] = np.concatenate(
            [
                wide(ups[part]) @ wide(downs[reads[part]]) if part in ups else np.zeros((outputs, inputs))
                for part, outputs in enumerate(self.outputs)
            ]
        )

    def run(self, x: Tensor, out: Tensor, numbers: list[int]) -> Tensor:
        found = out.clone()
        self.rows.set(np.array(numbers, np.int32))
        self.ops.add_low_rank(x, found, self.pairs, self.rows)
        return found

    def check(self, x: Tensor, out: Tensor, numbers: list[int]) -> None:
        found, exact = self.run(x, out, numbers), wide(out)
        for row, number in enumerate(numbers):
            if number in self.added:
                exact[row] += self.added[number] @ wide(x[row])
        close(found, exact, self.dtype)
        if self.ops.name != "reference":  # which rounds down(x) to 16 bits
            near(found, exact, 2e-5)
        plain = [row for row, number in enumerate(numbers) if number not in self.added]
        assert same_bits(found[plain], out[plain])


ADAPTED = ((16, (8, 16, 8)), (136, (40, 24, 8)), (1096, (1048, 8, 32)), (65, (31, 1, 7)))
"""Inputs of a weight and outputs of its parts."""


@in_its_types
@pytest.mark.parametrize(("inputs", "outputs"), ADAPTED)
def test_adapters_are_added_to_their_rows_alone(
    ops: AnyOps, inputs: int, outputs: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if isinstance(ops, CudaOps) and inputs % 8:
        with pytest.raises(ValueError, match=f"a row of {inputs} numbers"):
            Adapters(ops, dtype, inputs, outputs)
        return
    adapters, width = Adapters(ops, dtype, inputs, outputs), sum(outputs)
    generator = np.random.default_rng(5)
    for rows in (1, 3, 17, 90):
        x, out = random((rows, inputs), rows, dtype), random((rows, width), rows + 1, dtype)
        adapters.check(x, out, generator.integers(0, 7, rows).tolist())
        adapters.check(x, out, [3] * rows)
        adapters.check(x, out, [0] * rows)
    adapters.pairs.remove(3)
    del adapters.added[3]
    adapters.check(x, out, [3, 2, 0] * 30)
    adapters.set(3, (2, 40), 8)
    adapters.check(x, out, [3, 2, 0] * 30)


@in_types_of_kernels
def test_adapted_row_has_the_same_bits_in_any_batch(ops: AnyOps, dtype: torch.dtype) -> None:
    adapters = Adapters(ops, dtype, 1096, (1048, 8, 32))
    x, out = random((40, 1096), 1, dtype), random((40, 1088), 2, dtype)
    numbers = [3, 5, 0, 1, 3, 6, 2, 3] * 5
    together = adapters.run(x, out, numbers)
    for row in (0, 1, 5, 39):
        alone = adapters.run(x[row : row + 1], out[row : row + 1], [numbers[row]])
        assert same_bits(alone[0], together[row])
    order = np.random.default_rng(3).permutation(40)
    assert same_bits(adapters.run(x[order], out[order], [numbers[row] for row in order]), together[order])
    x[4] = torch.nan
    spoilt = adapters.run(x, out, numbers)
    assert spoilt[4].isnan().all()
    others = [row for row in range(40) if row != 4]
    assert same_bits(spoilt[others], together[others])


@in_its_types
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (64, 64), (24, 24), (80, 32), (16, 0), (10, 4)])
def test_q_and_k_are_normed_turned_and_written(
    ops: AnyOps, head_dim: int, rotary: int, with_norms: bool, dtype: torch.dtype
) -> None:
    cache = new_cache(ops, CacheShape(4, 0, 2, 2, 16, head_dim, dtype))
    angles = np.random.default_rng(0).uniform(0, 6, (40, rotary // 2))
    rope = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).float()
    norm = replace(make_norm("rms", head_dim), eps=1e-3)
    attention = Attention(
        heads=4,
        scale=1.0,
        rope=rope if rotary else None,
        q_norm=norm if with_norms else None,
        k_norm=replace(norm, weight=norm.weight.flip(0).contiguous()) if with_norms else None,
    )
    positions = np.array([29, 30, 31, 32, 33])
    batch = replace(
        chunk([0] * 5, [4], first=29),
        tables=np.array([[2, 3, 1]], np.int32),
        write_blocks=np.array([3, 3, 3, 1, 1], np.int32),
        write_offsets=(positions % 16).astype(np.int32),
    )
    qkv = random((5, 8 * head_dim), 7, dtype)
    q, k, v = np.split(wide(qkv).reshape(5, 8, head_dim), [4, 6], axis=1)
    if attention.q_norm and attention.k_norm:
        q, k = normed(q, attention.q_norm), normed(k, attention.k_norm)
    turns = np.exp(1j * angles[positions])[:, None, :]
    for heads in (q, k):
        turned = (heads[..., : rotary // 2] + 1j * heads[..., rotary // 2 : rotary]) * turns
        heads[..., :rotary] = np.concatenate([turned.real, turned.imag], -1)
    before = [cache.read_block(block) for block in range(4)]
    found = ops.rope_and_write(qkv.clone(), attention, ops.prepare(batch, cache), cache, 1)
    close(found.view(5, 4, head_dim), q, dtype)
    for block, offsets, rows in ((3, slice(13, 16), slice(0, 3)), (1, slice(0, 2), slice(3, 5))):
        for index, wanted in ((0, k), (1, v)):
            close(cache.read_block(block)[1, index, :, offsets], wanted[rows].transpose(1, 0, 2), dtype)
    after = [cache.read_block(block) for block in range(4)]
    for block, offsets in ((3, slice(13, 16)), (1, slice(0, 2))):
        after[block][1, :, :, offsets] = before[block][1, :, :, offsets]
    assert all(map(same_bits, before, after)), "rows and layers of no sequence"


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "window-of-one": {"window": 1},
    "wide-window": {"window": 40},
    "alibi": {"slopes": 2.0 ** -torch.arange(1, 9)},
    "sinks": {"sinks": torch.linspace(-3, 4, 8)},
    "sinks-window": {"sinks": torch.linspace(4, -3, 8), "window": 7},
    "softcap": {"softcap": 0.5},
    "softcap-window": {"softcap": 2.0, "window": 12},
    "sinks-alibi": {"sinks": torch.linspace(-3, 4, 8), "slopes": 2.0 ** -torch.arange(1, 9)},
    "alibi-window": {"slopes": 2.0 ** -torch.arange(1, 9), "window": 12},
    "both-ways": {"causal": False},
}


LAYOUTS = [(1, 16), (2, 4), (4, 32), (4, 1), (2, 48)]
"""Query heads that share one of KV, and block sizes."""


@in_its_types
@pytest.mark.parametrize(
    ("group", "block_size", "feature"),
    # Each feature with two layouts in turn; which of them a backend has does not depend on the feature.
    [(*LAYOUTS[(at + by) % 5], feature) for at, feature in enumerate(FEATURES) for by in (0, 2)],
)
def test_paged_attention_of_mixed_chunks_and_decodes_is_the_formula(
    ops: AnyOps, group: int, block_size: int, feature: str, dtype: torch.dtype
) -> None:
    contexts = [1, 5, 16, 17, 33, 64, 3]
    attention = Attention(heads=2 * group, scale=0.25, **FEATURES[feature])
    if attention.slopes is not None:
        attention = replace(attention, slopes=attention.slopes[: 2 * group])
    if attention.sinks is not None:
        attention = replace(attention, sinks=attention.sinks[: 2 * group].contiguous())
    world = Sequences(ops, dtype, contexts, block_size, attention)
    if isinstance(ops, CudaOps) and (attention.sinks is not None or attention.softcap or not attention.causal):
        with pytest.raises(ValueError, match="sinks, capped scores or attention both ways: the cuda kernels have none"):
            world.run([(0, 0, 1)])
        return
    cuts = zip(contexts, [0, 1, 1, 4, 1, 30, 3], strict=True)
    before = [(s, 0, n - cut) for s, (n, cut) in enumerate(cuts) if n > cut]
    world.run(before)
    now = [(s, end, contexts[s]) for s, _, end in before if end < contexts[s]] + [(6, 0, 3)]
    world.check(now[::-1])
    world.check([(s, 0, n) for s, n in enumerate(contexts)])  # whole prompts, and one of a single token
    world.check([(s, n - 1, n) for s, n in enumerate(contexts)])  # decodes alone


@in_its_types
def test_block_comes_back_from_host_bit_for_bit_and_elsewhere(ops: AnyOps, dtype: torch.dtype) -> None:
    world = Sequences(ops, dtype, [80], 16, PLAIN)
    world.run([(0, 0, 80)])
    blocks = world.tables[0, [4, 1]]
    before = [world.cache.read_block(int(block)) for block in blocks]
    unused = np.setdiff1d(np.arange(8), world.tables[0])[:2].astype(np.int32)
    world.cache.copy_out(blocks, np.array([1, 0], np.int32))
    world.cache.copy_in(np.array([1, 0], np.int32), unused)
    for block, kept in zip(unused, before, strict=True):
        assert kept.any() and same_bits(world.cache.read_block(int(block)), kept)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"'abacus'.*reference"):
        kernel_ops.create("abacus", torch.device("cpu"))

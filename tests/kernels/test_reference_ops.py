"""Every operation of a backend against float64 numpy, through the interface alone: other backends join this list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kernels.reference  # noqa: F401 - registers the backend
from kernels import ops as kernel_ops
from kernels.ops import AnyOps, Attention, Batch, Cache, CacheShape, Norm

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=kernel_ops.names())
def ops(request: pytest.FixtureRequest) -> Iterator[AnyOps]:
    yield kernel_ops.create(request.param, CPU)


def close(found: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    error = np.abs(found.double().numpy() - expected).max()
    assert error <= TOLERANCE[dtype] * max(1.0, np.abs(expected).max()), error


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_chunk(ops: AnyOps, cache: Cache, tokens: list[int], sample_rows: list[int]) -> Any:
    """A sequence of these tokens from position 0 on, in the blocks 0, 1, 2, ..."""
    count, size = len(tokens), cache.shape.block_size
    positions = np.arange(count, dtype=np.int32)
    batch = Batch(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        query_start=np.array([0, count], np.int32),
        context=np.array([count], np.int32),
        tables=np.arange(-(-count // size), dtype=np.int32)[None],
        write_blocks=positions // size,
        write_offsets=positions % size,
        sample_rows=np.array(sample_rows, np.int32),
    )
    return ops.prepare(batch, cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_the_formula_and_the_residual_is_added_in_place(ops: AnyOps, dtype: torch.dtype) -> None:
    x, residual = (random((5, 48), seed, dtype) for seed in (1, 2))
    weight = random((48,), 3, torch.float32)

    def norm(value: np.ndarray) -> np.ndarray:
        return value / np.sqrt((value**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()

    close(ops.norm(x, Norm(weight, None, 1e-5)), norm(x.double().numpy()), dtype)
    total = x.double().numpy() + residual.double().numpy()
    close(ops.add_norm(x, residual, Norm(weight, None, 1e-5)), norm(total), dtype)
    close(residual, total, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_embed_and_gated_are_their_formulas(ops: AnyOps, dtype: torch.dtype) -> None:
    x, weight, bias = random((5, 32), 1, dtype), random((24, 32), 2, dtype), random((24,), 3, torch.float32)
    exact = x.double().numpy() @ weight.double().numpy().T
    close(ops.linear(x, ops.pack_linear([weight], 24, 32, None)), exact, dtype)
    close(ops.linear(x, ops.pack_linear(weight.split(7), 24, 32, bias)), exact + bias.double().numpy(), dtype)
    gate, up = x.double().numpy()[:, :16], x.double().numpy()[:, 16:]
    close(ops.gated(x.clone(), "silu"), gate / (1 + np.exp(-gate)) * up, dtype)
    prepared = one_chunk(ops, ops.new_cache(CacheShape(1, 0, 1, 1, 16, 16, dtype)), [3, 0, 3], [2])
    for table in (ops.pack_embedding([weight], 24, 32), ops.pack_linear([weight], 24, 32, None)):
        assert torch.equal(ops.embed(prepared, table), weight[[3, 0, 3]])


class Sequences:
    """Random sequences in a paged cache with shuffled blocks, and the same K and V unpaged in float64."""

    def __init__(self, ops: AnyOps, dtype: torch.dtype, contexts: list[int], block_size: int, kv_heads: int) -> None:
        self.ops, self.dtype, self.block_size, self.kv_heads, self.head_dim = ops, dtype, block_size, kv_heads, 16
        used = [-(-n // block_size) for n in contexts]
        self.cache: Cache = ops.new_cache(CacheShape(sum(used) + 3, 2, 3, kv_heads, block_size, 16, dtype))
        order = np.random.default_rng(0).permutation(sum(used) + 3).astype(np.int32)
        self.tables = np.zeros((len(contexts), max(used)), np.int32)
        first = 0
        for s, count in enumerate(used):
            self.tables[s, :count] = order[first : first + count]
            first += count
        self.rope = torch.cat((torch.ones(max(contexts), 8), torch.zeros(max(contexts), 8)), dim=1)  # turns nothing
        self.keys = [random((n, kv_heads, 16), 10 + s, dtype) for s, n in enumerate(contexts)]
        self.values = [random((n, kv_heads, 16), 90 + s, dtype) for s, n in enumerate(contexts)]

    def batch(self, which: list[int], starts: list[int], ends: list[int]) -> Batch:
        lengths = np.array(ends) - starts
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(starts, ends, strict=True)])
        owner = np.repeat(which, lengths)
        query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return Batch(
            tokens=np.zeros(len(positions), np.int32),
            positions=positions,
            query_start=query_start,
            context=np.array(ends, np.int32),
            tables=self.tables[which],
            write_blocks=self.tables[owner, positions // self.block_size],
            write_offsets=positions % self.block_size,
            sample_rows=query_start[1:] - 1,
        )

    def run(self, queries: torch.Tensor, which: list[int], starts: list[int], ends: list[int]) -> torch.Tensor:
        """Writes K and V of these ranges and attends with the queries [N, heads, head_dim], layer 1 of 3."""
        prepared = self.ops.prepare(self.batch(which, starts, ends), self.cache)
        spans = list(zip(which, starts, ends, strict=True))
        keys = torch.cat([self.keys[s][a:b] for s, a, b in spans])
        values = torch.cat([self.values[s][a:b] for s, a, b in spans])
        heads = queries.shape[1]
        qkv = torch.cat([queries.flatten(1), keys.flatten(1), values.flatten(1)], dim=1)
        attention = Attention(heads, 0.25, self.rope)
        q = self.ops.rope_and_write(qkv, attention, prepared, self.cache, 1)
        return self.ops.attention(q, attention, prepared, self.cache, 1)

    def expected(self, queries: torch.Tensor, which: list[int], starts: list[int], ends: list[int]) -> np.ndarray:
        out, row = [], 0
        for s, a, b in zip(which, starts, ends, strict=True):
            for position in range(a, b):
                heads = []
                for head in range(queries.shape[1]):
                    kv = head // (queries.shape[1] // self.kv_heads)
                    k = self.keys[s][: position + 1, kv].double().numpy()
                    v = self.values[s][: position + 1, kv].double().numpy()
                    scores = k @ queries[row, head].double().numpy() * 0.25
                    weights = np.exp(scores - scores.max())
                    heads.append(weights @ v / weights.sum())
                out.append(np.concatenate(heads))
                row += 1
        return np.stack(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_paged_attention_of_mixed_chunks_and_decodes_is_the_formula(
    ops: AnyOps, dtype: torch.dtype, block_size: int, group: int
) -> None:
    contexts = [1, 5, 16, 17, 33, 64, 3]
    world = Sequences(ops, dtype, contexts, block_size, kv_heads=2)
    before = [
        (s, 0, n - cut) for s, (n, cut) in enumerate(zip(contexts, [0, 1, 1, 4, 1, 30, 3], strict=True)) if n > cut
    ]
    parts = [list(column) for column in zip(*before, strict=True)]
    world.run(random((sum(parts[2]), 2 * group, 16), 5, dtype), *parts)
    now = [(s, end, contexts[s]) for s, _, end in before if end < contexts[s]] + [(6, 0, 3)]
    columns = [list(column) for column in zip(*now[::-1], strict=True)]
    queries = random((sum(columns[2]) - sum(columns[1]), 2 * group, 16), 6, dtype)
    close(world.run(queries, *columns), world.expected(queries, *columns), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_an_earlier_owner_left_in_a_block_reach_nobody(ops: AnyOps, dtype: torch.dtype) -> None:
    world = Sequences(ops, dtype, [6, 16, 30], 16, kv_heads=2)
    world.keys[2][:] = torch.nan
    world.values[2][:] = torch.nan
    world.run(random((30, 4, 16), 1, dtype), [2], [0], [30])
    world.tables[0, 0], world.tables[1, 0] = world.tables[2, 0], world.tables[2, 1]  # their new owners
    world.run(random((20, 4, 16), 2, dtype), [0, 1], [0, 0], [5, 15])
    queries = random((2, 4, 16), 3, dtype)
    close(world.run(queries, [0, 1], [5, 15], [6, 16]), world.expected(queries, [0, 1], [5, 15], [6, 16]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_pads_a_shorter_sequence_in_a_batch_reaches_nobody(ops: AnyOps, dtype: torch.dtype) -> None:
    world = Sequences(ops, dtype, [17, 25, 8], 8, kv_heads=2)  # three and four blocks: one group
    world.keys[2][:] = torch.nan
    world.values[2][:] = torch.nan
    world.run(random((8, 4, 16), 1, dtype), [2], [0], [8])
    world.tables[0, 3:] = world.tables[2, 0]
    world.run(random((40, 4, 16), 2, dtype), [0, 1], [0, 0], [16, 24])
    queries = random((2, 4, 16), 3, dtype)
    close(world.run(queries, [0, 1], [16, 24], [17, 25]), world.expected(queries, [0, 1], [16, 24], [17, 25]), dtype)


def test_rope_turns_pairs_half_a_head_apart_by_the_angle_of_the_position(ops: AnyOps) -> None:
    cache = ops.new_cache(CacheShape(4, 0, 1, 1, 4, 8, torch.float32))
    angles = np.random.default_rng(0).uniform(0, 6, (16, 4))
    rope = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).float()
    positions = np.array([5, 6, 7], np.int32)
    batch = Batch(
        tokens=np.zeros(3, np.int32),
        positions=positions,
        query_start=np.array([0, 3], np.int32),
        context=np.array([8], np.int32),
        tables=np.array([[2, 3]], np.int32),
        write_blocks=np.array([3, 3, 3], np.int32),
        write_offsets=np.array([1, 2, 3], np.int32),
        sample_rows=np.array([2], np.int32),
    )
    qkv = random((3, 4 * 8), 7, torch.float32)
    exact = qkv.double().numpy().reshape(3, 4, 8).copy()
    turned = exact[:, :3, :4] + 1j * exact[:, :3, 4:]
    turned = turned * np.exp(1j * angles[positions])[:, None, :]
    q = ops.rope_and_write(qkv.clone(), Attention(2, 1.0, rope), ops.prepare(batch, cache), cache, 0)
    close(q.view(3, 2, 8), np.concatenate([turned.real, turned.imag], -1)[:, :2], torch.float32)
    block = cache.read_block(3)
    close(block[0, 0, 0, 1:], np.concatenate([turned.real, turned.imag], -1)[:, 2], torch.float32)
    close(block[0, 1, 0, 1:], exact[:, 3], torch.float32)
    assert not block[0, :, :, 0].any(), "a row that nobody wrote"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_comes_back_from_the_host_bit_for_bit_and_elsewhere(ops: AnyOps, dtype: torch.dtype) -> None:
    world = Sequences(ops, dtype, [40], 8, kv_heads=2)
    world.run(random((40, 4, 16), 1, dtype), [0], [0], [40])
    blocks = world.tables[0, [4, 1]]
    before = [world.cache.read_block(int(block)) for block in blocks]
    unused = np.setdiff1d(np.arange(8), world.tables[0])[:2].astype(np.int32)
    world.cache.copy_out(blocks, np.array([1, 0], np.int32))
    world.cache.copy_in(np.array([1, 0], np.int32), unused)
    for block, kept in zip(unused, before, strict=True):
        assert kept.any() and torch.equal(world.cache.read_block(int(block)), kept)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"'abacus'.*reference"):
        kernel_ops.create("abacus", CPU)

"""Paged attention over the CPU's pools of both kinds: float64 oracles, NaN in what is stale, bits that stay."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.backend import CpuOps
from kernels.cpu.commands import CopyArgs
from kernels.cpu.program import Immediate, address
from kernels.ops import Attention
from tests.kernels.cpu_variants import library
from tests.kernels.sequences import (
    HARD_VECTORS,
    Chunk,
    Sequences,
    attended,
    coded,
    e4m3_neighbours,
    rounded,
    wide,
)

pytestmark = pytest.mark.sanitized

F32, BF16 = torch.float32, torch.bfloat16
CONTEXTS = [1, 17, 200, 64, 130, 33, 400, 15, 47]
in_its_pools = pytest.mark.parametrize(
    ("dtype", "kv_dtype"), list(product((F32, BF16), ("auto", "int8", "fp8"))), ids=str
)


@pytest.fixture
def ops(variant: str) -> CpuOps:
    return CpuOps(library(variant), 1)


def written(
    ops: CpuOps,
    contexts: list[int],
    dtype: torch.dtype = F32,
    kv_dtype: str = "auto",
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    spread: float = 1.0,
    alibi: bool = False,
    **fields: Any,
) -> Sequences:
    """Sequences with all their K and V written. heads: of queries and of KV."""
    slopes = 2.0 ** -torch.arange(1.0, heads[0] + 1) if alibi else None
    attention = Attention(heads[0], head_dim**-0.5, slopes=slopes, **fields)
    made = Sequences(ops, dtype, contexts, block_size, attention, head_dim, heads[1], kv_dtype, spread)
    made.write()
    return made


def mixed(contexts: list[int], seed: int) -> list[Chunk]:
    """A decode row, a whole prompt or a chunk at the end of each sequence."""
    rng = np.random.default_rng(seed)
    counts = [[1, context, int(rng.integers(1, context + 1))][s % 3] for s, context in enumerate(contexts)]
    return [(s, context - count, context) for s, (context, count) in enumerate(zip(contexts, counts, strict=True))]


@in_its_pools
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (20, 64), (128, 32), (72, 48), (1, 256)])
def test_every_variant_is_the_formula(
    ops: CpuOps, head_dim: int, block_size: int, dtype: torch.dtype, kv_dtype: str
) -> None:
    sizes: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": head_dim, "block_size": block_size}
    written(ops, CONTEXTS, heads=(6, 2), **sizes).check(mixed(CONTEXTS, 1))
    written(ops, CONTEXTS, heads=(7, 1), window=40, alibi=True, **sizes).check(mixed(CONTEXTS, 1))


@in_its_pools
@pytest.mark.parametrize("window", [0, 40])
def test_sinks_and_capped_scores_are_the_formula(ops: CpuOps, window: int, dtype: torch.dtype, kv_dtype: str) -> None:
    """Sinks far below and far above every score too; the latter leave hardly anything of the values."""
    sinks = torch.tensor([0.5, -30, 4, 2, 60, -1])
    for seed, (cap, given) in enumerate([(0.0, sinks), (3.0, None), (5.0, sinks)]):
        world = written(
            ops, CONTEXTS, dtype, kv_dtype, heads=(6, 2), window=window, spread=3.0, softcap=cap, sinks=given
        )
        world.check(mixed(CONTEXTS, seed))


@in_its_pools
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (20, 48)])
def test_attention_both_ways_is_the_formula(
    ops: CpuOps, head_dim: int, block_size: int, dtype: torch.dtype, kv_dtype: str
) -> None:
    contexts = [*CONTEXTS, 600]
    world = written(
        ops, contexts, dtype, kv_dtype, heads=(6, 2), head_dim=head_dim, block_size=block_size, causal=False
    )
    whole = [(s, 0, context) for s, context in enumerate(contexts)]
    world.check(whole)
    alone = torch.cat([world.run([chunk]) for chunk in whole])
    world.ops = CpuOps(ops.library, 3)
    assert torch.equal(world.run(whole), alone)


@in_its_pools
@pytest.mark.parametrize(("window", "threads"), [(0, 1), (700, 2), (0, 5)])
def test_a_long_sequence_among_short_ones(
    best_variant: str, window: int, threads: int, dtype: torch.dtype, kv_dtype: str
) -> None:
    ops = CpuOps(library(best_variant), threads)
    world = written(ops, [3000, 20, 513, 1024], dtype, kv_dtype, window=window, alibi=True)
    world.check([(0, 2999, 3000), (1, 0, 20), (2, 512, 513), (3, 1000, 1024)])
    world.check([(0, 2900, 3000)])
    world.check([(0, 2999, 3000)])


def test_huge_scores_and_far_ones_stay_finite(ops: CpuOps) -> None:
    world = written(ops, [300], spread=200.0)
    found = world.run([(0, 0, 300)])
    expected = attended(*(wide(x[0]) for x in (world.queries, world.keys, world.values)), scale=0.125)
    assert found.isfinite().all() and np.abs(wide(found) - expected.reshape(300, -1)).max() < 1e-3


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"dtype": BF16},
        {"window": 90},
        {"window": 150, "dtype": BF16, "head_dim": 80},
        {"alibi": True, "dtype": BF16},
        {"alibi": True, "window": 600, "heads": (6, 1), "head_dim": 80},
        {"heads": (14, 2), "head_dim": 16, "block_size": 64, "dtype": BF16, "window": 33},
        {"kv_dtype": "int8"},
        {"kv_dtype": "int8", "dtype": BF16, "window": 11, "sinks": torch.tensor([0.5, -30, 4, 60])},
        {"kv_dtype": "int8", "dtype": BF16, "head_dim": 80, "block_size": 32, "window": 150, "alibi": True},
        {"kv_dtype": "fp8"},
        {"kv_dtype": "fp8", "dtype": BF16, "head_dim": 80, "block_size": 32, "window": 150, "alibi": True},
    ],
    ids=str,
)
def test_a_row_is_the_same_bits_however_it_is_computed(ops: CpuOps, setting: dict[str, Any]) -> None:
    contexts = [1100, 300, 64, 65]
    world = written(ops, contexts, **setting)
    whole = world.run([(s, 0, context) for s, context in enumerate(contexts)]).split(contexts)
    rng = np.random.default_rng(1)

    def same(chunks: list[Chunk]) -> None:
        assert torch.equal(world.run(chunks), torch.cat([whole[s][first:end] for s, first, end in chunks])), chunks

    for position in (0, 15, 16, 63, 64, 200, 511, 512, 600, 1024, 1099):
        same([(0, position, position + 1)])
    same([(0, position, position + 1) for position in range(0, 1100, 7)])
    for threads in (2, 5):
        cuts = [0, *sorted(rng.choice(np.arange(1, 1100), 6, replace=False).tolist()), 1100]
        world.place(int(rng.integers(1000)))
        world.write()
        world.ops = CpuOps(ops.library, threads)
        same([(0, a, b) for a, b in pairwise(cuts)])
        same([(1, 299, 300), (0, 1090, 1100), (2, 0, 64), (3, 33, 65)])
        same([(0, 1099, 1100)])


@in_its_pools
def test_row_is_unchanged_when_later_rows_are_nan(ops: CpuOps, dtype: torch.dtype, kv_dtype: str) -> None:
    world = written(ops, [100], dtype, kv_dtype)
    clean = world.run([(0, 0, 100)])
    world.keys[0][70] = world.values[0][70] = torch.nan
    found = world.run([(0, 0, 100)])
    assert torch.equal(found[:70], clean[:70]) and found[70:].isnan().all()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [0, 90])
def test_attention_over_8_bits_is_that_over_the_decoded_numbers(
    ops: CpuOps, window: int, dtype: torch.dtype, kv_dtype: str
) -> None:
    sizes: dict[str, Any] = {"head_dim": 72, "block_size": 32, "window": window}
    held, plain = (written(ops, CONTEXTS, dtype, one, **sizes) for one in (kv_dtype, "auto"))
    plain.keys, plain.values = ([rounded(x, kv_dtype) for x in kind] for kind in (plain.keys, plain.values))
    plain.write()
    chunks = mixed(CONTEXTS, 2)
    assert torch.equal(held.run(chunks), plain.run(chunks))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("head_dim", [4, 17, 64])
def test_block_of_8_bits_holds_what_the_formula_rounds(ops: CpuOps, head_dim: int, kv_dtype: str) -> None:
    world = written(ops, [len(HARD_VECTORS)], kv_dtype=kv_dtype, head_dim=head_dim)
    for kind in (world.keys, world.values):
        kind[0][:] = 0
        kind[0][:, :, :4] = HARD_VECTORS[:, None]
    world.write()
    found = world.cache.read_block(int(world.tables[0, 0]))[1][:, :, : len(HARD_VECTORS)]
    plain = torch.stack([world.keys[0], world.values[0]]).transpose(1, 2)
    broken = ~plain.isfinite().all(-1)
    assert broken.sum() == 3 * 2 * 2 and found[broken].isnan().all()
    assert torch.equal(found[~broken], coded(plain[~broken], kv_dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_over_one_token_reads_all_codes_of_fp8(ops: CpuOps, dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0).view(8, 32)
    world = written(ops, [1] * 8, dtype, "fp8", head_dim=33)
    for place, v in enumerate(world.values):
        v[..., :32], v[..., 32] = numbers[place], 448  # the scale is 1
    world.write()
    found = world.run([(sequence, 0, 1) for sequence in range(8)]).float().view(8, 4, 33)[..., :32]
    assert torch.equal(found, numbers[:, None].expand(8, 4, 32))


def test_fp8_codes_are_the_nearest_numbers_of_e4m3(ops: CpuOps) -> None:
    world = written(ops, [32], kv_dtype="fp8", head_dim=33)
    numbers = e4m3_neighbours(1024).view(32, 32)
    for kind in (world.keys, world.values):
        kind[0][:, :, :32], kind[0][:, :, 32] = numbers[:, None], 448  # the scale is 1
    world.write()
    blocks = [world.cache.read_block(int(block))[1] for block in world.tables[0, :2]]
    found = torch.cat(blocks, dim=2)[..., :32]
    assert torch.equal(found, numbers.to(torch.float8_e4m3fn).float().expand(2, 2, 32, 32))


@pytest.mark.parametrize(("size", "threads"), [(64, 2), (4096, 5), (300_000, 1), (300_000, 5)])
def test_blocks_are_copied_pair_by_pair(best_variant: str, size: int, threads: int) -> None:
    rng = np.random.default_rng(size)
    source, target = rng.integers(0, 256, (6, size), np.uint8), np.zeros((5, size), np.uint8)
    from_, to = np.array([5, 0, 3], np.int32), np.array([1, 4, 0], np.int32)
    args = CopyArgs(source.ctypes.data, target.ctypes.data, address(from_), address(to), size)
    Immediate(library(best_variant), threads).now(3, args)
    expected = np.zeros_like(target)
    expected[to] = source[from_]
    assert np.array_equal(target, expected)

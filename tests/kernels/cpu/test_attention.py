"""Paged attention, rope and block copies of the CPU library: float64 oracles, NaN in what is stale, bits that stay."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cpu.commands import BFLOAT16 as BF16
from kernels.cpu.commands import FLOAT32 as F32
from kernels.cpu.commands import AttentionArgs, CopyArgs, Pool, Step, command
from tests.kernels import cpu_variants

Array = npt.NDArray[Any]


def address(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data


def to_bf16(x: Array) -> Array:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def encode(x: Array, dtype: int) -> Array:
    return np.ascontiguousarray(x, np.float32) if dtype == F32 else to_bf16(x)


def decode(x: Array) -> Array:
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def rounded(x: Array) -> Array:
    """The numbers [..., head_dim] that codes and scales of 8 bits stand for, in the type of x."""
    numbers = decode(x).astype(np.float32)
    scale = np.abs(numbers).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(numbers / np.where(scale > 0, scale, np.float32(1)))
    return encode(codes * scale, BF16 if x.dtype == np.uint16 else F32)


def empty(shape: tuple[int, ...], dtype: int) -> Array:
    return np.full(shape, np.nan, np.float32) if dtype == F32 else np.full(shape, 0x7FC0, np.uint16)


class Library:
    """The compiled kernels, one command at a time."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.orcinus_block_bytes.restype = ctypes.c_int64

    def run(self, args: ctypes.Structure, rows: int, step: Step, threads: int) -> None:
        made = command(rows, args)
        self.c.orcinus_run(ctypes.byref(made), ctypes.c_int64(1), ctypes.byref(step), ctypes.c_int32(threads), None)

    def move_block(self, verb: str, pool: Pool, block: int, plain: Array) -> None:
        function = getattr(self.c, f"orcinus_{verb}_block")
        function(ctypes.byref(pool), ctypes.c_int64(block), ctypes.c_void_p(plain.ctypes.data))


@pytest.fixture
def library(variant: str) -> Library:
    return Library(cpu_variants.library(variant).path)


@pytest.fixture
def best(best_variant: str) -> Library:
    return Library(cpu_variants.library(best_variant).path)


@dataclass
class World:
    """Sequences with random K and V in a pool with NaN at every other place."""

    library: Library
    contexts: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: int = F32
    layers: int = 2
    layer: int = 1
    window: int = 0
    alibi: bool = False
    seed: int = 0
    spread: float = 1.0
    int8: bool = False
    softcap: float = 0.0
    sinks: Array | None = None
    causal: bool = True
    k: list[Array] = field(default_factory=list)
    v: list[Array] = field(default_factory=list)
    q: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for context in self.contexts:
            shape = (context, self.kv_heads, self.head_dim)
            self.k.append(encode(rng.standard_normal(shape), self.dtype))
            self.v.append(encode(rng.standard_normal(shape), self.dtype))
            shape = (context, self.heads, self.head_dim)
            self.q.append(encode(self.spread * rng.standard_normal(shape), self.dtype))
        self.scale = self.head_dim**-0.5
        self.slopes = (2.0 ** -np.arange(1, self.heads + 1)).astype(np.float32) if self.alibi else None
        self.place(self.seed)

    def place(self, seed: int) -> None:
        """Puts the KV into blocks drawn at random; the pool around them and the tables behind them are poison."""
        rng = np.random.default_rng(seed)
        c, size = self.library.c, self.block_size
        block_bytes = c.orcinus_block_bytes(self.layers, self.kv_heads, size, self.head_dim, self.dtype, self.int8)
        needed = [-(-context // size) for context in self.contexts]
        blocks = sum(needed) + 2
        word, poison = (np.uint16, 0x7FC0) if self.dtype == BF16 and not self.int8 else (np.uint32, 0x7FC00000)
        raw = np.full(blocks * block_bytes + 64, 0, np.uint8)
        start = -raw.ctypes.data % 64
        self.memory = raw[start : start + blocks * block_bytes].reshape(blocks, block_bytes)
        self.memory.view(word)[:] = poison
        stride = c.orcinus_head_stride(self.head_dim)
        self.pool = Pool(
            self.memory.ctypes.data,
            block_bytes,
            self.layers,
            self.kv_heads,
            size,
            self.head_dim,
            stride,
            self.dtype,
            self.int8,
        )
        order = rng.permutation(blocks).astype(np.int32)
        self.tables = np.full((len(self.contexts), max(needed) + 1), 2**30, np.int32)
        taken = 0
        for s, count in enumerate(needed):
            self.tables[s, :count] = order[taken : taken + count]
            taken += count
            for b in range(count):
                plain = empty((self.layers, 2, self.kv_heads, size, self.head_dim), self.dtype)
                k, v = (x[s][b * size : (b + 1) * size].transpose(1, 0, 2) for x in (self.k, self.v))
                plain[self.layer, 0, :, : k.shape[1]], plain[self.layer, 1, :, : v.shape[1]] = k, v
                self.library.move_block("write", self.pool, int(self.tables[s, b]), plain)

    def read_block(self, block: int) -> Array:
        out = empty((self.layers, 2, self.kv_heads, self.block_size, self.head_dim), self.dtype)
        self.library.move_block("read", self.pool, block, out)
        return out

    def attend(self, chunks: list[tuple[int, int, int]], threads: int = 2) -> list[Array]:
        """Of each (sequence, first position, end): the rows' outputs [count, heads, head_dim]."""
        counts = [end - first for _, first, end in chunks]
        q = np.concatenate([self.q[s][first:end] for s, first, end in chunks])
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        context = np.array([end for _, _, end in chunks], np.int32)
        tables = np.full((len(chunks), self.tables.shape[1]), 2**30, np.int32)
        for row, (s, _, end) in enumerate(chunks):
            known = -(-end // self.block_size)
            tables[row, :known] = self.tables[s, :known]
        out = empty(q.shape, self.dtype)
        step = Step(len(q), 0, len(chunks), tables.shape[1], None, None, address(query_start), address(context))
        step.tables = address(tables)
        args = AttentionArgs(address(q), address(out), address(self.slopes), address(self.sinks))
        args.pool = ctypes.pointer(self.pool)
        args.heads, args.layer, args.dtype = self.heads, self.layer, self.dtype
        args.window, args.scale = self.window, self.scale
        args.softcap, args.causal = self.softcap, self.causal
        self.library.run(args, len(q), step, threads)
        return np.split(out, np.cumsum(counts)[:-1])

    def expected(self, s: int, first: int, end: int) -> Array:
        q, k, v = (decode(rounded(x[s]) if self.int8 and x is not self.q else x[s]) for x in (self.q, self.k, self.v))
        group = self.heads // self.kv_heads
        q, k, v = q[first:end].swapaxes(0, 1), *(np.repeat(x[:end], group, axis=1).swapaxes(0, 1) for x in (k, v))
        scores = q @ k.swapaxes(1, 2) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        distance = np.arange(end)[None, :] - np.arange(first, end)[:, None]
        if self.slopes is not None:
            scores = scores + self.slopes.astype(np.float64)[:, None, None] * distance
        hidden = (distance > 0) & self.causal
        if self.window:
            hidden |= distance <= -self.window
        scores = np.where(hidden, -np.inf, scores)
        most = scores.max(-1, keepdims=True)
        total = np.exp(scores - most).sum(-1, keepdims=True)
        if self.sinks is not None:
            total += np.exp(self.sinks[:, None, None] - most)
        out: Array = (np.exp(scores - most) / total) @ v
        return out.swapaxes(0, 1)

    def check(self, chunks: list[tuple[int, int, int]], threads: int = 2) -> None:
        for found, chunk in zip(self.attend(chunks, threads), chunks, strict=True):
            expected = self.expected(*chunk)
            close(decode(found), expected, self.dtype)


def close(found: Array, expected: Array, dtype: int) -> None:
    assert np.isfinite(found).all()
    error = np.abs(found - expected)
    if dtype == F32:
        assert error.max() <= 1e-5 * max(1.0, np.abs(expected).max()), error.max()
    else:
        # Half a unit of the last place, and float32's own error where a result is close to a border.
        assert (error <= np.abs(expected) * 2.0**-8 + 2e-5).all(), error.max()


def mixed(contexts: list[int], seed: int) -> list[tuple[int, int, int]]:
    """A decode row, a whole prompt or a chunk at the end of each sequence."""
    rng = np.random.default_rng(seed)
    chunks = []
    for s, context in enumerate(contexts):
        count = [1, context, int(rng.integers(1, context + 1))][s % 3]
        chunks.append((s, context - count, context))
    return chunks


in_its_pools = pytest.mark.parametrize(
    ("dtype", "int8"),
    [
        pytest.param(dtype, int8, id=f"{name}{'-int8' if int8 else ''}")
        for dtype, name in ((F32, "float32"), (BF16, "bfloat16"))
        for int8 in (False, True)
    ],
)

CONTEXTS = [1, 17, 200, 64, 130, 33, 600, 15, 47]


@in_its_pools
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (20, 64), (128, 32), (72, 48), (1, 256)])
def test_every_variant_is_the_formula(library: Library, head_dim: int, block_size: int, dtype: int, int8: bool) -> None:
    for window, alibi, heads, kv_heads in ((0, False, 6, 2), (40, True, 7, 1)):
        world = World(
            library,
            CONTEXTS,
            heads,
            kv_heads,
            head_dim,
            block_size,
            dtype,
            window=window,
            alibi=alibi,
            seed=1,
            int8=int8,
        )
        world.check(mixed(CONTEXTS, 1))


@in_its_pools
@pytest.mark.parametrize("window", [0, 40])
def test_sinks_and_capped_scores_are_the_formula(library: Library, window: int, dtype: int, int8: bool) -> None:
    """Sinks far below and far above every score too; the latter leave hardly anything of the values."""
    sinks = np.array([0.5, -30, 4, 2, 60, -1], np.float32)
    for seed, (cap, with_sinks) in enumerate([(0.0, True), (3.0, False), (5.0, True)]):
        world = World(
            library, CONTEXTS, 6, 2, 64, dtype=dtype, window=window, seed=seed, spread=3.0, int8=int8, softcap=cap,
            sinks=sinks if with_sinks else None,
        )  # fmt: skip
        world.check(mixed(CONTEXTS, seed))


@in_its_pools
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (20, 48)])
def test_attention_both_ways_is_the_formula(
    library: Library, head_dim: int, block_size: int, dtype: int, int8: bool
) -> None:
    contexts = [*CONTEXTS, 1100]
    world = World(library, contexts, 6, 2, head_dim, block_size, dtype, seed=2, int8=int8, causal=False)
    whole = [(s, 0, context) for s, context in enumerate(contexts)]
    world.check(whole)
    alone = [world.attend([chunk])[0] for chunk in whole]
    for threads in (1, 2, 5):
        assert all(np.array_equal(*both) for both in zip(world.attend(whole, threads), alone, strict=True))


@in_its_pools
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("window", [0, 700])
def test_a_long_sequence_among_short_ones(best: Library, window: int, threads: int, dtype: int, int8: bool) -> None:
    contexts = [3000, 20, 513, 1024]
    world = World(best, contexts, 4, 2, 64, dtype=dtype, window=window, alibi=True, seed=3, int8=int8)
    world.check([(0, 2999, 3000), (1, 0, 20), (2, 512, 513), (3, 1000, 1024)], threads)
    world.check([(0, 2900, 3000)], threads)
    world.check([(0, 2999, 3000)], threads)


def test_huge_scores_and_far_ones_stay_finite(library: Library) -> None:
    world = World(library, [300], spread=200.0, seed=5)
    for found in world.attend([(0, 0, 300)]):
        assert np.isfinite(found).all()
        assert np.abs(found - world.expected(0, 0, 300)).max() < 1e-3


SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": BF16},
    {"window": 90},
    {"window": 150, "dtype": BF16, "head_dim": 80},
    {"alibi": True, "dtype": BF16},
    {"alibi": True, "window": 600, "heads": 6, "kv_heads": 1, "head_dim": 80},
    {"heads": 14, "kv_heads": 2, "head_dim": 16, "block_size": 64, "dtype": BF16, "window": 33},
    {"int8": True},
    {"int8": True, "dtype": BF16, "head_dim": 80, "block_size": 32, "window": 150, "alibi": True},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_row_is_the_same_bits_however_it_is_computed(library: Library, setting: dict[str, Any]) -> None:
    contexts = [1500, 300, 64, 65]
    world = World(library, contexts, seed=9, **setting)
    whole = world.attend([(s, 0, context) for s, context in enumerate(contexts)], threads=1)
    rng = np.random.default_rng(1)

    def same(chunks: list[tuple[int, int, int]], threads: int) -> None:
        for (s, first, end), found in zip(chunks, world.attend(chunks, threads), strict=True):
            assert np.array_equal(found.view(np.uint8), whole[s][first:end].view(np.uint8)), (s, first, end)

    for position in (0, 15, 16, 63, 64, 200, 511, 512, 600, 1024, 1499):
        same([(0, position, position + 1)], threads=2)
    same([(0, position, position + 1) for position in range(0, 1500, 7)], threads=2)
    for threads in (1, 2, 5):
        cuts = [0, *sorted(rng.choice(np.arange(1, 1500), 6, replace=False)), 1500]
        world.place(int(rng.integers(1000)))
        same([(0, int(a), int(b)) for a, b in pairwise(cuts)], threads)
        same([(1, 299, 300), (0, 1490, 1500), (2, 0, 64), (3, 33, 65)], threads)
        same([(0, 1499, 1500)], threads)


@in_its_pools
def test_row_is_unchanged_when_later_rows_are_nan(library: Library, dtype: int, int8: bool) -> None:
    world = World(library, [100], dtype=dtype, seed=2, int8=int8)
    clean = world.attend([(0, 0, 100)])[0]
    poison = np.float32(np.nan) if dtype == F32 else np.uint16(0x7FC0)
    world.k[0][70], world.v[0][70] = poison, poison
    world.place(4)
    found = world.attend([(0, 0, 100)])[0]
    assert np.array_equal(found[:70].view(np.uint8), clean[:70].view(np.uint8))
    assert np.isnan(decode(found[70:])).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [0, 90])
def test_attention_over_int8_has_the_bits_of_the_numbers_it_stands_for(
    library: Library, window: int, dtype: int
) -> None:
    chunks = mixed(CONTEXTS, 2)
    held = World(library, CONTEXTS, head_dim=72, block_size=32, dtype=dtype, window=window, seed=8, int8=True)
    plain = World(library, CONTEXTS, head_dim=72, block_size=32, dtype=dtype, window=window, seed=8)
    plain.k, plain.v = [[rounded(x) for x in kind] for kind in (plain.k, plain.v)]
    plain.place(1)
    for found, expected in zip(held.attend(chunks), plain.attend(chunks), strict=True):
        assert np.array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (20, 48)])
def test_a_block_is_read_as_it_was_written(library: Library, head_dim: int, block_size: int, dtype: int) -> None:
    world = World(library, [1], head_dim=head_dim, block_size=block_size, dtype=dtype)
    rng = np.random.default_rng(0)
    shape = (world.layers, 2, world.kv_heads, block_size, head_dim)
    plain = encode(rng.standard_normal(shape), dtype)
    library.move_block("write", world.pool, 1, plain)
    assert np.array_equal(world.read_block(1), plain)


HARD_VECTORS = np.array(
    [
        [0, 0, 0, 0],
        [127, 0.5, 1.5, -2.5],  # ties
        [-127, 126.5, -0.5, 3.49],
        [1e-44, -1e-44, 0, 1e-45],  # the scale is 0
        [3e-43, -3e-43, 1e-43, 0],  # the scale is denormal, and a quotient above 127
        [3e38, -3e38, 1, 1e-30],
        [np.nan, 1, 2, 3],
        [-np.inf, 1, 2, 3],
        [1, np.inf, np.nan, 3],
        [-1, -2, -3, -4],
    ],
    np.float32,
)


@pytest.mark.parametrize("head_dim", [4, 17, 64])
def test_int8_block_holds_what_the_formula_rounds(library: Library, head_dim: int) -> None:
    world = World(library, [1], head_dim=head_dim, dtype=F32, int8=True)
    plain = np.random.default_rng(0).standard_normal((world.layers, 2, world.kv_heads, 16, head_dim), np.float32)
    plain[:, :, :, : len(HARD_VECTORS), :4] = HARD_VECTORS
    plain[:, :, :, : len(HARD_VECTORS), 4:] = 0
    library.move_block("write", world.pool, 1, plain)
    found = world.read_block(1)
    broken = ~np.isfinite(plain).all(-1)
    assert broken.sum() == 3 * world.layers * 2 * world.kv_heads
    assert np.isnan(found[broken]).all()
    scale = np.abs(plain[~broken]).max(-1, keepdims=True) / np.float32(127)
    codes = np.clip(np.rint(plain[~broken] / np.where(scale > 0, scale, np.float32(1))), -127, 127)
    assert np.array_equal(found[~broken], np.where(scale > 0, codes * scale, 0))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [64, 4096, 300_000])
def test_blocks_are_copied_pair_by_pair(best: Library, size: int, threads: int) -> None:
    rng = np.random.default_rng(size)
    source, target = rng.integers(0, 256, (6, size), np.uint8), np.zeros((5, size), np.uint8)
    from_, to = np.array([5, 0, 3], np.int32), np.array([1, 4, 0], np.int32)
    args = CopyArgs(address(source), address(target), address(from_), address(to), size)
    best.run(args, 3, Step(), threads)
    expected = np.zeros_like(target)
    expected[to] = source[from_]
    assert np.array_equal(target, expected)

"""Attention of chunks over paged K and V, emulated in three orders of threads, against float64.

Whatever no row sees is NaN: blocks of no sequence, places behind a sequence's end, positions before a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.calls import BF16, F16, FP8_HEAD_DIMS, HEAD_DIMS, ITEM, SLAB, WGMMA_HEAD_DIMS
from tests.kernels.cuda.programs import (
    HAS_WGMMA,
    ORDERS,
    TYPES,
    UNTOUCHED,
    assert_fences,
    fenced,
    int32,
    launch,
    numbers,
    part_of,
    put,
    untouched,
)
from tests.kernels.sequences import ROUNDING, attended, wide
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 2e-3}
"""Of the largest number expected, beside one rounding to the type that is stored."""
LAYERS, LAYER = 2, 1
SPARE_BLOCKS = 3
PROCESSORS = 3
"""Where wgmma is: each of its blocks goes through several pieces of work."""
KINDS: dict[str, dict[str, int]] = {"mma": {}, "fp8": {"fp8": True}} | (
    {"wgmma": {"head_dim": 128, "processors": PROCESSORS}} if HAS_WGMMA else {}
)
HEADS = [(head_dim, 0) for head_dim in HEAD_DIMS] + [(dim, PROCESSORS) for dim in WGMMA_HEAD_DIMS if HAS_WGMMA]


@dataclass(frozen=True, slots=True)
class Case:
    chunks: tuple[tuple[int, int], ...]  # of each sequence: positions cached before, rows
    group: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    alibi: bool = False
    layer_major: bool = False
    growth: float = 0.0  # of the scores, from one position to the next
    first_block: int = 0  # the number of the pool's first block, were there more before it
    processors: int = 0  # with wgmma
    fp8: bool = False

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.chunks)


class Problem:
    """A case with numbers; `items` is all its work, each tile in `splits` parts."""

    def __init__(self, case: Case, dtype: str, splits: int = 1) -> None:
        self.case, self.dtype, kind = case, dtype, TYPES[dtype]
        self.q = numbers(case.rows, case.heads, case.head_dim, dtype=kind, seed=1)
        contexts = [before + rows for before, rows in case.chunks]
        sizes = [(context, case.kv_heads, case.head_dim) for context in contexts]
        self.keys = [numbers(*size, dtype=kind, seed=10 + s) for s, size in enumerate(sizes)]
        self.values = [numbers(*size, dtype=kind, seed=50 + s) for s, size in enumerate(sizes)]
        if case.growth:
            self._let_scores_grow()
        self.slopes = fenced(2.0 ** -torch.linspace(0, 6, case.heads)) if case.alibi else None
        self.context = int32(*contexts)
        self.query_start = int32(*np.cumsum([0, *(rows for _, rows in case.chunks)]).tolist())
        self._fill_pool(contexts)
        self.items, self.starts, self.merged_rows = self._plan(splits)
        parts = self.starts[-1]
        self.partial_out = untouched(parts, case.heads, case.head_dim, dtype=torch.float32)
        self.partial_lse = untouched(parts, case.heads, dtype=torch.float32)
        self.out = untouched(case.rows, case.heads, case.head_dim, dtype=kind)

    def _let_scores_grow(self) -> None:
        """The last number of a head adds growth * position of the key to its scores."""
        self.q[..., -1] = self.case.head_dim**0.5
        for keys in self.keys:
            keys[..., -1] = (torch.arange(len(keys)) * self.case.growth)[:, None]

    def _fill_pool(self, contexts: Sequence[int]) -> None:
        case, size = self.case, self.case.block_size
        used = [-(-context // size) for context in contexts]
        order = np.random.default_rng(3).permutation(sum(used) + SPARE_BLOCKS)
        part = part_of(case.kv_heads, size, case.head_dim, TYPES[self.dtype], case.fp8)
        if case.layer_major:
            pool = fenced(part.expand(LAYERS, 2, len(order), *part.shape).clone())
            k, v, self.stride = pool[LAYER, 0], pool[LAYER, 1], pool.stride(2)
        else:
            pool = fenced(part.expand(len(order), LAYERS, 2, *part.shape).clone())
            k, v, self.stride = pool[:, LAYER, 0], pool[:, LAYER, 1], pool.stride(0)
        self.pool, self.pool_keys, self.pool_values = pool, k, v
        self.page_start = int32(*np.cumsum([0, *used[:-1]]).tolist())
        self.pages = int32(*(order + case.first_block).tolist())
        for s, (before, _) in enumerate(case.chunks):
            seen_from = max(0, before - case.window + 1) if case.window else 0
            seen = torch.arange(seen_from, contexts[s])
            pages, places = torch.from_numpy(order)[int(self.page_start[s]) + seen // size], seen % size
            for pool_part, kind in ((k, self.keys), (v, self.values)):
                kind[s][seen_from:] = put(pool_part, pages, places, kind[s][seen_from:], case.fp8)

    def _plan(self, splits: int) -> tuple[list[tuple[Any, ...]], list[int], list[int]]:
        """Items, and of all tokens: where the parts begin, the row of out. Slabs are cut without regard to tiles."""
        per_item = calls.tokens_per_item(self.case.head_dim, self.case.group)
        items: list[tuple[Any, ...]] = []
        for s, (_, rows) in enumerate(self.case.chunks):
            slabs = -(-int(self.context[s]) // SLAB)
            cuts = [slabs * i // splits for i in range(splits + 1)]
            for first in range(0, rows, per_item):
                partial = (int(self.query_start[s]) + first) * splits if splits > 1 else -1
                for i in range(splits):
                    items.append((s, first, cuts[i], cuts[i + 1], partial + i if splits > 1 else -1, splits, (0, 0)))
        return items, [row * splits for row in range(self.case.rows + 1)], list(range(self.case.rows))

    def run(self, order: int) -> None:
        case, items = self.case, int32(*np.array(self.items, ITEM).view(np.int32).tolist())
        before = case.first_block * self.stride * self.pool.element_size()
        call = calls.attention_prefill(
            self.dtype, len(self.items), case.heads, case.kv_heads, case.head_dim, case.block_size, self.stride,
            case.head_dim**-0.5, self.q.data_ptr(), self.out.data_ptr(), self.pool_keys.data_ptr() - before,
            self.pool_values.data_ptr() - before, items.ctypes.data, self.pages.ctypes.data,
            self.page_start.ctypes.data, self.context.ctypes.data, self.query_start.ctypes.data,
            self.partial_out.data_ptr(), self.partial_lse.data_ptr(),
            self.slopes.data_ptr() if self.slopes is not None else 0, case.window, case.processors,
            case.fp8,
        )  # fmt: skip
        launch(call, order)
        assert_fences(self.out, self.partial_out, self.partial_lse)

    def merge(self, order: int) -> None:
        starts, rows = int32(*self.starts), int32(*self.merged_rows)
        call = calls.attention_merge(
            self.dtype, self.case.rows, self.case.heads, self.case.head_dim, self.out.data_ptr(),
            self.partial_out.data_ptr(), self.partial_lse.data_ptr(), starts.ctypes.data, rows.ctypes.data,
        )  # fmt: skip
        launch(call, order)

    def expected(self) -> Any:
        """[rows, heads, head_dim] float64"""
        case, slopes = self.case, None if self.slopes is None else wide(self.slopes)
        queries = np.split(wide(self.q), self.query_start[1:-1])
        found = [
            attended(q, wide(k), wide(v), case.head_dim**-0.5, slopes, case.window)
            for q, k, v in zip(queries, self.keys, self.values, strict=True)
        ]
        return np.concatenate(found)

    def check(self, found: Tensor | None = None) -> None:
        expected, kind = self.expected(), TYPES[self.dtype]
        error = np.abs(wide(self.out if found is None else found) - expected)
        limit = TOLERANCE[kind] * np.abs(expected).max() + ROUNDING[kind] * np.abs(expected)
        assert (error <= limit).all(), f"{np.nanmax(error)}, largest {np.abs(expected).max()}"


def check(case: Case, dtype: str, order: int) -> None:
    problem = Problem(case, dtype)
    problem.run(order)
    problem.check()
    assert (problem.partial_out == UNTOUCHED).all() and (problem.partial_lse == UNTOUCHED).all()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a case has that one of the kernels takes."""
    return KINDS[request.param]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("head_dim", "processors"), HEADS)
def test_every_head_dim_and_type(head_dim: int, processors: int, dtype: str, order: int) -> None:
    check(Case(((0, 33), (70, 9)), group=3, head_dim=head_dim, processors=processors), dtype, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", FP8_HEAD_DIMS)
def test_every_head_dim_and_type_of_fp8(head_dim: int, dtype: str, order: int) -> None:
    check(Case(((0, 33), (70, 9)), group=3, head_dim=head_dim, fp8=True), dtype, order)


@pytest.mark.parametrize(("group", "order"), zip(range(1, 17), cycle(ORDERS)))
def test_every_group_of_query_heads(group: int, order: int, kind: dict[str, Any]) -> None:
    check(Case(((0, 21), (40, 30)), group=group, kv_heads=2, **kind), (BF16, F16)[group % 2], order)


@pytest.mark.parametrize("group", [71, 128])
def test_a_group_that_fills_a_tile_by_itself(group: int, kind: dict[str, Any]) -> None:
    check(Case(((0, 3), (40, 2)), group=group, **kind), F16, ORDERS[0])


def test_a_pool_of_more_numbers_than_32_bits_count(kind: dict[str, Any]) -> None:
    check(Case(((20, 5),), first_block=1 << 20, **kind), F16, ORDERS[0])


@pytest.mark.parametrize("order", ORDERS)
def test_borders_of_chunks_prefixes_and_tiles(order: int, kind: dict[str, Any]) -> None:
    chunks = ((0, 1), (1, 15), (15, 16), (16, 17), (47, 63), (64, 64), (3, 65), (100, 130), (0, 130), (129, 1))
    check(Case(chunks, group=2, **kind), F16, order)


@pytest.mark.parametrize("order", ORDERS)
def test_more_keys_than_a_ring_of_tiles_holds(order: int, kind: dict[str, Any]) -> None:
    check(Case(((700, 20), (300, 260)), group=1, **kind), BF16, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("block_size", "layer_major"), [(16, True), (32, False), (64, False), (64, True)])
def test_block_sizes_and_layouts(block_size: int, layer_major: bool, order: int, kind: dict[str, Any]) -> None:
    case = Case(((0, 70), (90, 40), (31, 2)), kv_heads=2, block_size=block_size, layer_major=layer_major, **kind)
    check(case, F16, order)


WINDOWS = ((1, 4), (5, 4), (16, 4), (33, 1), (64, 4), (101, 1), (1000, 4))
"""With their groups. At 101, the second warp's last row sees all keys of a piece but the first."""


@pytest.mark.parametrize(("window", "group", "order"), [(*case, order) for case, order in zip(WINDOWS, cycle(ORDERS))])
def test_a_window_hides_what_lies_before_it(window: int, group: int, order: int, kind: dict[str, Any]) -> None:
    check(Case(((150, 70), (0, 70), (200, 1)), group=group, window=window, **kind), F16, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window", [0, 20])
def test_alibi(window: int, order: int, kind: dict[str, Any]) -> None:
    check(Case(((90, 40), (0, 33)), group=3, kv_heads=2, window=window, alibi=True, **kind), F16, order)


@pytest.mark.parametrize("growth", [0.02, 0.3, -0.3, 3.0])
def test_scores_may_grow_and_fall_along_a_sequence(growth: float, kind: dict[str, Any]) -> None:
    check(Case(((200, 40),), growth=growth, **{"head_dim": 128, **kind}), F16, ORDERS[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("splits", "window"), [(2, 0), (5, 0), (7, 30)])
def test_parts_are_merged(splits: int, window: int, order: int, kind: dict[str, Any]) -> None:
    """Parts wholly behind a tile's last row or before its window are empty."""
    problem = Problem(Case(((0, 70), (110, 40), (60, 1)), kv_heads=2, window=window, **kind), F16, splits)
    problem.run(order)
    assert (problem.out == UNTOUCHED).all()
    lse = problem.partial_lse.unflatten(0, (-1, splits))
    assert (lse > -torch.inf).any(1).all() and (lse == -torch.inf).any()
    weights = (lse - lse.amax(1, keepdim=True)).exp2()
    parts = problem.partial_out.unflatten(0, (-1, splits))
    problem.check((parts * weights[..., None]).sum(1) / weights.sum(1)[..., None])
    problem.merge(order)
    problem.check()


@pytest.mark.parametrize("order", ORDERS)
def test_padding_items_write_nothing(order: int, kind: dict[str, Any]) -> None:
    problem = Problem(Case(((0, 5), (8, 3)), **kind), BF16)
    kept = problem.items[1:]
    problem.items = [(-1, *[1 << 30] * 5, (0, 0)), *kept, (-1, *[-1] * 5, (0, 0))]
    problem.run(order)
    assert (problem.out[:5] == UNTOUCHED).all() and (problem.out[5:] != UNTOUCHED).any(-1).all()


def test_a_tile_holds_whole_tokens() -> None:
    for head_dim in HEAD_DIMS:
        for group in range(1, 65):
            tokens = calls.tokens_per_item(head_dim, group)
            assert tokens >= 1 and tokens * group <= (64 if head_dim == 256 else 128) < (tokens + 1) * group
    with pytest.raises(ValueError, match="65 query heads share a KV head; prefill of heads of 256 takes 64 at most"):
        calls.tokens_per_item(256, 65)
    with pytest.raises(ValueError, match="heads of 72"):
        calls.tokens_per_item(72, 1)

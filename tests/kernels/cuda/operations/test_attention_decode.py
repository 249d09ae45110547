"""Decode attention and the merge of its parts, emulated in three orders of threads, against float64.

Whatever no row may see is NaN: positions before the window, places past the context, blocks of no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.calls import FP8_HEAD_DIMS, HEAD_DIMS, ITEM, SLAB
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
    put,
    untouched,
)
from tests.kernels.sequences import attended, near, wide
from tests.support.compiler import needs_compiler

in_every_order = pytest.mark.parametrize("order", ORDERS)
pytestmark = needs_compiler

LAYERS, LAYER = 2, 1
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 1e-3}
"""Of the largest result, besides the rounding of what is stored: weights are rounded before they meet V."""


@dataclass(frozen=True, slots=True)
class Case:
    head_dim: int
    kv_heads: int
    group: int
    lengths: tuple[int, ...] = (33, 1, 16, 100, 15, 17)
    block_size: int = 16
    window: int = 0
    alibi: bool = False
    layer_major: bool = False
    fp8: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


CASES = {
    **{f"heads of {d}, {g} share one": Case(d, 1, g) for d in HEAD_DIMS for g in (1, 2, 4, 7, 8, 16, 32)},
    "some KV heads": Case(64, 3, 3, (200, 64)),
    "blocks of 32": Case(96, 2, 5, block_size=32),
    "blocks of 64, layer by layer": Case(64, 2, 4, (129, 64, 63, 3), block_size=64, layer_major=True),
    "a window in one slab": Case(64, 2, 4, (5, 4, 3, 70, 81), window=4),
    "a window over several": Case(80, 2, 2, (20, 39, 40, 41, 200), window=40, block_size=32),
    "alibi": Case(64, 2, 16, (300, 1, 17), alibi=True),
    "alibi, window, two tiles, the second not full": Case(128, 1, 20, (100, 30), alibi=True, window=50),
    **{f"fp8, heads of {d}, {g} share one": Case(d, 1, g, fp8=True) for d in FP8_HEAD_DIMS for g in (1, 16)},
    "fp8, blocks of 64": Case(64, 3, 2, (200, 64, 31), block_size=64, fp8=True),
    "fp8, alibi, window, layer by layer": Case(
        128, 2, 20, (100, 30), block_size=32, alibi=True, window=50, layer_major=True, fp8=True
    ),
}
SPLIT_CASES = {
    "plain": Case(64, 2, 4, (150, 40, 16, 1)),
    "heads of 80": Case(80, 1, 7, (150, 17)),
    "heads of 256": Case(256, 1, 2, (130, 33)),
    "window": Case(128, 2, 1, (200, 60), window=70),
    "alibi": Case(96, 1, 20, (130, 50), alibi=True),
    "fp8": Case(128, 2, 4, (300, 40, 16, 1), fp8=True),
}
BORDERS = (0, 1, 1, 3, 99)
"""Of the parts of a sequence, in slabs: one is empty, the others often, and the last is larger than the sequence."""
PARTS = len(BORDERS) - 1


class Step:
    """The tensors of one iteration; `expected` [sequences, heads, head_dim]: what the sequences' rows should give."""

    def __init__(self, case: Case, dtype: str, seed: int = 0) -> None:
        self.case, self.dtype, self.seed = case, dtype, seed
        kind, generator, sequences = TYPES[dtype], np.random.default_rng(seed), len(case.lengths)
        held = [-(-length // case.block_size) for length in case.lengths]
        start, blocks = np.cumsum([0, *held]), sum(held) + 2
        pages = generator.permutation(blocks)[: sum(held)]
        part = part_of(case.kv_heads, case.block_size, case.head_dim, kind, case.fp8)
        shape = (LAYERS, 2, blocks) if case.layer_major else (blocks, LAYERS, 2)
        self.pool = fenced(part.expand(*shape, *part.shape).clone())
        layer = self.pool[LAYER] if case.layer_major else self.pool[:, LAYER].transpose(0, 1)
        self.keys, self.values = layer[0], layer[1]
        self.block_stride = self.keys.stride(0)
        # The row of a sequence is not its number, and rows of others lie between.
        self.rows = 2 * generator.permutation(sequences) + 1
        self.q = numbers(2 * sequences + 1, case.heads, case.head_dim, dtype=kind, seed=seed)
        self.out = untouched(*self.q.shape, dtype=kind)
        self.slopes = fenced(2.0 ** -torch.arange(1.0, case.heads + 1).div(4)) if case.alibi else None
        self.scale = case.head_dim**-0.5
        self.pages, self.page_start, self.context = int32(*pages), int32(*start[:-1]), int32(*case.lengths)
        self.query_start = int32(*self.rows, 2 * sequences + 1)
        self.expected = np.stack([self._fill(s, pages[start[s] : start[s + 1]]) for s in range(sequences)])

    def _fill(self, sequence: int, pages: Any) -> Any:
        """Writes what the sequence's row sees to its pages, and says what the row should give."""
        case, length = self.case, self.case.lengths[sequence]
        first = max(0, length - case.window) if case.window else 0
        positions = np.arange(first, length)
        shape, seed = (length - first, case.kv_heads, case.head_dim), 1000 * self.seed + 2 * sequence
        k = numbers(*shape, dtype=self.q.dtype, seed=seed)
        v = numbers(*shape, dtype=self.q.dtype, seed=seed + 1)
        block = torch.from_numpy(pages[positions // case.block_size])
        place = torch.from_numpy(positions % case.block_size)
        k, v = (put(part, block, place, x, case.fp8) for part, x in ((self.keys, k), (self.values, v)))
        slopes = None if self.slopes is None else wide(self.slopes)
        return attended(wide(self.q[self.rows[sequence]])[None], wide(k), wide(v), self.scale, slopes)[0]

    def decode(
        self,
        items: Sequence[tuple[int, int, int, int]],
        order: int,
        partial: tuple[Tensor, Tensor] | None = None,
        moved_bytes: int = 0,
    ) -> None:
        """items: sequence, first slab, end, row of the partial results. moved_bytes: K and V begin so far before."""
        case, array = self.case, np.zeros(len(items), ITEM)
        for at, (sequence, first, end, row) in enumerate(items):
            array[at] = (sequence, 0, first, end, row, 1, (0, 0))
        held = fenced(torch.from_numpy(array.view(np.int32).copy()))
        call = calls.attention_decode(
            self.dtype, len(items), case.heads, case.kv_heads, case.head_dim, case.block_size, self.block_stride,
            self.scale, self.q.data_ptr(), self.out.data_ptr(), self.keys.data_ptr() - moved_bytes,
            self.values.data_ptr() - moved_bytes, held.data_ptr(), self.pages.ctypes.data, self.page_start.ctypes.data,
            self.context.ctypes.data, self.query_start.ctypes.data, *(part.data_ptr() for part in partial or ()),
            slopes=0 if self.slopes is None else self.slopes.data_ptr(), window=case.window, fp8=case.fp8,
        )  # fmt: skip
        launch(call, order)
        assert_fences(self.pool, self.q, self.out, *(partial or ()))

    def partials(self, rows: int) -> tuple[Tensor, Tensor]:
        """Room for partial results, NaN where nothing is written."""
        out = torch.full((rows, self.case.heads, self.case.head_dim), torch.nan)
        return fenced(out), fenced(torch.full((rows, self.case.heads), torch.nan))

    def merge(self, partial: tuple[Tensor, Tensor], starts: Any, rows: Any, order: int) -> None:
        addresses = (self.out.data_ptr(), *(part.data_ptr() for part in partial), starts.ctypes.data, rows.ctypes.data)
        launch(calls.attention_merge(self.dtype, len(rows), self.case.heads, self.case.head_dim, *addresses), order)
        assert_fences(self.out)

    def whole(self, sequence: int) -> tuple[int, int, int, int]:
        """The item that has all of a sequence."""
        return sequence, 0, -(-self.case.lengths[sequence] // SLAB), -1

    def check(self) -> None:
        """Every sequence's row is right and the others are as they were."""
        near(self.out[self.rows], self.expected, absolute=TOLERANCE[self.q.dtype] * np.abs(self.expected).max())
        others = np.setdiff1d(np.arange(len(self.out)), self.rows)
        assert (self.out[others] == UNTOUCHED).all()


@in_every_order
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_row_is_the_mean_of_the_values_that_it_sees(order: int, name: str, dtype: str) -> None:
    step = Step(CASES[name], dtype)
    padding = (-1, 1 << 30, 1 << 30, 5)
    step.decode([padding, *map(step.whole, range(len(step.case.lengths))), padding], order)
    step.check()


@in_every_order
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SPLIT_CASES)
def test_parts_brought_together_are_the_whole(order: int, name: str, dtype: str) -> None:
    step = Step(SPLIT_CASES[name], dtype)
    *cut, last = range(len(step.case.lengths))
    rows = PARTS * len(cut)
    items = [(s, first, end, s * PARTS + i) for s in cut for i, (first, end) in enumerate(pairwise(BORDERS))]
    partial = step.partials(rows)
    step.decode([step.whole(last), *items[::-1]], order, partial)
    assert torch.isneginf(partial[1][1::PARTS]).all(), "there is nothing in the empty part"
    step.merge(partial, int32(*range(0, rows + 1, PARTS), 0), int32(*step.rows[cut], -1), order)
    step.check()


@in_every_order
def test_a_part_says_what_its_weights_add_up_to(order: int) -> None:
    step = Step(Case(64, 2, 3, (40,)), "f16")
    out, lse = step.partials(2)
    step.decode([(0, 0, 3, 1)], order, (out, lse))
    k = torch.cat([step.keys[page] for page in step.pages], 1)[:, :40]
    scores = np.einsum("hgd,htd->hgt", wide(step.q[step.rows[0]]).reshape(2, 3, 64), wide(k)) * step.scale
    assert np.allclose(wide(lse[1]).reshape(2, 3), np.log2(np.exp(scores).sum(-1)), rtol=0, atol=1e-5)
    assert np.abs(wide(out[1]) - step.expected[0]).max() <= TOLERANCE[torch.float16] * np.abs(step.expected).max()
    assert torch.isnan(out[0]).all() and torch.isnan(lse[0]).all() and (step.out == UNTOUCHED).all()


@in_every_order
def test_a_block_is_found_where_32_bits_do_not_reach(order: int) -> None:
    step = Step(Case(64, 1, 4, (20,), block_size=64), "bf16")
    page, far = int(step.pages[0]), 1 << 28
    step.pages[0] = 40
    moved_bytes = 2 * (40 * far - page * step.block_stride)  # so that no memory is needed in between
    step.block_stride = far
    step.decode([step.whole(0)], order, moved_bytes=moved_bytes)
    step.check()


@in_every_order
def test_a_row_is_the_same_alone_and_beside_others(order: int) -> None:
    step = Step(Case(64, 2, 4, (100, 33, 7)), "bf16")
    step.decode([step.whole(s) for s in (2, 0, 1)], order)
    together = step.out.clone()
    for sequence, row in enumerate(step.rows):
        step.out.fill_(UNTOUCHED)
        step.decode([step.whole(sequence)], order)
        assert torch.equal(step.out[row], together[row])


@in_every_order
def test_a_score_far_above_those_before_takes_over(order: int) -> None:
    """Of one head alone, so that nothing but its own rise can scale its sums down before they overflow."""
    step = Step(Case(64, 1, 16, (100,)), "bf16")
    row, (block, place) = step.rows[0], divmod(90, 16)
    step.q[row, :9] = step.q[row, 10:] = 0
    step.keys[step.pages[block], 0, place] = 30 * step.q[row, 9]
    values = wide(torch.cat([step.values[page, 0] for page in step.pages])[:100])
    step.expected[0] = values.mean(0)
    step.expected[0, 9] = values[90]
    step.decode([step.whole(0)], order)
    step.check()


@in_every_order
def test_nan_that_is_seen_is_not_hidden(order: int) -> None:
    step = Step(Case(64, 2, 4, (100,)), "bf16")
    step.keys[step.pages[2], 1, 5] = torch.nan
    partial = step.partials(2)
    step.decode([step.whole(0), (0, 0, 3, 0), (0, 3, 7, 1)], order, partial)
    final = step.out.clone()
    step.merge(partial, int32(0, 2), int32(*step.rows), order)
    for out in (final[step.rows], step.out[step.rows]):
        assert torch.isnan(out[:, 4:]).all() and not torch.isnan(out[:, :4]).any()


@in_every_order
@pytest.mark.parametrize("dtype", TYPES)
def test_the_merge_weighs_any_number_of_parts(order: int, dtype: str) -> None:
    heads, head_dim, counts = 3, 80, (1, 2, 0, 9, 40)
    starts = np.cumsum([0, *counts])
    x, lse = numbers(starts[-1], heads, head_dim), numbers(starts[-1], heads, seed=1, scale=4.0)
    lse[5, 1], lse[20:30] = -torch.inf, -torch.inf
    x[20:30] = torch.nan
    out, rows = untouched(6, heads, head_dim, dtype=TYPES[dtype]), int32(3, 0, -1, 5, 2)
    begins = int32(*starts)
    addresses = (out.data_ptr(), x.data_ptr(), lse.data_ptr(), begins.ctypes.data, rows.ctypes.data)
    call = calls.attention_merge(dtype, len(rows), heads, head_dim, *addresses)
    launch(call, order)
    for token, row in enumerate(rows):
        part = slice(starts[token], starts[token + 1])
        if row >= 0:
            weights = np.exp2(wide(lse[part]) - wide(lse[part]).max(0))
            weighted = np.where(weights[..., None] > 0, wide(x[part]), 0) * weights[..., None]
            near(out[row], weighted.sum(0) / weights.sum(0)[:, None], absolute=1e-5)
    assert (out[[1, 4]] == UNTOUCHED).all()
    before = out.clone()
    out.fill_(UNTOUCHED)
    launch(call._replace(grid=(len(rows), 1, 1)), order)  # as with many tokens: one block has all of a row
    assert torch.equal(out, before)
    assert_fences(out, x, lse)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "reason"),
    [(8, 2, 72, 16, "72"), (7, 2, 64, 16, "7 query heads"), (8, 2, 64, 24, "24"), (8, 2, 64, 48, "48")],
)
def test_sizes_that_no_kernel_has_are_named(
    heads: int, kv_heads: int, head_dim: int, block_size: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        calls.attention_decode("bf16", 1, heads, kv_heads, head_dim, block_size, 0, 1.0, *[0] * 9)

"""How the attention kernels are launched, and the form of the plan that they read. See `calls` for what a Call is.

The planner (`planner`) cuts the attention of an iteration into work items. A sequence is read in slabs of SLAB tokens:
slab i lies in its page i * SLAB // block_size, and one KV head's slab is SLAB * head_dim numbers in one piece. The
sequences with one row go to the decode kernel, the others to the prefill kernel; both read the same arrays and write
the same kinds of results.

A work item whose `partial` is below zero writes its rows of `out` itself. The others each cover a part of the slabs:
the token with index i in the item writes its result, still to be weighted, to row partial + i * splits of partial_out,
and the base-2 logarithm of its sum of exponentials to the same row of partial_lse; `attention_merge` then brings the
rows of one token, which lie one after another, together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kernels.cuda.calls import WARP, Call, Params, _filled, _some, _struct

SLAB = 16  # tokens
HEAD_DIMS = (64, 80, 96, 128, 256)
LOG2_E = math.log2(math.e)

DECODE_ROWS = 16  # attention_decode.cuh: ROWS
DECODE_RINGS = {64: (4, 5), 80: (4, 5), 96: (4, 5), 128: (4, 4), 256: (3, 3)}  # WARPS, UNITS
PREFILL_WARPS, PREFILL_ROW_BYTES = 4, 8  # attention_prefill.cuh: WARPS, RowTable
MERGE_WARPS, MERGE_PIECE = 8, 128  # attention_merge.cu: WARPS, PIECE
MERGE_BLOCKS = 1024
"""Blocks of a merge, about: with many tokens each takes more of a row, for most tokens of a graph are padding."""

ITEM = np.dtype(
    [
        ("sequence", "i4"),  # below zero: nothing to do
        ("first_token", "i4"),  # counted from the sequence's first row of this iteration
        ("first_slab", "i4"),
        ("end_slab", "i4"),
        ("partial", "i4"),  # row of the partial results that the item's first token writes; below zero: final
        ("splits", "i4"),  # rows from one token's partial result to the next token's
        ("unused", "i4", (2,)),
    ]
)
"""One work item, 32 bytes."""

ATTENTION = _struct(
    # q, out [rows, heads, head_dim]; keys, values: this layer's of block 0, [kv_heads, block_size, head_dim]; pages:
    # blocks of all sequences one after another, those of sequence s from page_start[s] on; context [S]: tokens of a
    # sequence, its rows of this iteration included; query_start [S + 1]; slopes [heads] float32 or null.
    "q out keys values items pages page_start context query_start partial_out partial_lse slopes",
    ("block_stride", "i8"),  # numbers from a block's K to the next block's
    ("kv_heads", "i4"),
    ("group", "i4"),  # query heads of a KV head
    ("slabs_per_block", "i4"),  # a power of two
    ("window", "i4"),  # the latest so many positions are seen, the row's own included; 0: all
    ("scale_log2", "f4"),  # the scale of the scores, times log2(e)
)

MERGE = _struct(
    # Token m of the merge: partial rows starts[m] .. starts[m + 1] - 1 give row rows[m] of out; rows[m] below zero:
    # nothing to do. partial_out [.., heads, head_dim] float32, partial_lse [.., heads] float32.
    "out partial_out partial_lse starts rows",
    ("heads", "i4"),
    ("head_dim", "i4"),
)


def tokens_per_item(head_dim: int, group: int) -> int:
    """Tokens of a prefill item at most: their rows, `group` each, fill the kernel's tile.

    Raises ValueError for heads that no kernel has, and where one token's rows are more than a tile.
    """
    rows, _ = _prefill_tile(head_dim)
    if group > rows:
        raise ValueError(f"{group} query heads share a KV head; prefill of heads of {head_dim} takes {rows} at most")
    return rows // group


def decode(
    dtype: str,
    items: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    block_stride: int,
    scale: float,
    q: int,
    out: int,
    keys: int,
    values: int,
    item_array: int,
    pages: int,
    page_start: int,
    context: int,
    query_start: int,
    partial_out: int = 0,
    partial_lse: int = 0,
    slopes: int = 0,
    window: int = 0,
) -> Call:
    """Items of sequences with one row. partial_*: see MERGE; slopes: ALiBi, in natural units (not times log2(e))."""
    params = _attention(
        heads, kv_heads, head_dim, block_size, block_stride, scale, slopes, window,
        (q, out, keys, values, item_array, pages, page_start, context, query_start, partial_out, partial_lse),
    )  # fmt: skip
    warps, units = DECODE_RINGS[head_dim]
    shared = (1 + warps * units) * SLAB * head_dim * 2
    grid = (-(-heads // kv_heads // DECODE_ROWS), kv_heads, _some(items))
    return Call(f"attention_decode_{dtype}_d{head_dim}", grid, (warps * WARP, 1, 1), shared, params)


def prefill(
    dtype: str,
    items: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    block_stride: int,
    scale: float,
    q: int,
    out: int,
    keys: int,
    values: int,
    item_array: int,
    pages: int,
    page_start: int,
    context: int,
    query_start: int,
    partial_out: int = 0,
    partial_lse: int = 0,
    slopes: int = 0,
    window: int = 0,
) -> Call:
    """Items of sequences with any number of rows, tokens_per_item each but for the last; causal. See decode.

    Raises ValueError as tokens_per_item does.
    """
    tokens_per_item(head_dim, heads // kv_heads)
    rows, stages = _prefill_tile(head_dim)
    params = _attention(
        heads, kv_heads, head_dim, block_size, block_stride, scale, slopes, window,
        (q, out, keys, values, item_array, pages, page_start, context, query_start, partial_out, partial_lse),
    )  # fmt: skip
    shared = (rows + stages * PREFILL_WARPS * SLAB) * head_dim * 2 + rows * PREFILL_ROW_BYTES
    grid = (_some(items), kv_heads, 1)
    return Call(f"attention_prefill_{dtype}_d{head_dim}", grid, (PREFILL_WARPS * WARP, 1, 1), shared, params)


def merge(
    dtype: str,
    tokens: int,
    heads: int,
    head_dim: int,
    out: int,
    partial_out: int,
    partial_lse: int,
    starts: int,
    rows: int,
) -> Call:
    """Brings the partial results of `tokens` tokens together. Padding tokens have a row below zero."""
    pieces = -(-heads * head_dim // MERGE_PIECE)
    grid = (_some(tokens), min(pieces, max(1, MERGE_BLOCKS // tokens)), 1)
    params = _filled(MERGE, (out, partial_out, partial_lse, starts, rows, heads, head_dim))
    return Call(f"attention_merge_{dtype}", grid, (MERGE_WARPS * WARP, 1, 1), 0, params)


def _prefill_tile(head_dim: int) -> tuple[int, int]:
    """ROWS and STAGES of attention_prefill.cuh."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"heads of {head_dim} numbers; attention has kernels for {HEAD_DIMS}")
    return (128, 3) if head_dim <= 128 else (64, 2)


def _attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    block_stride: int,
    scale: float,
    slopes: int,
    window: int,
    addresses: Sequence[int],
) -> Params:
    """ATTENTION, its addresses up to `slopes` in one piece. Raises ValueError for sizes that no kernel has."""
    slabs = block_size // SLAB
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"heads of {head_dim} numbers; attention has kernels for {HEAD_DIMS}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    if block_size % SLAB or slabs < 1 or slabs & (slabs - 1):
        raise ValueError(f"blocks of {block_size} tokens; attention takes {SLAB} times a power of two")
    sizes = (block_stride, kv_heads, heads // kv_heads, slabs, window, scale * LOG2_E)
    return _filled(ATTENTION, (*addresses, slopes, *sizes))

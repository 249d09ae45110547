"""How each kernel is launched: its Params as numpy packs them, grid, block, shared memory. Pure arithmetic.

A Call goes to `Program.launch(*call, stream)` of the loader or of the emulator. Addresses are integers
(`tensor.data_ptr()`), 0 where there is none; all begin at a multiple of 16 bytes; `dtype` is BF16 or F16. The meaning
of each operation is in kernels/ops.py, the layout of its Params in src/, in the order of the fields here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BF16, F16 = "bf16", "f16"
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

VECTOR = 8  # numbers in 16 bytes
WARP = 32
ROW_THREADS, ROW_VECTORS = 1024, 4  # norms.cu: THREADS, HELD
ROW_MANY_VECTORS = 1 << 18
"""From so many on each thread of a norm takes two: about what the threads of all multiprocessors take at once."""

PIECE_THREADS = 256  # activations.cu, gather.cu, rope.cu: THREADS; linear_packed.cu: UNPACK_THREADS
COPIED = 4  # gather.cu
MAX_GRID_Y = 65_535
PADDING = -(2**31)
"""A token of a row that is not there."""
MAX_NORM_HIDDEN = ROW_THREADS * ROW_VECTORS * VECTOR

Params = npt.NDArray[np.void]
Sizes = tuple[int, int, int]


class Call(NamedTuple):
    """One launch, without its stream. `params` may be changed and launched again."""

    name: str
    grid: Sizes
    block: Sizes
    shared: int  # bytes of dynamic shared memory
    params: Params


class Block(NamedTuple):
    """The resources that a block of a kernel takes of a multiprocessor, without registers."""

    name: str
    threads: int
    shared: int  # bytes of dynamic shared memory


def _struct(pointers: str, *others: tuple[str, str]) -> np.dtype[np.void]:
    """Return a C struct: 64-bit addresses first, then the rest, padded as a compiler pads."""
    return np.dtype([*((name, "u8") for name in pointers.split()), *others], align=True)


NORM = _struct("x residual out weight bias", ("hidden", "i4"), ("eps", "f4"))
ACTIVATION = _struct("x out", ("width", "i4"), ("activation", "i4"))
ADD = _struct("x residual", ("width", "i4"))
EMBED = _struct("table places out tokens positions last_tokens", ("hidden", "i4"), ("scale", "f4"))
SELECT = _struct("x out rows", ("width", "i4"))
COPY = _struct(
    "source target from_ to",
    ("source_stride", "i8"),
    ("target_stride", "i8"),
    ("source_part_stride", "i8"),
    ("target_part_stride", "i8"),
    ("part_bytes", "i8"),
)
ROPE = _struct(
    "qkv q keys values bias angles q_norm k_norm positions slots",
    ("block_stride", "i8"),
    ("rows", "i4"),
    ("heads", "i4"),
    ("kv_heads", "i4"),
    ("head_dim", "i4"),
    ("block_size", "i4"),
    ("rotary", "i4"),
    ("lane_bits", "i4"),
    ("q_eps", "f4"),
    ("k_eps", "f4"),
)

LOW_RANK_ROWS, LOW_RANK_RANKS = 16, 8  # low_rank.cu: ITEM_ROWS, RANKS
LOW_RANK_DOWN_THREADS, LOW_RANK_UP_THREADS, LOW_RANK_OUTPUTS = 512, 64, 128  # likewise: 32 quads
LOW_RANK_ITEM = 2 + LOW_RANK_ROWS
LOW_RANK = _struct(
    "x down inner up out items ranks reads",
    ("inputs", "i4"),
    ("outputs", "i4"),
    ("downs", "i4"),
    ("rank", "i4"),
)

PACKED_THREADS, PACKED_STAGES, PACKED_TILE, PACKED_UNIT = 256, 2, 16, 128  # linear_packed.cu: as there
PACKED_WIDE = 16_384
"""Outputs from which on two tiles a block are enough blocks for an H100."""


class Packing(NamedTuple):
    """How kernels of linear_packed.cu hold the numbers of a matrix."""

    name: str  # in the kernels' names
    bits: int
    shapes: tuple[tuple[int, int], ...]
    """TILES and COLUMNS of its kernels; the last one is for many rows."""

    @property
    def tile_words(self) -> int:
        """Return the uint4 of a tile and unit."""
        return PACKED_TILE * PACKED_UNIT * self.bits // 128


Q4 = Packing("q4", 4, ((1, 1), (2, 1), (1, 2), (2, 2), (4, 4)))
FP8 = Packing("fp8", 8, ((1, 1), (2, 1), (1, 2), (2, 2), (2, 4)))
"""Rings of four tiles would not fit into the 99 KiB that sm_86 and sm_89 have."""
LINEAR_PACKED = _struct(
    "x words scales mins bias out",
    ("stride", "i8"),
    ("rows", "i4"),
    ("inputs", "i4"),
    ("outputs", "i4"),
    ("groups", "i4"),
)
UNPACK = _struct("words scales mins out", ("inputs", "i4"), ("outputs", "i4"), ("groups", "i4"))
MAX_EXPERTS = 1024  # routing.cu: its block has a thread for each
COMBINE_THREADS = 256  # routing.cu: THREADS
ROUTE = _struct(
    "logits present chosen weights order tiles finished",
    ("rows", "i4"),
    ("experts", "i4"),
    ("top_k", "i4"),
    ("normalize", "i4"),
    ("tile_rows", "i4"),
    ("most_tiles", "i4"),
)
COMBINE = _struct("x weights shared shared_logits out", ("width", "i4"), ("top_k", "i4"))
EXPERTS = _struct(
    "x weights out order tiles",
    ("inputs", "i4"),
    ("outputs", "i4"),
    ("columns", "i4"),
    ("top_k", "i4"),
    ("activation", "i4"),
)
EXPERTS_THREADS, EXPERTS_DEPTH = 128, 64  # products.cu: THREADS, DEPTH
EXPERTS_TILES = {16: (64, 5), 64: (128, 3), 128: (128, 3)}  # products.cu: COLUMNS and STAGES by ROWS
EXPERTS_TILE_BYTES = 16  # of an int4 in ROUTE's tiles

# Attention. The planner (`planner`) cuts the attention of an iteration into work items. A sequence is read in slabs of
# SLAB tokens: slab i lies in its page i * SLAB // block_size, and one KV head's slab is SLAB * head_dim numbers in one
# piece. Sequences with one row go to the decode kernel, all others to the prefill kernel; both read the same arrays and
# write the same kinds of results. A work item with a `partial` below zero writes its rows of `out` itself. Any other
# covers a part of the slabs: the token with index i in the item writes its result, still to be weighted, to row
# partial + i * splits of partial_out, and the base-2 logarithm of its sum of exponentials to the same row of
# partial_lse; `attention_merge` then combines the rows of one token, which lie one after another.
SLAB = 16  # tokens
HEAD_DIMS = (64, 80, 96, 128, 256)
FP8_HEAD_DIMS = (64, 128)
"""Of the kernels with K and V in fp8: their slabs have codes and scales (fp8.cuh), and strides of blocks are bytes."""
SCALE_BYTES = 4  # fp8.cuh
LOG2_E = math.log2(math.e)

DECODE_ROWS = 16  # attention_decode.cuh: ROWS
DECODE_RINGS = {64: (4, 5), 80: (4, 5), 96: (4, 5), 128: (4, 4), 256: (3, 3)}  # WARPS, UNITS
PREFILL_WARPS, PREFILL_ROW_BYTES = 4, 8  # attention_prefill.cuh: WARPS, RowTable
WGMMA_HEAD_DIMS = (64, 128)  # attention_prefill_sm90.cu: its kernels
WGMMA_ROWS, WGMMA_KEYS, WGMMA_STAGES = 128, 128, 2  # ROWS, KEYS, STAGES
WGMMA_WARPS, WGMMA_WORK_BYTES = 12, 40  # THREADS / 32, Work
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
    ("window", "i4"),  # the latest so many positions are seen, including the row's position; 0: all
    ("scale_log2", "f4"),  # the scale of the scores, times log2(e)
    ("item_count", "i4"),
)

MERGE = _struct(
    # Token m of the merge: partial rows starts[m] .. starts[m + 1] - 1 give row rows[m] of out; rows[m] below zero:
    # nothing to do. partial_out [.., heads, head_dim] float32, partial_lse [.., heads] float32.
    "out partial_out partial_lse starts rows",
    ("heads", "i4"),
    ("head_dim", "i4"),
)

# The sampler; the C side is src/sampler_params.cuh.
SAMPLER_THREADS = 512  # sampler.cu
SAMPLER_GROUP = 4  # ids that a thread reads at once
SAMPLER_PARTS = 16  # of a row at most; sampler_once.cuh: MAX_PARTS
SAMPLER_LISTED = 3584  # sampler_draw.cuh: SHORTLIST
SAMPLER_PART = np.dtype([("peak", "u8"), ("drawn", "u8"), ("tail", "u8"), ("listed", "i4"), ("finite", "i4")])
"""What a block leaves of its part of a row."""

SAMPLER_ROW = np.dtype(
    [
        ("seed", "u8"),
        ("position", "i8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("repetition", "f4"),
        ("top_k", "i4"),
        ("want_logprob", "i4"),
        ("slot", "i4"),  # the slot that gets the token as its last one; below zero: none
        ("mask", "i4"),  # row of mask_words; below zero: every id is allowed
        ("first_bias", "i4"),
        ("end_bias", "i4"),
        ("first_banned", "i4"),
        ("end_banned", "i4"),
        ("first_history", "i4"),
        ("first_output", "i4"),  # in the history; the prompt's tokens come before
        ("end_history", "i4"),
    ],
    align=True,
)
"""How one row is sampled; first_*, end_*: its entries in the arrays of SAMPLER."""

SAMPLER = _struct(
    # logits [rows or more, vocab] float32; rows [rows] of SAMPLER_ROW; entries of all rows: bias_ids (equal ids of a
    # row side by side) and bias_values, banned_ids, history_ids; mask_words [masks, ceil(vocab / 32)]; room for as many
    # numbers as there are entries: bias_before and history_before float32, history_counts int32; last_tokens [slots]
    # int32; the results [rows]: tokens and status int32, logprobs float32; where a row is split, what its blocks leave
    # for the last one: found [rows, parts] of SAMPLER_PART, listed_scores and listed_ids [rows, parts, SAMPLER_LISTED],
    # arrived [rows] int32, zeros before and after.
    "logits rows bias_ids bias_values banned_ids history_ids mask_words "
    "bias_before history_before history_counts last_tokens tokens status logprobs "
    "found listed_scores listed_ids arrived",
    ("vocab", "i4"),
    ("parts", "i4"),
)


def norm(
    dtype: str,
    rows: int,
    hidden: int,
    x: int,
    out: int,
    weight: int,
    eps: float,
    bias: int = 0,
    residual: int = 0,
    layer_norm: bool = False,
) -> Call:
    """Return the RMSNorm or LayerNorm of x [rows, hidden], of residual + x with a residual, which is then stored."""
    vectors = _vectors(hidden)
    if hidden > MAX_NORM_HIDDEN:
        raise ValueError(f"a row of {hidden} numbers; the norms take {MAX_NORM_HIDDEN} at most")
    name = "layer_norm" if layer_norm else "rms_norm"
    of_thread = 2 if rows * vectors >= ROW_MANY_VECTORS else 1
    params = _filled(NORM, (x, residual, out, weight, bias, hidden, eps))
    return Call(
        f"{name}_{dtype}", (_some(rows), 1, 1), (_whole_warps(-(-vectors // of_thread), ROW_THREADS), 1, 1), 0, params
    )


def gated(dtype: str, rows: int, width: int, x: int, out: int, activation: str) -> Call:
    """Return activation(first half) * second half of x [rows, 2 width]."""
    params = _filled(ACTIVATION, (x, out, width, ACTIVATIONS[activation]))
    return _pieces(f"gated_{dtype}", rows, width, params)


def activate(dtype: str, rows: int, width: int, x: int, out: int, activation: str) -> Call:
    """Return activation(x), x [rows, width]; out may be x."""
    params = _filled(ACTIVATION, (x, out, width, ACTIVATIONS[activation]))
    return _pieces(f"activate_{dtype}", rows, width, params)


def add(dtype: str, rows: int, width: int, x: int, residual: int) -> Call:
    """Return residual += x in place, both [rows, width]."""
    return _pieces(f"add_{dtype}", rows, width, _filled(ADD, (x, residual, width)))


def embed(
    dtype: str,
    rows: int,
    hidden: int,
    table: int,
    out: int,
    tokens: int,
    scale: float = 1.0,
    places: int = 0,
    positions: int = 0,
    last_tokens: int = 0,
) -> Call:
    """Return the rows of table times scale, plus rows of places.

    tokens: int32; ~s, below zero, is last_tokens[s] (int32), and PADDING leaves its row of out as it is.
    """
    params = _filled(EMBED, (table, places, out, tokens, positions, last_tokens, hidden, scale))
    return _pieces(f"embed_{dtype}", rows, hidden, params)


def select(rows: int, width: int, x: int, out: int, chosen: int) -> Call:
    """Return out[r] = x[chosen[r]], of 16-bit numbers; where chosen is below zero out stays as it is."""
    return _pieces("select_rows", rows, width, _filled(SELECT, (x, out, chosen, width)))


def low_rank(
    dtype: str,
    items: int,
    inputs: int,
    outputs: int,
    downs: int,
    rank: int,
    x: int,
    down: int,
    inner: int,
    up: int,
    out: int,
    item_array: int,
    ranks: int,
    reads: int,
) -> tuple[Call, Call]:
    """Return the two calls of out[row] += up(down(x[row])) for at most so many items of rows.

    downs: matrices down; rank: of each at most, a multiple of LOW_RANK_RANKS. The arrays are those of low_rank.cu.
    """
    demand_vectors(inputs, outputs)
    params = _filled(LOW_RANK, (x, down, inner, up, out, item_array, ranks, reads, inputs, outputs, downs, rank))
    pieces = downs * rank // LOW_RANK_RANKS, -(-outputs // LOW_RANK_OUTPUTS)
    first, second = (
        Call(f"low_rank_{name}_{dtype}", (_some(items), of_outputs, 1), (threads, 1, 1), 0, params)
        for name, of_outputs, threads in zip(
            ("down", "up"), pieces, (LOW_RANK_DOWN_THREADS, LOW_RANK_UP_THREADS), strict=True
        )
    )
    return first, second


def packed_shape(packing: Packing, rows: int, outputs: int) -> tuple[int, int]:
    """Return which shape multiplies so many rows fastest, of 4 bits on an H100; all give the same bits."""
    tiles = 1 if outputs < PACKED_WIDE else 2
    return (tiles, 1) if rows <= 8 else (tiles, 2) if rows <= 16 else packing.shapes[-1]


def linear_packed(
    packing: Packing,
    dtype: str,
    rows: int,
    inputs: int,
    outputs: int,
    group: int,
    x: int,
    words: int,
    scales: int,
    mins: int,
    bias: int,
    out: int,
    stride: int,
    shape: tuple[int, int] | None = None,
) -> Call:
    """Return out = x weight^T + bias of a packed matrix, x [rows, inputs], out [rows, outputs] with `stride`.

    group: inputs that share a scale. shape: another one than packed_shape gives. The arrays are those of
    linear_packed.cu.
    """
    demand_vectors(inputs)
    tiles, columns = shape or packed_shape(packing, rows, outputs)
    warps, width, block_rows = PACKED_THREADS // WARP, tiles * PACKED_TILE, columns * 8
    groups = PACKED_UNIT // group
    ring = PACKED_STAGES * tiles * (packing.tile_words + groups * PACKED_TILE // 4 * (2 if mins else 1)) * 16
    sums = block_rows * (width + 4) * 4
    grid = (-(-outputs // width), -(-_some(rows) // block_rows), 1)
    params = _filled(LINEAR_PACKED, (x, words, scales, mins, bias, out, stride, rows, inputs, outputs, groups))
    name = f"linear_{packing.name}_t{tiles}c{columns}_{dtype}"
    return Call(name, grid, (PACKED_THREADS, 1, 1), warps * max(ring, sums), params)


def unpack(
    packing: Packing, dtype: str, inputs: int, outputs: int, group: int, words: int, scales: int, mins: int, out: int
) -> Call:
    """Return out [outputs, inputs], the weights of a packed matrix, each rounded once; see linear_packed."""
    demand_vectors(inputs)
    units = PIECE_THREADS // packing.tile_words  # of a block
    grid = (-(-outputs // PACKED_TILE), -(-inputs // (PACKED_UNIT * units)), 1)
    params = _filled(UNPACK, (words, scales, mins, out, inputs, outputs, PACKED_UNIT // group))
    return Call(f"unpack_{packing.name}_{dtype}", grid, (PIECE_THREADS, 1, 1), 0, params)


def most_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """Return how many tiles of `tile_rows` pairs of one expert so many pairs make at most."""
    touched = min(experts, pairs)
    return touched + (pairs - touched) // tile_rows


def route(
    rows: int,
    experts: int,
    top_k: int,
    tile_rows: int,
    normalize: bool,
    logits: int,
    chosen: int,
    weights: int,
    order: int,
    tiles: int,
    finished: int,
    present: int = 0,
) -> Call:
    """Return the call that gives rows to experts. The arrays are those of routing.cu, most_tiles() of them tiles."""
    if not 0 < top_k <= experts <= MAX_EXPERTS:
        raise ValueError(f"{top_k} of {experts} experts for a row; the CUDA kernels take {MAX_EXPERTS} at most")
    most = most_tiles(_some(rows) * top_k, experts, tile_rows)
    pointers = (logits, present, chosen, weights, order, tiles, finished)
    params = _filled(ROUTE, (*pointers, rows, experts, top_k, normalize, tile_rows, most))
    threads = _whole_warps(max(experts, rows * WARP), MAX_EXPERTS)
    return Call("route", (-(-rows // (threads // WARP)), 1, 1), (threads, 1, 1), 0, params)


def experts(
    dtype: str,
    tile_rows: int,
    tiles: int,
    inputs: int,
    outputs: int,
    top_k: int,
    x: int,
    weights: int,
    out: int,
    order: int,
    tile_array: int,
    activation: str = "",
) -> Call:
    """Return the products of pairs with their expert's matrix, for at most so many tiles of `route`.

    With an activation the matrices have gates above ups, 2 outputs in all: x [rows, inputs] to out [places, outputs],
    else x [places, inputs] to out [pairs, outputs].
    """
    demand_vectors(inputs, outputs)
    columns, stages = EXPERTS_TILES[tile_rows]
    across = -(-outputs // (columns // 2 if activation else columns))
    kind = ACTIVATIONS[activation] if activation else -1
    params = _filled(EXPERTS, (x, weights, out, order, tile_array, inputs, outputs, across, top_k, kind))
    shared = stages * (tile_rows + columns) * EXPERTS_DEPTH * 2
    grid = (_some(tiles) * across, 1, 1)
    return Call(f"experts_r{tile_rows}_{dtype}", grid, (EXPERTS_THREADS, 1, 1), shared, params)


def combine(
    dtype: str,
    rows: int,
    width: int,
    top_k: int,
    x: int,
    weights: int,
    out: int,
    shared: int = 0,
    shared_logits: int = 0,
) -> Call:
    """Return out[row] = the sum of weights[pair] * x[pair], and of sigmoid(shared_logits[row]) * shared[row]."""
    vectors = _vectors(width)
    params = _filled(COMBINE, (x, weights, shared, shared_logits, out, width, top_k))
    grid = (_some(rows), -(-vectors // COMBINE_THREADS), 1)
    return Call(f"combine_{dtype}", grid, (COMBINE_THREADS, 1, 1), 0, params)


def copy_blocks(
    pairs: int,
    source: int,
    target: int,
    strides: tuple[int, int],
    part_bytes: int,
    parts: int = 1,
    part_strides: tuple[int, int] = (0, 0),
    from_: int = 0,
    to: int = 0,
) -> Call:
    """Copy block from_[i] of source to block to[i] of target; without from_ (or to) block i.

    from_ and to are int32; a pair with a number below zero is skipped. Strides, of the source and of the target, are
    bytes from block to block and, where a block lies in several parts, from part to part; all multiples of 16.
    """
    if any(size % 16 for size in (*strides, *part_strides, part_bytes)):
        raise ValueError(
            f"copies go 16 bytes at a time: strides {strides}, {part_strides}, parts of {part_bytes} bytes"
        )
    vectors = part_bytes // 16
    threads = _whole_warps(-(-vectors // COPIED), PIECE_THREADS)
    params = _filled(COPY, (source, target, from_, to, *strides, *part_strides, part_bytes))
    grid = (_some(pairs), -(-vectors // (threads * COPIED)), parts)
    return Call("copy_blocks", grid, (threads, 1, 1), 0, params)


def rope_and_write(
    dtype: str,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    block_stride: int,
    qkv: int,
    q: int,
    keys: int,
    values: int,
    slots: int,
    bias: int = 0,
    angles: int = 0,
    rotary: int = 0,
    positions: int = 0,
    q_norm: int = 0,
    k_norm: int = 0,
    eps: tuple[float, float] = (0.0, 0.0),
    fp8: bool = False,
) -> Call:
    """Split qkv, add the bias, norm and rotate, write k and v of each row to slots[row] and q to q.

    keys and values: this layer's K and V of block 0, [kv_heads, block_size, head_dim], block_stride numbers from one
    block to the next; with fp8 slabs, and bytes. slots: int32, block * block_size + place; below zero neither k nor v
    is written. eps: of q_norm and of k_norm.
    """
    lane_bits = ((_vectors(head_dim) + 1) // 2 - 1).bit_length()
    if 1 << lane_bits > WARP:
        raise ValueError(f"heads of {head_dim} numbers; rope_and_write takes {2 * VECTOR * WARP} at most")
    if rotary % 2 or rotary > head_dim or bool(angles) != bool(rotary):
        raise ValueError(f"{rotary} rotary numbers in heads of {head_dim}, angles {'given' if angles else 'missing'}")
    pointers = (qkv, q, keys, values, bias, angles, q_norm, k_norm, positions, slots)
    sizes = (rows, heads, kv_heads, head_dim, block_size, rotary, lane_bits)
    params = _filled(ROPE, (*pointers, block_stride, *sizes, *eps))
    grid = (-(-_some(rows) * (heads + 2 * kv_heads << lane_bits) // PIECE_THREADS), 1, 1)
    return Call(f"rope_and_write_{_stored(dtype, fp8)}", grid, (PIECE_THREADS, 1, 1), 0, params)


def tokens_per_item(head_dim: int, group: int) -> int:
    """Return the tokens of a prefill item at most: their rows, `group` each, fill the kernel's tile.

    Raise ValueError for heads that no kernel has, and where one token's rows are more than a tile.
    """
    rows, _ = _prefill_tile(head_dim)
    if group > rows:
        raise ValueError(f"{group} query heads share a KV head; prefill of heads of {head_dim} takes {rows} at most")
    return rows // group


def attention_decode(
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
    fp8: bool = False,
) -> Call:
    """Return the call for items of sequences with one row.

    partial_*: see MERGE; slopes: ALiBi, in natural units (not times log2(e)).
    """
    params = _attention_params(
        heads, kv_heads, head_dim, block_size, block_stride, scale, slopes, window,
        (q, out, keys, values, item_array, pages, page_start, context, query_start, partial_out, partial_lse), items,
    )  # fmt: skip
    name, threads, shared = decode_block(dtype, head_dim, fp8)
    grid = (-(-heads // kv_heads // DECODE_ROWS), kv_heads, _some(items))
    return Call(name, grid, (threads, 1, 1), shared, params)


def decode_block(dtype: str, head_dim: int, fp8: bool = False) -> Block:
    """Return the kernel of attention_decode and what one of its blocks takes."""
    warps, units = DECODE_RINGS[head_dim]
    numbers, held = _token_bytes(head_dim, fp8)
    shared = SLAB * (numbers + warps * (numbers * fp8 + units * held))
    return Block(f"attention_decode_{_stored(dtype, fp8)}_d{head_dim}", warps * WARP, shared)


def attention_prefill(
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
    wgmma_processors: int = 0,
    fp8: bool = False,
) -> Call:
    """Return the call for items of any number of rows, tokens_per_item each but for the last; causal.

    See attention_decode and, for what wgmma_processors is, prefill_block.

    Raise ValueError as tokens_per_item does, and for more items than a launch has.
    """
    tokens_per_item(head_dim, heads // kv_heads)
    has_wgmma = wgmma_processors > 0 and head_dim in WGMMA_HEAD_DIMS and not fp8
    name, threads, shared = prefill_block(dtype, head_dim, has_wgmma, fp8)
    params = _attention_params(
        heads, kv_heads, head_dim, block_size, block_stride, scale, slopes, window,
        (q, out, keys, values, item_array, pages, page_start, context, query_start, partial_out, partial_lse), items,
    )  # fmt: skip
    if has_wgmma:
        return Call(name, (min(wgmma_processors, kv_heads * _some(items)), 1, 1), (threads, 1, 1), shared, params)
    if items > MAX_GRID_Y:
        raise ValueError(f"{items} pieces of prompts in a step, a launch has {MAX_GRID_Y}; lower --max-step-tokens")
    return Call(name, (kv_heads, _some(items), 1), (threads, 1, 1), shared, params)


def prefill_block(dtype: str, head_dim: int, has_wgmma: bool = False, fp8: bool = False) -> Block:
    """Return the kernel of attention_prefill and what one of its blocks takes.

    has_wgmma: on compute capability 9.0, which has a kernel of its own for some heads, and none for fp8. It runs one
    block on each of the multiprocessors.
    """
    if has_wgmma and head_dim in WGMMA_HEAD_DIMS and not fp8:
        shared = (WGMMA_ROWS + 2 * WGMMA_STAGES * WGMMA_KEYS) * head_dim * 2 + 2 * WGMMA_WORK_BYTES
        return Block(f"attention_prefill_sm90_{dtype}_d{head_dim}", WGMMA_WARPS * WARP, shared)
    rows, stages = _prefill_tile(head_dim)
    numbers, held = _token_bytes(head_dim, fp8)
    shared = rows * (numbers + PREFILL_ROW_BYTES) + PREFILL_WARPS * SLAB * (numbers * fp8 + stages * held)
    return Block(f"attention_prefill_{_stored(dtype, fp8)}_d{head_dim}", PREFILL_WARPS * WARP, shared)


def _stored(dtype: str, fp8: bool) -> str:
    """Return the part of a kernel's name that says what q and out are, and K and V in their blocks."""
    return f"fp8_{dtype}" if fp8 else dtype


def _token_bytes(head_dim: int, fp8: bool) -> tuple[int, int]:
    """Return the bytes of a token's head, as numbers and in a block. Raise ValueError where there is no kernel."""
    if fp8 and head_dim not in FP8_HEAD_DIMS:
        kernels = " and ".join(map(str, FP8_HEAD_DIMS))
        raise ValueError(
            f"heads of {head_dim} numbers, attention over fp8 has kernels for {kernels}; give --kv-dtype auto"
        )
    return 2 * head_dim, head_dim + SCALE_BYTES if fp8 else 2 * head_dim


def attention_merge(
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
    """Return the call that merges the partial results of `tokens` tokens together.

    Padding tokens have a row below zero.
    """
    pieces = -(-heads * head_dim // MERGE_PIECE)
    grid = (_some(tokens), min(pieces, max(1, MERGE_BLOCKS // tokens)), 1)
    params = _filled(MERGE, (out, partial_out, partial_lse, starts, rows, heads, head_dim))
    return Call(f"attention_merge_{dtype}", grid, (MERGE_WARPS * WARP, 1, 1), 0, params)


def _prefill_tile(head_dim: int) -> tuple[int, int]:
    """Return ROWS and STAGES of attention_prefill.cuh."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"heads of {head_dim} numbers; attention has kernels for {HEAD_DIMS}")
    return (128, 3) if head_dim <= 128 else (64, 2)


def _attention_params(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    block_stride: int,
    scale: float,
    slopes: int,
    window: int,
    addresses: Sequence[int],
    items: int,
) -> Params:
    """Return ATTENTION, its addresses up to `slopes` in one piece. Raise ValueError for sizes that no kernel has."""
    slabs = block_size // SLAB
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"heads of {head_dim} numbers; attention has kernels for {HEAD_DIMS}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    if block_size % SLAB or slabs < 1 or slabs & (slabs - 1):
        raise ValueError(f"blocks of {block_size} tokens; attention takes {SLAB} times a power of two")
    sizes = (block_stride, kv_heads, heads // kv_heads, slabs, window, scale * LOG2_E, items)
    return _filled(ATTENTION, (*addresses, slopes, *sizes))


def sample(
    rows: int,
    vocab: int,
    logits: int,
    row_array: int,
    tokens: int,
    status: int,
    logprobs: int,
    last_tokens: int = 0,
    bias_ids: int = 0,
    bias_values: int = 0,
    banned_ids: int = 0,
    history_ids: int = 0,
    mask_words: int = 0,
    bias_before: int = 0,
    history_before: int = 0,
    history_counts: int = 0,
    parts: int = 1,
    found: int = 0,
    listed_scores: int = 0,
    listed_ids: int = 0,
    arrived: int = 0,
) -> Call:
    """Return one token of each row. An address is 0 where no row needs what lies there; edits change the logits.

    parts: blocks of a row, see sampler_parts; more than one need found, listed_scores, listed_ids and arrived.
    """
    entries = (bias_ids, bias_values, banned_ids, history_ids, mask_words, bias_before, history_before, history_counts)
    results, room = (last_tokens, tokens, status, logprobs), (found, listed_scores, listed_ids, arrived)
    params = _filled(SAMPLER, (logits, row_array, *entries, *results, *room, vocab, parts))
    threads = _whole_warps(-(-vocab // SAMPLER_GROUP), SAMPLER_THREADS)
    return Call("sample", (parts, _some(rows), 1), (threads, 1, 1), 0, params)


def sampler_parts(rows: int, vocab: int, blocks: int) -> int:
    """Return into how many parts rows are split, a power of two; blocks: of all rows, at most."""
    parts = min(SAMPLER_PARTS, blocks // rows, vocab // (SAMPLER_GROUP * SAMPLER_THREADS))
    return 1 << max(1, parts).bit_length() - 1


def _filled(struct: np.dtype[np.void], values: Sequence[Any]) -> Params:
    params = np.zeros(1, struct)
    params[0] = tuple(values)
    return params


def _pieces(name: str, rows: int, width: int, params: Params) -> Call:
    vectors = _vectors(width)
    threads = _whole_warps(vectors, PIECE_THREADS)
    return Call(name, (_some(rows), -(-vectors // threads), 1), (threads, 1, 1), 0, params)


def demand_vectors(*widths: int) -> None:
    """Raise ValueError for a row that is no whole number of vectors."""
    for width in widths:
        _vectors(width)


def _vectors(width: int) -> int:
    if width < VECTOR or width % VECTOR:
        raise ValueError(f"a row of {width} numbers; the CUDA kernels take multiples of {VECTOR}")
    return width // VECTOR


def _some(rows: int) -> int:
    if rows < 1:
        raise ValueError(f"{rows} rows: there is nothing to launch")
    return rows


def _whole_warps(threads: int, most: int) -> int:
    return min(most, -(-threads // WARP) * WARP)

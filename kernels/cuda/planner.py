"""Cut the attention of an iteration into work items (`calls.ITEM`). Pure numpy; no loop over sequences.

A sequence with one row is one tile of the decode kernel, any other is cut into tiles of `tokens_per_item` tokens for
the prefill kernel. A tile with more KV than each resident block of the GPU should get is split into several items;
`attention_merge` brings their partial results together. The same lengths always give the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kernels.cuda.calls import ITEM, SLAB, tokens_per_item
from kernels.ops import Int32

DECODE_SPLIT_SLABS = 16  # 256 tokens: below, merging costs more than the split gains
PREFILL_SPLIT_SLABS = 48
"""Of a tile; docs/gpu-results.md has times on an H100."""

SPLIT_STEP = 4  # slabs: one for each warp of a decode block, one KV tile of the prefill kernel
MMA_ROWS = 16  # query heads of a KV head that a decode block takes at once

ITEM_INTS = ITEM.itemsize // 4
SEQUENCE, FIRST_TOKEN, FIRST_SLAB, END_SLAB, PARTIAL, SPLITS, TOKENS, SIZE = range(ITEM_INTS)
"""Columns of items and tiles as int32 [.., ITEM_INTS]. Kernels do not read the last two: tokens of the tile, and slabs
of each of its items."""

_LONGEST = (1 << 15) - 1  # slabs
SlabsT = TypeVar("SlabsT", int, Int32)
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Plan:
    """Work items of both kernels, longest first, and what is to be merged (see calls.MERGE)."""

    decode: Int32  # [items, ITEM_INTS]
    prefill: Int32  # [items, ITEM_INTS]
    starts: Int32  # [tokens that are merged + 1]
    rows: Int32  # [tokens that are merged]
    partial_rows: int


@dataclass(frozen=True, slots=True)
class Room:
    """The bounds of an iteration."""

    rows: int
    decodes: int  # sequences with one row, and rows that sample
    chunks: int  # sequences with more rows


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a plan has, whatever the lengths."""

    decode: int  # items
    prefill: int  # items
    merged: int
    partial_rows: int


class Seats(NamedTuple):
    """How many blocks of each kernel a device runs at once."""

    decode: int
    prefill: int


class Planner:
    """Plans for one model on one device."""

    def __init__(self, seats: Seats, kv_heads: int, group: int, head_dim: int, window: int = 0) -> None:
        """Create a planner.

        group: query heads of a KV head; window: the largest of the layers.

        A window of 0 means that some layer sees everything. Raise ValueError for a group that no tile can hold.
        """
        self.group, self.window = group, window
        self._tile = tokens_per_item(head_dim, group)
        decode_blocks = kv_heads * -(-group // MMA_ROWS)  # each item is launched so many times
        self._decode_items = max(1, seats.decode // decode_blocks)
        self._prefill_items = max(1, seats.prefill // kv_heads)

    def same_plans(self, other: Planner) -> bool:
        """Return whether both make the same plans."""
        return vars(self) == vars(other)

    def plan(self, query_start: Int32, context: Int32) -> Plan:
        """Return the items of S sequences: query_start [S + 1], context [S] (see kernels.ops.Batch)."""
        lengths = query_start[1:] - query_start[:-1]
        one = lengths == 1
        decodes, chunks = np.flatnonzero(one), np.flatnonzero(~one)
        tiles = self._decode_tiles(decodes, context)
        if chunks.size:
            tiles = np.concatenate([tiles, self._prefill_tiles(chunks, lengths, context)])
        work, most = tiles[:, END_SLAB] - tiles[:, FIRST_SLAB], np.empty(len(tiles), np.int32)
        least = np.where(np.arange(len(tiles)) < decodes.size, DECODE_SPLIT_SLABS, PREFILL_SPLIT_SLABS)
        most[: decodes.size] = _most(work[: decodes.size], self._decode_items, DECODE_SPLIT_SLABS)
        most[decodes.size :] = _most(work[decodes.size :], self._prefill_items, PREFILL_SPLIT_SLABS)
        items = tiles if (work <= most).all() else _split(tiles, work, most, least)
        count = int(tiles[: decodes.size, SPLITS].sum())
        items = items.take(_longest_first(items, count), axis=0)
        starts, rows = _merges(tiles.take(np.flatnonzero(tiles[:, SPLITS] > 1), axis=0), query_start)
        return Plan(items[:count], items[count:], starts, rows, int(starts[-1]))

    def bounds(self, room: Room) -> Bounds:
        """Return the bounds of an iteration that has no more than this.

        A split holds `total slabs / wanted items` or more, so the numbers of splits, each rounded up, sum up to fewer
        than wanted + tiles, and fewer tiles than are wanted are longer than one split.
        """
        merged = min(room.decodes, self._decode_items - 1)
        decode, partial_rows = room.decodes + self._decode_items - 1, self._decode_items + merged
        if not room.chunks:
            return Bounds(decode, 0, merged, partial_rows)
        tiles = room.rows // self._tile + room.chunks
        split, tokens = min(tiles, self._prefill_items - 1), min(room.rows, self._tile)
        return Bounds(
            decode=decode,
            prefill=tiles + self._prefill_items - 1,
            merged=min(room.rows, merged + split * tokens),
            partial_rows=partial_rows + (self._prefill_items + split) * tokens,
        )

    def _decode_tiles(self, sequences: Indices, context: Int32) -> Int32:
        tiles = _new_tiles(len(sequences))
        context = context.take(sequences)
        tiles[:, SEQUENCE] = sequences
        tiles[:, TOKENS] = 1
        if self.window:
            tiles[:, FIRST_SLAB] = np.maximum(context - self.window, 0) // SLAB
        tiles[:, END_SLAB] = -(-context // SLAB)
        return tiles

    def _prefill_tiles(self, sequences: Indices, lengths: Int32, context: Int32) -> Int32:
        lengths, context = lengths.take(sequences), context.take(sequences)
        owner, index = _places(-(-lengths // self._tile))
        tiles = _new_tiles(len(owner))
        first_token = index * self._tile
        tokens = np.minimum(lengths.take(owner) - first_token, self._tile)
        position = (context - lengths).take(owner) + first_token  # of the tile's first token
        tiles[:, SEQUENCE] = sequences.take(owner)
        tiles[:, FIRST_TOKEN] = first_token
        tiles[:, TOKENS] = tokens
        if self.window:
            tiles[:, FIRST_SLAB] = np.maximum(position - self.window + 1, 0) // SLAB
        tiles[:, END_SLAB] = -(-(position + tokens) // SLAB)
        return tiles


def _new_tiles(count: int) -> Int32:
    tiles = np.zeros((count, ITEM_INTS), np.int32)
    tiles[:, PARTIAL], tiles[:, SPLITS] = -1, 1
    return tiles


def _most(work: Int32, wanted: int, least: int) -> int:
    """Return the slabs of an item at most, `least` or more: the fewest with which there are up to `wanted` items.

    A share is that part of all work which each of `wanted` seats would have. Where more tiles come than that, or one
    wave leaves an item with more than two shares, items have a share at most: begun with the longest, they end within
    two. Tiles of at most two shares, also a whole wave of almost equal ones, gain nothing by cuts and stay whole.
    """
    share = max(least, _whole_steps(-(-int(work.sum(dtype=np.int64)) // wanted)))
    size = longest = int(work.max(initial=0))
    if longest <= share:
        return share
    if len(work) < wanted:
        low, high = share // SPLIT_STEP, -(-longest // SPLIT_STEP)  # with `high` every tile is one item
        while low < high:
            middle = (low + high) // 2
            if int((-(-work // (middle * SPLIT_STEP))).sum()) <= wanted:
                high = middle
            else:
                low = middle + 1
        size = low * SPLIT_STEP
    return size if size <= 2 * share else share


def _split(tiles: Int32, work: Int32, most: Int32, least: Int32) -> Int32:
    """Return the items of the tiles, in their order; several, of `least` work, where a tile has more than `most` work.

    Write SPLITS of tiles.
    """
    splits = np.minimum(-(-work // most), np.maximum(work // least, 1))
    size = _whole_steps(-(-work // splits))
    splits = -(-work // size)
    rows = np.where(splits > 1, splits * tiles[:, TOKENS], 0)
    tiles[:, SIZE], tiles[:, SPLITS] = size, splits
    tiles[:, PARTIAL] = np.where(splits > 1, np.cumsum(rows) - rows, -1)
    owner, index = _places(splits)
    items = tiles.take(owner, axis=0)
    items[:, FIRST_SLAB] += index * items[:, SIZE]
    items[:, END_SLAB] = np.minimum(items[:, FIRST_SLAB] + items[:, SIZE], items[:, END_SLAB])
    items[:, PARTIAL] += index  # 0 where there is but one
    return items


def _longest_first(items: Int32, decodes: int) -> Indices:
    """Return the order of the first `decodes` items among themselves, then of the others.

    16-bit keys are sorted by their digits, in linear time; items beyond half a million tokens count as that long.
    """
    slabs = np.minimum(items[:, END_SLAB] - items[:, FIRST_SLAB], _LONGEST)
    keys = (_LONGEST - slabs).astype(np.uint16)
    keys[decodes:] += _LONGEST + 1
    return np.argsort(keys, kind="stable")


def _merges(tiles: Int32, query_start: Int32) -> tuple[Int32, Int32]:
    """Return for the tokens of tiles that are split: where their partial rows start and, last, end; and their rows."""
    if not len(tiles):
        return np.zeros(1, np.int32), np.zeros(0, np.int32)
    owner, index = _places(tiles[:, TOKENS])
    starts = np.zeros(len(owner) + 1, np.int32)
    np.cumsum(tiles[:, SPLITS].take(owner), out=starts[1:])
    first_row = query_start.take(tiles[:, SEQUENCE]) + tiles[:, FIRST_TOKEN]
    return starts, first_row.take(owner) + index


def _places(counts: Int32) -> tuple[Indices, Int32]:
    """Return owner and index of each of counts[0] things of owner 0, counts[1] of owner 1, ..."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    return owner, np.arange(len(owner), dtype=np.int32) - starts.take(owner)


def _whole_steps(slabs: SlabsT) -> SlabsT:
    return -(-slabs // SPLIT_STEP) * SPLIT_STEP

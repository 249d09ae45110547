"""KV in blocks: sequences in a paged pool for the attention cases, and copies between pool and host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.kernels.case import Bench, Case, Maker
from bench.kernels.shapes import BLOCK_SIZE, Plan
from kernels.ops import Attention, Batch, Cache, CacheShape, Int32

PIECE_ROWS = 4096  # written at a time


def rows_of(
    tables: Int32,
    starts: Sequence[int],
    ends: Sequence[int],
    sample_rows: Int32 | None = None,
    block_size: int = BLOCK_SIZE,
) -> Batch:
    """Return a batch: sequence s computes positions starts[s] ..

    ends[s] - 1 in blocks tables[s]. Tokens are 0, 1, 2, ...
    """
    lengths = np.asarray(ends, np.intp) - np.asarray(starts, np.intp)
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(starts, ends, strict=True)])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Batch(
        tokens=np.arange(len(positions), dtype=np.int32),
        positions=positions,
        query_start=query_start,
        context=np.array(ends, np.int32),
        tables=tables,
        write_blocks=tables[owner, positions // block_size],
        write_offsets=positions % block_size,
        sample_rows=query_start[1:] - 1 if sample_rows is None else sample_rows,
    )


def some_rows(count: int) -> tuple[Batch, int]:
    """Return a batch of one sequence's first `count` tokens, all of which sample, and its blocks."""
    blocks = -(-count // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
    return rows_of(tables, [0], [count], np.arange(count, dtype=np.int32)), blocks


class Paged:
    """Sequences of these lengths. K and V of a sequence are the same in every layer, where they lie apart."""

    def __init__(
        self,
        bench: Bench,
        contexts: Sequence[int],
        layers: int,
        cache: Cache | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """cache: of the shape that `shape` gives; None makes one with the backend."""
        self.bench, self.contexts, self.layers, self.block_size = bench, contexts, layers, block_size
        shape = self.shape(bench, contexts, layers, block_size)
        self.cache: Cache = bench.clock.ops.new_cache(shape) if cache is None else cache
        order = np.random.default_rng(20261120).permutation(shape.blocks).astype(np.int32)
        used = [-(-context // block_size) for context in contexts]
        self.tables: Int32 = np.zeros((len(contexts), max(used)), np.int32)
        for table, end, count in zip(self.tables, np.cumsum(used), used, strict=True):
            table[:count] = order[end - count : end]
        last = len(contexts) - 1
        self._kept: dict[int, Tensor] = {}
        for sequence in range(len(contexts)):
            qkv = self._fill(sequence)
            if sequence in (0, last // 2, last):
                self._kept[sequence] = qkv

    @staticmethod
    def shape(bench: Bench, contexts: Sequence[int], layers: int, block_size: int = BLOCK_SIZE) -> CacheShape:
        """Return the shape of a pool that the sequences fill."""
        model = bench.plan.model
        blocks = sum(-(-context // block_size) for context in contexts)
        return CacheShape(blocks, 0, layers, model.kv_heads, block_size, model.head_dim, bench.dtype)

    @property
    def kept(self) -> list[int]:
        """Return the sequences that `attended` can compute."""
        return sorted(self._kept)

    def last_rows(self, rows: Sequence[int]) -> Batch:
        """Return the batch that computes the last rows[s] tokens of every sequence."""
        starts = [context - count for context, count in zip(self.contexts, rows, strict=True)]
        return rows_of(self.tables, starts, self.contexts, block_size=self.block_size)

    def attended(self, sequence: int, q: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return float64 attention of rows q [n, heads, head_dim] at these positions of a kept sequence."""
        model = self.bench.plan.model
        heads = self._kept[sequence].view(self.contexts[sequence], -1, model.head_dim)[:, model.heads :]
        group = model.heads // model.kv_heads
        keys, values = (part.repeat_interleave(group, 1).double() for part in heads.chunk(2, dim=1))
        distance = torch.arange(len(keys), device=q.device) - positions[:, None]
        scores = torch.einsum("nhd,khd->hnk", q.double(), keys) * attention.scale
        if attention.slopes is not None:
            scores += attention.slopes.double()[:, None, None] * distance
        hidden = distance > 0
        if attention.window:
            hidden |= distance <= -attention.window
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hnk,khd->nhd", weights, values)

    def _fill(self, sequence: int) -> Tensor:
        clock, model, context = self.bench.clock, self.bench.plan.model, self.contexts[sequence]
        qkv = clock.random(context, model.qkv, dtype=self.bench.dtype, seed=sequence)
        plain = Attention(heads=model.heads, scale=1.0)
        table = self.tables[sequence : sequence + 1]
        for first in range(0, context, PIECE_ROWS):
            end = min(context, first + PIECE_ROWS)
            prepared = clock.ops.prepare(rows_of(table, [first], [end], block_size=self.block_size), self.cache)
            for layer in range(self.layers):
                clock.ops.rope_and_write(qkv[first:end], plain, prepared, self.cache, layer)
        clock.compute(lambda: None)
        return qkv


PlainCopy = Callable[[int, bool], Callable[[], object]]
"""Of a size in bytes, and whether it goes out, to a call that copies so much at once and waits for it."""


def copies(plan: Plan, plain: PlainCopy) -> list[Maker]:
    """Yield copies out and in, of scattered and of consecutive blocks."""
    return [
        (f"{op} {plan.swapped_blocks} blocks, {order}", partial(copy, op, order, plain))
        for op in ("copy_out", "copy_in")
        for order in ("scattered", "in a row")
    ]


def copy(op: str, order: str, plain: PlainCopy, bench: Bench) -> Case:
    """Time a copy until it is complete, by the host's clock."""
    model, count = bench.plan.model, bench.plan.swapped_blocks
    shape = CacheShape(count, count, model.layers, model.kv_heads, BLOCK_SIZE, model.head_dim, bench.dtype)
    cache = bench.clock.ops.new_cache(shape)
    there = np.arange(count, dtype=np.int32)
    if order == "scattered":
        there = np.random.default_rng(0).permutation(there).astype(np.int32)
    host = np.arange(count, dtype=np.int32)
    move = partial(cache.copy_out, there, host) if op == "copy_out" else partial(cache.copy_in, host, there)
    size = float(count * shape.block_bytes)
    plain_copy = plain(int(size), op == "copy_out")
    plain_us = bench.clock.wall([plain_copy], 1) and bench.clock.wall([plain_copy], bench.wall_repeats)
    return Case(
        op,
        f"{count} blocks of {shape.block_bytes >> 10} KiB, {order}",
        size,
        0.0,
        time=lambda: bench.clock.wall([move], 1) and bench.clock.wall([move], bench.wall_repeats),
        error=lambda: _error(bench, cache, there, host),
        limit=0.0,
        peers={"one plain copy": lambda: plain_us},
        floor_us=plain_us,
    )


def _error(bench: Bench, cache: Cache, there: Int32, host: Int32) -> float:
    """Return 0 if blocks that were written, copied out, overwritten and copied in again are unchanged."""
    model, ops = bench.plan.model, bench.clock.ops
    rows = min(len(there), 4) * BLOCK_SIZE
    attention = Attention(heads=model.heads, scale=1.0)
    batch = rows_of(there[None, : rows // BLOCK_SIZE], [0], [rows])
    prepared = ops.prepare(batch, cache)

    def write(seed: int) -> None:
        qkv = bench.clock.random(rows, model.qkv, dtype=bench.dtype, seed=seed)
        for layer in range(model.layers):
            ops.rope_and_write(qkv, attention, prepared, cache, layer)

    blocks = there[: rows // BLOCK_SIZE].tolist()
    write(1)
    before = torch.stack([cache.read_block(block) for block in blocks])
    cache.copy_out(there, host)
    write(2)
    cache.copy_in(host, there)
    after = torch.stack([cache.read_block(block) for block in blocks])
    return float((before.double() - after.double()).abs().max())

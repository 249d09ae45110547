"""Sequences in a paged pool, as the attention cases read them: blocks shuffled, layers filled, some kept unpaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bench.kernels.case import Bench
from bench.kernels.shapes import BLOCK_SIZE
from kernels.ops import Attention, Batch, Cache, CacheShape, Int32

PIECE_ROWS = 4096  # written at a time


def rows_of(
    tables: Int32,
    starts: Sequence[int],
    ends: Sequence[int],
    sample_rows: Int32 | None = None,
    block_size: int = BLOCK_SIZE,
) -> Batch:
    """Sequence s computes positions starts[s] .. ends[s] - 1 in blocks tables[s]. Tokens are 0, 1, 2, ..."""
    lengths = np.array(ends) - starts
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
    """One sequence's first `count` tokens, each of which samples, and the blocks that it takes."""
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
        """cache: one of the shape that `shape` gives; by default the backend's own."""
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
        """Of a pool that the sequences fill."""
        model = bench.plan.model
        blocks = sum(-(-context // block_size) for context in contexts)
        return CacheShape(blocks, 0, layers, model.kv_heads, block_size, model.head_dim, bench.dtype)

    @property
    def kept(self) -> list[int]:
        """The sequences that `attended` knows."""
        return sorted(self._kept)

    def last_rows(self, rows: Sequence[int]) -> Batch:
        """The batch that computes the last rows[s] tokens of every sequence."""
        starts = [context - count for context, count in zip(self.contexts, rows, strict=True)]
        return rows_of(self.tables, starts, self.contexts, block_size=self.block_size)

    def attended(self, sequence: int, q: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """float64 attention of rows q [n, heads, head_dim] at these positions of a kept sequence, of the same shape."""
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

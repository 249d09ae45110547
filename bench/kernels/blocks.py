"""Copies of KV blocks between the pool and the host tier, beside one plain copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.kernels.case import Bench, Case, Maker
from bench.kernels.paged import rows_of
from bench.kernels.shapes import BLOCK_SIZE, Plan
from kernels.ops import Attention, Cache, CacheShape, Int32

PlainCopy = Callable[[int, bool], Callable[[], object]]
"""Of a size in bytes, and whether it goes out, to a call that copies so much at once and waits for it."""


def copies(plan: Plan, plain: PlainCopy) -> list[Maker]:
    """Out and in, blocks that lie apart and blocks one after another."""
    return [
        (f"{op} {plan.swapped_blocks} blocks, {order}", partial(copy, op, order, plain))
        for op in ("copy_out", "copy_in")
        for order in ("scattered", "in a row")
    ]


def copy(op: str, order: str, plain: PlainCopy, bench: Bench) -> Case:
    """By the host's clock, until the copy is complete."""
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
    """Blocks that were written, copied out, overwritten and copied in again are what they were: 0."""
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

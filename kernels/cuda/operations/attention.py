"""Paged attention of an iteration: the decode and the prefill kernel over their work items, then the merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.cuda import calls
from kernels.cuda.cache import CudaCache
from kernels.cuda.device import Device, dtype_name, launch, pointer
from kernels.cuda.metadata import CudaPrepared, Staging, Work, plan_columns
from kernels.cuda.planner import Planner, Seats
from kernels.ops import Attention


class PagedAttention:
    """The operation `attention` of kernels.ops, and the memory for its partial results."""

    def __init__(self, gpu: Device, staging: Staging) -> None:
        self.layers: list[Attention] | None = None  # what is asked for, while compile collects it
        self._gpu, self._staging = gpu, staging
        self._prefill_block = partial(calls.prefill_block, has_wgmma=gpu.has_wgmma)
        self._prefill = partial(calls.attention_prefill, wgmma_processors=gpu.processors * gpu.has_wgmma)
        self._partial_out = gpu.empty((0,), torch.float32)
        self._partial_lse = gpu.empty((0,), torch.float32)

    def planner(self, layers: Sequence[Attention], cache: CudaCache) -> Planner:
        """Plan for layers with this attention, as wide as the widest of them."""
        shape, windows = cache.shape, [layer.window for layer in layers]
        group, dtype = layers[0].heads // shape.kv_heads, dtype_name(shape.dtype)
        of_heads, fp8 = (dtype, shape.head_dim), shape.is_8bit
        blocks = calls.decode_block(*of_heads, fp8=fp8), self._prefill_block(*of_heads, fp8=fp8)
        seats = Seats(*(self._gpu.processors * self._gpu.resident(block) for block in blocks))
        return Planner(seats, shape.kv_heads, group, shape.head_dim, max(windows) if all(windows) else 0)

    def reserve(self, rows: int, heads: int, head_dim: int) -> None:
        """Take memory for so many partial rows, once for all layers and iterations."""
        if rows * heads * head_dim > self._partial_out.numel() or rows * heads > self._partial_lse.numel():
            self._partial_out, self._partial_lse = self._partials(rows, heads, head_dim)

    def __call__(self, q: Tensor, attention: Attention, prepared: CudaPrepared, cache: CudaCache, layer: int) -> Tensor:
        if attention.sinks is not None or attention.softcap or not attention.causal:
            what = "sinks, capped scores or attention both ways"
            raise ValueError(f"{what}: the cuda kernels have none; give --kernels reference")
        if self.layers is not None:
            self.layers.append(attention)
        work = self._work(attention, prepared, cache)
        out = self._gpu.empty((q.shape[0], q.shape[1]), q.dtype)
        heads, head_dim = attention.heads, cache.shape.head_dim
        partial_out, partial_lse = self._partial_out, self._partial_lse
        if (
            work.partial_rows * heads * head_dim > partial_out.numel()
            or work.partial_rows * heads > partial_lse.numel()
        ):
            partial_out, partial_lse = self._partials(work.partial_rows, heads, head_dim)
        columns, plan = prepared.columns, prepared.plan
        for make, items, name in (
            (calls.attention_decode, work.decode_items, "decode_items"),
            (self._prefill, work.prefill_items, "prefill_items"),
        ):
            if not items:
                continue
            call = make(
                dtype_name(q.dtype),
                items,
                heads,
                cache.shape.kv_heads,
                head_dim,
                cache.shape.block_size,
                cache.block_stride,
                attention.scale,
                pointer(q),
                pointer(out),
                cache.keys(layer),
                cache.values(layer),
                plan.address(name),
                columns.address("pages"),
                columns.address("page_start"),
                columns.address("context"),
                columns.address("query_start"),
                pointer(partial_out),
                pointer(partial_lse),
                pointer(attention.slopes),
                attention.window,
                fp8=cache.shape.is_8bit,
            )
            read = (q, cache.pool, columns.tensor, plan.tensor, attention.slopes)
            launch(self._gpu.main, call, *read, out, partial_out, partial_lse)
        if work.merged:
            call = calls.attention_merge(
                dtype_name(q.dtype),
                work.merged,
                heads,
                head_dim,
                pointer(out),
                pointer(partial_out),
                pointer(partial_lse),
                plan.address("merge_starts"),
                plan.address("merge_rows"),
            )
            launch(self._gpu.main, call, out, partial_out, partial_lse, plan.tensor)
        return out

    def _work(self, attention: Attention, prepared: CudaPrepared, cache: CudaCache) -> Work:
        """Return the plan of the batch; made now where nothing was known of the attention when it was prepared."""
        group = attention.heads // cache.shape.kv_heads
        if prepared.work is not None and prepared.work.covers(group, attention.window):
            return prepared.work
        planner = self.planner([replace(attention, window=0)], cache)  # for whatever may be asked for next
        plan = planner.plan(prepared.batch.query_start, prepared.batch.context)
        return prepared.plan_anew(Work.of(planner, plan), self._staging.stage(plan_columns(plan)))

    def _partials(self, rows: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        out = self._gpu.empty((rows, heads, head_dim), torch.float32)
        return out, self._gpu.empty((rows, heads), torch.float32)

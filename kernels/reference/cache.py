"""The reference backend's paged KV pool: [block, layer, K/V, kv_head, block_size, head_dim].

Written row by row (head_dim numbers of one token), read tile by tile (block_size rows of one head), so that gathering
a batch is one index_select. One block more than the shape says is kept at zero: shorter sequences are padded with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Cache, CacheShape, Int32


class ReferenceCache(Cache):
    """The pool, and two views of it: `rows` [-1, head_dim] and `tiles` [-1, block_size * head_dim]."""

    layout = "plain"

    def __init__(self, shape: CacheShape, device: torch.device, host: Tensor | None = None) -> None:
        """Take the memory. host: as Ops.new_cache. Raise ValueError for K and V in 8 bits."""
        shape.demand_kv_dtype("reference", "auto")
        self.shape = shape
        block = (shape.layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)
        # empty + zero_ touches every page: memory that is missing is missed now, not in the middle of a request.
        self.pool = torch.empty((shape.blocks + 1, *block), dtype=shape.dtype, device=device).zero_()
        memory = torch.empty(shape.host_blocks * shape.block_bytes, dtype=torch.uint8) if host is None else host
        self.host = self.host_tier(memory.zero_())
        self.rows = self.pool.view(-1, shape.head_dim)
        self.tiles = self.pool.view(-1, shape.block_size * shape.head_dim)
        self.tiles_per_block = shape.layers * 2 * shape.kv_heads
        self.rows_per_block = self.tiles_per_block * shape.block_size

    def layer_tiles(self, layer: int, value: bool) -> Tensor:
        """Return the tiles from a layer's K (or V) of block 0 on: an index for layer 0's K then finds this layer's."""
        return self.tiles[(2 * layer + value) * self.shape.kv_heads :]

    def layer_rows(self, layer: int, value: bool) -> Tensor:
        """Return the same for rows."""
        return self.rows[(2 * layer + value) * self.shape.kv_heads * self.shape.block_size :]

    def put(self, array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """Return the host numbers on the pool's device."""
        return torch.from_numpy(array).to(self.pool.device)

    def copy_out(self, blocks: Int32, host_blocks: Int32) -> None:
        self.host.index_copy_(0, _index(host_blocks), self.pool.index_select(0, _index(blocks)).cpu())

    def host_tier(self, memory: Tensor) -> Tensor:
        return memory.view(self.shape.dtype).view(-1, *self.pool.shape[1:])

    def copy_in(self, host_blocks: Int32, blocks: Int32, tier: Tensor | None = None) -> None:
        source = self.host if tier is None else tier
        found = source.index_select(0, _index(host_blocks)).to(self.pool.device)
        self.pool.index_copy_(0, _index(blocks).to(self.pool.device), found)

    def read_block(self, block: int) -> Tensor:
        return self.pool[block].cpu().clone()


def _index(values: Int32) -> Tensor:
    return torch.from_numpy(values.astype("int64"))

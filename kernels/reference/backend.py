"""Plain torch, one operation after another: the oracle of the other backends and the engine where none is built.

Decode rows (one new token each) are gathered and computed together, a few groups of similar length at a time; chunks of
several tokens are computed sequence by sequence: their lengths and starts differ, padding them would cost more than
the loop, and the token budget bounds how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Batch, CacheShape, Int32, Int64, Ops, Prepared, Sampled, SamplingRows
from kernels.reference.cache import ReferenceCache
from kernels.reference.sampling import sample


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B sequences with one row each, padded to T tokens. `rows` is None when the group is the whole batch."""

    rows: Tensor | None  # [B] int64
    index: Tensor  # [B * kv_heads * T] rows of layer 0's K
    mask: Tensor | None  # [B, 1, 1, T] True where there is a token; None: no padding


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several rows."""

    first: int
    length: int
    context: int
    index: Tensor  # [kv_heads * context]
    mask: Tensor | None  # [length, context]; None: the chunk starts at position 0, plain causal


@dataclass(slots=True)
class ReferencePrepared(Prepared):
    write_index: Tensor  # [N * kv_heads] rows of layer 0's K
    groups: list[DecodeGroup]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Packed:
    weight: Tensor
    bias: Tensor | None


class ReferenceOps(Ops[ReferencePrepared, ReferenceCache]):
    name = "reference"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_cache(self, shape: CacheShape) -> ReferenceCache:
        return ReferenceCache(shape, self.device)

    def prepare(self, batch: Batch, cache: ReferenceCache) -> ReferencePrepared:
        lengths = np.diff(batch.query_start)
        heads = np.arange(cache.shape.kv_heads, dtype=np.int64) * cache.shape.block_size
        write = batch.write_blocks.astype(np.int64) * cache.rows_per_block + batch.write_offsets
        return ReferencePrepared(
            tokens=self._put(batch.tokens.astype(np.int64)),
            positions=self._put(batch.positions.astype(np.int64)),
            sample_rows=self._put(batch.sample_rows.astype(np.int64)),
            write_index=self._put((write[:, None] + heads).ravel()),
            groups=self._decode_groups(batch, np.flatnonzero(lengths == 1), cache),
            chunks=[self._chunk(batch, int(s), cache) for s in np.flatnonzero(lengths > 1)],
        )

    def _decode_groups(self, batch: Batch, sequences: Int64, cache: ReferenceCache) -> list[DecodeGroup]:
        """Sequences by the power of two of their block count: at most half of a group is padding."""
        if not sequences.size:
            return []
        blocks = -(-batch.context[sequences] // cache.shape.block_size)
        bucket = np.ceil(np.log2(blocks)).astype(np.int64)
        groups = []
        for value in np.unique(bucket):
            members = sequences[bucket == value]
            context = batch.context[members]
            longest = int(context.max())
            whole = len(members) == len(batch.tokens)
            mask = None if context.min() == longest else np.arange(longest, dtype=np.int32) < context[:, None]
            groups.append(
                DecodeGroup(
                    rows=None if whole else self._put(batch.query_start[members].astype(np.int64)),
                    index=self._put(_read_index(batch.tables[members], context, longest, cache)),
                    mask=None if mask is None else self._put(mask)[:, None, None, :],
                )
            )
        return groups

    def _chunk(self, batch: Batch, sequence: int, cache: ReferenceCache) -> Chunk:
        first, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
        context, length = int(batch.context[sequence]), end - first
        mask = None
        if length != context:
            mask = self._put(np.arange(context) <= np.arange(context - length, context)[:, None])
        index = _read_index(
            batch.tables[sequence : sequence + 1], batch.context[sequence : sequence + 1], context, cache
        )
        return Chunk(first, length, context, self._put(index), mask)

    def _put(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return Packed(weight.contiguous(), bias)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        return F.linear(x, packed.weight, packed.bias)

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, tokens)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_and_write(
        self, qkv: Tensor, heads: int, rope: Tensor, prepared: ReferencePrepared, cache: ReferenceCache, layer: int
    ) -> Tensor:
        shape = cache.shape
        half = shape.head_dim // 2
        split = qkv.view(qkv.shape[0], -1, shape.head_dim)
        turned = split[:, : heads + shape.kv_heads].float()
        angles = rope.index_select(0, prepared.positions)[:, None, :]
        cos, sin = angles[..., :half], angles[..., half:]
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype)
        keys = out[:, heads:].reshape(-1, shape.head_dim)
        values = split[:, heads + shape.kv_heads :].reshape(-1, shape.head_dim)
        cache.layer_rows(layer, value=False).index_copy_(0, prepared.write_index, keys)
        cache.layer_rows(layer, value=True).index_copy_(0, prepared.write_index, values)
        return out[:, :heads].reshape(qkv.shape[0], -1)

    def attention(
        self, q: Tensor, prepared: ReferencePrepared, cache: ReferenceCache, layer: int, scale: float
    ) -> Tensor:
        kv_heads, head_dim = cache.shape.kv_heads, cache.shape.head_dim
        group = q.shape[1] // (kv_heads * head_dim)
        keys, values = cache.layer_rows(layer, value=False), cache.layer_rows(layer, value=True)
        out: Tensor | None = None
        for decode in prepared.groups:
            rows = q if decode.rows is None else q.index_select(0, decode.rows)
            # The query heads that share a KV head stand where SDPA expects query positions: no copy of K and V for GQA.
            found = F.scaled_dot_product_attention(
                rows.view(-1, kv_heads, group, head_dim),
                keys.index_select(0, decode.index).view(rows.shape[0], kv_heads, -1, head_dim),
                values.index_select(0, decode.index).view(rows.shape[0], kv_heads, -1, head_dim),
                attn_mask=decode.mask,
                scale=scale,
            ).reshape(rows.shape[0], -1)
            if decode.rows is None:
                return found
            out = torch.empty_like(q) if out is None else out
            out.index_copy_(0, decode.rows, found)
        out = torch.empty_like(q) if out is None else out
        for chunk in prepared.chunks:
            rows = q[chunk.first : chunk.first + chunk.length]
            out[chunk.first : chunk.first + chunk.length] = (
                F.scaled_dot_product_attention(
                    rows.view(1, chunk.length, -1, head_dim).transpose(1, 2),
                    keys.index_select(0, chunk.index).view(1, kv_heads, chunk.context, head_dim),
                    values.index_select(0, chunk.index).view(1, kv_heads, chunk.context, head_dim),
                    attn_mask=chunk.mask,
                    is_causal=chunk.mask is None,
                    scale=scale,
                    enable_gqa=group > 1,
                )
                .transpose(1, 2)
                .reshape(chunk.length, -1)
            )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        return sample(logits, rows)


def _read_index(tables: Int32, context: Int32, longest: int, cache: ReferenceCache) -> Int64:
    """[B * kv_heads * longest] rows of layer 0's K, sequence by sequence and head by head; zero rows past the end."""
    shape = cache.shape
    positions = np.arange(longest, dtype=np.int64)
    rows = tables[:, : -(-longest // shape.block_size)].astype(np.int64) * cache.rows_per_block
    rows = np.repeat(rows, shape.block_size, axis=1)[:, :longest] + positions % shape.block_size
    rows[positions >= context[:, None]] = shape.blocks * cache.rows_per_block
    heads = np.arange(shape.kv_heads, dtype=np.int64) * shape.block_size
    return (rows[:, None, :] + heads[:, None]).ravel()

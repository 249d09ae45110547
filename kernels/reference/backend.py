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

GATHERED_NUMBERS = 1 << 19  # of K in one decode group at most: K and V stay in cache (measured: half the CPU time)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B sequences with one row each, padded to T tokens, whole blocks. `rows` is None when it is the whole batch."""

    rows: Tensor | None  # [B] int64
    tiles: Tensor  # [B * kv_heads * T / block_size] of layer 0's K
    tail: Tensor  # places past a sequence's end in its last block, in the gathered [B * kv_heads * T]
    masked: Tensor  # [B, 1, 1, T] True where there is no token


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several rows."""

    first: int
    length: int
    context: int
    tiles: Tensor  # [kv_heads * blocks] of layer 0's K
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
        per_block = cache.shape.kv_heads * cache.shape.block_size * cache.shape.head_dim
        for value in np.unique(bucket):
            members = sequences[bucket == value]
            at_most = max(1, GATHERED_NUMBERS // (per_block << int(value)))
            groups += [
                self._decode_group(batch, members[first : first + at_most], cache)
                for first in range(0, len(members), at_most)
            ]
        return groups

    def _decode_group(self, batch: Batch, members: Int64, cache: ReferenceCache) -> DecodeGroup:
        size, kv_heads = cache.shape.block_size, cache.shape.kv_heads
        context = batch.context[members]
        tiles = _tiles(batch.tables[members], context, cache)
        longest = tiles.shape[2] * size
        positions = np.arange(longest, dtype=np.int32)
        masked = positions >= context[:, None]
        whole = len(members) == len(batch.tokens)
        # Past the end of a last block lie numbers of earlier owners, NaN perhaps, which no mask would stop: 0 * NaN.
        row, offset = np.nonzero(masked & (positions < (-(-context // size) * size)[:, None]))
        tail = (row[:, None] * kv_heads + np.arange(kv_heads)) * longest + offset[:, None]
        return DecodeGroup(
            rows=None if whole else self._put(batch.query_start[members].astype(np.int64)),
            tiles=self._put(tiles.ravel()),
            tail=self._put(tail.ravel()),
            masked=self._put(masked)[:, None, None, :],
        )

    def _chunk(self, batch: Batch, sequence: int, cache: ReferenceCache) -> Chunk:
        first, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
        context, length = int(batch.context[sequence]), end - first
        mask = None
        if length != context:
            mask = self._put(np.arange(context) <= np.arange(context - length, context)[:, None])
        alone = slice(sequence, sequence + 1)
        tiles = _tiles(batch.tables[alone], batch.context[alone], cache)
        return Chunk(first, length, context, self._put(tiles.ravel()), mask)

    def _put(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return Packed(weight.contiguous(), bias)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        rows = x.shape[0]
        size = rows if x.dtype == torch.float32 else _batch_size(rows)
        if size == rows:
            return F.linear(x, packed.weight, packed.bias)
        padded = x.new_zeros(size, x.shape[1])
        padded[:rows] = x
        return F.linear(padded, packed.weight, packed.bias)[:rows]

    def batch_sizes(self, dtype: torch.dtype, most: int) -> list[int]:
        return [] if dtype == torch.float32 else sorted({_batch_size(rows) for rows in range(1, most + 1)})

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
        keys, values = cache.layer_tiles(layer, value=False), cache.layer_tiles(layer, value=True)
        out: Tensor | None = None
        for group in prepared.groups:
            rows = q if group.rows is None else q.index_select(0, group.rows)
            found = _decode(rows, group, keys, values, cache.shape, scale)
            if group.rows is None:
                return found
            out = torch.empty_like(q) if out is None else out
            out.index_copy_(0, group.rows, found)
        out = torch.empty_like(q) if out is None else out
        for chunk in prepared.chunks:
            part = slice(chunk.first, chunk.first + chunk.length)
            out[part] = _prefill(q[part], chunk, keys, values, cache.shape, scale)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        return sample(logits, rows)


def _batch_size(rows: int) -> int:
    """The number of rows that is computed for `rows`.

    oneDNN keeps generated code and buffers for every number of rows it has seen with a bfloat16 matrix (0.25 MB and
    more each, 1,024 kept), so memory would grow for hours; powers of two and eighths of them are few.
    """
    step = max(1, 1 << max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step


def _decode(q: Tensor, group: DecodeGroup, keys: Tensor, values: Tensor, shape: CacheShape, scale: float) -> Tensor:
    """q [B, heads * head_dim] -> the same shape. The query heads that share a KV head stand side by side: no copies."""
    q = q.view(q.shape[0], shape.kv_heads, -1, shape.head_dim)
    k = keys.index_select(0, group.tiles).view(-1, shape.head_dim).index_fill_(0, group.tail, 0.0)
    v = values.index_select(0, group.tiles).view(-1, shape.head_dim).index_fill_(0, group.tail, 0.0)
    k, v = k.view(*q.shape[:2], -1, shape.head_dim), v.view(*q.shape[:2], -1, shape.head_dim)
    if q.dtype != torch.float32:
        # Scores must not be rounded to 8 bits on their way to the softmax; SDPA keeps them in float32.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~group.masked, scale=scale).reshape(q.shape[0], -1)
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(scale).masked_fill_(group.masked, -torch.inf)
    return torch.matmul(scores.softmax(-1), v).reshape(q.shape[0], -1)


def _prefill(q: Tensor, chunk: Chunk, keys: Tensor, values: Tensor, shape: CacheShape, scale: float) -> Tensor:
    """q [length, heads * head_dim] -> the same shape."""
    k = keys.index_select(0, chunk.tiles).view(1, shape.kv_heads, -1, shape.head_dim)[:, :, : chunk.context]
    v = values.index_select(0, chunk.tiles).view(1, shape.kv_heads, -1, shape.head_dim)[:, :, : chunk.context]
    q = q.view(1, chunk.length, -1, shape.head_dim).transpose(1, 2)
    found = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != shape.kv_heads,
    )
    return found.transpose(1, 2).reshape(chunk.length, -1)


def _tiles(tables: Int32, context: Int32, cache: ReferenceCache) -> Int64:
    """[B, kv_heads, blocks of the longest] tiles of layer 0's K; the zero block where a sequence has none."""
    used = -(-context // cache.shape.block_size)
    blocks = tables[:, : int(used.max())].astype(np.int64)
    blocks[np.arange(blocks.shape[1]) >= used[:, None]] = cache.shape.blocks
    return blocks[:, None, :] * cache.tiles_per_block + np.arange(cache.shape.kv_heads)[:, None]

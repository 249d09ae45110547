"""Paged attention in plain torch, with ALiBi, windows, sinks and capped scores. Used by the reference backend alone.

Decode rows (one new token each) are gathered and computed together, a few groups of similar length at a time; chunks of
several tokens are computed sequence by sequence: their lengths and starts differ, padding them would cost more than
the loop, and the token budget bounds how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Attention, Batch, Int32, Int64
from kernels.reference.cache import ReferenceCache

GATHERED_NUMBERS = 1 << 19  # of K in one decode group at most: K and V stay in cache (measured: half the CPU time)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B sequences with one row each, padded to T tokens, whole blocks. `rows` is None when it is the whole batch."""

    rows: Tensor | None  # [B] int64
    tiles: Tensor  # [B * kv_heads * T / block_size] of layer 0's K
    tail: Tensor  # places past a sequence's end in its last block, in the gathered [B * kv_heads * T]
    distance: Tensor  # [B, T] int32: the key's position - the row's; above 0 there is no token
    masked: dict[int, Tensor] = field(default_factory=dict)  # by window: [B, 1, 1, T] True where no token is seen


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several rows."""

    first: int
    length: int
    context: int
    tiles: Tensor  # [kv_heads * blocks] of layer 0's K
    visible: dict[int, Tensor] = field(default_factory=dict)  # by window: [length, context]


def decode_groups(batch: Batch, cache: ReferenceCache) -> list[DecodeGroup]:
    """Return the sequences by the power of two of their block count: at most half of a group is padding."""
    sequences = np.flatnonzero(np.diff(batch.query_start) == 1)
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
            _decode_group(batch, members[first : first + at_most], cache) for first in range(0, len(members), at_most)
        ]
    return groups


def chunks(batch: Batch, cache: ReferenceCache) -> list[Chunk]:
    """Return the sequences of more rows than one."""
    return [_chunk(batch, int(s), cache) for s in np.flatnonzero(np.diff(batch.query_start) > 1)]


def decode(q: Tensor, group: DecodeGroup, cache: ReferenceCache, layer: int, attention: Attention) -> Tensor:
    """Attend q [B, heads * head_dim] -> the same shape.

    The query heads that share a KV head stand side by side: no copies.
    """
    shape = cache.shape
    q = q.view(q.shape[0], shape.kv_heads, -1, shape.head_dim)
    k, v = (
        cache.layer_tiles(layer, value=value)
        .index_select(0, group.tiles)
        .view(-1, shape.head_dim)
        .index_fill_(0, group.tail, 0.0)
        .view(*q.shape[:2], -1, shape.head_dim)
        for value in (False, True)
    )
    if attention.window not in group.masked:
        group.masked[attention.window] = ~_is_visible(group.distance, attention.window)[:, None, None, :]
    hidden = group.masked[attention.window]
    if _is_plain(attention) and attention.slopes is None and q.dtype != torch.float32:
        # Scores must not be rounded to 8 bits on their way to the softmax; SDPA keeps them in float32.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=attention.scale).reshape(q.shape[0], -1)
    scores = _cap(torch.matmul(q.float(), k.float().transpose(2, 3)).mul_(attention.scale), attention)
    if attention.slopes is not None:
        scores += attention.slopes.view(shape.kv_heads, -1, 1) * group.distance[:, None, None, :]
    sinks = None if attention.sinks is None else attention.sinks.view(shape.kv_heads, -1, 1)
    weights = _softmax(scores.masked_fill_(hidden, -torch.inf), sinks)
    return torch.matmul(weights, v.float()).reshape(q.shape[0], -1).to(q.dtype)


def prefill(q: Tensor, chunk: Chunk, cache: ReferenceCache, layer: int, attention: Attention) -> Tensor:
    """Attend q [length, heads * head_dim] -> the same shape."""
    shape = cache.shape
    k, v = (
        cache.layer_tiles(layer, value=value)
        .index_select(0, chunk.tiles)
        .view(1, shape.kv_heads, -1, shape.head_dim)[:, :, : chunk.context]
        for value in (False, True)
    )
    if not _is_plain(attention):
        return _prefill_by_formula(q, k[0], v[0], chunk, attention)
    plain = chunk.length == chunk.context and not attention.window and attention.slopes is None
    mask: Tensor | None = None
    if not plain and attention.causal:
        mask = _chunk_mask(chunk, attention, q.device)
    dtype = q.dtype
    if attention.slopes is not None:
        q, k, v = q.float(), k.float(), v.float()
    q = q.view(1, chunk.length, -1, shape.head_dim).transpose(1, 2)
    found = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=plain and attention.causal,
        scale=attention.scale,
        enable_gqa=q.shape[1] != shape.kv_heads,
    )
    return found.transpose(1, 2).reshape(chunk.length, -1).to(dtype)


def _is_plain(attention: Attention) -> bool:
    """Return whether torch's own attention computes it."""
    return attention.sinks is None and not attention.softcap


def _prefill_by_formula(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, attention: Attention) -> Tensor:
    """Attend q [length, heads * head_dim] to k and v [kv_heads, context, head_dim] in float32."""
    kv_heads, _, head_dim = k.shape
    rows = q.float().view(chunk.length, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, length, dim]
    scores = _cap(torch.matmul(rows, k.float()[:, None].transpose(2, 3)).mul_(attention.scale), attention)
    mask = _chunk_mask(chunk, attention, q.device)
    if attention.slopes is None:
        scores.masked_fill_(~mask, -torch.inf)
    else:
        scores += mask.view(kv_heads, -1, *mask.shape[1:])
    sinks = None if attention.sinks is None else attention.sinks.view(kv_heads, -1, 1, 1)
    found = torch.matmul(_softmax(scores, sinks), v.float()[:, None])
    return found.permute(2, 0, 1, 3).reshape(chunk.length, -1).to(q.dtype)


def _cap(scores: Tensor, attention: Attention) -> Tensor:
    return scores.div_(attention.softcap).tanh_().mul_(attention.softcap) if attention.softcap else scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last axis; sinks: one more score of each row, of the shape of scores[..., :1]."""
    if sinks is None:
        return scores.softmax(-1)
    most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - most).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + (sinks - most).exp_())


def _chunk_mask(chunk: Chunk, attention: Attention, device: torch.device) -> Tensor:
    """Return [length, context] True where a row sees a key; with ALiBi [heads, length, context] added to scores.

    The latter in float32 whatever the model's type: a bias of eight bits would move whole positions.
    """
    window, slopes = attention.window, attention.slopes
    if window in chunk.visible and slopes is None:
        return chunk.visible[window]
    positions = torch.arange(chunk.context, dtype=torch.int32, device=device)
    distance = positions - positions[chunk.context - chunk.length :, None]
    chunk.visible[window] = seen = _is_visible(distance, window)
    return seen if slopes is None else (slopes[:, None, None] * distance).masked_fill_(~seen, -torch.inf)


def _is_visible(distance: Tensor, window: int) -> Tensor:
    seen = distance <= 0
    return seen & (distance > -window) if window else seen


def _decode_group(batch: Batch, members: Int64, cache: ReferenceCache) -> DecodeGroup:
    size, kv_heads = cache.shape.block_size, cache.shape.kv_heads
    context = batch.context[members]
    tiles = _tiles(batch.tables[members], context, cache)
    longest = tiles.shape[2] * size
    positions = np.arange(longest, dtype=np.int32)
    whole = len(members) == len(batch.tokens)
    # Past the end of a last block lie numbers of earlier owners, NaN perhaps, which no mask would stop: 0 * NaN.
    used = (-(-context // size) * size)[:, None]
    row, offset = np.nonzero((positions >= context[:, None]) & (positions < used))
    tail = (row[:, None] * kv_heads + np.arange(kv_heads)) * longest + offset[:, None]
    return DecodeGroup(
        rows=None if whole else cache.put(batch.query_start[members].astype(np.int64)),
        tiles=cache.put(tiles.ravel()),
        tail=cache.put(tail.ravel()),
        distance=cache.put(positions - (context[:, None] - 1)),
    )


def _chunk(batch: Batch, sequence: int, cache: ReferenceCache) -> Chunk:
    first, end = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
    context, length = int(batch.context[sequence]), end - first
    alone = slice(sequence, sequence + 1)
    tiles = _tiles(batch.tables[alone], batch.context[alone], cache)
    return Chunk(first, length, context, cache.put(tiles.ravel()))


def _tiles(tables: Int32, context: Int32, cache: ReferenceCache) -> Int64:
    """Return [B, kv_heads, blocks of the longest] tiles of layer 0's K; the zero block where a sequence has none."""
    used = -(-context // cache.shape.block_size)
    blocks = tables[:, : int(used.max())].astype(np.int64)
    blocks[np.arange(blocks.shape[1]) >= used[:, None]] = cache.shape.blocks
    return blocks[:, None, :] * cache.tiles_per_block + np.arange(cache.shape.kv_heads)[:, None]

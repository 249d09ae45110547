"""The reference backend: plain torch, one operation after another.

The oracle of the other backends and the engine where none of them can be had. Attention is in attention.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.formats import W8A8
from kernels.ops import (
    Attention,
    Batch,
    CacheShape,
    Groups,
    LowRankPairs,
    Norm,
    Ops,
    Prepared,
    Routing,
    RowsByAdapter,
    Sampled,
    SamplingRows,
)
from kernels.reference.attention import Chunk, DecodeGroup, chunks, decode, decode_groups, prefill
from kernels.reference.cache import ReferenceCache
from kernels.reference.sampling import sample


@dataclass(frozen=True, slots=True)
class ReferencePrepared(Prepared):
    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    sample_rows: Tensor  # [R] int64
    write_index: Tensor  # [N * kv_heads] rows of layer 0's K
    groups: list[DecodeGroup]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Packed:
    weight: Tensor
    bias: Tensor | None  # of the weight's dtype


EXACT_INPUTS = 1024
"""Of a sum in float32: 1,024 products of at most 127 * 128 add up to less than 2^24, so no sum is rounded."""


@dataclass(frozen=True, slots=True)
class RoundingRows:
    """A matrix of Groups with rounds_rows."""

    weight: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs] float32
    bias: Tensor | None  # [outputs] float32


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices of both kinds, one under the other."""

    parts: tuple[Packed | RoundingRows, ...]


AnyPacked = Packed | RoundingRows | Stacked


class ReferenceOps(Ops[ReferencePrepared, ReferenceCache]):
    name = "reference"
    group_formats = frozenset({W8A8})

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_cache(self, shape: CacheShape, host: Tensor | None = None) -> ReferenceCache:
        return ReferenceCache(shape, self.device, host)

    def prepare(self, batch: Batch, cache: ReferenceCache) -> ReferencePrepared:
        heads = np.arange(cache.shape.kv_heads, dtype=np.int64) * cache.shape.block_size
        write = batch.write_blocks.astype(np.int64) * cache.rows_per_block + batch.write_offsets
        return ReferencePrepared(
            tokens=cache.put(batch.tokens.astype(np.int64)),
            positions=cache.put(batch.positions.astype(np.int64)),
            sample_rows=cache.put(batch.sample_rows.astype(np.int64)),
            write_index=cache.put((write[:, None] + heads).ravel()),
            groups=decode_groups(batch, cache),
            chunks=chunks(batch, cache),
        )

    def pack_linear(
        self, parts: Iterable[Tensor], outputs: int, inputs: int, bias: Tensor | None, weight_format: str = ""
    ) -> Packed:
        self.demand_format(weight_format)
        weight = self._join(parts, outputs, inputs)
        return Packed(weight, None if bias is None else bias.to(self.device, weight.dtype))

    def pack_groups(self, parts: Iterable[Groups], outputs: int, inputs: int, bias: Tensor | None) -> RoundingRows:
        weight = torch.empty(outputs, inputs, dtype=torch.int8, device=self.device)
        scales = torch.empty(outputs, device=self.device)
        first = 0
        for part in parts:
            if part.group_format not in self.group_formats:
                raise ValueError(f"weights in {part.group_format}: the {self.name} backend has no kernels for them")
            rows = slice(first, first + len(part.numbers))
            weight[rows], scales[rows] = part.numbers.to(torch.int16) - 128, part.scales[:, 0]
            first = rows.stop
        if first != outputs:
            raise ValueError(f"the parts of a matrix of {outputs} rows have {first}")
        return RoundingRows(weight, scales, None if bias is None else bias.to(self.device))

    def stack(self, packed: Sequence[Packed | RoundingRows]) -> Stacked:
        return Stacked(tuple(packed))

    def pack_embedding(self, parts: Iterable[Tensor], tokens: int, hidden: int) -> Packed:
        return Packed(self._join(parts, tokens, hidden), None)

    def _join(self, parts: Iterable[Tensor], rows: int, width: int) -> Tensor:
        whole: Tensor | None = None
        first = 0
        for part in parts:
            if whole is None:
                whole = torch.empty(rows, width, dtype=part.dtype, device=self.device)
            whole[first : first + part.shape[0]] = part
            first += part.shape[0]
        if whole is None or first != rows:
            raise ValueError(f"the parts of a matrix of {rows} rows have {first}")
        return whole

    def linear(self, x: Tensor, packed: AnyPacked) -> Tensor:
        if isinstance(packed, Stacked):
            return torch.cat([self.linear(x, part) for part in packed.parts], -1)
        if isinstance(packed, RoundingRows):
            return _rounding_rows(x.float(), packed).to(x.dtype)
        rows = x.shape[0]
        size = rows if x.dtype == torch.float32 else batch_size(rows)
        if size == rows:
            return F.linear(x, packed.weight, packed.bias)
        padded = x.new_zeros(size, x.shape[1])
        padded[:rows] = x
        return F.linear(padded, packed.weight, packed.bias)[:rows]

    def logits(self, x: Tensor, packed: Packed) -> Tensor:
        return self.linear(x, packed).float()

    def batch_sizes(self, dtype: torch.dtype, most: int) -> list[int]:
        return [] if dtype == torch.float32 else sorted({min(batch_size(rows), most) for rows in range(1, most + 1)})

    def embed(
        self, prepared: ReferencePrepared, table: Packed, scale: float = 1.0, position_embeddings: Tensor | None = None
    ) -> Tensor:
        found = table.weight.index_select(0, prepared.tokens)
        if scale != 1.0:
            found *= scale
        if position_embeddings is not None:
            found += position_embeddings.index_select(0, prepared.positions)
        return found

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        width, wide = (x.shape[-1],), x.float()
        if norm.layer_norm:
            return F.layer_norm(wide, width, norm.weight, norm.bias, norm.eps).to(x.dtype)
        return F.rms_norm(wide, width, norm.weight, norm.eps).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        residual += x
        return self.norm(residual, norm)

    def add(self, x: Tensor, residual: Tensor) -> None:
        residual += x

    def blank(self, prepared: ReferencePrepared, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(len(prepared.tokens), width, dtype=dtype, device=self.device)

    def add_low_rank(self, x: Tensor, out: Tensor, pairs: LowRankPairs, rows: RowsByAdapter) -> None:
        for number, *ends in zip(rows.adapters.tolist(), rows.starts[:-1], rows.starts[1:], strict=True):
            if number in pairs.by_number:
                down, ups = pairs.by_number[number]
                these = torch.from_numpy(rows.order[slice(*ends)]).to(self.device)
                inner, whole = self.logits(x[these], down), out[these]
                for up in ups:
                    part = whole[:, up.outputs.start : up.outputs.stop]
                    added = self.logits(inner[:, up.ranks.start : up.ranks.stop], up.matrix)
                    part.copy_(part.float() + added)
                out[these] = whole

    def select(self, x: Tensor, prepared: ReferencePrepared) -> Tensor:
        return x.index_select(0, prepared.sample_rows)

    def rope_and_write(
        self, qkv: Tensor, attention: Attention, prepared: ReferencePrepared, cache: ReferenceCache, layer: int
    ) -> Tensor:
        shape, heads = cache.shape, attention.heads
        split = qkv.view(qkv.shape[0], -1, shape.head_dim)
        q, k = split[:, :heads], split[:, heads : heads + shape.kv_heads]
        if attention.q_norm is not None:
            q = self.norm(q, attention.q_norm)
        if attention.k_norm is not None:
            k = self.norm(k, attention.k_norm)
        if attention.rope is not None:
            angles = attention.rope.index_select(0, prepared.positions)[:, None, :]
            q, k = _rotate(q, angles), _rotate(k, angles)
        values = split[:, heads + shape.kv_heads :].reshape(-1, shape.head_dim)
        cache.layer_rows(layer, value=False).index_copy_(0, prepared.write_index, k.reshape(-1, shape.head_dim))
        cache.layer_rows(layer, value=True).index_copy_(0, prepared.write_index, values)
        return q.reshape(qkv.shape[0], -1)

    def attention(
        self, q: Tensor, attention: Attention, prepared: ReferencePrepared, cache: ReferenceCache, layer: int
    ) -> Tensor:
        out: Tensor | None = None
        for group in prepared.groups:
            rows = q if group.rows is None else q.index_select(0, group.rows)
            found = decode(rows, group, cache, layer, attention)
            if group.rows is None:
                return found
            out = torch.empty_like(q) if out is None else out
            out.index_copy_(0, group.rows, found)
        out = torch.empty_like(q) if out is None else out
        for chunk in prepared.chunks:
            part = slice(chunk.first, chunk.first + chunk.length)
            out[part] = prefill(q[part], chunk, cache, layer, attention)
        return out

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gate, up = gate.float().clamp(max=7), up.float().clamp(-7, 7)
            return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(gate_up.dtype)
        return self.activate(gate, activation).mul_(up)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return F.silu(x)
        if activation == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        return logits.div_(cap).tanh_().mul_(cap)

    def pack_experts(
        self, gate_up: Sequence[AnyPacked], down: Sequence[AnyPacked]
    ) -> list[tuple[AnyPacked, AnyPacked]]:
        return list(zip(gate_up, down, strict=True))

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        packed: list[tuple[AnyPacked, AnyPacked]],
        routing: Routing,
        shared: Tensor | None = None,
        shared_logits: Tensor | None = None,
    ) -> Tensor:
        chosen = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
        weights = torch.softmax(logits, -1).gather(1, chosen)
        if routing.normalize:
            weights /= weights.sum(-1, keepdim=True)
        terms = torch.empty(*chosen.shape, x.shape[1], dtype=torch.float32, device=self.device)
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = packed[expert]
            inner = self.act_and_mul(self.linear(x[rows], gate_up), routing.activation)
            terms[rows, ranks] = self.linear(inner, down).float() * weights[rows, ranks, None]
        out = terms[:, 0].clone()
        for rank in range(1, routing.top_k):
            out += terms[:, rank]
        if shared is not None and shared_logits is not None:
            out += torch.sigmoid(shared_logits) * shared.float()
        return out.to(x.dtype)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        return sample(logits.cpu(), rows)  # the sampler works on the host


def _rounding_rows(x: Tensor, packed: RoundingRows) -> Tensor:
    """Return what Groups.rounds_rows says of x [N, inputs] float32."""
    largest = x.abs().amax(-1, keepdim=True)
    scales = torch.where(largest < torch.inf, largest / 127, torch.nan)
    codes = (x / torch.where(scales > 0, scales, torch.inf)).clamp_(-127, 127).round_().nan_to_num_()
    sums = torch.zeros(len(x), len(packed.weight), dtype=torch.float64, device=x.device)
    for first in range(0, x.shape[1], EXACT_INPUTS):
        some = slice(first, first + EXACT_INPUTS)
        sums += codes[:, some] @ packed.weight[:, some].float().T
    found = sums.float() * packed.scales * scales
    return found if packed.bias is None else found + packed.bias


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [N, heads, head_dim] with its first numbers turned by angles [N, 1, rotary]."""
    rotary = angles.shape[-1]
    cos, sin = angles.chunk(2, dim=-1)
    a, b = x[..., :rotary].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), dim=-1)


def batch_size(rows: int) -> int:
    """Return the number of rows that is computed for `rows`.

    oneDNN keeps generated code and buffers for every number of rows it has seen with a bfloat16 matrix (0.25 MB and
    more each, 1,024 kept), so memory would grow for hours; powers of two and eighths of them are few.
    """
    step = max(1, 1 << max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step

"""The layers of a decoder: Attention, and Mlp or MixtureOfExperts, joined by DecoderLayer.

Each loads its weights and has one `forward`. `forward` calls operations of the backend and nothing else, the same ones
whatever the batch holds, so that a backend may record it (`Ops.compile`). It drops a tensor as soon as no operation
reads it any more: a recording reuses its memory. N is the number of rows of an iteration; after `select` it is the
number of rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import ops as kernel_ops
from kernels.ops import AnyOps, Cache, Norm, Prepared
from services.worker.checkpoint.source import trim_heap
from services.worker.models.adapters import LinearAdapters
from services.worker.models.config import Mixture
from services.worker.models.rope import rotary_table
from services.worker.models.weights import Rows, WeightLoader
from services.worker.parallel.state import ParallelState
from services.worker.quantization.base import LinearMethod


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix product; where ranks split it, each computes some of the outputs."""

    ops: AnyOps
    method: LinearMethod
    weight: Any  # as `method` packs it
    adapters: LinearAdapters

    def forward(self, x: Tensor, selected: bool = False) -> Tensor:
        """Multiply x [N, inputs] -> [N, outputs of this rank]. selected: the rows are those that sample alone."""
        out = self.method.multiply(self.ops, x, self.weight)
        self.adapters.add(x, out, selected)
        return out


@dataclass(frozen=True, slots=True)
class RowParallelLinear(Linear):
    """A matrix product. Each rank of a stage has some of the inputs, and the ranks' products are summed."""

    parallel: ParallelState

    def forward(self, x: Tensor, selected: bool = False) -> Tensor:
        """Multiply x [N, inputs of this rank] -> [N, outputs], summed over the ranks. selected: see Linear."""
        out = Linear.forward(self, x, selected)
        if self.parallel.tp > 1:
            self.ops.exchange(out, self.parallel.all_reduce)
        return out


@dataclass(slots=True)
class Residual:
    """The residual stream [N, hidden] of an iteration, and the output that is still to be added to it."""

    rows: Tensor
    pending: Tensor | None = None

    def norm(self, ops: AnyOps, norm: Norm) -> Tensor:
        """Add what is pending; return the rows normalised, [N, hidden]."""
        if self.pending is None:
            return ops.norm(self.rows, norm)
        pending, self.pending = self.pending, None
        return ops.add_norm(pending, self.rows, norm)

    def norm_then_add(self, ops: AnyOps, norm: Norm) -> Tensor:
        """Return the rows normalised without what is pending, [N, hidden], which is added afterwards."""
        normed = ops.norm(self.rows, norm)
        if self.pending is not None:
            ops.add(self.pending, self.rows)
            self.pending = None
        return normed


class PositionTables:
    """Rotary angles and ALiBi slopes of this rank's heads: computed once, shared by all layers."""

    def __init__(self, loader: WeightLoader) -> None:
        config, heads, device = loader.config, loader.shard.heads, loader.ops.device
        self.rope, self.local_rope = (
            None if rope is None else rotary_table(rope, loader.positions).to(device)
            for rope in (config.rope, config.local_rope)
        )
        self.slopes: Tensor | None = None
        if config.family.positions == "alibi":
            self.slopes = alibi_slopes(config.heads)[heads.start : heads.stop].to(device)


class Attention:
    """Grouped-query attention over the paged KV cache: qkv_proj, rotation, attention, o_proj."""

    def __init__(self, loader: WeightLoader, parallel: ParallelState, index: int, tables: PositionTables) -> None:
        """Load layer `index` of the whole model. Raise ModelError."""
        c, names, shard, ops = loader.config, loader.names, loader.shard, loader.ops
        prefix, window = loader.layer_prefix(index), c.windows[index]
        self.ops = ops
        self.cache_layer = 0 if c.family.is_encoder else index - shard.layers.start  # an encoder's KV lasts for a layer
        rows = _qkv_rows(loader, prefix)
        packed = loader.column_parallel(rows, "qkv_proj")
        self.qkv_proj = Linear(ops, loader.method, packed, loader.adapters_of(rows, range(c.hidden_size)))
        self.spec = kernel_ops.Attention(
            heads=len(shard.heads),
            scale=c.scale,
            rope=tables.local_rope if window and tables.local_rope is not None else tables.rope,
            q_norm=loader.optional_norm(prefix, names.q_norm, c.head_dim),
            k_norm=loader.optional_norm(prefix, names.k_norm, c.head_dim),
            window=window if window < loader.positions else 0,
            slopes=tables.slopes,
            sinks=loader.sinks(prefix),
            softcap=c.score_softcap,
            causal=not c.family.is_encoder,
        )
        columns = _head_numbers(shard.heads, c.head_dim)
        name = f"{prefix}{names.o_proj}"
        o_proj = loader.row_parallel(name, c.heads * c.head_dim, columns, "o_proj")
        adapters = loader.adapters_of([Rows(name, c.hidden_size, range(c.hidden_size))], columns)
        self.o_proj = RowParallelLinear(ops, loader.method, o_proj, adapters, parallel)

    def forward(self, x: Tensor, prepared: Prepared, cache: Cache, select: bool) -> Tensor:
        """Compute x [N, hidden] -> [N, hidden]; write the K and V of every row.

        select: return the rows that sample alone.
        """
        ops, spec, layer = self.ops, self.spec, self.cache_layer
        query = ops.rope_and_write(self.qkv_proj.forward(x), spec, prepared, cache, layer)
        del x
        attended = ops.attention(query, spec, prepared, cache, layer)
        del query
        if select:
            attended = ops.select(attended, prepared)
        return self.o_proj.forward(attended, select)


class Mlp:
    """gate_up_proj, activation, down_proj; without a gate, gate_up_proj is the up matrix alone."""

    def __init__(
        self,
        loader: WeightLoader,
        parallel: ParallelState,
        prefix: str,
        names: tuple[tuple[str, ...], str],
        inner: tuple[int, range],
    ) -> None:
        """Load the matrices `names` (gate_up_proj, down_proj) after `prefix`. Raise ModelError.

        inner: the intermediate size, and the rank's part of it.
        """
        c, ops = loader.config, loader.ops
        self.ops, self.activation = ops, c.activation
        gate_up, down = _mlp_matrices(loader, prefix, names, inner)
        hidden = range(c.hidden_size)
        rows = _gate_up_rows(loader, prefix, names[0], inner)
        self.gate_up_proj = Linear(ops, loader.method, gate_up, loader.adapters_of(rows, hidden))
        adapters = loader.adapters_of([Rows(f"{prefix}{names[1]}", c.hidden_size, hidden)], inner[1])
        self.down_proj = RowParallelLinear(ops, loader.method, down, adapters, parallel)
        self._activate = ops.act_and_mul if c.family.gated else ops.activate

    def forward(self, x: Tensor, selected: bool = False) -> Tensor:
        """Compute x [N, hidden] -> [N, hidden]. selected: the rows are those that sample alone."""
        inner = self.gate_up_proj.forward(x, selected)
        del x
        inner = self._activate(inner, self.activation)
        return self.down_proj.forward(inner, selected)


class MixtureOfExperts:
    """A router gives each row to a few gated MLPs, its experts; their outputs are summed with weights.

    A model may have a shared expert that computes every row. A rank has its part of every expert and the whole router.
    """

    def __init__(self, loader: WeightLoader, parallel: ParallelState, prefix: str, mixture: Mixture) -> None:
        """Load the tensors after `prefix`; mixture: of the whole model. Raise ModelError."""
        names, ops, shard = mixture.names, loader.ops, loader.shard
        self.ops, self.parallel = ops, parallel
        self.routing = kernel_ops.Routing(mixture.top_k, mixture.normalize, loader.config.activation)
        self.router = loader.replicated(f"{prefix}{names.router}", mixture.experts, "router")
        parts, inner = (names.gate_up_proj, names.down_proj), (mixture.intermediate_size, shard.expert)
        pairs = [
            loader.stacked_expert(prefix, mixture, expert)
            if names.stacked
            else _mlp_matrices(loader, f"{prefix}{names.experts}.{expert}.", parts, inner)
            for expert in range(mixture.experts)
        ]
        self.experts = ops.pack_experts([gate_up for gate_up, _ in pairs], [down for _, down in pairs])
        trim_heap()
        self.shared: Mlp | None = None
        self.shared_gate: Any = None
        if names.shared is not None and names.shared_gate is not None:
            inner = (mixture.shared_size, shard.shared)
            # Its part is summed over the ranks with those of the others.
            self.shared = Mlp(loader, ParallelState(), f"{prefix}{names.shared}.", parts, inner)
            self.shared_gate = loader.replicated(f"{prefix}{names.shared_gate}", 1)

    def forward(self, x: Tensor, selected: bool = False) -> Tensor:
        """Compute x [N, hidden] -> [N, hidden]. selected: see Mlp."""
        ops = self.ops
        logits = ops.logits(x, self.router)
        shared = shared_logits = None
        if self.shared is not None:
            shared, shared_logits = self.shared.forward(x, selected), ops.logits(x, self.shared_gate)
        out = ops.experts(x, logits, self.experts, self.routing, shared, shared_logits)
        if self.parallel.tp > 1:
            ops.exchange(out, self.parallel.all_reduce)
        return out


class DecoderLayer:
    """Attention and MLP on a residual stream, one after the other or side by side (GPT-NeoX's parallel residual)."""

    def __init__(self, loader: WeightLoader, parallel: ParallelState, index: int, tables: PositionTables) -> None:
        """Load layer `index` of the whole model, large matrices first. Raise ModelError."""
        names, prefix = loader.names, loader.layer_prefix(index)
        self.ops, self.parallel_residual = loader.ops, loader.config.parallel_residual
        self.attention = Attention(loader, parallel, index, tables)
        self.mlp: Mlp | MixtureOfExperts
        if mixture := loader.config.mixture_at(index):
            self.mlp = MixtureOfExperts(loader, parallel, prefix, mixture)
        else:
            parts = (names.gate_up_proj, names.down_proj)
            inner = (loader.config.intermediate_size, loader.shard.intermediate)
            self.mlp = Mlp(loader, parallel, prefix, parts, inner)
        self.input_norm = loader.norm(f"{prefix}{names.input_norm}")
        self.attention_norm = loader.optional_norm(prefix, names.attention_norm)
        self.mlp_norm = loader.norm(f"{prefix}{names.mlp_norm}")
        self.down_norm = loader.optional_norm(prefix, names.down_norm)

    def forward(self, residual: Residual, prepared: Prepared, cache: Cache, select: bool = False) -> None:
        """Advance `residual` by this layer, its output pending. select: in the last layer, keep the rows that sample.

        No row is read by another one after the last attention: only the rows that sample go on.
        """
        ops = self.ops
        out = self.attention.forward(residual.norm(ops, self.input_norm), prepared, cache, select)
        if select:
            residual.rows = ops.select(residual.rows, prepared)
        if self.attention_norm is not None:
            out = ops.norm(out, self.attention_norm)
        residual.pending = out
        del out
        norm = residual.norm_then_add if self.parallel_residual else residual.norm
        out = self.mlp.forward(norm(ops, self.mlp_norm), select)
        residual.pending = out if self.down_norm is None else ops.norm(out, self.down_norm)


def _mlp_matrices(
    loader: WeightLoader, prefix: str, names: tuple[tuple[str, ...], str], inner: tuple[int, range]
) -> tuple[Any, Any]:
    """Return the packed gate_up_proj and down_proj of an MLP; see Mlp."""
    gate_up_proj, down_proj = names
    rows = _gate_up_rows(loader, prefix, gate_up_proj, inner)
    return loader.column_parallel(rows, "mlp"), loader.row_parallel(f"{prefix}{down_proj}", *inner, "mlp")


def _gate_up_rows(loader: WeightLoader, prefix: str, names: tuple[str, ...], inner: tuple[int, range]) -> list[Rows]:
    """Return the rows of gate_up_proj; see Mlp."""
    return loader.stacked(prefix, names, [inner] * (2 if loader.config.family.gated else 1))


def _qkv_rows(loader: WeightLoader, prefix: str) -> list[Rows]:
    """Return the rows of the queries, keys and values of the shard's heads."""
    c, names, shard, size = loader.config, loader.names, loader.shard, loader.config.head_dim
    if c.family.interleaved:  # which has as many KV heads as heads
        total = 3 * c.heads * size
        starts = [3 * size * head + part * size for part in range(3) for head in shard.heads]
        return [Rows(f"{prefix}{names.qkv_proj[0]}", total, range(start, start + size)) for start in starts]
    query = (size * c.heads, _head_numbers(shard.heads, size))
    kv = (size * c.kv_heads, _head_numbers(shard.kv_heads, size))
    return loader.stacked(prefix, names.qkv_proj, [query, kv, kv])


def _head_numbers(heads: range, size: int) -> range:
    """Return the numbers of heads that have `size` each."""
    return range(heads.start * size, heads.stop * size)


def alibi_slopes(heads: int) -> Tensor:
    """Return [heads] float32: the geometric sequence of ALiBi (arXiv 2108.12409, section 3).

    Where the number of heads is no power of two: those of the largest power below, then every other one of the next.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)

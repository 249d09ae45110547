"""One decoder described by a DecoderConfig, or a rank's part of it; it knows tensors and kernels, no slot.

`forward` takes the flattened tokens of an iteration (selective batching: linear layers see one matrix, attention sees
per-sequence ranges) and returns the logits of the rows that sample. A backend may record it (`Ops.compile`): it calls
the same operations whatever the batch holds, nothing but operations, and lets go of what it no longer needs. Where
ranks meet it says so by an operation too (`Ops.exchange`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.ops import AnyOps, Cache, Prepared
from services.worker.models.checkpoint import Source
from services.worker.models.config import DecoderConfig
from services.worker.models.shard import shard_of
from services.worker.models.weights import load_weights
from services.worker.parallel.state import Mesh


class Decoder:
    """Weights and forward pass."""

    def __init__(
        self,
        config: DecoderConfig,
        source: Source,
        ops: AnyOps,
        dtype: torch.dtype,
        positions: int,
        int8: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """Loads the weights; `positions` is the largest context served. int8: of the layers' matrices.

        config: of the whole model, of which this rank of the mesh computes a part. Raises ModelError, and
        ConfigurationError where the mesh cannot cut the model.
        """
        self.mesh = mesh or Mesh()
        self.shard = shard_of(config, self.mesh)
        self.config = self.shard.config(config)
        self.ops = ops
        self.dtype = dtype
        self.weights = load_weights(config, self.shard, source, ops, dtype, positions, int8)
        self.began: Any = None  # Ops.mark() when the stage before this one had sent its rows

    def forward(self, prepared: Prepared, cache: Cache) -> Tensor:
        """[R, vocab] float32 logits of the rows that sample, or this rank's vocab_rows of them; writes the K and V of
        every row. A stage that is not the last sends its rows on; what it returns means nothing."""
        ops, weights, mesh = self.ops, self.weights, self.mesh
        residual = self._enter(prepared)
        act = ops.gated if self.config.family.gated else ops.activate
        hidden: Tensor | None = None  # what is still to be added to the residual
        for index, layer in enumerate(weights.layers):
            if hidden is None:
                normed = ops.norm(residual, layer.input_norm)
            else:
                normed = ops.add_norm(hidden, residual, layer.input_norm)
            hidden = None
            query = ops.rope_and_write(ops.linear(normed, layer.qkv), layer.attention, prepared, cache, index)
            del normed
            attended = ops.attention(query, layer.attention, prepared, cache, index)
            del query
            if mesh.last and index == len(weights.layers) - 1:
                # From here on no row is read by another: only those that sample go on.
                attended, residual = ops.select(attended, prepared), ops.select(residual, prepared)
            out = ops.linear(attended, layer.out)
            self._sum(out)
            del attended
            if layer.attention_norm is not None:
                out = ops.norm(out, layer.attention_norm)
            if self.config.parallel:
                normed = ops.norm(residual, layer.mlp_norm)
                ops.add(out, residual)
            else:
                normed = ops.add_norm(out, residual, layer.mlp_norm)
            del out
            inner = ops.linear(normed, layer.up)
            del normed
            inner = act(inner, self.config.activation)
            hidden = ops.linear(inner, layer.down)
            self._sum(hidden)
            del inner
            if layer.down_norm is not None:
                hidden = ops.norm(hidden, layer.down_norm)
        if hidden is None:
            raise ValueError("a decoder needs at least one layer")
        if weights.norm is None:
            ops.add(hidden, residual)
            ops.exchange(residual, mesh.send_rows)
            return residual
        return ops.logits(ops.add_norm(hidden, residual, weights.norm), weights.head)

    def _enter(self, prepared: Prepared) -> Tensor:
        """[N, hidden]: the tokens' embeddings, or what the stage before this one has made of them."""
        ops, weights = self.ops, self.weights
        if not self.mesh.first:
            residual = ops.blank(prepared, self.config.hidden_size, self.dtype)
            ops.exchange(residual, self._receive)
            return residual
        residual = ops.embed(prepared, weights.tokens, weights.tokens_scale, weights.places)
        self._sum(residual)
        return residual if weights.tokens_norm is None else ops.norm(residual, weights.tokens_norm)

    def _receive(self, rows: Tensor) -> None:
        self.mesh.receive_rows(rows)
        self.began = self.ops.mark()

    def _sum(self, x: Tensor) -> None:
        """x, of which every rank of the stage has a part, becomes the whole."""
        if self.mesh.tp > 1:
            self.ops.exchange(x, self.mesh.all_reduce)

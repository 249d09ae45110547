"""One decoder described by a DecoderConfig; it knows tensors and kernels, no slot and no scheduler.

`forward` takes the flattened tokens of an iteration (selective batching: linear layers see one matrix, attention sees
per-sequence ranges) and returns the logits of the rows that sample. A backend may record it (`Ops.compile`): it calls
the same operations whatever the batch holds, nothing but operations, and lets go of what it no longer needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import AnyOps, Cache, Prepared
from services.worker.models.config import DecoderConfig
from services.worker.models.loader import Source
from services.worker.models.weights import load_weights


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
    ) -> None:
        """Loads all weights; `positions` is the largest context served. int8: of the layers' matrices.

        Raises ModelError.
        """
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.weights = load_weights(config, source, ops, dtype, positions, int8)

    def forward(self, prepared: Prepared, cache: Cache) -> Tensor:
        """[R, vocab] float32 logits of the rows that sample; writes the K and V of every row."""
        ops, weights = self.ops, self.weights
        residual = ops.embed(prepared, weights.tokens, weights.tokens_scale, weights.places)
        if weights.tokens_norm is not None:
            residual = ops.norm(residual, weights.tokens_norm)
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
            if index == len(weights.layers) - 1:
                # From here on no row is read by another: only those that sample go on.
                attended, residual = ops.select(attended, prepared), ops.select(residual, prepared)
            out = ops.linear(attended, layer.out)
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
            del inner
            if layer.down_norm is not None:
                hidden = ops.norm(hidden, layer.down_norm)
        if hidden is None:
            raise ValueError("a decoder needs at least one layer")
        return ops.logits(ops.add_norm(hidden, residual, weights.norm), weights.head)

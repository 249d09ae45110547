"""One decoder described by a DecoderConfig; it knows tensors and kernels, no slot and no scheduler.

`forward` takes the flattened tokens of an iteration (selective batching: linear layers see one matrix, attention sees
per-sequence ranges) and returns the logits of the rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AnyOps, Cache, Prepared
from services.worker.models.config import DecoderConfig
from services.worker.models.loader import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; linear ones are packed by the backend."""

    input_norm: Tensor
    qkv: Any
    out: Any
    post_norm: Tensor
    gate_up: Any
    down: Any


class Decoder:
    """Weights and forward pass."""

    def __init__(
        self, config: DecoderConfig, weights: Checkpoint, ops: AnyOps, dtype: torch.dtype, positions: int
    ) -> None:
        """Loads all weights; `positions` is the largest context served. Raises ModelError."""
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self._weights: Checkpoint | None = weights
        self._embedding = self._take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._layer(index) for index in range(config.layers)]
        self._norm = self._take("model.norm.weight", config.hidden_size)
        head = self._embedding if config.tied else self._take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = ops.pack_linear(head, None)
        self._rope = config.rope.table(positions).to(ops.device)
        self._scale = config.head_dim**-0.5
        self._weights = None

    def forward(self, prepared: Prepared, cache: Cache) -> Tensor:
        """[R, vocab] float32 logits of `prepared.sample_rows`; writes the K and V of every row."""
        ops, eps = self.ops, self.config.norm_eps
        residual = ops.embed(prepared.tokens, self._embedding)
        hidden: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if hidden is None:
                normed = ops.rms_norm(residual, layer.input_norm, eps)
            else:
                normed = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            qkv = ops.linear(normed, layer.qkv)
            query = ops.rope_and_write(qkv, self.config.heads, self._rope, prepared, cache, index)
            attended = ops.attention(query, prepared, cache, index, self._scale)
            if index == len(self._layers) - 1:
                # From here on no row is read by another: only those that sample go on.
                attended = attended.index_select(0, prepared.sample_rows)
                residual = residual.index_select(0, prepared.sample_rows)
            normed = ops.add_rms_norm(ops.linear(attended, layer.out), residual, layer.post_norm, eps)
            hidden = ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)
        if hidden is None:
            raise ValueError("a decoder needs at least one layer")
        return ops.linear(ops.add_rms_norm(hidden, residual, self._norm, eps), self._head).float()

    def _layer(self, index: int) -> Layer:
        c, name = self.config, f"model.layers.{index}"
        query, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        parts = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
        return Layer(
            input_norm=self._take(f"{name}.input_layernorm.weight", c.hidden_size),
            qkv=self._linear([(f"{name}.self_attn.{part}", size) for part, size in parts], c.hidden_size, c.qkv_bias),
            out=self._linear([(f"{name}.self_attn.o_proj", c.hidden_size)], query, c.out_bias),
            post_norm=self._take(f"{name}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._linear(
                [(f"{name}.mlp.{part}", c.intermediate_size) for part in ("gate_proj", "up_proj")],
                c.hidden_size,
                c.mlp_bias,
            ),
            down=self._linear([(f"{name}.mlp.down_proj", c.hidden_size)], c.intermediate_size, c.mlp_bias),
        )

    def _linear(self, parts: list[tuple[str, int]], inputs: int, bias: bool) -> Any:
        """One packed matrix of several of the checkpoint, one under the other."""
        weight = torch.cat([self._take(f"{name}.weight", size, inputs) for name, size in parts])
        vector = torch.cat([self._take(f"{name}.bias", size) for name, size in parts]) if bias else None
        return self.ops.pack_linear(weight, vector)

    def _take(self, name: str, *shape: int) -> Tensor:
        if self._weights is None:
            raise RuntimeError("weights are taken in the constructor only")
        return self._weights.take(name, shape, self.dtype).to(self.ops.device)

"""One decoder described by a DecoderConfig; it knows tensors and kernels, no slot and no scheduler.

`forward` takes the flattened tokens of an iteration (selective batching: linear layers see one matrix, attention sees
per-sequence ranges) and returns the logits of the rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AnyOps, Attention, Cache, Norm, Prepared
from services.worker.models.config import DecoderConfig
from services.worker.models.loader import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; linear ones are packed by the backend."""

    input_norm: Norm
    qkv: Any
    out: Any
    post_norm: Norm
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
        self._tokens: Any = None
        if not config.tied:
            table = self._take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
            self._tokens = ops.pack_embedding([table], config.vocab_size, config.hidden_size)
        name = "model.embed_tokens" if config.tied else "lm_head"
        self._head = self._linear([(name, config.vocab_size)], config.hidden_size, bias=False)
        self._layers = [self._layer(index) for index in range(config.layers)]
        self._norm = self._rms_norm("model.norm.weight")
        rope = config.rope.table(positions).to(ops.device)
        self._attention = Attention(heads=config.heads, scale=config.head_dim**-0.5, rope=rope)
        self._weights = None

    def forward(self, prepared: Prepared, cache: Cache) -> Tensor:
        """[R, vocab] float32 logits of `prepared.sample_rows`; writes the K and V of every row."""
        ops, attention = self.ops, self._attention
        residual = ops.embed(prepared, self._head if self._tokens is None else self._tokens)
        hidden: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if hidden is None:
                normed = ops.norm(residual, layer.input_norm)
            else:
                normed = ops.add_norm(hidden, residual, layer.input_norm)
            qkv = ops.linear(normed, layer.qkv)
            query = ops.rope_and_write(qkv, attention, prepared, cache, index)
            attended = ops.attention(query, attention, prepared, cache, index)
            if index == len(self._layers) - 1:
                # From here on no row is read by another: only those that sample go on.
                attended, residual = ops.select(attended, prepared), ops.select(residual, prepared)
            normed = ops.add_norm(ops.linear(attended, layer.out), residual, layer.post_norm)
            hidden = ops.linear(ops.gated(ops.linear(normed, layer.gate_up), "silu"), layer.down)
        if hidden is None:
            raise ValueError("a decoder needs at least one layer")
        return ops.logits(ops.add_norm(hidden, residual, self._norm), self._head)

    def _layer(self, index: int) -> Layer:
        c, name = self.config, f"model.layers.{index}"
        query, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        parts = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
        return Layer(
            input_norm=self._rms_norm(f"{name}.input_layernorm.weight"),
            qkv=self._linear([(f"{name}.self_attn.{part}", size) for part, size in parts], c.hidden_size, c.qkv_bias),
            out=self._linear([(f"{name}.self_attn.o_proj", c.hidden_size)], query, c.out_bias),
            post_norm=self._rms_norm(f"{name}.post_attention_layernorm.weight"),
            gate_up=self._linear(
                [(f"{name}.mlp.{part}", c.intermediate_size) for part in ("gate_proj", "up_proj")],
                c.hidden_size,
                c.mlp_bias,
            ),
            down=self._linear([(f"{name}.mlp.down_proj", c.hidden_size)], c.intermediate_size, c.mlp_bias),
        )

    def _linear(self, parts: list[tuple[str, int]], inputs: int, bias: bool) -> Any:
        """One packed matrix of several of the checkpoint, one under the other."""
        weights = (self._take(f"{name}.weight", size, inputs) for name, size in parts)
        vector = torch.cat([self._take(f"{name}.bias", size).float() for name, size in parts]) if bias else None
        return self.ops.pack_linear(weights, sum(size for _, size in parts), inputs, vector)

    def _rms_norm(self, name: str) -> Norm:
        return Norm(self._take(name, self.config.hidden_size).float(), None, self.config.norm_eps)

    def _take(self, name: str, *shape: int) -> Tensor:
        if self._weights is None:
            raise RuntimeError("weights are taken in the constructor only")
        return self._weights.take(name, shape, self.dtype).to(self.ops.device)

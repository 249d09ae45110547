"""A checkpoint's tensors -> what the decoder computes with: packed matrices, norms, what each layer's attention is.

Called once, when the model is loaded. Large matrices come first, while little else is held, and are handed to the
backend a few rows at a time: the peak of memory is the weights as they are held and one piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AnyOps, Attention, Norm
from services.worker.models.config import DecoderConfig
from services.worker.models.loader import Source, as_piece

BUFFERS = ("inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
"""Ends of names that older checkpoints carry and that are computed, not learned."""

log = logging.getLogger("orcinus.worker")


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; linear ones are packed by the backend. See families.Names."""

    input_norm: Norm
    qkv: Any
    attention: Attention
    out: Any
    attention_norm: Norm | None
    mlp_norm: Norm
    up: Any
    down: Any
    down_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole decoder."""

    tokens: Any  # the head, where it is tied
    tokens_scale: float
    tokens_norm: Norm | None
    places: Tensor | None
    layers: list[Layer]
    norm: Norm
    head: Any


def load_weights(
    config: DecoderConfig, source: Source, ops: AnyOps, dtype: torch.dtype, positions: int, int8: bool
) -> Weights:
    """Loads all weights; `positions` is the largest context served. Raises ModelError naming the tensor."""
    loader = _Loader(config, source, ops, dtype, positions, int8)
    weights = loader.weights()
    names = config.family.names
    left = [name for name in source.unread() if not name.endswith(BUFFERS) and not name.startswith(names.head + ".")]
    if left:
        log.warning(
            "%s: %d tensors are of no use to %s: %s, ...", source.model, len(left), config.architecture, left[0]
        )
    return weights


def check_matrices(config: DecoderConfig, source: Source) -> None:
    """Raises ModelError naming the first matrix of the checkpoint that is missing or not as config.json says.

    Reads headers and takes no memory: a size that nobody can hold is a misshapen tensor first.
    """
    c, family, names = config, config.family, config.family.names
    embedding = (c.vocab_size, c.hidden_size)
    source.check(find(config, source, f"{names.base}{names.tokens}.weight"), embedding)
    if not c.tied:
        source.check(find(config, source, f"{names.head}.weight"), embedding)
    if names.places is not None:
        shape = (c.context + family.first_place, c.hidden_size)
        source.check(find(config, source, f"{names.base}{names.places}.weight"), shape)
    query, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    each = (query, kv, kv) if len(names.qkv) == 3 else (query + 2 * kv,)
    parts = [(part, size, c.hidden_size) for part, size in zip(names.qkv, each, strict=True)]
    parts += [(part, c.up_size // len(names.up), c.hidden_size) for part in names.up]
    parts += [(names.out, c.hidden_size, query), (names.down, c.hidden_size, c.intermediate_size)]
    for index in range(c.layers):
        for part, outputs, inputs in parts:
            name = find(config, source, f"{names.base}{names.layers}.{index}.{part}.weight")
            source.check(name, (inputs, outputs) if family.transposed else (outputs, inputs))


def find(config: DecoderConfig, source: Source, name: str) -> str:
    """The name, without what stands before all of the decoder's where the checkpoint leaves that out."""
    bare = name.removeprefix(config.family.names.base)
    return bare if name not in source and bare in source else name


class _Loader:
    def __init__(
        self, config: DecoderConfig, source: Source, ops: AnyOps, dtype: torch.dtype, positions: int, int8: bool
    ) -> None:
        self.config, self.names = config, config.family.names
        self.source, self.ops, self.dtype, self.int8 = source, ops, dtype, int8
        self.positions = positions
        self.rope, self.local_rope = (
            None if rope is None else rope.table(positions).to(ops.device) for rope in (config.rope, config.local_rope)
        )
        slopes = alibi_slopes(config.heads) if config.family.positions == "alibi" else None
        self.slopes = None if slopes is None else slopes.to(ops.device)

    def weights(self) -> Weights:
        c, names = self.config, self.names
        tokens = f"{names.base}{names.tokens}"
        table = (c.vocab_size, c.hidden_size)
        embedded: Any = None
        if not c.tied:
            pieces = self.source.pieces(self._find(f"{tokens}.weight"), table, self.dtype)
            embedded = self.ops.pack_embedding(pieces, *table)
        head = tokens if c.tied else names.head
        pieces = self.source.pieces(self._find(f"{head}.weight"), table, self.dtype)
        bias = self._vector(f"{names.head}.bias", c.vocab_size) if "head" in c.biases else None
        packed = (self.ops.pack_tied if c.tied else self.ops.pack_linear)(pieces, *table, bias)
        scale = 1.0
        if c.family.embedding_scale:  # rounded to the model's type, as the model was trained
            scale = float(torch.tensor(c.hidden_size**0.5).to(self.dtype))
        return Weights(
            tokens=packed if embedded is None else embedded,
            tokens_scale=scale,
            tokens_norm=self._norm(names.base, names.tokens_norm),
            places=self._places(),
            layers=[self._layer(index) for index in range(c.layers)],
            norm=self._needed_norm(names.base, names.norm),
            head=packed,
        )

    def _places(self) -> Tensor | None:
        c, first = self.config, self.config.family.first_place
        if self.names.places is None:
            return None
        name = self._find(f"{self.names.base}{self.names.places}.weight")
        table = self.source.take(name, (c.context + first, c.hidden_size), self.dtype)
        return table[first : first + self.positions].clone().to(self.ops.device)

    def _layer(self, index: int) -> Layer:
        c, names = self.config, self.names
        at = f"{names.base}{names.layers}.{index}."
        query, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return Layer(
            input_norm=self._needed_norm(at, names.input_norm),
            qkv=self._linear(at, names.qkv, (query, kv, kv), c.hidden_size, "qkv"),
            attention=self._attention(at, index),
            out=self._linear(at, (names.out,), (c.hidden_size,), query, "out"),
            attention_norm=self._norm(at, names.attention_norm),
            mlp_norm=self._needed_norm(at, names.mlp_norm),
            up=self._linear(at, names.up, (c.up_size // len(names.up),) * len(names.up), c.hidden_size, "mlp"),
            down=self._linear(at, (names.down,), (c.hidden_size,), c.intermediate_size, "mlp"),
            down_norm=self._norm(at, names.down_norm),
        )

    def _attention(self, at: str, index: int) -> Attention:
        c, window = self.config, self.config.windows[index]
        return Attention(
            heads=c.heads,
            scale=c.scale,
            rope=self.local_rope if window and self.local_rope is not None else self.rope,
            q_norm=self._norm(at, self.names.q_norm, c.head_dim),
            k_norm=self._norm(at, self.names.k_norm, c.head_dim),
            window=window if window < self.positions else 0,
            slopes=self.slopes,
        )

    def _linear(self, at: str, parts: tuple[str, ...], sizes: tuple[int, ...], inputs: int, kind: str) -> Any:
        """One packed matrix of several of the checkpoint, one under the other, or of one that is fused already."""
        outputs = sum(sizes)
        named = [f"{at}{part}" for part in parts]
        each = sizes if len(parts) == len(sizes) else (outputs,)
        bias = None
        if kind in self.config.biases:
            bias = torch.cat([self._vector(f"{name}.bias", size) for name, size in zip(named, each, strict=True)])
            if kind == "qkv" and self.config.family.interleaved:
                bias = bias.view(-1, 3, self.config.head_dim).transpose(0, 1).flatten()
        pieces = (
            piece
            for name, size in zip(named, each, strict=True)
            for piece in self._pieces(self._find(f"{name}.weight"), size, inputs, kind)
        )
        return self.ops.pack_linear(pieces, outputs, inputs, bias, self.int8)

    def _pieces(self, name: str, outputs: int, inputs: int, kind: str) -> Iterator[Tensor]:
        """The matrix in pieces [rows, inputs], rows in the order in which the decoder wants them."""
        source, family, size = self.source, self.config.family, self.config.head_dim
        if family.transposed:
            whole = source.take(name, (inputs, outputs), self.dtype)
            step = -(-outputs // 8)
            yield from (as_piece(whole[:, first : first + step].t(), self.dtype) for first in range(0, outputs, step))
        elif kind == "qkv" and family.interleaved:
            source.check(name, (outputs, inputs))
            for first in (0, size, 2 * size):
                for head in range(self.config.heads):
                    yield as_piece(source.read(name, (outputs, inputs), 3 * size * head + first, size), self.dtype)
        else:
            yield from source.pieces(name, (outputs, inputs), self.dtype)

    def _needed_norm(self, at: str, name: str) -> Norm:
        return self._norm_of(f"{at}{name}", self.config.hidden_size)

    def _norm(self, at: str, name: str | None, size: int = 0) -> Norm | None:
        return None if name is None else self._norm_of(f"{at}{name}", size or self.config.hidden_size)

    def _norm_of(self, name: str, size: int) -> Norm:
        family = self.config.family
        weight = self._vector(f"{name}.weight", size)
        return Norm(
            weight=weight + family.norm_plus if family.norm_plus else weight,
            bias=self._vector(f"{name}.bias", size) if family.layer_norm else None,
            eps=self.config.norm_eps,
            layer_norm=family.layer_norm,
        )

    def _vector(self, name: str, size: int) -> Tensor:
        return self.source.take(self._find(name), (size,), torch.float32).to(self.ops.device)

    def _find(self, name: str) -> str:
        return find(self.config, self.source, name)


def alibi_slopes(heads: int) -> Tensor:
    """[heads] float32: the geometric sequence of ALiBi (arXiv 2108.12409, section 3).

    Where the number of heads is no power of two: those of the largest power below, then every other one of the next.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)

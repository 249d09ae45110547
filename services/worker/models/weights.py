"""A checkpoint's tensors -> what a rank's decoder computes with: packed matrices, norms, each layer's attention.

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
from services.worker.models.checkpoint import Source, as_piece
from services.worker.models.config import DecoderConfig
from services.worker.models.shard import Shard

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
    """A decoder, or a rank's part of it: where a stage has no embedding or no head, theirs are None."""

    tokens: Any  # the head, where it is tied and both are here
    tokens_scale: float
    tokens_norm: Norm | None
    places: Tensor | None
    layers: list[Layer]
    norm: Norm | None
    head: Any


def load_weights(
    config: DecoderConfig, shard: Shard, source: Source, ops: AnyOps, dtype: torch.dtype, positions: int, int8: bool
) -> Weights:
    """Loads the shard's weights; config: the whole model's; `positions` is the largest context served.

    Raises ModelError naming the tensor.
    """
    loader = _Loader(config, shard, source, ops, dtype, positions, int8)
    weights = loader.weights()
    if not (shard.first and shard.last):
        return weights  # the other stages read the rest
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor of the checkpoint that has `total`."""

    name: str  # without .weight and .bias
    total: int
    rows: range


class _Loader:
    def __init__(
        self,
        config: DecoderConfig,
        shard: Shard,
        source: Source,
        ops: AnyOps,
        dtype: torch.dtype,
        positions: int,
        int8: bool,
    ) -> None:
        self.config, self.shard, self.names = config, shard, config.family.names
        self.source, self.ops, self.dtype, self.int8 = source, ops, dtype, int8
        self.positions = positions
        self.rope, self.local_rope = (
            None if rope is None else rope.table(positions).to(ops.device) for rope in (config.rope, config.local_rope)
        )
        heads = shard.heads
        slopes = alibi_slopes(config.heads)[heads.start : heads.stop] if config.family.positions == "alibi" else None
        self.slopes = None if slopes is None else slopes.to(ops.device)

    def weights(self) -> Weights:
        c, names, shard = self.config, self.names, self.shard
        tokens = f"{names.base}{names.tokens}"
        size = (shard.vocab_rows, c.hidden_size)
        tied = c.tied and shard.first and shard.last
        embedded: Any = None
        packed: Any = None
        if shard.first and not tied:
            embedded = self.ops.pack_embedding(self._table(tokens), *size)
        if shard.last:
            bias = self._head_bias() if "head" in c.biases else None
            pack = self.ops.pack_tied if tied else self.ops.pack_linear
            packed = pack(self._table(tokens if c.tied else names.head), *size, bias)
        scale = 1.0
        if c.family.embedding_scale:  # rounded to the model's type, as the model was trained
            scale = float(torch.tensor(c.hidden_size**0.5).to(self.dtype))
        return Weights(
            tokens=packed if tied else embedded,
            tokens_scale=scale,
            tokens_norm=self._norm(names.base, names.tokens_norm) if shard.first else None,
            places=self._places() if shard.first and shard.adds else None,
            layers=[self._layer(index) for index in shard.layers],
            norm=self._needed_norm(names.base, names.norm) if shard.last else None,
            head=packed,
        )

    def _table(self, name: str) -> Iterator[Tensor]:
        """The shard's rows of the embedding or the head, and zeros."""
        c, vocab, more = self.config, self.shard.vocab, self.shard.vocab_rows - len(self.shard.vocab)
        whole = (c.vocab_size, c.hidden_size)
        yield from self.source.pieces(self._find(f"{name}.weight"), whole, self.dtype, vocab, range(c.hidden_size))
        if more:
            yield torch.zeros(more, c.hidden_size, dtype=self.dtype)

    def _head_bias(self) -> Tensor:
        vocab = self.shard.vocab
        bias = self._vector(f"{self.names.head}.bias", self.config.vocab_size)[vocab.start : vocab.stop]
        return torch.nn.functional.pad(bias, (0, self.shard.vocab_rows - len(vocab)))

    def _places(self) -> Tensor | None:
        c, first = self.config, self.config.family.first_place
        if self.names.places is None:
            return None
        name = self._find(f"{self.names.base}{self.names.places}.weight")
        table = self.source.take(name, (c.context + first, c.hidden_size), self.dtype)
        return table[first : first + self.positions].clone().to(self.ops.device)

    def _layer(self, index: int) -> Layer:
        c, names, shard = self.config, self.names, self.shard
        at = f"{names.base}{names.layers}.{index}."
        return Layer(
            input_norm=self._needed_norm(at, names.input_norm),
            qkv=self._outputs(self._qkv(at), "qkv"),
            attention=self._attention(at, index),
            out=self._inputs(f"{at}{names.out}", c.heads * c.head_dim, _numbers(shard.heads, c.head_dim), "out"),
            attention_norm=self._norm(at, names.attention_norm),
            mlp_norm=self._needed_norm(at, names.mlp_norm),
            up=self._outputs(self._stacked(at, names.up, [(c.intermediate_size, shard.inner)] * self._ups), "mlp"),
            down=self._inputs(f"{at}{names.down}", c.intermediate_size, shard.inner, "mlp"),
            down_norm=self._norm(at, names.down_norm),
        )

    @property
    def _ups(self) -> int:
        return 2 if self.config.family.gated else 1

    def _attention(self, at: str, index: int) -> Attention:
        c, window = self.config, self.config.windows[index]
        return Attention(
            heads=len(self.shard.heads),
            scale=c.scale,
            rope=self.local_rope if window and self.local_rope is not None else self.rope,
            q_norm=self._norm(at, self.names.q_norm, c.head_dim),
            k_norm=self._norm(at, self.names.k_norm, c.head_dim),
            window=window if window < self.positions else 0,
            slopes=self.slopes,
        )

    def _qkv(self, at: str) -> list[_Rows]:
        """Queries, keys and values of the shard's heads."""
        c, names, size = self.config, self.names, self.config.head_dim
        if c.family.interleaved:  # which has as many KV heads as heads
            total = 3 * c.heads * size
            starts = [3 * size * head + part * size for part in range(3) for head in self.shard.heads]
            return [_Rows(f"{at}{names.qkv[0]}", total, range(start, start + size)) for start in starts]
        query, kv = (
            (size * count, _numbers(held, size))
            for count, held in ((c.heads, self.shard.heads), (c.kv_heads, self.shard.kv_heads))
        )
        return self._stacked(at, names.qkv, [query, kv, kv])

    def _stacked(self, at: str, parts: tuple[str, ...], sizes: list[tuple[int, range]]) -> list[_Rows]:
        """The rows, each of (size, rows), that lie one under the other in one tensor, or each in its own."""
        if len(parts) == len(sizes):
            return [_Rows(f"{at}{part}", size, rows) for part, (size, rows) in zip(parts, sizes, strict=True)]
        found: list[_Rows] = []
        total, above = sum(size for size, _ in sizes), 0
        for size, rows in sizes:
            start, stop = above + rows.start, above + rows.stop
            if found and found[-1].rows.stop == start:
                start = found.pop().rows.start  # one piece with those above
            found.append(_Rows(f"{at}{parts[0]}", total, range(start, stop)))
            above += size
        return found

    def _outputs(self, parts: list[_Rows], kind: str) -> Any:
        """One packed matrix of these rows, one under the other, and their biases."""
        bias = None
        if kind in self.config.biases:
            wholes = {name: self._vector(f"{name}.bias", total) for name, total in {(p.name, p.total) for p in parts}}
            bias = torch.cat([wholes[part.name][part.rows.start : part.rows.stop] for part in parts])
        hidden = self.config.hidden_size
        pieces = (piece for part in parts for piece in self._pieces(part, hidden, range(hidden)))
        return self.ops.pack_linear(pieces, sum(len(part.rows) for part in parts), hidden, bias, self.int8)

    def _inputs(self, name: str, inputs: int, columns: range, kind: str) -> Any:
        """A packed matrix of all rows and these columns. Its bias is added once: the ranks' products are summed."""
        hidden = self.config.hidden_size
        bias = self._vector(f"{name}.bias", hidden) if kind in self.config.biases and self.shard.adds else None
        pieces = self._pieces(_Rows(name, hidden, range(hidden)), inputs, columns)
        return self.ops.pack_linear(pieces, hidden, len(columns), bias, self.int8)

    def _pieces(self, part: _Rows, inputs: int, columns: range) -> Iterator[Tensor]:
        """[some of the rows, columns], from the first row to the last."""
        source, name, rows = self.source, self._find(f"{part.name}.weight"), part.rows
        if not self.config.family.transposed:
            yield from source.pieces(name, (part.total, inputs), self.dtype, rows, columns)
            return
        source.check(name, (inputs, part.total))
        whole = as_piece(source.read(name, (inputs, part.total), columns.start, len(columns)), self.dtype)
        step = -(-len(rows) // 8)
        for first in range(rows.start, rows.stop, step):
            yield as_piece(whole[:, first : min(first + step, rows.stop)].t(), self.dtype)

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


def _numbers(heads: range, size: int) -> range:
    """The numbers of heads that have `size` each."""
    return range(heads.start * size, heads.stop * size)


def alibi_slopes(heads: int) -> Tensor:
    """[heads] float32: the geometric sequence of ALiBi (arXiv 2108.12409, section 3).

    Where the number of heads is no power of two: those of the largest power below, then every other one of the next.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)

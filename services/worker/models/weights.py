"""Load a rank's part of a checkpoint: packed matrices, norms, tables. Called once, by `layers` and `decoder`.

`Shard` says which part a rank holds (Megatron-LM, arXiv 1909.08053, section 3; pipeline stages of whole layers): the
first matrix of attention and MLP is split by outputs, the second by inputs, so that each of the two needs one sum over
the ranks of a stage; embedding and head are split by token ids. Matrices go to the backend a few rows at a time: the
peak of memory is the weights as they are held and one piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AnyOps, Norm
from services.worker.checkpoint.source import Source
from services.worker.models.adapters import AdapterRows, LinearAdapters, Outputs
from services.worker.models.config import DecoderConfig, Mixture, check_split
from services.worker.models.matrices import layer_prefix
from services.worker.parallel.state import ParallelState
from services.worker.quantization.base import LinearMethod, Matrix, Part, Stack
from shared.errors import ModelError

BUFFERS = ("inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
"""Ends of names that older checkpoints carry and that are computed, not learned."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a decoder that one rank holds, as ranges of the whole model's numbers."""

    layers: range
    heads: range
    kv_heads: range  # held by several ranks where there are fewer than ranks
    intermediate: range  # of intermediate_size
    expert: range  # of each expert's
    shared: range  # of the shared expert's
    vocab: range  # token ids
    vocab_rows: int  # rows that embedding and head have here; those behind `vocab` are zeros. The same on all ranks
    first: bool  # whether the stage embeds
    last: bool  # and whether it computes logits
    adds: bool  # whether it adds what a stage adds once: biases of matrices split by inputs, learned positions

    def config(self, model: DecoderConfig) -> DecoderConfig:
        """Return the configuration of the decoder that this rank computes."""
        return dataclasses.replace(
            model,
            layers=len(self.layers),
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
            mixture=model.mixture
            and dataclasses.replace(model.mixture, intermediate_size=len(self.expert), shared_size=len(self.shared)),
            windows=model.windows[self.layers.start : self.layers.stop],
        )


def shard_of(config: DecoderConfig, parallel: ParallelState) -> Shard:
    """Return the rank's part. Raise ConfigurationError for a model that cannot be split so."""
    check_split(config, parallel.tp, parallel.pp)
    group = config.heads // config.kv_heads
    heads = _part(config.heads, parallel.tp_rank, parallel.tp)
    vocab = range(config.vocab_size)
    rows = config.vocab_size
    if parallel.tp > 1:
        each = -(-config.vocab_size // parallel.tp)
        vocab = vocab[each * parallel.tp_rank : each * (parallel.tp_rank + 1)]
        rows = each + 1  # the last stands for the tokens of other ranks: their sum counts them once
    mixture = config.mixture
    return Shard(
        layers=_part(config.layers, parallel.stage, parallel.pp),
        heads=heads,
        kv_heads=range(heads.start // group, (heads.stop - 1) // group + 1),
        intermediate=_part(config.intermediate_size, parallel.tp_rank, parallel.tp),
        expert=_part(mixture.intermediate_size if mixture else 0, parallel.tp_rank, parallel.tp),
        shared=_part(mixture.shared_size if mixture else 0, parallel.tp_rank, parallel.tp),
        vocab=vocab,
        vocab_rows=rows,
        first=parallel.first,
        last=parallel.last,
        adds=parallel.tp_rank == 0,
    )


def _part(count: int, at: int, parts: int) -> range:
    """Return part `at` of `parts`, which differ by one at most."""
    return range(count * at // parts, count * (at + 1) // parts)


def find_tensor(config: DecoderConfig, source: Source, name: str) -> str:
    """Return the name as the checkpoint has it: with the family's prefix, another one or none."""
    names = config.family.names
    if name in source or not name.startswith(names.prefix):
        return name
    bare = name.removeprefix(names.prefix)
    return next((other + bare for other in (*names.other_prefixes, "") if other + bare in source), name)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some of the `total` rows (outputs) of a matrix of the checkpoint."""

    name: str  # without .weight and .bias
    total: int
    rows: range
    stack: Stack | None = None


class WeightLoader:
    """Reads the tensors of one rank. Names are those of the checkpoint; all methods raise ModelError naming the tensor.

    config: of the whole model. positions: the largest context served. Bias kinds: see Family.biases.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shard: Shard,
        source: Source,
        ops: AnyOps,
        dtype: torch.dtype,
        positions: int,
        method: LinearMethod,
    ) -> None:
        self.config, self.shard, self.names = config, shard, config.family.names
        self.source, self.ops, self.dtype, self.method = source, ops, dtype, method
        self.positions = positions
        self.part_counts = [0, 0]  # parts of matrices in the model's type, and in Groups
        self.adapters = AdapterRows(ops, dtype)

    def layer_prefix(self, index: int) -> str:
        """Return the beginning of the names of layer `index`."""
        return layer_prefix(self.config, index)

    def embedding_and_head(self) -> tuple[Any, Any]:
        """Return embed_tokens and lm_head as the backend packs them: one object where they are tied and both are here.

        None for the one that this rank's stage does not have.
        """
        c, names, shard = self.config, self.names, self.shard
        tokens = f"{names.prefix}{names.embed_tokens}"
        size = (shard.vocab_rows, c.hidden_size)
        tied = c.tied and shard.first and shard.last
        embed_tokens = self.embedding() if shard.first and not tied else None
        lm_head: Any = None
        if shard.last:
            if c.tied:
                self._check_tied(tokens)
            bias = self._head_bias() if "lm_head" in c.biases else None
            head = tokens if c.tied else names.lm_head
            lm_head = self._packed_table(head, bias) if not tied or self.dtype == torch.float32 else None
            if lm_head is None:
                pack = self.ops.pack_tied if tied else self.ops.pack_linear
                lm_head = pack(self._vocab_rows(head), *size, bias)
        return (lm_head if tied else embed_tokens), lm_head

    def embedding(self) -> Any:
        """Return embed_tokens as the backend packs it, for `embed` alone."""
        tokens = f"{self.names.prefix}{self.names.embed_tokens}"
        # `embed` yields float32 of a packed table.
        packed = self._packed_table(tokens, None) if self.dtype == torch.float32 else None
        if packed is not None:
            return packed
        return self.ops.pack_embedding(self._vocab_rows(tokens), self.shard.vocab_rows, self.config.hidden_size)

    def table(self, name: str, rows: int) -> Tensor:
        """Return a table [rows, hidden] in the model's dtype."""
        tensor = self.source.take(self._find(f"{name}.weight"), (rows, self.config.hidden_size), self.dtype)
        return tensor.to(self.ops.device)

    def plain(self, name: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """Return a matrix [outputs, inputs] and its bias in float32 on the host, whatever the method."""
        weight = self.source.take(self._find(f"{name}.weight"), (outputs, inputs), torch.float32)
        return weight, self.source.take(self._find(f"{name}.bias"), (outputs,), torch.float32)

    def position_embeddings(self) -> Tensor | None:
        """Return the learned positions [positions, hidden] in the model's dtype, for the rank that adds them."""
        c, first = self.config, self.config.family.position_offset
        if self.names.position_embeddings is None or not (self.shard.first and self.shard.adds):
            return None
        name = self._find(f"{self.names.prefix}{self.names.position_embeddings}.weight")
        table = self.source.take(name, (c.context + first, c.hidden_size), self.dtype)
        return table[first : first + self.positions].clone().to(self.ops.device)

    def stacked(self, prefix: str, parts: tuple[str, ...], sizes: list[tuple[int, range]]) -> list[Rows]:
        """Return the rows, each of (size, rows), that lie one under the other in one tensor, or each in another."""
        if len(parts) == len(sizes):
            return [Rows(f"{prefix}{part}", size, rows) for part, (size, rows) in zip(parts, sizes, strict=True)]
        pieces: list[Rows] = []
        total, above = sum(size for size, _ in sizes), 0
        for size, rows in sizes:
            start, stop = above + rows.start, above + rows.stop
            if pieces and pieces[-1].rows.stop == start:
                start = pieces.pop().rows.start  # one piece with those above
            pieces.append(Rows(f"{prefix}{parts[0]}", total, range(start, stop)))
            above += size
        return pieces

    def column_parallel(self, parts: list[Rows], bias_kind: str) -> Any:
        """Return one packed matrix [outputs of all parts, hidden] of these rows, one under the other, with biases."""
        bias = None
        if bias_kind in self.config.biases:
            totals = {part.name: part.total for part in parts}
            biases = {name: self._vector(f"{name}.bias", total) for name, total in totals.items()}
            bias = torch.cat([biases[part.name][part.rows.start : part.rows.stop] for part in parts])
        hidden = self.config.hidden_size
        return self.method.pack(self.ops, [self._read(part, hidden, range(hidden)) for part in parts], hidden, bias)

    def adapters_of(self, parts: list[Rows], columns: range) -> LinearAdapters:
        """Return what adapters add to a packed matrix of these rows and inputs."""
        return LinearAdapters(self.adapters, [Outputs(part.name, part.rows) for part in parts], columns)

    def row_parallel(self, name: str, inputs: int, columns: range, bias_kind: str) -> Any:
        """Return a packed matrix [hidden, these columns]. The ranks' products are summed: one rank adds the bias."""
        hidden = self.config.hidden_size
        bias = self._vector(f"{name}.bias", hidden) if bias_kind in self.config.biases and self.shard.adds else None
        part = self._read(Rows(name, hidden, range(hidden)), inputs, columns)
        return self.method.pack(self.ops, [part], len(columns), bias)

    def stacked_expert(self, prefix: str, mixture: Mixture, index: int) -> tuple[Any, Any]:
        """Return the packed gate_up_proj and down_proj of an expert; all of a layer lie in one tensor each.

        mixture: of the whole model. prefix: of the layer.
        """
        names, hidden, inner = mixture.names, self.config.hidden_size, self.shard.expert
        gate_up, down = (f"{prefix}{names.experts}.{name}" for name in (names.gate_up_proj[0], names.down_proj))
        size, outputs = mixture.intermediate_size, range(2 * inner.start, 2 * inner.stop)
        bias = down_bias = None
        if "experts" in self.config.biases:
            both = self._row(f"{gate_up}_bias", (mixture.experts, 2 * size), index)[outputs.start : outputs.stop]
            bias = torch.cat((both[0::2], both[1::2]))
            if self.shard.adds:
                down_bias = self._row(f"{down}_bias", (mixture.experts, hidden), index)
        first = self._read(
            Rows(gate_up, 2 * size, outputs, Stack(index, mixture.experts, interleaved=True)), hidden, range(hidden)
        )
        packed = self.method.pack(self.ops, [first], hidden, bias)
        second = self._read(Rows(down, hidden, range(hidden), Stack(index, mixture.experts)), size, inner)
        return packed, self.method.pack(self.ops, [second], len(inner), down_bias)

    def sinks(self, prefix: str) -> Tensor | None:
        """Return the sinks of the shard's heads, [heads] float32, of a layer that has them."""
        if self.names.sinks is None:
            return None
        heads = self.shard.heads
        return self._vector(f"{prefix}{self.names.sinks}", self.config.heads)[heads.start : heads.stop].contiguous()

    def replicated(self, name: str, outputs: int, bias_kind: str = "") -> Any:
        """Return a packed matrix [outputs, hidden] that every rank has whole, in the model's type whatever the method.

        A router's: which experts a row has must not depend on --quantize or the rank.
        """
        hidden = self.config.hidden_size
        shape = (outputs, hidden)
        pieces = self.source.pieces(self._find(f"{name}.weight"), shape, self.dtype, range(outputs), range(hidden))
        bias = self._vector(f"{name}.bias", outputs) if bias_kind in self.config.biases else None
        return self.ops.pack_linear(pieces, outputs, hidden, bias)

    def norm(self, name: str, size: int = 0) -> Norm:
        """Return the norm of `size` numbers, by default hidden_size."""
        family, size = self.config.family, size or self.config.hidden_size
        weight = self._vector(f"{name}.weight", size)
        return Norm(
            weight=weight + family.norm_offset if family.norm_offset else weight,
            bias=self._vector(f"{name}.bias", size) if family.layer_norm else None,
            eps=self.config.norm_eps,
            layer_norm=family.layer_norm,
        )

    def optional_norm(self, prefix: str, name: str | None, size: int = 0) -> Norm | None:
        """Return the norm, or None where the family has none of that name."""
        return None if name is None else self.norm(f"{prefix}{name}", size)

    def unused(self) -> list[str]:
        """Return the tensors that no layer has read, except those that a decoder may ignore."""
        others = (f"{self.names.lm_head}.", *self.config.family.unread)
        return [name for name in self.source.unread() if not name.endswith(BUFFERS) and not name.startswith(others)]

    def _read(self, rows: Rows, inputs: int, columns: range) -> Part:
        if rows.stack is not None:
            name = self._find(rows.name)
        else:
            name = self._find(f"{rows.name}.weight").removesuffix(".weight")
        transposed = self.config.family.transposed
        matrix = Matrix(name, rows.total, inputs, rows.rows, columns, transposed, rows.stack)
        keeps = self.ops.packs_experts or not self._is_of_experts(rows.name)
        pieces = self.method.read(self.source, matrix, self.dtype)
        part = Part(self.ops, len(rows.rows), pieces, self.dtype, keeps)
        self.part_counts[bool(part.group_format)] += 1
        return part

    def _is_of_experts(self, name: str) -> bool:
        """Return whether a matrix is one of an expert, other than the shared one."""
        mixture = self.config.mixture
        return mixture is not None and f"{mixture.names.experts}." in name

    def _packed_table(self, name: str, bias: Tensor | None) -> Any:
        """Return the embedding or the head as the checkpoint packs it; None where it, the backend or ranks do not."""
        c = self.config
        packs = self.method.packs_tables and self.ops.packs_tables
        if not packs or self.shard.vocab_rows != c.vocab_size:
            return None
        stem = self._find(f"{name}.weight").removesuffix(".weight")
        matrix = Matrix(stem, c.vocab_size, c.hidden_size, range(c.vocab_size), range(c.hidden_size))
        part = Part(self.ops, c.vocab_size, self.method.read(self.source, matrix, self.dtype), self.dtype)
        return self.method.pack(self.ops, [part], c.hidden_size, bias) if part.group_format else None

    def _vocab_rows(self, name: str) -> Iterator[Tensor]:
        """Yield the shard's rows of the embedding or the head, and zeros behind them."""
        c, vocab, more = self.config, self.shard.vocab, self.shard.vocab_rows - len(self.shard.vocab)
        shape = (c.vocab_size, c.hidden_size)
        yield from self.source.pieces(self._find(f"{name}.weight"), shape, self.dtype, vocab, range(c.hidden_size))
        if more:
            yield torch.zeros(more, c.hidden_size, dtype=self.dtype)

    def _check_tied(self, tokens: str) -> None:
        """Raise ModelError where the checkpoint has a head beside the embedding, and another one.

        Versions of transformers differ in which of the two they take.
        """
        vocab, shape = self.shard.vocab, (self.config.vocab_size, self.config.hidden_size)
        embedding, ending = self._find(f"{tokens}.weight"), f".{self.names.lm_head}.weight"
        head = next((name for name in self.source.unread() if f".{name}".endswith(ending)), None)
        if head is None:
            return
        pieces = (self.source.pieces(name, shape, self.dtype, vocab, range(shape[1])) for name in (embedding, head))
        if not all(torch.equal(one, other) for one, other in zip(*pieces, strict=True)):
            raise ModelError(
                f"{self.source.model}: tensor {head} differs from {embedding}, and tie_word_embeddings of config.json "
                "is true; set it to false to use this head, or remove the tensor"
            )

    def _head_bias(self) -> Tensor:
        vocab = self.shard.vocab
        bias = self._vector(f"{self.names.lm_head}.bias", self.config.vocab_size)[vocab.start : vocab.stop]
        return torch.nn.functional.pad(bias, (0, self.shard.vocab_rows - len(vocab)))

    def _vector(self, name: str, size: int) -> Tensor:
        return self.source.take(self._find(name), (size,), torch.float32).to(self.ops.device)

    def _row(self, name: str, shape: tuple[int, int], index: int) -> Tensor:
        name = self._find(name)
        self.source.check(name, shape)
        return self.source.read(name, shape, index, 1)[0].to(self.ops.device, torch.float32)

    def _find(self, name: str) -> str:
        return find_tensor(self.config, self.source, name)

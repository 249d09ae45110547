"""Which part of a decoder one rank of a mesh holds (Megatron-LM, arXiv 1909.08053, section 3; stages of whole layers).

The first matrix of attention and MLP is cut by outputs (heads, inner numbers), the second by inputs, so that each of
the two needs one sum over the stage's ranks. Embedding and head are cut by token ids. All of it is arithmetic on sizes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from services.worker.models.config import DecoderConfig
from services.worker.parallel.state import Mesh
from shared.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranges of the whole model's numbers."""

    layers: range
    heads: range
    kv_heads: range  # held by several ranks where there are fewer than ranks
    inner: range  # of intermediate_size
    vocab: range  # token ids
    vocab_rows: int  # rows that embedding and head have here; those behind `vocab` are zeros. The same on all ranks
    first: bool  # whether the stage embeds
    last: bool  # and whether it computes logits
    adds: bool  # what must be added once in a stage: biases of matrices that are cut by inputs, learned positions

    def config(self, whole: DecoderConfig) -> DecoderConfig:
        """The decoder that this rank computes."""
        return dataclasses.replace(
            whole,
            layers=len(self.layers),
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            windows=whole.windows[self.layers.start : self.layers.stop],
        )


def shard_of(config: DecoderConfig, mesh: Mesh) -> Shard:
    """The rank's share. Raises ConfigurationError for a model that cannot be cut so."""
    _check(config, mesh.tp, mesh.pp)
    group = config.heads // config.kv_heads
    heads = _part(config.heads, mesh.tp_rank, mesh.tp)
    vocab = range(config.vocab_size)
    rows = config.vocab_size
    if mesh.tp > 1:
        each = -(-config.vocab_size // mesh.tp)
        vocab = vocab[each * mesh.tp_rank : each * (mesh.tp_rank + 1)]
        rows = each + 1  # the last stands for the tokens of other ranks: their sum counts them once
    return Shard(
        layers=_part(config.layers, mesh.stage, mesh.pp),
        heads=heads,
        kv_heads=range(heads.start // group, (heads.stop - 1) // group + 1),
        inner=_part(config.intermediate_size, mesh.tp_rank, mesh.tp),
        vocab=vocab,
        vocab_rows=rows,
        first=mesh.first,
        last=mesh.last,
        adds=mesh.tp_rank == 0,
    )


def _part(count: int, at: int, parts: int) -> range:
    """The parts differ by one at most."""
    return range(count * at // parts, count * (at + 1) // parts)


def _check(config: DecoderConfig, tp: int, pp: int) -> None:
    for name, value in (("num_attention_heads", config.heads), ("intermediate_size", config.intermediate_size)):
        if value % tp:
            raise ConfigurationError(f"--tp {tp} does not divide the model's {name} {value}; {_remedy(value, tp)}")
    if config.kv_heads % tp and tp % config.kv_heads:
        raise ConfigurationError(
            f"--tp {tp} neither divides the model's num_key_value_heads {config.kv_heads} nor is a multiple of it; "
            f"{_remedy(config.kv_heads, tp)}"
        )
    if pp > config.layers:
        raise ConfigurationError(f"--pp {pp} is more stages than the model's {config.layers} layers; lower it")


def _remedy(value: int, tp: int) -> str:
    below = max(number for number in range(1, tp) if value % number == 0)
    return f"--tp {below} does"

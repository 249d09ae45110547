"""The matrices of a checkpoint, by name and shape, as its config says: checked before loading, sized without weights.

`decoder` compares them with the weights' headers, and `orcinus up` adds up those of `--load-format dummy`. Imports no
torch. Norms and biases are left out: they are less than a hundredth.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.models.config import DecoderConfig, Mixture

Named = tuple[str, int, int]
"""Name without `.weight`, outputs (rows), inputs (columns)."""
Stacked = tuple[str, int, int, int]
"""Name of a tensor [count, inputs, outputs], count, outputs, inputs of each matrix."""


def tables(config: DecoderConfig) -> list[Named]:
    """Return the embedding, the head where it is another matrix, and learned positions, under their whole names."""
    family, names, hidden = config.family, config.family.names, config.hidden_size
    matrices = [(f"{names.prefix}{names.embed_tokens}", config.vocab_size, hidden)]
    if not config.tied:
        matrices.append((names.lm_head, config.vocab_size, hidden))
    if names.position_embeddings is not None:
        matrices.append((f"{names.prefix}{names.position_embeddings}", config.context + family.position_offset, hidden))
    return matrices


def layer_prefix(config: DecoderConfig, index: int) -> str:
    """Return what the names of layer `index` of the whole model begin with."""
    return f"{config.family.names.prefix}{config.family.names.layers}.{index}."


def routers(config: DecoderConfig, index: int) -> list[Named]:
    """Return the matrices of layer `index` that no method rounds; names as in Names."""
    mixture = config.mixture_at(index)
    if mixture is None:
        return []
    router, gate = mixture.names.router, mixture.names.shared_gate
    return [(router, mixture.experts, config.hidden_size), *([(gate, 1, config.hidden_size)] if gate else [])]


def stacks(config: DecoderConfig, index: int) -> list[Stacked]:
    """Return the tensors of layer `index` that hold a matrix of each expert; names as in Names."""
    mixture, hidden = config.mixture_at(index), config.hidden_size
    if mixture is None or not mixture.names.stacked:
        return []
    names, inner = mixture.names, mixture.intermediate_size
    return [
        (f"{names.experts}.{names.gate_up_proj[0]}", mixture.experts, 2 * inner, hidden),
        (f"{names.experts}.{names.down_proj}", mixture.experts, hidden, inner),
    ]


def layer_matrices(config: DecoderConfig, index: int) -> list[Named]:
    """Return the matrices of layer `index` but those of a router and of `stacks`; names as in Names."""
    names, hidden, mixture = config.family.names, config.hidden_size, config.mixture_at(index)
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    outputs = (query, kv, kv) if len(names.qkv_proj) == 3 else (query + 2 * kv,)
    qkv = [(name, rows, hidden) for name, rows in zip(names.qkv_proj, outputs, strict=True)]
    if mixture is not None:
        return [*qkv, (names.o_proj, hidden, query), *_expert_matrices(mixture, hidden)]
    rows = config.gate_up_size // len(names.gate_up_proj)
    gate_up = [(name, rows, hidden) for name in names.gate_up_proj]
    return [*qkv, (names.o_proj, hidden, query), *gate_up, (names.down_proj, hidden, config.intermediate_size)]


def shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor with matrices of the model."""
    for name, outputs, inputs in tables(config):
        yield f"{name}.weight", (outputs, inputs)
    for index in range(config.layers):
        prefix = layer_prefix(config, index)
        for name, outputs, inputs in (*routers(config, index), *layer_matrices(config, index)):
            yield f"{prefix}{name}.weight", (outputs, inputs)
        for name, count, outputs, inputs in stacks(config, index):
            yield f"{prefix}{name}", (count, inputs, outputs)


def _expert_matrices(mixture: Mixture, hidden: int) -> list[Named]:
    names = mixture.names
    if names.stacked:
        return []
    mlps = [(f"{names.experts}.{expert}", mixture.intermediate_size) for expert in range(mixture.experts)]
    mlps += [(names.shared, mixture.shared_size)] if names.shared else []
    return [
        (f"{mlp}.{name}", *shape)
        for mlp, inner in mlps
        for name, shape in (
            *((name, (inner, hidden)) for name in names.gate_up_proj),
            (names.down_proj, (hidden, inner)),
        )
    ]

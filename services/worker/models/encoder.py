"""One encoder (BERT, RoBERTa, XLM-R): attention both ways, norms behind the sums, and what is pooled of its rows.

A family is its rows of `registry` and this file. Sources: modeling_bert.py and modeling_xlm_roberta.py of transformers
5.23; modules.json and 1_Pooling/config.json as sentence-transformers writes them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AnyOps, Batch, Cache, Float32, Int32, Int64, Prepared
from services.worker.checkpoint.source import Source
from services.worker.models.config import DecoderConfig
from services.worker.models.layers import Attention, Mlp, PositionTables
from services.worker.models.weights import WeightLoader, shard_of
from services.worker.parallel.state import ParallelState
from services.worker.quantization.base import LinearMethod
from shared.errors import ModelError
from shared.models.fields import Fields
from shared.models.model_files import AGAIN, read_json

MEAN, CLS = "mean", "cls"
LEAST_LENGTH = 1e-12
"""A vector is divided by no less."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a vector is made of a sequence's rows: their mean or the first one (CLS), perhaps divided by its length."""

    kind: str = MEAN
    normalize: bool = False


def read_pooling(model: Path) -> Pooling:
    """Return what modules.json says; without the file the mean, as sentence-transformers. Raise ModelError."""
    path = model / "modules.json"
    if not path.exists():
        return Pooling()
    listed = read_json(path, list)
    kinds = [str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else "" for module in listed]
    known = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
    if kinds not in known:
        raise ModelError(f"{path}: modules {kinds} are not supported; only Transformer, Pooling and Normalize are")
    folder = listed[1].get("path")
    if not isinstance(folder, str) or Path(folder).name != folder:
        raise ModelError(f"{path}: path {folder!r} of Pooling is no folder beside the file; fetch the model again")
    return Pooling(_kind(model / folder / "config.json"), "Normalize" in kinds)


def _kind(path: Path) -> str:
    raw = read_json(path)
    read = Fields(raw, str(path), remedy=AGAIN)
    switched = [key.removeprefix("pooling_mode_") for key in raw if key.startswith("pooling_mode_") and read.flag(key)]
    named = {"mean_tokens": MEAN, "cls_token": CLS, MEAN: MEAN, CLS: CLS}
    kinds = switched or [read.text("pooling_mode", MEAN)]
    if len(kinds) != 1 or kinds[0] not in named:
        raise ModelError(f"{path}: pooling {', '.join(kinds)} is not supported; only mean or cls alone is")
    return named[kinds[0]]


class EncoderLayer:
    """Attention and MLP, each added to its input and normed."""

    def __init__(self, loader: WeightLoader, index: int, tables: PositionTables) -> None:
        """Load layer `index`. Raise ModelError."""
        names, prefix, alone = loader.names, loader.layer_prefix(index), ParallelState()
        if names.attention_norm is None or names.down_norm is None:
            raise ValueError("an encoder needs the names of both norms")
        inner = (loader.config.intermediate_size, loader.shard.intermediate)
        self.ops = loader.ops
        self.attention = Attention(loader, alone, index, tables)
        self.mlp = Mlp(loader, alone, prefix, (names.gate_up_proj, names.down_proj), inner)
        self.attention_norm = loader.norm(f"{prefix}{names.attention_norm}")
        self.down_norm = loader.norm(f"{prefix}{names.down_norm}")

    def forward(self, x: Tensor, prepared: Prepared, cache: Cache, select: bool) -> Tensor:
        """Compute x [N, hidden] -> [N, hidden], overwriting x. select: return the rows that are pooled alone."""
        ops = self.ops
        out = self.attention.forward(x, prepared, cache, select)
        if select:
            x = ops.select(x, prepared)
        x = ops.add_norm(out, x, self.attention_norm)
        del out
        out = self.mlp.forward(x)
        return ops.add_norm(out, x, self.down_norm)


class Head:
    """A classifier with one label over the first row of a sequence: a score. In float32, on the host."""

    def __init__(self, loader: WeightLoader) -> None:
        """Load its two layers. Raise ModelError."""
        if loader.names.head is None:
            raise ValueError("a head needs the names of its layers")
        dense, out = loader.names.head
        hidden = loader.config.hidden_size
        self.dense, self.dense_bias = loader.plain(dense, hidden, hidden)
        self.out, self.out_bias = loader.plain(out, 1, hidden)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute [S, hidden] float32 -> [S, 1]."""
        inner = torch.tanh(torch.nn.functional.linear(rows, self.dense, self.dense_bias))
        return torch.nn.functional.linear(inner, self.out, self.out_bias)


class Encoder:
    """Weights, forward pass and pooling. A batch holds whole sequences; their K and V last for one layer."""

    def __init__(
        self,
        config: DecoderConfig,
        source: Source,
        ops: AnyOps,
        dtype: torch.dtype,
        positions: int,
        method: LinearMethod,
        pooling: Pooling,
    ) -> None:
        """Load the weights. positions: tokens of the longest sequence. Raise ModelError."""
        self.config, self.ops, self.pooling = config, ops, pooling
        loader = WeightLoader(config, shard_of(config, ParallelState()), source, ops, dtype, positions, method)
        self.embed_tokens = loader.embedding()
        self.positions, self.position_embeddings = positions, self._positions(loader)
        self.embed_norm = loader.norm(f"{loader.names.prefix}{loader.names.embed_norm}")
        tables = PositionTables(loader)
        self.layers = [EncoderLayer(loader, index, tables) for index in range(config.layers)]
        self.head = Head(loader) if config.family.scores else None
        self.adapters = loader.adapters

    def forward(self, prepared: Prepared, cache: Cache) -> Tensor:
        """Return [R, hidden]: the rows of the last layer that are pooled."""
        x = self.ops.embed(prepared, self.embed_tokens, 1.0, self.position_embeddings)
        x = self.ops.norm(x, self.embed_norm)
        for index, layer in enumerate(self.layers):
            x = layer.forward(x, prepared, cache, select=index + 1 == len(self.layers))
        return x

    def local_batch(self, batch: Batch, segments: Int32, block_size: int) -> Batch:
        """Return the batch with its rows in blocks of one step, from block 0 on, and the rows that are pooled.

        segments [S]: the first token of each sequence's second text; 0 for none. Its tokens have the second row of
        token_type_embeddings, which lies behind the positions of the first.
        """
        lengths = np.diff(batch.query_start)
        used = -(-lengths // block_size)
        firsts = np.cumsum(used, dtype=np.int32) - used
        positions = batch.positions
        blocks = np.repeat(firsts, lengths) + positions // block_size
        if self.config.token_types > 1:
            begins = np.repeat(np.where(segments > 0, segments, self.positions), lengths)
            positions = positions + np.where(positions >= begins, np.int32(self.positions), np.int32(0))
        all_rows = self.head is None and self.pooling.kind == MEAN
        return dataclasses.replace(
            batch,
            positions=positions,
            tables=firsts[:, None] + np.arange(int(used.max()), dtype=np.int32),
            write_blocks=blocks.astype(np.int32),
            write_offsets=batch.positions % block_size,
            sample_rows=np.arange(len(positions), dtype=np.int32) if all_rows else batch.query_start[:-1],
        )

    def pool(self, rows: Tensor, lengths: Int32) -> Float32:
        """Return [S, hidden] vectors, or [S, 1] scores, of what `forward` returned; lengths [S]."""
        rows = rows.float().cpu()
        if self.head is not None:
            return self.head.forward(rows).numpy()
        vectors: Float32 = rows.numpy()
        if self.pooling.kind == MEAN:
            starts: Int64 = np.cumsum(lengths, dtype=np.int64) - lengths
            vectors = np.add.reduceat(vectors, starts, axis=0)
            vectors /= lengths[:, None]
        return normalized(vectors) if self.pooling.normalize else vectors.copy()

    def _positions(self, loader: WeightLoader) -> Any:
        """Return [token types * positions, hidden]: each position's embedding with that of each token type."""
        names, positions = loader.names, loader.position_embeddings()
        if positions is None or names.type_embeddings is None:
            raise ValueError("an encoder needs the names of its positions and token types")
        types = loader.table(f"{names.prefix}{names.type_embeddings}", self.config.token_types)
        return torch.cat([positions + types[row] for row in range(min(2, self.config.token_types))])


def normalized(vectors: Float32) -> Float32:
    """Return [S, hidden] vectors of length 1; one of zeros stays."""
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(1, keepdims=True))
    rows: Float32 = (vectors / np.maximum(lengths, LEAST_LENGTH)).astype(np.float32)
    return rows

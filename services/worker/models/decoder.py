"""One decoder described by a DecoderConfig, or a rank's part of it; it knows tensors and kernels, no slot.

`forward` takes the flattened tokens of an iteration (selective batching: linear layers see one matrix, attention sees
per-sequence ranges) and returns the logits of the rows that sample. A backend may record it (see `layers`); where ranks
meet it says so by an operation too (`Ops.exchange`).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AnyOps, Batch, Cache, Prepared
from services.worker.checkpoint.source import Source
from services.worker.models.config import DecoderConfig
from services.worker.models.layers import DecoderLayer, PositionTables, Residual
from services.worker.models.matrices import layer_matrices, layer_prefix, routers, stacks, tables
from services.worker.models.weights import WeightLoader, find_tensor, shard_of
from services.worker.parallel.state import ParallelState
from services.worker.quantization import METHODS
from services.worker.quantization.base import LinearMethod, Matrix, Stack

log = logging.getLogger("orcinus.worker")


class Decoder:
    """Weights and forward pass."""

    def __init__(
        self,
        config: DecoderConfig,
        source: Source,
        ops: AnyOps,
        dtype: torch.dtype,
        positions: int,
        method: LinearMethod = METHODS["none"],
        parallel: ParallelState | None = None,
    ) -> None:
        """Load the weights. positions: the largest context served. method: of the layers' matrices.

        config: of the whole model, of which this rank computes a part. Raise ModelError, and ConfigurationError where
        the ranks cannot split the model.
        """
        self.parallel = parallel or ParallelState()
        self.shard = shard_of(config, self.parallel)
        self.config = self.shard.config(config)
        self.ops, self.dtype = ops, dtype
        self.began: Any = None  # Ops.mark() when the stage before this one had sent its rows
        self._vocab_size = config.vocab_size
        loader = WeightLoader(config, self.shard, source, ops, dtype, positions, method)
        names, first, last = loader.names, self.shard.first, self.shard.last
        self.embed_tokens, self.lm_head = loader.embedding_and_head()
        self.embed_scale = 1.0
        if config.family.embedding_scale:  # rounded to the model's type, as the model was trained
            self.embed_scale = float(torch.tensor(config.hidden_size**0.5).to(dtype))
        self.embed_norm = loader.optional_norm(names.prefix, names.embed_norm) if first else None
        self.position_embeddings = loader.position_embeddings()
        tables = PositionTables(loader)
        self.layers = [DecoderLayer(loader, self.parallel, index, tables) for index in self.shard.layers]
        self.norm = loader.norm(f"{names.prefix}{names.norm}") if last else None
        self.adapters = loader.adapters
        if config.stored is not None:
            plain, grouped = loader.part_counts
            stored, name = config.stored, str(dtype).removeprefix("torch.")
            log.info("%s, %d bits: %d matrices stay so, %d are in %s", stored.method, stored.bits, grouped, plain, name)
        if first and last and (unused := loader.unused()):  # of several stages, the others read the rest
            log.warning(
                "%s: tensors of no use to %s: %d, the first is %s",
                source.model,
                config.architecture,
                len(unused),
                unused[0],
            )

    def forward(self, prepared: Prepared, cache: Cache) -> Tensor:
        """Return [R, vocab] float32 logits of the rows that sample, or this rank's vocab_rows of them.

        Write the K and V of every row. A stage that is not the last sends its rows on; what it returns means nothing.
        """
        rows = self.last_rows(prepared, cache)
        return rows if self.norm is None else self.logits(rows)

    def logits(self, rows: Tensor) -> Tensor:
        """Return [R, vocab] float32 logits of what last_rows returned, or of some of it; as `forward`."""
        logits = self.ops.logits(rows, self.lm_head)
        return self.ops.softcap(logits, self.config.logit_softcap) if self.config.logit_softcap else logits

    def last_rows(self, prepared: Prepared, cache: Cache) -> Tensor:
        """Return [R, hidden]: as `forward`, of the rows that sample all but the last product."""
        ops, last = self.ops, len(self.layers) - 1
        residual = Residual(self._embed(prepared))
        for index, layer in enumerate(self.layers):
            layer.forward(residual, prepared, cache, select=self.parallel.last and index == last)
        if residual.pending is None:
            raise ValueError("a decoder needs at least one layer")
        if self.norm is None:
            ops.add(residual.pending, residual.rows)
            ops.exchange(residual.rows, self.parallel.send_rows)
            return residual.rows
        return residual.norm(ops, self.norm)

    def local_tokens(self, batch: Batch) -> Batch:
        """Return the batch with tokens as rows of this rank's embedding, those of other ranks as the row of zeros."""
        vocab, rows = self.shard.vocab, self.shard.vocab_rows
        if self.parallel.tp == 1:
            return batch
        inside = (batch.tokens >= vocab.start) & (batch.tokens < vocab.stop)
        local = np.where(inside, batch.tokens - vocab.start, rows - 1).astype(np.int32)
        return dataclasses.replace(batch, tokens=local)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return [R, vocab] of all ranks' parts at the rank that samples; what it returns elsewhere means nothing."""
        if not self.parallel.last or self.parallel.tp == 1:
            return logits
        parts: list[Tensor] = []
        self.ops.exchange(logits, lambda mine: parts.extend(self.parallel.gather(mine) or []))
        if not parts:
            return logits
        ids = self.shard.vocab_rows - 1
        return torch.cat([part[:, :ids] for part in parts], dim=1)[:, : self._vocab_size].contiguous()

    def _embed(self, prepared: Prepared) -> Tensor:
        """Return [N, hidden]: the tokens' embeddings, or the rows that the stage before this one sends."""
        ops = self.ops
        if not self.parallel.first:
            rows = ops.blank(prepared, self.config.hidden_size, self.dtype)
            ops.exchange(rows, self._receive)
            return rows
        rows = ops.embed(prepared, self.embed_tokens, self.embed_scale, self.position_embeddings)
        if self.parallel.tp > 1:
            ops.exchange(rows, self.parallel.all_reduce)
        return rows if self.embed_norm is None else ops.norm(rows, self.embed_norm)

    def _receive(self, rows: Tensor) -> None:
        self.parallel.receive_rows(rows)
        self.began = self.ops.mark()


def check_matrices(config: DecoderConfig, source: Source, method: LinearMethod) -> None:
    """Raise ModelError for the first matrix of the checkpoint that is missing or not as config.json says.

    Read headers and take no memory: a size that no machine can hold is a misshapen tensor first.
    """
    for name, outputs, inputs in tables(config):
        source.check(find_tensor(config, source, f"{name}.weight"), (outputs, inputs))
    for index in range(config.layers):
        prefix = layer_prefix(config, index)
        for name, outputs, inputs in routers(config, index):
            source.check(find_tensor(config, source, f"{prefix}{name}.weight"), (outputs, inputs))
        for name, outputs, inputs in layer_matrices(config, index):
            stem = find_tensor(config, source, f"{prefix}{name}.weight").removesuffix(".weight")
            matrix = Matrix(stem, outputs, inputs, range(outputs), range(inputs), config.family.transposed)
            method.check(source, matrix)
        for name, count, outputs, inputs in stacks(config, index):
            tensor = find_tensor(config, source, f"{prefix}{name}")
            method.check(source, Matrix(tensor, outputs, inputs, range(outputs), range(inputs), stack=Stack(0, count)))

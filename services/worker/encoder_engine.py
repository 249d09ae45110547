"""The engine of an encoder: whole prompts go in, vectors or scores come out; no KV is kept and no token drawn.

For the scheduler a block stands for a slot and holds any sequence, so that nothing is cached, swapped or refused for
want of memory. The K and V of a step lie in blocks that the engine numbers anew in each step.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from kernels.ops import STATUS_FINE, STATUS_NOT_FINITE, Batch, CacheShape, Done, Prepared, Sampled
from protos import worker_pb2
from services.worker.checkpoint.source import Progress, Source
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.kv.cache import Lengths, room_for
from services.worker.models.config import DecoderConfig, load_config
from services.worker.models.encoder import Encoder, read_pooling
from services.worker.parallel.state import ParallelState
from services.worker.quantization.base import LinearMethod
from services.worker.slots import SCORE, VECTOR, Chunks, SlotTable
from services.worker.warm_up import Speed, WarmUp
from shared.errors import ConfigurationError, ProtocolError

if TYPE_CHECKING:
    from shared.settings import WorkerSettings  # pydantic: an engine in process does without

log = logging.getLogger("orcinus.worker")


def load_engine(
    settings: WorkerSettings, progress: Progress | None = None, parallel: ParallelState | None = None
) -> Engine:
    """Return the engine of the model, decoder or encoder; as Engine."""
    kind = EncoderEngine if load_config(settings.model).family.is_encoder else Engine
    return kind(settings, progress, parallel)


class EncoderEngine(Engine):
    """An encoder, and the blocks of one step for one layer."""

    @property
    def pooling(self) -> int:
        """Return what each sequence gives: Enter.pooling."""
        return SCORE if self.config.family.scores else VECTOR

    @property
    def adapter_dir(self) -> Path | None:
        """Return None: a gateway loads no adapter for an encoder. The setting is that of all models of a stack."""
        return None

    @property
    def vector_size(self) -> int:
        return 0 if self.config.family.scores else self.config.hidden_size

    def info(self) -> worker_pb2.WorkerInfo:
        info = super().info()
        info.block_size, info.block_bytes = self.slots.block_size, 0
        info.gpu_blocks, info.host_blocks = self.slots.total_blocks, 0
        info.max_drafts, info.whole_prompts = 0, True
        return info

    def _wanted_lengths(self, config: DecoderConfig) -> Lengths:
        settings = self.settings
        refused = {
            f"--tp {settings.tp}": settings.tp > 1,
            f"--pp {settings.pp}": settings.pp > 1,
            f"--kv-dtype {settings.kv_dtype}": settings.kv_dtype != "auto",
            f"--worker-role {settings.worker_role}": settings.worker_role != "both",
        }
        if given := next((option for option, is_given in refused.items() if is_given), ""):
            raise ConfigurationError(
                f"{given}: {config.architecture} is an encoder, which has no such thing; leave it out"
            )
        wanted, most = settings.max_input_tokens, min(config.context, settings.max_step_tokens)
        if wanted > most:
            raise ConfigurationError(
                f"--max-input-tokens {wanted}: an encoder computes a text in one step, of at most {most} tokens by the "
                f"model's context and --max-step-tokens; lower the first or raise the last"
            )
        longest = wanted or most
        if not wanted and longest < config.context:
            log.warning(
                "--max-step-tokens %d: texts have at most as many tokens, the model's context is %d",
                longest,
                config.context,
            )
        return Lengths(model=longest + 1, input=longest, output=1)  # what is pooled counts as a token

    def _load(self, weights: Source, method: LinearMethod) -> None:
        pooling = read_pooling(self.settings.model)
        self.encoder = Encoder(self.config, weights, self.ops, self.dtype, self.lengths.input, method, pooling)
        self.adapter_rows = self.encoder.adapters

    def _plan_memory(self) -> None:
        settings, config = self.settings, self.config
        # Of each sequence the last block may be nearly empty.
        blocks = settings.max_step_tokens // settings.block_size + min(settings.max_seqs, settings.max_step_tokens)
        shape = CacheShape(blocks, 0, 1, config.kv_heads, settings.block_size, config.head_dim, self.dtype)
        with room_for("the KV of a step", "lower --max-step-tokens or --max-seqs"):
            self.cache = self.ops.new_cache(shape)
        self.slots = SlotTable(
            settings.max_seqs,
            self.lengths.model,
            self.lengths.model,
            settings.max_seqs,
            0,
            config.vocab_size,
            frozenset({self.pooling}),
        )
        self._begin_run()

    def _compile(self) -> None:
        cache, tokens = self.cache, self.settings.max_step_tokens
        self.compiled = self.ops.compile(lambda prepared: self.encoder.forward(prepared, cache), cache, tokens, tokens)

    def _run_largest(self) -> None:
        step, tokens = self._warm_steps.prefill()
        self.speed = Speed(self._run_alone(step), 0.0, tokens)

    @property
    def _warm_steps(self) -> WarmUp:
        return dataclasses.replace(super()._warm_steps, block_size=self.slots.block_size, pooling=self.pooling)

    def _local_batch(self, batch: Batch, chunks: Chunks) -> Batch:
        if chunks.starts.any() or not chunks.samples.all():
            raise ProtocolError("chunk_starts, chunk_lengths: an encoder computes each sequence whole, in one chunk")
        return self.encoder.local_batch(batch, self.slots.segment[chunks.slots], self.cache.shape.block_size)

    def _forward(self, inflight: InFlightStep, prepared: Prepared) -> Tensor:
        rows: Tensor = self.compiled(prepared)
        inflight.vectors = self.encoder.pool(rows, inflight.chunks.lengths)
        return rows

    def _sample(self, inflight: InFlightStep, logits: Tensor) -> None:
        """Give each sequence, in place of a token, id 0."""
        slots, table = inflight.sampling, self.slots
        inflight.positions, inflight.logprobs = table.known[slots], np.zeros(slots.size, np.int32)
        vectors = inflight.vectors
        is_fine = np.ones(slots.size, np.bool_) if vectors is None else np.isfinite(vectors).all(1)
        status = np.where(is_fine, STATUS_FINE, STATUS_NOT_FINITE)
        with self._lock:
            table.expect(slots, inflight.positions)
        inflight.sampled = Done(Sampled(np.zeros(slots.size, np.int64), status, None))

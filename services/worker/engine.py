"""The engine: runs one Step after another, in order, and answers each with a Result.

Usable in process (tests, benches) and behind gRPC (`services.worker.server`). One thread at a time may call it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import IO

import numpy as np
import orjson
import torch
from torch import Tensor

from kernels.cpu.backend import Compiled, CpuOps
from kernels.ops import (
    STATUS_FINE,
    STATUS_NOT_FINITE,
    Cache,
    CacheShape,
    Int32,
)
from protos import worker_pb2
from services.worker.backend import choose
from services.worker.cache import free_memory_bytes, plan_blocks, plan_host_blocks, room_for, wanted_lengths
from services.worker.models.config import load_config
from services.worker.models.decoder import Decoder
from services.worker.models.loader import Progress, open_weights
from services.worker.models.weights import check_matrices
from services.worker.slots import Chunks, SlotTable
from shared.columns import pack, pack_float, unpack
from shared.errors import ConfigurationError, ProtocolError
from shared.ids import identity
from shared.settings import WorkerSettings

log = logging.getLogger("orcinus.worker")


class Engine:
    """A model, its KV pool and its slots."""

    def __init__(self, settings: WorkerSettings, progress: Progress | None = None) -> None:
        """Loads the model and takes all memory. Raises ModelError or ConfigurationError."""
        self.settings = settings
        self.identity = identity()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        config = load_config(settings.model)
        lengths = wanted_lengths(settings, config)
        weights = open_weights(settings.model, settings.load_format, progress)
        check_matrices(config, weights)
        self.config = config
        self.model_hash = weights.fingerprint()
        with room_for("measuring the kernels", "use a smaller model"):
            self._ops, self.dtype = choose(settings, config)
        with room_for("the weights", "use a smaller model, or lower --max-input-tokens and --max-output-tokens"):
            int8 = settings.quantize == "int8"
            self._decoder = Decoder(config, weights, self._ops, self.dtype, lengths.model, int8)
        shape = CacheShape(
            blocks=1,
            host_blocks=0,
            layers=config.layers,
            kv_heads=config.kv_heads,
            block_size=settings.block_size,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )
        free_bytes = free_memory_bytes()
        blocks, self.lengths = plan_blocks(settings, shape, lengths, free_bytes)
        host_blocks = plan_host_blocks(settings, blocks, self.lengths, shape.block_bytes, free_bytes)
        with room_for("the KV pool", "lower --kv-blocks, --kv-memory-fraction or --host-blocks"):
            self._cache: Cache = self._ops.new_cache(dataclasses.replace(shape, blocks=blocks, host_blocks=host_blocks))
        with room_for("the largest step", "lower --max-step-tokens"):
            self._compiled = self._ops.compile(
                lambda prepared: self._decoder.forward(prepared, self._cache),
                self._cache,
                settings.max_step_tokens,
                min(settings.max_seqs, settings.max_step_tokens),
            )
        self._slots = SlotTable(
            settings.max_seqs, self.lengths.model, settings.block_size, blocks, host_blocks, config.vocab_size
        )
        self._last_end_ns = 0
        self._warm_s, self._warm_tokens = 0.0, 0  # the largest step of the warm-up
        self._warm_decode_s = 0.0
        self._step_log: IO[bytes] | None = _open_log(settings.step_log)

    @property
    def matrices(self) -> str:
        """Whose matrix kernels run: "own" or "torch"."""
        return self._ops.path if isinstance(self._ops, CpuOps) else "torch"

    def info(self) -> worker_pb2.WorkerInfo:
        """What Describe answers."""
        shape = self._cache.shape
        return worker_pb2.WorkerInfo(
            id=self.settings.worker_id,
            identity=self.identity,
            model=self.settings.served_model_name,
            model_hash=self.model_hash,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self._ops.device),
            backend=self._ops.name,
            layers=shape.layers,
            block_size=shape.block_size,
            block_bytes=shape.block_bytes,
            gpu_blocks=shape.blocks,
            host_blocks=shape.host_blocks,
            max_seqs=self.settings.max_seqs,
            max_model_len=self.lengths.model,
            max_input_tokens=self.lengths.input,
            max_output_tokens=self.lengths.output,
            max_step_tokens=self.settings.max_step_tokens,
            vocab_size=self.config.vocab_size,
            stages=1,
            largest_step_ms=max(1, round(self._warm_s * 1000)) if self._warm_tokens else 0,
        )

    def predicted_s(self, tokens: int) -> float:
        """Seconds that a step of so many tokens takes by the warm-up's measure; 0 before the warm-up.

        Few tokens with long contexts cost more than their share of the largest step: at least the step in which
        every slot decodes.
        """
        return max(self._warm_s * tokens / max(self._warm_tokens, 1), self._warm_decode_s)

    def reset(self) -> None:
        """A new Run: no slot is taken and no KV is known. What stays in the blocks is never read."""
        self._slots.clear()
        self._last_end_ns = 0

    def warm_up(self) -> None:
        """Runs the largest batches, so that what is missing (memory above all) is missing now. Ends with reset().

        All sequences share one block table: their numbers mean nothing, and any pool is large enough. Raises
        ConfigurationError where the memory does not suffice.
        """
        with room_for("the largest step", "lower --max-step-tokens or --max-seqs"):
            self._warm_up()

    def _warm_up(self) -> None:
        seqs, budget = self.settings.max_seqs, self.settings.max_step_tokens
        longest = min(self.lengths.model - 1, budget)
        blocks = pack(np.arange(-(-longest // self.settings.block_size)))
        lengths = [longest] * min(seqs, budget // longest)
        if len(lengths) < seqs and budget % longest:
            lengths.append(budget % longest)
        result = self.execute(_warm_step(lengths, 0, blocks))
        self._warm_s, self._warm_tokens = result.timings.total_ns / 1e9, sum(lengths)
        self.reset()
        rows = min(seqs, budget)
        context = max(1, min(longest, self._cache.shape.blocks * self.settings.block_size // rows))
        result = self.execute(_warm_step([context] * rows, context - 1, blocks))
        self._warm_decode_s = result.timings.total_ns / 1e9
        self.reset()
        for size in self._ops.batch_sizes(self.dtype, budget):
            whole, rest = divmod(size, longest)
            lengths = [longest] * whole + [rest] * (rest > 0)
            if len(lengths) <= seqs:
                self.execute(_warm_step(lengths, 0, blocks))
                self.reset()
            if size <= rows:
                self.execute(_warm_step([2] * size, 1, blocks))
                self.reset()
        if most := min(self._slots.max_blocks, self._cache.shape.blocks, self._cache.shape.host_blocks):
            copied = pack(np.arange(most))  # the longest sequence, out and in
            self.execute(
                worker_pb2.Step(swap_out_gpu=copied, swap_out_host=copied, swap_in_host=copied, swap_in_gpu=copied)
            )
            self.reset()

    def read_block(self, block: int) -> Tensor:
        """[layers, 2, kv_heads, block_size, head_dim]: one block's K and V, copied."""
        return self._cache.read_block(block)

    def profile(self, step: worker_pb2.Step) -> list[tuple[str, int]]:
        """Runs a step's forward pass; (operation, ns) in order, as the backend measures them. Samples nothing.

        Raises ConfigurationError where the backend cannot tell.
        """
        if not isinstance(self._compiled, Compiled):
            remedy = "--deterministic keeps to our own" if self._ops.name == "cpu" else "use --kernels cpu"
            raise ConfigurationError(f"{self.matrices}'s matrix kernels cannot be profiled; {remedy}")
        with torch.inference_mode():
            chunks = self._slots.apply(step, self._cache)
            found = self._compiled.profile(self._ops.prepare(self._slots.batch(chunks), self._cache))
            self._slots.computed_through(chunks)
        return found

    def execute(self, step: worker_pb2.Step, received_ns: int = 0) -> worker_pb2.Result:
        """Runs one step. `received_ns` is time.monotonic_ns() at its receipt.

        Raises ProtocolError for a step that breaks the contract, and whatever the backend raises; after either the
        state is not to be trusted until reset(). A sequence that fails alone is in Result.errors.
        """
        started = time.monotonic_ns()
        if step.HasField("hello"):
            raise ProtocolError("a step cannot carry hello: it begins a Run")
        with torch.inference_mode():
            chunks = self._slots.apply(step, self._cache)
            errors = self._failed(step)
            tokens_total = int(chunks.lengths.sum())
            if tokens_total > self.settings.max_step_tokens:
                raise ProtocolError(
                    f"the step has {tokens_total} tokens, this worker takes at most {self.settings.max_step_tokens}"
                )
            logits = self._forward(chunks)
            forwarded = time.monotonic_ns()
            slots, tokens, logprobs = self._sample(logits, chunks.slots[chunks.samples], errors)
        ended = time.monotonic_ns()
        result = worker_pb2.Result(
            epoch=step.epoch,
            id=step.id,
            slots=pack(slots),
            tokens=pack(tokens),
            logprobs=b"" if logprobs is None else pack_float(logprobs),
            timings=worker_pb2.Timings(
                queued_ns=started - received_ns if received_ns else 0,
                idle_ns=started - self._last_end_ns if self._last_end_ns else 0,
                forward_ns=forwarded - started,
                sample_ns=ended - forwarded,
                total_ns=ended - started,
                swap_ns=chunks.swap_ns,
            ),
            swap_out_acks=step.swap_out_gpu,
            swap_in_acks=step.swap_in_host,
            errors=errors,
        )
        self._last_end_ns = ended
        self._write_log(result, chunks)
        return result

    def _forward(self, chunks: Chunks) -> Tensor | None:
        """Logits of the chunks that sample; None when the step computes nothing."""
        if not chunks.slots.size:
            return None
        prepared = self._ops.prepare(self._slots.batch(chunks), self._cache)
        logits = self._compiled(prepared)
        self._slots.computed_through(chunks)
        return logits

    def _sample(
        self, logits: Tensor | None, slots: Int32, errors: list[worker_pb2.SequenceError]
    ) -> tuple[Int32, Int32, np.ndarray | None]:
        """Samples one token per slot; those that cannot go to `errors` and out of the answer."""
        if logits is None or not slots.size:
            return slots[:0], slots[:0], None
        table = self._slots
        unmasked = [s for s in slots[table.sampling.needs_mask[slots]].tolist() if not table.sampling.has_mask(s)]
        if unmasked:
            for slot in unmasked:
                self._fail(slot, "no_mask", "no allow-bitmask came for this step", errors)
            keep = ~np.isin(slots, unmasked)
            slots, logits = slots[keep], logits[torch.from_numpy(keep)]
            if not slots.size:
                return slots, slots, None
        rows = table.sampling.rows(slots, table.known[slots], table.prompt[slots], table.tokens)
        sampled = self._ops.sample(logits, rows)
        tokens = sampled.tokens.cpu().numpy().astype(np.int32)
        status = sampled.status.cpu().numpy()
        logprobs = None if sampled.logprobs is None else sampled.logprobs.cpu().numpy()
        if (status != STATUS_FINE).any():
            for row in np.flatnonzero(status != STATUS_FINE).tolist():
                if status[row] == STATUS_NOT_FINITE:
                    self._fail(int(slots[row]), "nan_logits", "the model gave logits that are not finite", errors)
                else:
                    self._fail(int(slots[row]), "nothing_allowed", "bans and mask leave no token to choose", errors)
            fine = status == STATUS_FINE
            slots, tokens = slots[fine], tokens[fine]
            logprobs = None if logprobs is None else logprobs[fine]
        table.record(slots, tokens)
        return slots, tokens, logprobs

    def _fail(self, slot: int, code: str, message: str, errors: list[worker_pb2.SequenceError]) -> None:
        self._slots.fail(slot, code, message)
        errors.append(worker_pb2.SequenceError(slot=slot, code=code, message=message))

    def _failed(self, step: worker_pb2.Step) -> list[worker_pb2.SequenceError]:
        """The errors of slots that failed before and are in this step again (or entered in it with bad input)."""
        failed = self._slots.failed
        if not failed:
            return []
        return [
            worker_pb2.SequenceError(slot=slot, code=failed[slot][0], message=failed[slot][1])
            for slot in unpack(step.chunk_slots).tolist()
            if slot in failed
        ]

    def _write_log(self, result: worker_pb2.Result, chunks: Chunks) -> None:
        if self._step_log is None:
            return
        one = chunks.lengths == 1
        starts, lengths = chunks.starts[~one].astype(np.int64), chunks.lengths[~one]
        line = {
            "epoch": result.epoch,
            "step": result.id,
            "sequences": len(chunks.slots),
            "tokens": int(chunks.lengths.sum()),
            "decode_context": int(chunks.starts[one].sum()),
            "prefill_context": float((lengths * (starts + (lengths + 1) / 2)).sum()),
            "sampled": len(result.slots) // 4,
            "errors": len(result.errors),
            "queued_us": result.timings.queued_ns // 1000,
            "idle_us": result.timings.idle_ns // 1000,
            "forward_us": result.timings.forward_ns // 1000,
            "sample_us": result.timings.sample_ns // 1000,
            "swap_us": result.timings.swap_ns // 1000,
        }
        self._step_log.write(orjson.dumps(line) + b"\n")
        self._step_log.flush()


def _warm_step(lengths: list[int], computed: int, blocks: bytes) -> worker_pb2.Step:
    """Sequences of these lengths, all but the first `computed` tokens of each to be computed."""
    slots = list(range(len(lengths)))
    return worker_pb2.Step(
        enters=[
            worker_pb2.Enter(slot=slot, tokens=bytes(4 * n), prompt_tokens=n, computed=computed, blocks=blocks)
            for slot, n in zip(slots, lengths, strict=True)
        ],
        chunk_slots=pack(slots),
        chunk_starts=pack([computed] * len(slots)),
        chunk_lengths=pack([n - computed for n in lengths]),
    )


def _open_log(path: Path | None) -> IO[bytes] | None:
    if path is None:
        return None
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigurationError(f"--step-log {path}: {error.strerror}") from error

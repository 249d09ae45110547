"""The engine: gives one Step after another to the device, in order, and answers each with a Result.

Usable in process (tests, benches) and behind gRPC (`services.worker.serving`). Where the backend overlaps, a step may
be submitted while the one before it is computed: one thread submits, one finishes, each in the order of the steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.backend import Compiled
from kernels.cuda.device import Device
from kernels.ops import SCORED_BYTES, Batch, Cache, CacheShape, Int32, Prepared, Scored
from protos import worker_pb2
from services.worker.adapters.table import AdapterTable
from services.worker.backend import choose, device_of, set_threads
from services.worker.broadcast import TokenBroadcast
from services.worker.checkpoint.fingerprint import Fingerprint
from services.worker.checkpoint.source import Progress, Source, open_weights
from services.worker.grammar import SlotGrammars
from services.worker.in_flight import GRAMMAR, NO_ROWS, InFlightStep, InFlightSteps, Marks
from services.worker.kv.cache import (
    Lengths,
    has_room_for_all,
    plan_pool,
    resident_memory_bytes,
    room_for,
    wanted_lengths,
)
from services.worker.kv.host_tier import HostTier
from services.worker.kv.transfers import Acknowledged, KVTransfers
from services.worker.models.config import DecoderConfig, load_config, rank_config
from services.worker.models.decoder import Decoder, check_matrices
from services.worker.models.encoder import normalized
from services.worker.models.gguf import GgufWeights
from services.worker.parallel.state import ParallelState
from services.worker.quantization import method_of
from services.worker.quantization.base import LinearMethod
from services.worker.slots import SCORE, Chunks, ScoredTokens, SlotTable
from services.worker.step_log import StepLog
from services.worker.warm_up import Speed, WarmUp
from shared.errors import ConfigurationError, ProtocolError
from shared.ids import identity
from shared.models.gguf.reader import is_gguf
from shared.wire import handshake
from shared.wire.columns import pack, unpack

if TYPE_CHECKING:
    from shared.settings import WorkerSettings  # pydantic: an engine in process does without

log = logging.getLogger("orcinus.worker")

MAX_DRAFTS = 64
"""Draft tokens of one step."""

STEPS_IN_FLIGHT = 2
"""Steps that may be submitted and not finished. With more, a step could need a token that was overwritten."""


class Engine:
    """A model, its KV pool and its slots."""

    def __init__(
        self, settings: WorkerSettings, progress: Progress | None = None, parallel: ParallelState | None = None
    ) -> None:
        """Load the model and take all memory. Raise ModelError or ConfigurationError.

        With several ranks each makes an engine with the same settings, warms it up, resets it and is given the same
        steps in the same order; only the leader's results are complete. Then RankError is raised too, and what any call
        raises but ProtocolError leaves the ranks out of step: the process has to end.
        """
        self.settings = settings
        self.parallel = parallel or ParallelState()
        self.identity = identity()
        self._tier = HostTier(
            settings, self.parallel
        )  # first: what is amiss with the folder shows before the weights come
        set_threads(settings, self.parallel.ranks_here)
        config = load_config(settings.model)
        if is_gguf(settings.model) and settings.load_format != "auto":
            raise ConfigurationError(
                f"--load-format {settings.load_format}: {settings.model} is a GGUF file; leave the option out"
            )
        if config.stored is not None and settings.load_format == "dummy":
            raise ConfigurationError(
                "--load-format dummy: config.json has a quantization_config, random weights are plain; take it out"
            )
        method = method_of(settings.quantize, config.stored)
        self.lengths = self._wanted_lengths(config)
        weights: Source
        if is_gguf(settings.model):
            weights = GgufWeights(config, settings.model, progress)
        else:
            weights = open_weights(settings.model, settings.load_format, progress)
        check_matrices(config, weights, method)
        self.config = config
        head, spans = weights.head(), weights.spans()
        fingerprint = Fingerprint(head, spans, max(1, torch.get_num_threads() // 2), self.parallel)
        with room_for("the kernels", "use a smaller model"):
            self.ops, self.dtype = choose(settings, rank_config(config, self.parallel.tp, self.parallel.pp))
        self._numerics_of_format = method.numerics(self.ops, self.dtype)
        has_adapters = "no" if self.adapter_dir is None else "an"  # each host may have the folder elsewhere
        self.parallel.demand_same(
            f"{hashlib.sha256(head).hexdigest()} {self.numerics} --block-size {settings.block_size} "
            f"--max-seqs {settings.max_seqs} --max-step-tokens {settings.max_step_tokens} {self.lengths} "
            f"{has_adapters} --adapter-dir --max-loras {settings.max_loras} --max-lora-rank {settings.max_lora_rank}"
        )
        self.parallel.connect(self.ops.device, settings.deterministic)
        with room_for("the weights", "use a smaller model, or lower --max-input-tokens and --max-output-tokens"):
            self._load(weights, method)
        limits = settings.max_loras, settings.max_lora_rank
        if self.adapter_dir is not None:
            with room_for("the adapters", "lower --max-loras or --max-lora-rank"):
                self.adapter_rows.reserve(*limits, settings.max_step_tokens)
        self.adapters = AdapterTable(self.adapter_dir, self.adapter_rows, config, limits, self.parallel)
        self.grammars = SlotGrammars(settings.model, config.vocab_size)
        self.takes_late = False
        """Whether the scheduler of the Run plans late rows again."""
        self._broadcast = TokenBroadcast(self.parallel)
        self._lock = threading.Lock()  # around slots and steps in flight, which both threads change
        self.speed = Speed()
        self._step_log: StepLog | None = None
        self._plan_memory()
        with room_for("the largest step", "lower --max-step-tokens, --max-seqs or --kv-memory-fraction"):
            self._compile()
        self.model_hash = weights.prefix + fingerprint.result()
        if settings.step_log is not None and self.parallel.is_leader:
            self._step_log = StepLog(settings.step_log)

    def _wanted_lengths(self, config: DecoderConfig) -> Lengths:
        """Return the lengths that are served. Raise ConfigurationError for settings that this model cannot have."""
        return wanted_lengths(self.settings, config)

    def _load(self, weights: Source, method: LinearMethod) -> None:
        self.decoder = Decoder(self.config, weights, self.ops, self.dtype, self.lengths.model, method, self.parallel)
        self.adapter_rows = self.decoder.adapters

    def _plan_memory(self) -> None:
        """Take a pool of as many blocks as there may be; on a GPU, of those that weights and the largest step leave."""
        settings, config = self.settings, self.decoder.config
        tokens, heads = settings.block_size, config.kv_heads
        shape = CacheShape(1, 0, config.layers, heads, tokens, config.head_dim, self.dtype, settings.kv_dtype)
        gpu_bytes = None
        if (device := device_of(self.ops)) is not None:
            with room_for("the largest step", "lower --max-step-tokens or --max-seqs"):
                gpu_bytes = self._left_on(device, shape)
        block_bytes = self.ops.block_bytes(shape)
        shape, self.lengths = plan_pool(settings, shape, block_bytes, self.lengths, gpu_bytes, self.parallel)
        with room_for("the KV pool", "lower --kv-blocks, --kv-memory-fraction or --host-blocks"):
            self._take_pool(shape)

    def _left_on(self, device: Device, shape: CacheShape) -> int:
        """Return the bytes of the device that are free while the largest step runs, with a pool just large enough."""
        free, _ = device.free_bytes()
        if self.settings.kv_blocks:
            return free  # the setting decides
        device.peak_bytes(reset=True)
        shape = dataclasses.replace(shape, blocks=self._warm_steps.blocks)
        self._take_pool(shape)
        self._compile()
        self._run_largest()
        self._run_alone(self._warm_steps.score())
        # With what the driver keeps for itself: kernels, handles of libraries, recorded steps.
        left, _ = device.free_bytes()
        peak, pool = device.peak_bytes(reset=True), shape.blocks * shape.block_bytes
        left += pool - (peak - device.peak_bytes())
        del self.compiled, self._compiled_with_adapters  # and what it holds of the device, before the next is made
        log.info(
            "the largest step takes %.0f MiB of the %.0f that the weights leave", (free - left) / 2**20, free / 2**20
        )
        return max(0, left)

    def _take_pool(self, shape: CacheShape) -> None:
        on_gpu = device_of(self.ops) is not None
        swaps = on_gpu and not has_room_for_all(self.settings, shape.blocks, self.lengths)
        host_blocks, host = self._tier.take(shape.host_blocks, self.ops.block_bytes(shape), swaps)
        shape = dataclasses.replace(shape, host_blocks=host_blocks)
        self.cache: Cache = self.ops.new_cache(shape, host)
        self.slots = SlotTable(
            self.settings.max_seqs,
            self.lengths.model,
            shape.block_size,
            shape.blocks,
            shape.host_blocks,
            self.config.vocab_size,
            wrong_adapter=self.adapters.problem,
        )
        self._begin_run()

    def _compile(self) -> None:
        """Compile the forward pass, and another one with the products of adapters where there may be any."""
        rows = self.adapter_rows
        rows.begin(None)
        self.compiled = self._compiled_with_adapters = self._compiled()
        if self.adapter_dir is not None:
            rows.begin(NO_ROWS)
            self._compiled_with_adapters = self._compiled()
            rows.begin(None)

    def _compiled(self) -> Callable[[Prepared], Tensor]:
        cache, step_tokens = self.cache, self.settings.max_step_tokens
        return self.ops.compile(
            lambda prepared: self.decoder.forward(prepared, cache),
            cache,
            step_tokens,
            min(self.settings.max_seqs + MAX_DRAFTS, step_tokens),
            self.parallel.least,
        )

    @property
    def overlaps(self) -> bool:
        """Return whether a step may be submitted before the previous one is finished: up to `max_in_flight`."""
        return self.parallel.pp > 1 or (self.ops.overlaps and self.parallel.size == 1)

    @property
    def max_in_flight(self) -> int:
        """Return how many steps may be submitted and not finished."""
        return STEPS_IN_FLIGHT * self.parallel.pp

    @property
    def numerics(self) -> str:
        """Return what decides the numbers of this engine besides the model: kernels, type, formats of weights, KV and
        adapters.
        """
        dtype, up = (str(one).removeprefix("torch.") for one in (self.dtype, self.ops.up_dtype(self.dtype)))
        kv = "" if self.settings.kv_dtype == "auto" else f" kv {self.settings.kv_dtype}"
        adapters = "" if self.adapter_dir is None or up == "float32" else f" adapters {up}"
        weights = f"{self.settings.quantize}{self._numerics_of_format}"
        return f"{self.ops.numerics(self.dtype)} {dtype} {weights}{kv}{adapters}"

    @property
    def adapter_dir(self) -> Path | None:
        """Return the folder of the adapters; None where there are none."""
        return self.settings.adapter_dir

    @property
    def vector_size(self) -> int:
        """Return how many numbers the vector of a pooled sequence has."""
        return self.config.hidden_size

    def info(self) -> worker_pb2.WorkerInfo:
        """Return what Describe answers."""
        shape = self.cache.shape
        return worker_pb2.WorkerInfo(
            id=self.settings.worker_id,
            version=handshake.version(),
            identity=self.identity,
            model=self.settings.served_model_name,
            model_hash=self.model_hash,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.ops.device),
            backend=self.ops.name,
            layers=self.config.layers,
            block_size=shape.block_size,
            block_bytes=self.ops.block_bytes(shape),
            gpu_blocks=shape.blocks,
            host_blocks=shape.host_blocks,
            max_seqs=self.settings.max_seqs,
            max_model_len=self.lengths.model,
            max_input_tokens=self.lengths.input,
            max_output_tokens=self.lengths.output,
            max_step_tokens=self.settings.max_step_tokens,
            vocab_size=self.config.vocab_size,
            stages=self.parallel.pp,
            tensor_ranks=self.parallel.tp,
            largest_step_ms=self.speed.largest_ms,
            max_drafts=MAX_DRAFTS,
            masks_behind_drafts=True,
            # Of more than two ranks the order of a sum depends on the row's place, unless the sums are to be exact.
            same_bits=self.ops.name == "cpu" and (self.parallel.tp <= 2 or self.settings.deterministic),
            numerics=self.numerics,
            experts=mixture.experts if (mixture := self.config.mixture) else 0,
            experts_per_token=mixture.top_k if mixture else 0,
            vector_size=self.vector_size,
            max_loras=self.adapters.max_adapters,
            **self._tier.describe(self.cache, self.ops.name, self.model_hash),
        )

    def reset(self, epoch: int = 0) -> None:
        """Begin a new Run: no slot is taken, no block holds KV, no copy runs. Old content of blocks is never read, and
        results of steps in flight are discarded. epoch: that of the Run; 0 begins the same one anew."""
        self._transfers.drain()
        if epoch:
            self._tier.begin_run(epoch)
        if self.parallel.size > 1:  # what the ranks say to each other has an order
            self._learn(np.arange(self.slots.max_seqs, dtype=np.int32))
        with self._lock:
            self.slots.clear()
            self._begin_run()

    def serve(self, hello: worker_pb2.Hello) -> None:
        """Learn which scheduler the next Run is of. Before reset()."""
        self.takes_late = hello.takes_late
        self._tier.serve(hello.shard, hello.kept)

    def end_run(self) -> None:
        """End the Run: unmap the memory of other workers. For the thread that submits."""
        self._transfers.release_peers()

    def _begin_run(self) -> None:
        self._transfers = KVTransfers(self.cache, self._tier.peers(self.cache, self.ops.block_bytes(self.cache.shape)))
        self._in_flight = InFlightSteps(self.slots)
        self.grammars.clear()
        self.adapters.begin_run()
        self._previous: InFlightStep | None = None  # the last that was submitted
        self._last_end: Any = None

    def warm_up(self) -> None:
        """Run the largest batches, so that what is missing (memory above all) is missing now. End with reset().

        Raise ConfigurationError where the memory does not suffice.
        """
        with room_for("the largest step", "lower --max-step-tokens or --max-seqs"):
            self._run_largest()
            sizes = self.ops.batch_sizes(self.dtype, self.settings.max_step_tokens)
            for step in self._warm_steps.sizes(sizes):
                self._run_alone(step)
            shape = self.cache.shape
            if most := min(self.slots.max_blocks, shape.blocks, shape.host_blocks):
                self._run_alone(self._warm_steps.swap(most))  # the longest sequence, out and in
        if self.parallel.samples and not self.config.family.is_encoder:
            self.grammars.prepare()  # here: beside the steps before, it would make them seem slow

    def prove(self) -> None:
        """Run steps of one token, as the warm-up did. An error that they raise is the engine's, not
        that of a request before. No step may be in flight. End with reset()."""
        for step in self._warm_steps.sizes([1]):
            self._run_alone(step)

    def _run_largest(self) -> None:
        """Run the largest prefill and the largest decode; `speed` then has their times."""
        step, tokens = self._warm_steps.prefill()
        prefill_s = self._run_alone(step)
        self.speed = Speed(prefill_s, self._run_alone(self._warm_steps.decode(self.cache.shape.blocks)), tokens)

    def _run_alone(self, step: worker_pb2.Step) -> float:
        """Return the seconds of a step that nothing comes before or after."""
        seconds = self.execute(step).timings.total_ns / 1e9
        self.reset()
        return seconds

    @property
    def _warm_steps(self) -> WarmUp:
        settings = self.settings
        return WarmUp(settings.max_seqs, settings.max_step_tokens, self.lengths.model - 1, settings.block_size)

    def read_block(self, block: int) -> Tensor:
        """Return [layers, 2, kv_heads, block_size, head_dim]: one block's K and V, copied."""
        return self.cache.read_block(block)

    def profile(self, step: worker_pb2.Step) -> list[tuple[str, int]]:
        """Run a step's forward pass; (operation, ns) in order, as the backend measures them. Sample nothing.

        Raise ConfigurationError where the backend cannot tell.
        """
        if not isinstance(self.compiled, Compiled):
            raise ConfigurationError(f"the {self.ops.name} kernels cannot be profiled; use --kernels cpu")
        with torch.inference_mode():
            chunks = self.slots.apply(step, self._transfers)
            self.adapter_rows.begin(None)
            batch = self._local_batch(self.slots.batch(chunks), chunks)
            profile = self.compiled.profile(self.ops.prepare(batch, self.cache))
            self.slots.computed_through(chunks)
        return profile

    def execute(self, step: worker_pb2.Step, received_ns: int = 0) -> worker_pb2.Result:
        """Submit a step and finish it; see there for arguments and errors."""
        return self.finish(self.submit(step, received_ns))

    def submit(self, step: worker_pb2.Step, received_ns: int = 0) -> InFlightStep:
        """Give a step to the device. `received_ns` is time.monotonic_ns() at its receipt.

        At most one step may be in flight, and none unless the backend overlaps. Raise ProtocolError for a step that
        breaks the contract, and whatever the backend raises; after either the state is not to be trusted until reset().
        """
        queued_ns = time.monotonic_ns() - received_ns if received_ns else 0
        if step.HasField("hello"):
            raise ProtocolError("a step cannot carry hello: it begins a Run")
        with torch.inference_mode():
            if self.parallel.size > 1:
                self._learn(self.slots.slots_of(step.chunk_slots))
            peers = self._transfers.peers
            readable = peers.update(step.peers) if step.peers else []
            if step.epoch:  # else of a warm-up
                peers.remove_unannounced()
            adapters = self.adapters.update(step.adapters) if step.adapters else []
            marks = Marks(self._last_end, self.ops.mark())
            with self._lock:
                inflight, batch = self._begin(step, marks, queued_ns)
            inflight.peers, inflight.adapters = readable, adapters
            if step.peers:
                inflight.unreadable = peers.refusals
            if step.keep:
                inflight.keep = self._to_keep(unpack(step.keep))
            prepared = None if batch is None else self.ops.prepare(batch, self.cache)
            if self.ops.overlaps:
                marks.start = self.ops.mark()  # a device that has waited for the host until here was idle
            inflight.begun_ns = time.monotonic_ns()
            logits = None if prepared is None else self._forward(inflight, prepared)
            if logits is not None and not self.parallel.first:
                marks.start = self.decoder.began
            marks.forwarded = self.ops.mark()
            if logits is not None:
                self._sample(inflight, logits)
            marks.ended = self._last_end = self.ops.mark()
        self._previous = inflight
        return inflight

    def _to_keep(self, blocks: Int32) -> Int32:
        """Return which of the host blocks that are to outlive this worker may. Raise ProtocolError."""
        if np.unique(blocks).size < blocks.size or blocks.min() < 0 or blocks.max() >= self.cache.shape.host_blocks:
            raise ProtocolError(f"keep: a block twice, or outside 0..{self.cache.shape.host_blocks - 1}")
        has_bytes = resident_memory_bytes()
        if device_of(self.ops) is not None:
            has_bytes += self.cache.shape.blocks * self.ops.block_bytes(self.cache.shape)
        return blocks[: self._tier.make_room(blocks.size, has_bytes)]

    def finish(self, inflight: InFlightStep, more: Callable[[], bool] = lambda: False) -> worker_pb2.Result:
        """Wait for the device and answer. Steps are finished in the order in which they were submitted.

        more: whether another Result follows anyway once the tokens are there; copies that still run are then left to
        it. Raise whatever the backend raises, as `submit`. A sequence that fails alone is in Result.errors, and again
        in the result of a step that was submitted before it was known.
        """
        sampled = None if inflight.sampled is None else inflight.sampled.wait()
        with self._lock:
            slots, tokens, counts, records = self._in_flight.settle(inflight, sampled)
        waits = self.parallel.size > 1 or bool(inflight.keep.size) or not more()
        copied = inflight.transfers.acknowledge(inflight.id, wait=waits)
        kept = self._tier.keep(inflight.keep)
        are_stale = tuple(map(bool, copied.faults))
        if inflight.swaps and self.parallel.size > 1:
            are_stale = self._broadcast.confirm_copies(inflight, copied)
        stale = _stale_peers(inflight, copied, are_stale)
        result = worker_pb2.Result(
            epoch=inflight.epoch,
            id=inflight.id,
            slots=pack(slots),
            tokens=pack(tokens),
            timings=inflight.timings(self.ops, copied.ns),
            swap_out_acks=copied.out_gpu,
            swap_in_acks=copied.in_host,
            stale_reasons=stale.values(),
            errors=inflight.all_errors(),
            late_slots=inflight.late_slots(),
            kept=kept,
        )
        # What most steps do not have.
        if counts.size:
            result.token_counts = pack(counts)
        if records:
            result.logprobs, result.logprob_sizes = b"".join(records), pack([len(record) for record in records])
        if stale:
            result.stale_peers = pack(list(stale))
        if inflight.peers:
            result.peer_acks = pack(inflight.peers)
        if inflight.adapters:
            result.adapter_acks = pack(inflight.adapters)
        inflight.write_prompt_logprobs(result)
        inflight.write_forced(result)
        if self._step_log is not None:
            self._step_log.write(result, inflight.chunks)
        return result

    def _begin(self, step: worker_pb2.Step, marks: Marks, queued_ns: int) -> tuple[InFlightStep, Batch | None]:
        """Apply the step to the slots; return it with its batch, None when it computes nothing."""
        table = self.slots
        chunks = table.apply(step, self._transfers)
        if self.parallel.samples:
            if step.free_slots:
                self.grammars.free(unpack(step.free_slots))
            self.grammars.enter(step.enters)
            self.grammars.order(chunks, table)
            # Ranks have to agree on the rows of a step: with several only the tokens say which are late.
            is_alone = self.takes_late and self.parallel.size == 1
            if is_alone and (late := self.grammars.left_out(chunks, self._in_flight.is_empty)):
                table.late.update(late)
                chunks = chunks.without(late)
        tokens = int(chunks.lengths.sum())
        if tokens > self.settings.max_step_tokens:
            raise ProtocolError(
                f"the step has {tokens} tokens, this worker takes at most {self.settings.max_step_tokens}"
            )
        if chunks.guesses.size > MAX_DRAFTS:
            raise ProtocolError(
                f"drafts: the step has {chunks.guesses.size}, this worker takes at most {MAX_DRAFTS}; plan as many as "
                f"max_drafts of its Describe says"
            )
        inflight = InFlightStep(
            epoch=step.epoch,
            id=step.id,
            chunks=chunks,
            sampling=chunks.sampling,
            generations=table.generation[chunks.slots],
            departures=table.departures,
            transfers=self._transfers,
            marks=marks,
            queued_ns=queued_ns,
            errors=table.errors(step),
            late=chunks.late.tolist(),
            swaps=bool(step.swap_out_gpu or step.swap_in_host),
        )
        self._in_flight.begin(inflight)
        if not chunks.slots.size:
            return inflight, None
        batch = table.batch(chunks)
        if np.count_nonzero(table.pooling[chunks.slots]):
            inflight.pool(table.pooling[inflight.sampling], self.config.hidden_size)
        inflight.scoring = table.scored_tokens(chunks)
        if inflight.scoring is not None and self.parallel.last:
            rows = inflight.scoring.rows
            batch = dataclasses.replace(batch, sample_rows=np.append(batch.sample_rows, rows), scored=len(rows))
        table.computed_through(chunks)
        if self.adapter_dir is not None:
            self._begin_adapters(chunks, batch)
        return inflight, self._local_batch(batch, chunks)

    def _begin_adapters(self, chunks: Chunks, batch: Batch) -> None:
        """Set which rows of the batch have which adapter."""
        numbers = self.slots.adapter[chunks.slots]
        if np.count_nonzero(numbers):
            of_rows = np.repeat(self.adapters.places(numbers), chunks.lengths)
            self.adapter_rows.begin(of_rows, batch.sample_rows)
        else:
            self.adapter_rows.begin(None)

    def _local_batch(self, batch: Batch, chunks: Chunks) -> Batch:
        """Return the batch as the model computes it here. Raise ProtocolError."""
        return self.decoder.local_tokens(batch)

    def _learn(self, slots: Int32) -> None:
        """Wait for the tokens, drawn elsewhere, that these slots get in steps that are in flight."""
        for inflight in self._in_flight.unknown(slots):
            if inflight.sampled is not None and (sampled := inflight.sampled.wait()) is not None:
                with self._lock:
                    self._in_flight.learn(inflight, sampled)

    def _forward(self, inflight: InFlightStep, prepared: Prepared) -> Tensor:
        """Run a step's forward pass and return the logits that sample, or what `_sample` takes in their place."""
        if self.parallel.last and (inflight.scoring is not None or inflight.has_vectors):
            return self._read_rows(inflight, prepared)
        with_adapters = self.adapter_rows.computes
        logits: Tensor = (self._compiled_with_adapters if with_adapters else self.compiled)(prepared)
        return logits

    def _read_rows(self, inflight: InFlightStep, prepared: Prepared) -> Tensor:
        """Run a step's forward pass; read the rows of prompt tokens to score and of vectors; return the logits that
        sample.
        """
        rows = self.decoder.last_rows(prepared, self.cache)
        sampling = len(inflight.sampling)
        if inflight.scoring is not None:
            self._score(inflight, inflight.scoring, rows[sampling:])
        if inflight.has_vectors and self.parallel.samples:
            copies: list[Tensor] = []
            self.ops.exchange(rows[:sampling], lambda last: copies.append(last.float().cpu()))
            inflight.vectors = normalized(copies[0].numpy()[inflight.pooled])
        return self.decoder.logits(rows[:sampling])

    def _score_labels(self, inflight: InFlightStep, logits: Tensor) -> None:
        """Set the scores of the rows that want one: the logit of the first label less that of the second."""
        which = inflight.kinds == SCORE
        rows = inflight.pooled[which]
        labels = self.slots.label_ids[inflight.sampling[rows]].astype(np.int64)
        index = torch.from_numpy(rows)[:, None].to(logits.device), torch.from_numpy(labels).to(logits.device)
        copies: list[Tensor] = []
        self.ops.exchange(logits, lambda every: copies.append(every[index].cpu()))
        if inflight.vectors is None:
            inflight.vectors = np.zeros((len(inflight.pooled), inflight.vector_size), np.float32)
        inflight.vectors[which, 0] = (copies[0][:, 0] - copies[0][:, 1]).numpy()

    def _score(self, inflight: InFlightStep, scoring: ScoredTokens, rows: Tensor) -> None:
        """Score prompt tokens by the rows before them, a bounded number at once."""
        count, at_once = len(scoring.tokens), max(1, SCORED_BYTES // (4 * self.config.vocab_size))
        # Taken before any logits: what is kept between two pieces would keep the memory of both.
        scores = Scored.blank(count, scoring.likely)
        for first in range(0, count, at_once):
            end = min(first + at_once, count)
            logits = self.decoder.logits(rows[first:end])
            if self.parallel.size > 1:
                logits = self.decoder.gather_logits(logits)
            if self.parallel.samples:
                scores.put(first, self.ops.score(logits, scoring.tokens[first:end], scoring.likely))
        if self.parallel.samples:
            inflight.scores = scores
            with self._lock:
                self._in_flight.learn_scores(inflight)

    def _sample(self, inflight: InFlightStep, logits: Tensor) -> None:
        """Begin to draw the tokens of the slots that sample, or to receive them from the rank that does."""
        slots, table, chunks = inflight.sampling, self.slots, inflight.chunks
        inflight.positions = positions = table.known[slots] + (0 if chunks.drafts is None else chunks.behind())
        inflight.logprobs = table.sampling.logprobs[slots]
        if self.parallel.size > 1:
            inflight.has_grammars = bool(table.sampling.has_grammar[slots].any())
            logits = self.decoder.gather_logits(logits)
        if not self.parallel.samples:
            with self._lock:
                table.expect(slots, positions)
            inflight.sampled = self._broadcast.receive(inflight)
            return
        if slots.size:
            masks, wrong, late = self.grammars.masks(inflight, self._previous, table, self.takes_late)
            with self._lock:
                inflight.late += late
                table.late.update(late)
                if late and chunks.drafts is not None:
                    drafted = chunks.slots[chunks.drafts > 0]
                    table.drop_drafts(drafted[np.isin(drafted, late)])
                for slot, why in wrong.items():
                    self._in_flight.fail(inflight, slot, GRAMMAR, why)
                of_rows = inflight.masks_of_rows(masks)
                rows = table.sampling.rows(slots, positions, table.prompt[slots], table.tokens, of_rows)
                fine = ~np.isin(slots, late) if late else slice(None)
                table.expect(slots[fine], positions[fine])
            if inflight.has_scores:
                self._score_labels(inflight, logits)
            inflight.sampled = self.ops.sample_later(logits, rows, slots)
        if self.parallel.size > 1:
            self._broadcast.send(inflight)
            self._learn(slots)


def _stale_peers(inflight: InFlightStep, copied: Acknowledged, are_stale: tuple[bool, ...]) -> dict[int, str]:
    """Return why KV at a peer is computed again, by the peer's number. Log the copies that were wrong."""
    if not (copied.peers or inflight.unreadable):
        return {}
    faults: dict[int, str] = {}  # by peer, the first one that this rank has seen of several steps
    for number, is_stale, is_replaced, fault in zip(
        copied.peers, are_stale, copied.replaced, copied.faults, strict=True
    ):
        if is_stale and not is_replaced:
            faults[number] = faults.get(number) or fault
    stale = {
        number: f"KV in the host tier of peer {number} is computed again: {fault or 'another rank cannot use it'}"
        for number, fault in faults.items()
    }
    for reason in stale.values():
        log.warning("%s", reason)
    return stale | {
        number: f"the host tier of peer {number} cannot be read, KV there is computed again: {reason}"
        for number, reason in inflight.unreadable.items()
    }

"""The iterations that `orcinus bench engine` times, and the bytes and operations that each needs at least."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.clock import Clock
from bench.kernels.floor import Floor
from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.models.config import DecoderConfig
from services.worker.quantization import method_of
from shared.errors import ModelError
from shared.wire.columns import pack, unpack


@dataclass(slots=True)
class EngineSettings:
    """The settings that `services.worker.engine.Engine` reads, without pydantic, which `bench.gpu` may lack.

    Names and defaults are those of shared.settings.WorkerSettings; a test compares them.
    """

    model: Path
    served_model_name: str = ""
    worker_id: str = "worker-0"
    device: str = "auto"
    dtype: str = "auto"
    kernels: str = "auto"
    quantize: str = "none"
    kv_dtype: str = "auto"
    deterministic: bool = False
    load_format: str = "auto"
    block_size: int = 16
    max_seqs: int = 256
    max_input_tokens: int = 0
    max_output_tokens: int = 0
    max_step_tokens: int = 2048
    kv_memory_fraction: float | None = None
    kv_blocks: int = 0
    host_blocks: int | None = None
    worker_role: str = "both"
    kv_share_dir: Path | None = None
    threads: int = 0
    step_timeout_s: float = 0.0
    step_log: Path | None = None
    adapter_dir: Path | None = None
    max_loras: int = 8
    max_lora_rank: int = 64


TORCH_REPEATS = 5
TORCH_BYTES = 256 << 20  # of layers, past every cache; at least one layer


@dataclass(frozen=True, slots=True)
class Case:
    """`decodes` sequences of `context` tokens that decode, and prompts of `prefill` tokens, in each iteration."""

    name: str
    decodes: int
    context: int
    prefill: int = 0
    prompts: int = 0

    def fits(self, longest: int, steps: int) -> bool:
        """Return whether the case's sequences, grown by `steps` tokens, stay within `longest`."""
        return max(self.context + steps + 1, self.prefill + 1) <= longest

    @property
    def sequences(self) -> int:
        return self.decodes + self.prompts

    def blocks(self, block_size: int, steps: int) -> int:
        """Return the KV blocks of one of its sequences, grown by `steps` tokens."""
        return -(-(max(self.context, self.prefill) + steps + 1) // block_size)

    @property
    def step_tokens(self) -> int:
        # Also the prefill with which the contexts begin.
        return max(self.decodes + self.prefill * self.prompts, self.context)


CASES = (
    Case("decode-1", 1, 160),
    Case("decode-8", 8, 160),
    Case("decode-32", 32, 160),
    Case("decode-32-long", 32, 1024),
    Case("prefill-128", 0, 0, 128, 1),
    Case("prefill-512", 0, 0, 512, 1),
    Case("mixed-32-128", 32, 160, 128, 1),
)


class TorchMatrices:
    """The model's matrices for torch alone: some layers, which stand for all, and the head. Made once for all cases."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, clock: Clock | None = None) -> None:
        """clock: of a device, where they then are and are timed."""
        shapes = layer_matrices(config)
        layer_bytes = dtype.itemsize * sum(outputs * inputs for outputs, inputs in shapes)
        layers = max(1, min(config.layers, TORCH_BYTES // layer_bytes))
        generator = torch.Generator().manual_seed(20261120)

        def make(shape: tuple[int, int]) -> Tensor:
            if clock is not None:
                return clock.random(*shape, dtype=dtype)
            return torch.empty(shape, dtype=dtype).normal_(generator=generator)

        self._clock = clock
        self._share = config.layers / layers
        self._weights = [make(shape) for _ in range(layers) for shape in shapes]
        self._head = make((config.vocab_size, config.hidden_size))

    def ms(self, rows: int, sampled: int) -> float:
        """One iteration's matrices, one after another, nothing else; `sampled` of the rows go through the head."""
        if self._clock is not None:
            return self._device_ms(self._clock, rows, sampled)
        weights, head = self._weights, self._head
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]).to(head.dtype) for weight in (*weights, head)}
        layers_s, head_s = [], []
        with torch.inference_mode():
            for _ in range(TORCH_REPEATS):
                begun = time.perf_counter()
                for weight in weights:
                    F.linear(inputs[weight.shape[1]], weight)
                between = time.perf_counter()
                F.linear(inputs[head.shape[1]][:sampled], head)
                layers_s.append(between - begun)
                head_s.append(time.perf_counter() - between)
        return (min(layers_s) * self._share + min(head_s)) * 1000

    def _device_ms(self, clock: Clock, rows: int, sampled: int) -> float:
        weights, head = self._weights, self._head
        with torch.inference_mode():
            inputs = {
                size: clock.random(rows, size, dtype=head.dtype) for size in {w.shape[1] for w in (*weights, head)}
            }
            layers = [partial(F.linear, inputs[weight.shape[1]], weight) for weight in weights]
            layers_us = clock.eager(layers) * len(layers)
            head_us = clock.eager([partial(F.linear, inputs[head.shape[1]][:sampled], head)])
        return (layers_us * self._share + head_us) / 1000


def measure(
    engine: Engine, case: Case, steps: int, floor: Floor, torch_alone: TorchMatrices, profile: bool
) -> dict[str, Any]:
    """Return the JSON of one case: medians over `steps` iterations."""
    driver = Driver(engine, case, steps)
    results, walls = run(engine, driver, steps, 1 if engine.overlaps else 0)
    forwards = [result.timings.forward_ns for result in results]
    samples = [result.timings.sample_ns for result in results]
    read_bytes, operations = work(engine, case, steps)
    width = engine.dtype.itemsize
    floor_ms = floor.step_ms(read_bytes, operations, width)
    total_ms = float(np.median(walls)) / 1e6
    found = {
        "case": case.name,
        "tokens": case.decodes + case.prefill * case.prompts,
        "total_ms": total_ms,
        "p99_ms": float(np.percentile(walls, 99)) / 1e6,
        "forward_ms": float(np.median(forwards)) / 1e6,
        "sample_ms": float(np.median(samples)) / 1e6,
        "floor_ms": floor_ms,
        "read_mb": read_bytes / 1e6,
        "gflop": operations / 1e9,
        "ratio": total_ms / floor_ms,
        "torch_linear_ms": torch_alone.ms(case.decodes + case.prefill * case.prompts, case.sequences),
    }
    if profile:
        found["profile_us"] = _profile(engine, driver, max(1, steps // 4))
    engine.reset()
    return found


def run(engine: Engine, driver: Driver, steps: int, lookahead: int) -> tuple[list[worker_pb2.Result], list[int]]:
    """Results of so many iterations, and nanoseconds from answer to answer; the first, and with lookahead 0 each, from
    when the step was given. lookahead: steps that are given before one is answered."""
    in_flight: deque[InFlightStep] = deque()
    results, walls = [], []
    begun = 0

    def answer() -> None:
        nonlocal begun
        results.append(engine.finish(in_flight.popleft()))
        now = time.perf_counter_ns()
        walls.append(now - begun)
        begun = now

    for _ in range(steps):
        step = driver.next()
        if not in_flight:
            begun = time.perf_counter_ns()
        in_flight.append(engine.submit(step))
        driver.executed()
        if len(in_flight) > lookahead:
            answer()
    while in_flight:
        answer()
    return results, walls


def layer_matrices(config: DecoderConfig) -> list[tuple[int, int]]:
    """Return [outputs, inputs] of the matrices that one layer multiplies with."""
    hidden, attention = config.hidden_size, config.heads * config.head_dim
    qkv = attention + 2 * config.kv_heads * config.head_dim
    return [(qkv, hidden), (hidden, attention), (config.gate_up_size, hidden), (hidden, config.intermediate_size)]


def work(engine: Engine, case: Case, steps: int) -> tuple[float, float]:
    """Bytes that an iteration must read (weights once, every sequence's KV once) and operations it must do."""
    c, info = engine.config, engine.info()
    matrices = sum(outputs * inputs for outputs, inputs in layer_matrices(c)) * c.layers
    method = method_of(engine.settings.quantize, engine.config.stored)
    layers_bytes = c.layers * sum(method.weight_bytes(engine.ops, *shape, engine.dtype) for shape in layer_matrices(c))
    head = c.vocab_size * c.hidden_size
    rows, sampled = case.decodes + case.prefill * case.prompts, case.sequences
    per_token = info.block_bytes / info.block_size
    context = case.context + (steps + 1) / 2  # on average
    contexts = case.decodes * context + case.prompts * case.prefill
    read = layers_bytes + head * engine.dtype.itemsize + contexts * per_token
    pairs = case.decodes * context + case.prompts * case.prefill * (case.prefill + 1) / 2
    attention = 4.0 * c.layers * c.heads * c.head_dim * pairs
    return read, 2.0 * (matrices * rows + head * sampled) + attention


def _profile(engine: Engine, driver: Driver, steps: int) -> dict[str, float]:
    """Microseconds an iteration by operation, the median over iterations; `commands` is how many there are."""
    runs = []
    for _ in range(steps):
        step = driver.next()
        spent: Counter[str] = Counter()
        for name, ns in engine.profile(step):
            spent[name] += ns
        runs.append(spent)
    return {name: float(np.median([run[name] for run in runs])) / 1000 for name in sorted(set().union(*runs))}


class Driver:
    """Steps of a case; the decoding sequences grow by a token with each that was submitted or executed."""

    def __init__(self, engine: Engine, case: Case, steps: int, adapters: Sequence[bytes] = ()) -> None:
        """adapters: digests of those that the sequences have in turn, each of the engine's store; none: the base."""
        self._case, self._adapters = case, len(adapters)
        self._rng = np.random.default_rng(20261120)
        self._vocab = engine.config.vocab_size
        info = engine.info()
        engine.reset()
        blocks = np.arange(info.gpu_blocks, dtype=np.int32)
        self._position = case.context
        self._entered = False
        per = case.blocks(info.block_size, steps)
        self._tables = [blocks[i * per : (i + 1) * per] for i in range(case.sequences)]
        named = [worker_pb2.Adapter(number=at + 1, digest=digest) for at, digest in enumerate(adapters)]
        if named and len(unpack(engine.execute(worker_pb2.Step(adapters=named)).adapter_acks)) < len(named):
            raise ModelError("an adapter cannot be loaded; see the log")
        for slot in range(case.decodes):
            engine.execute(self._enter([slot], case.context, case.context))

    def executed(self) -> None:
        """The last step was, or is submitted, with its sampling."""
        self._position += 1

    def next(self) -> worker_pb2.Step:
        case = self._case
        prompts = list(range(case.decodes, case.sequences))
        step = self._enter(prompts, case.prefill, case.prefill) if prompts else worker_pb2.Step()
        step.free_slots = pack(prompts) if prompts and self._entered else b""
        self._entered = True
        decodes = list(range(case.decodes))
        lengths = [1] * case.decodes + [case.prefill] * case.prompts
        step.chunk_slots = pack(decodes + prompts)
        step.chunk_starts = pack([self._position] * case.decodes + [0] * case.prompts)
        step.chunk_lengths = pack(lengths)
        return step

    def _enter(self, slots: list[int], count: int, chunk: int) -> worker_pb2.Step:
        return worker_pb2.Step(
            enters=[
                worker_pb2.Enter(
                    slot=slot,
                    tokens=pack(self._rng.integers(0, self._vocab, count)),
                    prompt_tokens=count,
                    blocks=pack(self._tables[slot]),
                    adapter=1 + slot % self._adapters if self._adapters else 0,
                )
                for slot in slots
            ],
            chunk_slots=pack(slots),
            chunk_starts=pack([0] * len(slots)),
            chunk_lengths=pack([chunk] * len(slots)),
        )

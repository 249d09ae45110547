"""Engines for tests, and what drives them the way a scheduler would where a test wants a certain order of things."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protos import worker_pb2
from services.scheduler.core.types import NewRequest
from services.worker.checkpoint.fingerprint import Fingerprint
from services.worker.checkpoint.source import Source
from services.worker.encoder_engine import load_engine
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.parallel.state import ParallelState
from shared.settings import WorkerSettings
from shared.text.logprobs import TokenLogprobs, split_records, unpack_records
from shared.wire.columns import pack, unpack
from tests.support import in_process
from tests.support.checkpoints.models import Reference


def make_engine(model: Path, host_blocks: int = 0, parallel: ParallelState | None = None, **settings: Any) -> Engine:
    """A small float32 engine unless settings say otherwise."""
    values: dict[str, Any] = {"dtype": "float32", "max_seqs": 8, "block_size": 4, "max_step_tokens": 4096, "threads": 1}
    wanted = WorkerSettings(model=model, device="cpu", host_blocks=host_blocks, **(values | settings))
    return load_engine(wanted, parallel=parallel)


def fingerprint_of(source: Source, threads: int = 1) -> str:
    """Return the digest of the weights as an engine tells it."""
    return Fingerprint(source.head(), source.spans(), threads).result()


def requests_of(prompts: list[list[int]], count: int, **sampling: Any) -> list[NewRequest]:
    """Return r0, r1, ...: a request of `count` tokens for each prompt."""
    return [in_process.request(f"r{at}", prompt, count, **sampling) for at, prompt in enumerate(prompts)]


def tokens_of(recorded: in_process.Recorded) -> list[list[int]]:
    """Return the tokens of r0, r1, ..., none of which failed."""
    assert not recorded.errors
    return [recorded.tokens[f"r{at}", 0] for at in range(len(recorded.tokens))]


def generated(engine: Any, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    """Return the greedy tokens of prompts that the scheduler's core sends to the engine."""
    return tokens_of(in_process.run(engine, requests_of(prompts, count), "orcinus", **options)[0])


def assert_tokens(
    reference: Reference,
    model: Path,
    *kernels: str,
    count: int = 3,
    lengths: tuple[int, int] = (4, 40),
    new_tokens: int = 24,
    **settings: Any,
) -> None:
    """Demand of each of these kernels, on `model`, the tokens that transformers gives on the reference's weights."""
    cases = reference.cases(count, lengths, new_tokens, seed=3)
    for name in kernels:
        engine = make_engine(model, kernels=name, block_size=16, **settings)
        found = generated(engine, [case.prompt for case in cases], new_tokens)
        assert found == [case.tokens for case in cases], name


class Driver:
    """Slots with their own ranges of blocks; keeps the sampled tokens of each. prompts: of slots 0, 1, ..."""

    def __init__(self, engine: Any, prompts: Sequence[list[int]] = ()) -> None:
        self.engine = engine
        info = engine.info()
        self.size = info.block_size
        self.share = info.gpu_blocks // info.max_seqs
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.next_id = 1
        self._pooled: set[int] = set()  # slots with a vector or a score in place of log-probabilities
        self._enters: list[worker_pb2.Enter] = []
        self._free: list[int] = []
        for slot, prompt in enumerate(prompts):
            self.enter(slot, prompt)

    def blocks(self, slot: int) -> np.ndarray:
        """The slot's own blocks in a scrambled order."""
        own = np.arange(slot * self.share, (slot + 1) * self.share, dtype=np.int32)
        return np.random.default_rng(slot).permutation(own).astype(np.int32)

    def enter(self, slot: int, tokens: list[int], prompt: int = 0, computed: int = 0, **fields: Any) -> None:
        fields.setdefault("blocks", pack(self.blocks(slot)))
        self._enters.append(
            worker_pb2.Enter(
                slot=slot, tokens=pack(tokens), prompt_tokens=prompt or len(tokens), computed=computed, **fields
            )
        )
        (self._pooled.add if fields.get("pooling") else self._pooled.discard)(slot)
        self.outputs[slot], self.logprobs[slot] = list(tokens[prompt:]) if prompt else [], []
        self.known[slot], self.computed[slot] = len(tokens), computed

    def free(self, slot: int) -> None:
        self._free.append(slot)
        del self.known[slot]

    def step(self, chunks: dict[int, int], **fields: Any) -> worker_pb2.Result:
        """Computes up to so many further tokens of each slot."""
        lengths = {slot: min(count, self.known[slot] - self.computed[slot]) for slot, count in chunks.items()}
        lengths = {slot: count for slot, count in lengths.items() if count}
        step = worker_pb2.Step(
            epoch=1,
            id=self.next_id,
            enters=self._enters,
            free_slots=pack(self._free),
            chunk_slots=pack(list(lengths)),
            chunk_starts=pack([self.computed[slot] for slot in lengths]),
            chunk_lengths=pack(list(lengths.values())),
            **fields,
        )
        self.next_id, self._enters, self._free = self.next_id + 1, [], []
        result = self.engine.execute(worker_pb2.Step.FromString(step.SerializeToString()))
        for slot, count in lengths.items():
            self.computed[slot] += count
        for slot, token in zip(unpack(result.slots).tolist(), unpack(result.tokens).tolist(), strict=True):
            self.outputs[slot].append(token)
            self.known[slot] += 1
        slots = unpack(result.slots)
        if result.logprobs:
            parts = split_records(result.logprobs, unpack(result.logprob_sizes), len(slots))
            for slot, record in zip(slots.tolist(), parts.tolist(), strict=True):
                if slot in self._pooled:
                    continue
                self.logprobs[slot] += unpack_records(record, (len(record) // 4 + 1) // 2)
        return result

    def run(self, slot: int, count: int, chunk: int = 4096) -> list[int]:
        """Steps this slot alone until it has `count` outputs."""
        while len(self.outputs[slot]) < count:
            self.step({slot: chunk})
        return self.outputs[slot]

    def run_all(self, count: int, chunk: int = 4096) -> list[list[int]]:
        """Step all slots, each until it has `count` outputs; return these by slot."""
        while running := [slot for slot, tokens in self.outputs.items() if len(tokens) < count]:
            self.step(dict.fromkeys(running, chunk))
        return list(self.outputs.values())


class Ahead:
    """Submits steps by hand, as many as may be out. Slot s has blocks 12 s .. 12 s + 11 of its own."""

    def __init__(self, engine: Any) -> None:
        engine.reset()
        self.engine = engine
        self.id = 0
        self.outputs: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}

    def submit(self, chunks: dict[int, tuple[int, int]], **fields: Any) -> InFlightStep:
        """chunks: slot -> (start, length)."""
        self.id += 1
        starts, lengths = zip(*chunks.values(), strict=True) if chunks else ((), ())
        columns = {"chunk_slots": list(chunks), "chunk_starts": starts, "chunk_lengths": lengths}
        packed = {name: pack(column) for name, column in columns.items()}
        found: InFlightStep = self.engine.submit(worker_pb2.Step(epoch=1, id=self.id, **packed, **fields))
        return found

    def finish(self, inflight: InFlightStep, more: bool = False) -> worker_pb2.Result:
        result: worker_pb2.Result = self.engine.finish(inflight, lambda: more)
        assert not result.error
        for slot, token in zip(unpack(result.slots).tolist(), unpack(result.tokens).tolist(), strict=True):
            self.outputs.setdefault(slot, []).append(token)
        self.errors |= {error.slot: error.code for error in result.errors}
        return result


def entering(slot: int, tokens: list[int], **fields: Any) -> worker_pb2.Enter:
    """A sequence for Ahead."""
    blocks = pack(np.arange(12 * slot, 12 * slot + 12))
    return worker_pb2.Enter(slot=slot, tokens=pack(tokens), prompt_tokens=len(tokens), blocks=blocks, **fields)

"""Drives an Engine the way a scheduler would, for tests that want a certain order of things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from protos import worker_pb2
from services.worker.encoder_engine import load_engine
from services.worker.engine import Engine
from services.worker.parallel.state import ParallelState
from shared.columns import pack, unpack
from shared.settings import WorkerSettings
from shared.text.logprobs import TokenLogprobs, split_records, unpack_records


def make_engine(model: Path, host_blocks: int = 0, parallel: ParallelState | None = None, **settings: Any) -> Engine:
    """A small float32 engine unless settings say otherwise."""
    values: dict[str, Any] = {
        "dtype": "float32",
        "max_seqs": 8,
        "block_size": 4,
        "max_step_tokens": 4096,
        "threads": 1,
    }
    wanted = WorkerSettings(model=model, device="cpu", host_blocks=host_blocks, **(values | settings))
    return load_engine(wanted, parallel=parallel)


class Driver:
    """Slots with their own ranges of blocks; keeps the sampled tokens of each."""

    def __init__(self, engine: Engine) -> None:
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

"""The largest batches that an engine can be given, as Steps: to run them once shows what is missing, memory above all.

All their sequences share one block table: the numbers mean nothing, and any pool is large enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from protos import worker_pb2
from shared.text.logprobs import MAX_LOGPROBS
from shared.wire.columns import pack


@dataclass(frozen=True, slots=True)
class Speed:
    """The duration of the largest steps; zeros before the warm-up."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0  # of the prefill

    @property
    def largest_ms(self) -> int:
        """Return WorkerInfo.largest_step_ms."""
        return max(1, round(self.prefill_s * 1000)) if self.tokens else 0

    def predicted_s(self, tokens: int) -> float:
        """Return the seconds of a step of so many tokens, by the warm-up's measure; 0 before it.

        Few tokens with long contexts cost more than their share of the largest step: at least the step in which
        every slot decodes.
        """
        return max(self.prefill_s * tokens / max(self.tokens, 1), self.decode_s)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """seqs, step_tokens: of one step at most; longest: tokens of a sequence that still samples."""

    seqs: int
    step_tokens: int
    longest: int
    block_size: int
    pooling: int = 0  # of all sequences; with it every prompt is computed whole, and none decodes

    @property
    def chunk(self) -> int:
        """Return the tokens of the longest chunk."""
        return min(self.longest, self.step_tokens)

    @property
    def blocks(self) -> int:
        """Return the blocks that all of it needs."""
        return -(-self.chunk // self.block_size)

    @property
    def rows(self) -> int:
        """Return how many sequences can decode in one step."""
        return min(self.seqs, self.step_tokens)

    def prefill(self) -> tuple[worker_pb2.Step, int]:
        """Return a step with as many tokens as one can have, in the longest chunks; and how many those are."""
        lengths = [self.chunk] * min(self.seqs, self.step_tokens // self.chunk)
        if len(lengths) < self.seqs and self.step_tokens % self.chunk:
            lengths.append(self.step_tokens % self.chunk)
        return self._step(lengths, 0), sum(lengths)

    def score(self) -> worker_pb2.Step:
        """Return the step of `prefill`, in which all prompt tokens have log-probabilities."""
        step, _ = self.prefill()
        for enter in step.enters:
            enter.sampling.prompt_logprobs, enter.scored = MAX_LOGPROBS + 1, 1
        return step

    def decode(self, blocks: int) -> worker_pb2.Step:
        """Return a step in which every slot decodes, with contexts that together fill a pool of so many blocks."""
        context = max(1, min(self.chunk, blocks * self.block_size // self.rows))
        return self._step([context] * self.rows, context - 1)

    def sizes(self, sizes: Sequence[int]) -> Iterator[worker_pb2.Step]:
        """Yield steps with exactly so many rows: of prompts, and of decodes."""
        for size in sizes:
            whole, rest = divmod(size, self.chunk)
            lengths = [self.chunk] * whole + [rest] * (rest > 0)
            if len(lengths) <= self.seqs:
                yield self._step(lengths, 0)
            if size <= self.rows and not self.pooling:
                yield self._step([2] * size, 1)

    def swap(self, blocks: int) -> worker_pb2.Step:
        """Return a step that swaps so many blocks out and in again."""
        copied = pack(np.arange(blocks))
        return worker_pb2.Step(swap_out_gpu=copied, swap_out_host=copied, swap_in_host=copied, swap_in_gpu=copied)

    def _step(self, lengths: list[int], computed: int) -> worker_pb2.Step:
        """Return the sequences of these lengths, all but the first `computed` tokens of each to be computed."""
        slots, blocks = list(range(len(lengths))), pack(np.arange(self.blocks))
        return worker_pb2.Step(
            enters=[
                worker_pb2.Enter(
                    slot=slot,
                    tokens=bytes(4 * n),
                    prompt_tokens=n,
                    computed=computed,
                    blocks=blocks,
                    pooling=self.pooling,
                )
                for slot, n in zip(slots, lengths, strict=True)
            ],
            chunk_slots=pack(slots),
            chunk_starts=pack([computed] * len(slots)),
            chunk_lengths=pack([n - computed for n in lengths]),
        )

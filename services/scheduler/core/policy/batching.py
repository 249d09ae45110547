"""Batching: how many sequences share an iteration, how many may join, and how much of each prompt it computes."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.policy.base import Batching, ReplicaView
from services.scheduler.core.table import Int64


class WholePrefill(Batching):
    """Iteration-level batching with whole prompts (Orca): up to max_bs sequences that are not in flight, by arrival.

    A prompt waits for a step with room for all of it. The first prompt of a step does not wait: it is cut at what is
    left of the budget and goes on in the next steps, so that a prompt longer than the budget runs too.
    """

    def __init__(self, slots: int = 0) -> None:
        """slots: most sequences that run (lmdeploy's fixed slots); 0 means no limit but the caller's."""
        self._slots = slots

    def max_running(self, limit: int) -> int:
        return min(limit, self._slots or limit)

    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        return whole_lengths(rest, left, first)


class Static(Batching):
    """A batch of up to `max_bs` waiting sequences is formed when nothing runs, and none joins before all have ended.

    As FasterTransformer was. Its sequences may take several steps to enter. The batch is padded, and delivered at its
    end. With `delay_ns` (Triton's dynamic batching) a batch is formed when `max_bs` sequences wait or the first of them
    has waited for that time.
    """

    at_end = True

    def __init__(self, max_bs: int = 32, delay_ns: int = 0, padded: bool = True) -> None:
        self.is_padded = padded
        self._max_bs = max_bs
        self._delay_ns = delay_ns
        self._open: dict[int, int] = {}  # replica -> sequences of its batch that have not entered yet

    def max_running(self, limit: int) -> int:
        return min(limit, self._max_bs)

    def max_new_seqs(self, replica: ReplicaView, waiting: int, max_running: int, oldest_ns: int, now_ns: int) -> int:
        if not replica.table.count:
            size = min(self._max_bs, max_running)
            ready = waiting >= size or now_ns - oldest_ns >= self._delay_ns
            self._open[replica.number] = min(size, waiting) if ready else 0
        return min(self._open.get(replica.number, 0), waiting)

    def on_enter(self, replica: ReplicaView, sequences: int) -> None:
        self._open[replica.number] -= sequences

    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        return whole_lengths(rest, left, first)


class Chunked(Batching):
    """Prompts in chunks of what the decodes leave of the budget; microbatches share the sequences evenly.

    Sources: Sarathi; FastGen, where all passes have one size.
    """

    def __init__(self, multiple: int = 1, most: int = 0, least: int = 0, depth: int = 0, slots: int = 0) -> None:
        """multiple: a chunk is a multiple of it, unless less than that is left of its prompt.

        most: largest chunk, in tokens; 0 means no limit. least: no prompt runs with fewer tokens left of the budget
        (SGLang: 64). depth: the largest chunk (`most`, or else the budget) is divided by 2 after so many tokens of the
        prompt, by 3 after twice as many, and so on, because a chunk's attention reads all tokens before it; 0 means
        never. slots: most sequences that run; 0 means no limit but the caller's.
        """
        self._multiple, self._max_chunk, self._min_chunk, self._depth, self._slots = multiple, most, least, depth, slots

    def max_running(self, limit: int) -> int:
        return min(limit, self._slots or limit)

    def max_step_seqs(self, sequences: int, max_running: int, microbatches: int) -> int:
        return max(-(-min(sequences, max_running) // microbatches), 1)

    def chunks(self, rest: Int64, before: Int64, left: int, first: bool, alone: bool = False) -> Int64:
        if alone and left < max(self._min_chunk, self._multiple):  # else a small budget would keep prompts out for ever
            return np.minimum(rest[:1], left)
        if left < max(self._min_chunk, 1):
            return rest[:0]
        wanted, size = rest, self._multiple
        if self._max_chunk or self._depth:
            longest = np.full(rest.size, self._max_chunk or left, np.int64)
            if self._depth:
                longest = longest * self._depth // (self._depth + before)
            wanted = np.minimum(rest, np.maximum(longest, size))
        if size > 1:
            wanted = np.where(rest < size, rest, wanted // size * size)
        used = wanted.cumsum()
        count = int(used.searchsorted(left, side="right"))
        if count == rest.size:
            return wanted
        over = left - (int(used[count - 1]) if count else 0)
        over -= over % size  # tokens for the first prompt that does not fit
        lengths = wanted[: count + (over > 0)].copy()
        if over:
            lengths[-1] = over
        return lengths


def whole_lengths(rest: Int64, left: int, first: bool) -> Int64:
    """Return [k] lengths of the first prompts that fit whole in `left` tokens.

    Where none fits, the first prompt of a step (`first`) is cut to `left`.
    """
    count = int(np.searchsorted(np.cumsum(rest), left, side="right"))
    if not count and first and left > 0:
        return np.minimum(rest[:1], left)
    return rest[:count]

"""Chunks of prompts: how many tokens a step has for them, further chunks of those that run, and how a chunk is planned.

Called by passes.py (the prefill pass) and admit.py (first chunks).
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.draft import Draft, Shared
from services.scheduler.core.replica import Replica
from services.scheduler.core.table import PREFILLING, Int64
from services.scheduler.core.types import Priority, Rows

LOWEST = Priority.LOW


class Prompts:
    """Fills a draft with chunks of prompts."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def prefill(self, replica: Replica, draft: Draft, now_ns: int, first: int, last: int) -> None:
        """Further chunks of the prompts of classes first..last that run already."""
        if not draft.prompts or draft.seats <= 0 or draft.left <= 0:
            return
        table, high = replica.table, replica.table.high
        more = table.phase[:high] == PREFILLING
        more &= self._shared.wants(replica, draft.microbatch)
        if first or last < LOWEST:
            more &= (table.priority[:high] >= first) & (table.priority[:high] <= last)
        slots = np.flatnonzero(more)
        if not slots.size:
            return
        self.budget(replica, draft, now_ns)
        if draft.left <= 0:
            return
        slots = self._shared.policy.order.sort(table, slots, now_ns)[: draft.seats]
        before = table.planned[slots].astype(np.int64)
        rest = table.known[slots] - before
        lengths = self._shared.policy.batch.chunks(rest, before, draft.left, not draft.prefill, draft.empty)
        if lengths.size:
            self.run(replica, draft, slots[: lengths.size], lengths)

    def budget(self, replica: Replica, draft: Draft, now_ns: int, depth: int = 0) -> None:
        """`left` becomes what the policy leaves for prompts beside the decodes; asked once a step, and again for
        prompts that enter with so many tokens cached."""
        if depth or not draft.budgeted:
            draft.budgeted = True
            shared = self._shared
            budget = replica.tokens.budget(replica, draft.slots, now_ns, shared.step_tokens, depth)
            draft.left = min(draft.left, budget - draft.slots.size - draft.prefill)

    def run(self, replica: Replica, draft: Draft, slots: Rows, lengths: Int64) -> None:
        """Chunks of `lengths` tokens for the rows `slots`, with their blocks, which are promised and so are there."""
        table, size = replica.table, replica.limits.block_size
        starts = table.planned[slots]
        ends = (starts + lengths).astype(np.int32)
        held = table.held[slots]
        more = np.maximum(-(-ends // size) - held, 0)
        total = int(more.sum())
        if total:
            blocks = replica.pool.take(total)
            owed = np.maximum(table.promised[slots] - held, 0)
            replica.outstanding -= int(np.minimum(owed, more).sum())
            table.fill(slots, more, blocks)
            draft.append_slots.append(np.repeat(slots, more))
            draft.append_blocks.append(blocks)
        samples = ends == table.known[slots]
        table.planned[slots] = ends
        table.known[slots] += samples
        table.set_phase(slots)
        table.unanswered[slots] += 1
        table.microbatch[slots] = draft.microbatch
        draft.chunk_slots.append(slots)
        draft.chunk_starts.append(starts)
        draft.chunk_lengths.append(lengths.astype(np.int32))
        draft.chunk_samples.append(samples)
        spent = int(lengths.sum())
        draft.prefill += spent
        draft.prefill_context += float((lengths * (starts + (lengths + 1) / 2)).sum())
        draft.left -= spent
        draft.seats -= slots.size

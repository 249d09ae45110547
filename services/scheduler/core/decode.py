"""The decode pass: one token for every running sequence that lacks one, and its next block where it crosses a boundary.

Called by passes.py. Vector operations over the slot table; Python runs only for those who yield.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.draft import Draft, Shared
from services.scheduler.core.outcome import Collector
from services.scheduler.core.replica import Replica
from services.scheduler.core.table import DECODING, RowIndex
from services.scheduler.core.types import Rows


class Decoding:
    """Plans the decodes of a draft."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def plan(self, replica: Replica, draft: Draft, now_ns: int, known: Collector) -> None:
        """Fills the decode columns of `draft`."""
        table = replica.table
        slots = self._slots(replica, draft)
        if not slots.size:
            return
        limit = min(draft.seats, draft.left)
        if slots.size > limit:
            slots = np.sort(self._shared.policy.order.sort(table, slots, now_ns)[:limit])
        rows = table.rows(slots)
        edge = slots[table.planned[rows] == table.capacity[rows]]
        if edge.size:
            promised = int(np.count_nonzero(table.promised[edge] > table.held[edge]))
            if edge.size - promised > replica.available:
                slots = self._relieve(replica, draft, slots, now_ns, known)
                rows = table.rows(slots)
                edge = slots[table.planned[rows] == table.capacity[rows]]
                promised = int(np.count_nonzero(table.promised[edge] > table.held[edge]))
            self._grow(replica, draft, edge, promised)
        draft.slots, draft.starts = slots, table.planned[rows].copy()
        draft.context = int(draft.starts.sum())
        self._advance(replica, draft, rows)

    def _slots(self, replica: Replica, draft: Draft) -> Rows:
        """Return the rows that lack one token, ascending."""
        table, high = replica.table, replica.table.high
        wants = self._shared.wants(replica, draft.microbatch)
        one = wants & (table.phase[:high] == DECODING)
        count = int(np.count_nonzero(one))
        draft.prompts = count < high and count < int(np.count_nonzero(wants))
        if count < high:
            return np.flatnonzero(one)
        return table.first_rows(high)

    def _advance(self, replica: Replica, draft: Draft, rows: RowIndex) -> None:
        table = replica.table
        table.decoding[:, rows] += 1
        if replica.microbatches > 1:
            table.microbatch[rows] = draft.microbatch
        draft.seats -= draft.slots.size
        draft.left -= draft.slots.size

    @staticmethod
    def _grow(replica: Replica, draft: Draft, edge: Rows, promised: int) -> None:
        """One block for each row of `edge`, of which so many have it promised."""
        table = replica.table
        blocks = replica.pool.take(edge.size)
        replica.outstanding -= promised
        held = table.held[edge]
        table.blocks[edge, held] = blocks
        held += 1
        table.held[edge] = held
        table.capacity[edge] = held * table.block_size
        draft.append_slots.append(edge)
        draft.append_blocks.append(blocks)

    def _relieve(self, replica: Replica, draft: Draft, slots: Rows, now_ns: int, known: Collector) -> Rows:
        """Too few blocks for the next tokens of `slots`: some wait, some are preempted; the rest is returned.

        Who has a step unanswered sits out: the answer may end him, and no over-run token may cost anybody his KV. What
        a victim gives up by swap is free only when its copy is acknowledged; until then those it is for sit out too.
        """
        table, relief = replica.table, self._shared.policy.relief
        needs = table.planned[slots] == table.capacity[slots]
        needs &= table.promised[slots] <= table.held[slots]
        idle = table.unanswered[slots] == 0
        needy, slots = slots[needs & idle], slots[~needs | idle]
        if relief.stalls and (slots.size > needy.size or replica.inflight):
            return self._sit_out(replica, slots, needy, now_ns)
        while needy.size > replica.available + replica.pool.draining:
            high = table.high
            loads = replica.transfers.slots()
            victims = table.active[:high] & ~table.pinned[:high]
            victims[loads] = False
            candidates = np.flatnonzero(victims)
            if not candidates.size:
                break
            victim = relief.choose(table, candidates)
            self._shared.preempt(replica, draft, victim, now_ns, known)
            needy, slots = needy[needy != victim], slots[slots != victim]
            if relief.stalls:
                break
        return self._sit_out(replica, slots, needy, now_ns)

    def _sit_out(self, replica: Replica, slots: Rows, needy: Rows, now_ns: int) -> Rows:
        """`slots` without those of `needy` for whom there is no block, the last ones in order."""
        room = max(replica.available, 0)
        if needy.size <= room:
            return slots
        needy = self._shared.policy.order.sort(replica.table, needy, now_ns)
        left: Rows = slots[~np.isin(slots, needy[room:])]
        return left

"""Preemption for service levels, before a step is planned: for TBT limits of those that run, for those who wait.

Called by passes.py. The rules: docs/policies.md#parts-by-name.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.draft import Draft, Shared
from services.scheduler.core.outcome import Collector
from services.scheduler.core.policy.base import Mode, Slo
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import DECODING, Int64
from services.scheduler.core.types import Priority, Rows

MOST_VICTIMS = 64  # that one waiting sequence may make yield at once


class Guard:
    """Makes running sequences yield for the sake of others."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def protect(self, replica: Replica, draft: Draft, now_ns: int, known: Collector) -> None:
        """Victims until every running sequence of class <= high has slack in its TBT limit again.

        Nobody yields when that could not be reached even if all candidates did.
        """
        slo = self._shared.policy.relief.slo
        if slo is None or not replica.table.limited or not replica.model.observed:
            return
        table, high = replica.table, replica.table.high
        decodes = (table.phase[:high] == DECODING) & (table.known[:high] < table.limit[:high])
        urgent = np.flatnonzero(decodes & (table.tbt_slo_ns[:high] > 0) & (table.priority[:high] <= Priority.HIGH))
        if not urgent.size:
            return
        # Who has a step unanswered gets its token at that step's end, about now; the next one a step later.
        last = np.where(table.unanswered[urgent] > 0, now_ns, table.last_token_ns[urgent])
        slack = int((last + table.tbt_slo_ns[urgent]).min()) - now_ns
        running = int(np.count_nonzero(decodes))
        context = int(table.planned[:high][decodes].sum())
        if slack - replica.model.predict(running, context) >= slo.risk_ns:
            return
        self._yield_for(replica, draft, decodes, slack, running, context, slo, now_ns, known)

    def _yield_for(
        self, replica: Replica, draft: Draft, decodes: np.ndarray[tuple[int], np.dtype[np.bool_]], slack: int,
        running: int, context: int, slo: Slo, now_ns: int, known: Collector,
    ) -> None:  # fmt: skip
        table = replica.table
        victims = self._victims(replica, Priority.NORMAL)
        victims = victims[decodes[victims]]
        base, per_token, per_context, _ = replica.model.coefficients
        after = running - np.arange(1, victims.size + 1)
        contexts = context - np.cumsum(table.planned[victims])
        safe = slack - (base + per_token * after + per_context * contexts) > slo.safe_ns
        if safe.any():
            for victim in victims[: int(safe.argmax()) + 1].tolist():
                self._shared.preempt(replica, draft, victim, now_ns, known)

    def take(
        self, replica: Replica, draft: Draft, sequence: Sequence, cost: int, now_ns: int, known: Collector
    ) -> None:
        """`sequence`, of class <= high and first of the waiting, lacks a slot or `cost` blocks: running ones of lower
        classes yield both, if that is enough. Its blocks have to be there at once, so they yield by recompute."""
        table = replica.table
        victims = self._victims(replica, max(sequence.priority + 1, Priority.NORMAL))[:MOST_VICTIMS]
        lacking = cost - replica.available
        slots = 1 if table.count >= self._shared.most(replica) else 0
        freed = np.cumsum(self._frees(replica, victims))
        enough = int(np.searchsorted(freed, lacking)) + 1 if lacking > 0 else slots
        if not enough or enough > victims.size:
            return
        how = Mode.RECOMPUTE if lacking > 0 else None
        for victim in victims[:enough].tolist():
            self._shared.preempt(replica, draft, victim, now_ns, known, how)
        replica.beneficiary = sequence

    @staticmethod
    def _frees(replica: Replica, victims: Rows) -> Int64:
        """[n] blocks, at least, that each of `victims` makes available: those that it alone holds or is promised."""
        table, refs = replica.table, replica.pool.refs
        promised = np.maximum(table.promised[victims] - table.held[victims], 0).astype(np.int64)
        alone = [int(np.count_nonzero(refs[table.blocks[s, : table.held[s]]] == 1)) for s in victims.tolist()]
        frees: Int64 = promised + np.array(alone, np.int64)
        return frees

    def could_take(self, replica: Replica, sequence: Sequence) -> bool:
        """Does anybody run who would yield to `sequence`, of class <= high, if memory became short?"""
        takes = self._shared.policy.relief.takes and sequence.priority <= Priority.HIGH
        return takes and self._victims(replica, max(sequence.priority + 1, Priority.NORMAL)).size > 0

    @staticmethod
    def _victims(replica: Replica, lowest: int) -> Rows:
        """Who may yield, of classes >= `lowest`: the lowest class first, then the least work lost."""
        table, high = replica.table, replica.table.high
        may = table.active[:high] & ~table.pinned[:high] & (table.priority[:high] >= lowest)
        may[replica.transfers.slots()] = False
        slots = np.flatnonzero(may)
        order = np.lexsort((-table.number[slots], table.planned[slots], -table.priority[slots]))
        victims: Rows = slots[order]
        return victims

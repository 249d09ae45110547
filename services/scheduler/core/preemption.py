"""Preemption: for latency limits, for an urgent head of the waiting, and for lack of blocks.

Called by the planner before and while it schedules decodes. Victims of the first two stand in one order: the lowest
class first, then the least work lost; where blocks run out the policy chooses. A preempted sequence is requeued in its
old place. Rules: docs/policies.md.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.placement.router import Router
from services.scheduler.core.policy.base import Mode, Slo
from services.scheduler.core.replica import KV, Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.table import DECODING, Bool, Int64
from services.scheduler.core.types import DECODE, Priority, Rows

MAX_VICTIMS = 64  # of one waiting sequence at once


class Preempter:
    """Preempts running sequences of the replica that a step is planned for."""

    def __init__(self, state: SchedulerState, router: Router) -> None:
        self._state = state
        self._router = router

    def preempt(self, step: StepBuilder, row: int, now_ns: int, out: OutcomeBuilder, mode: Mode | None = None) -> None:
        """Release a row and let its sequence wait again; the KV goes to the host tier or is lost."""
        state, replica = self._state, step.replica
        if mode is None:
            decodes = (
                self._router.placement.has_roles and replica.limits.role == DECODE
            )  # without its KV it goes back to a prefill
            mode = Mode.SWAP if decodes else state.policy.relief.mode(replica, row)
        state.counters.preemptions += 1
        step.preemptions += 1
        sequence = replica.release(row, KV.SWAP if mode is Mode.SWAP else KV.DROP)
        step.forget(row)
        if not state.policy.relief.all_yield:  # its rule knows no last preemption
            sequence.preemptions += 1
        state.waiting.requeue(sequence, now_ns, out)

    def early(self, step: StepBuilder, head: Sequence | None, now_ns: int, out: OutcomeBuilder) -> None:
        """Preempt the rows that the policy names before the step is planned. head: the first waiting one if refused."""
        replica, relief = step.replica, self._state.policy.relief
        rows = np.flatnonzero(self._may_be_preempted(replica))
        for victim in relief.early_victims(replica, rows, head, now_ns):
            self.preempt(step, victim, now_ns, out)

    def for_latency_limits(self, step: StepBuilder, now_ns: int, out: OutcomeBuilder) -> None:
        """Preempt until every running sequence of class <= high has slack in its TBT limit again.

        Preempts nothing when that could not be reached even if all candidates were preempted.
        """
        relief, table = self._state.policy.relief, step.replica.table
        slo = relief.slo
        model, high = step.replica.model, table.high
        if slo is None:
            return
        if relief.all_yield:
            return self._all_yield(step, slo, now_ns, out)
        if not table.tbt_rows or not model.observations:
            return
        decodes = (table.phase[:high] == DECODING) & (table.known_tokens[:high] < table.limit[:high])
        urgent = np.flatnonzero(decodes & (table.tbt_slo_ns[:high] > 0) & (table.priority[:high] <= Priority.HIGH))
        if not urgent.size:
            return
        # A row with a step unanswered gets its token at that step's end, about now; the next one a step later.
        last = np.where(table.unanswered_steps[urgent] > 0, now_ns, table.last_token_ns[urgent])
        slack = int((last + table.tbt_slo_ns[urgent]).min()) - now_ns
        running = int(np.count_nonzero(decodes))
        context = int(table.planned_tokens[:high][decodes].sum())
        if slack - model.predict(running, context) < slo.risk_ns:
            for victim in self._enough_for(step.replica, decodes, slack, running, context, slo):
                self.preempt(step, victim, now_ns, out)

    def _all_yield(self, step: StepBuilder, slo: Slo, now_ns: int, out: OutcomeBuilder) -> None:
        """Preempt all rows of lower classes while one of class <= high has too little left of its TBT limit."""
        table, high = step.replica.table, step.replica.table.high
        urgent = table.active[:high] & (table.priority[:high] <= Priority.HIGH) & (table.tbt_slo_ns[:high] > 0)
        urgent &= table.applied_tokens[:high] > table.prompt[:high]
        rows = np.flatnonzero(urgent)
        if rows.size and int((table.last_token_ns[rows] + table.tbt_slo_ns[rows]).min()) - now_ns < slo.risk_ns:
            for victim in self._victims(step.replica, Priority.NORMAL).tolist():
                self.preempt(step, victim, now_ns, out)

    def _enough_for(
        self, replica: Replica, decodes: Bool, slack: int, running: int, context: int, slo: Slo
    ) -> list[int]:
        """Return the fewest victims after which a step leaves `slo.safe_ns`; none if no number of them does."""
        victims = self._victims(replica, Priority.NORMAL)
        victims = victims[decodes[victims]]
        after = running - np.arange(1, victims.size + 1)
        contexts = context - np.cumsum(replica.table.planned_tokens[victims])
        pairs = zip(after.tolist(), contexts.tolist(), strict=True)
        safe = slack - np.array([replica.model.predict(*pair) for pair in pairs]) > slo.safe_ns
        return victims[: int(safe.argmax()) + 1].tolist() if safe.any() else []

    def for_urgent(self, step: StepBuilder, sequence: Sequence, cost: int, now_ns: int, out: OutcomeBuilder) -> None:
        """Preempt rows of lower classes for the first of the waiting, of class <= high, which lacks a slot or `cost`
        blocks, if that is enough. Its blocks must be there at once, so victims for blocks lose their KV."""
        replica, table = step.replica, step.replica.table
        victims = self._victims(replica, max(sequence.priority + 1, Priority.NORMAL))[:MAX_VICTIMS]
        lacking = cost - replica.available
        slots = 1 if table.count >= step.max_running else 0
        freed = np.cumsum(self._frees(replica, victims))
        enough = int(np.searchsorted(freed, lacking)) + 1 if lacking > 0 else slots
        if not enough or enough > victims.size:
            return
        mode = Mode.RECOMPUTE if lacking > 0 else None
        for victim in victims[:enough].tolist():
            self.preempt(step, victim, now_ns, out, mode)
        replica.beneficiary = sequence

    def for_adapter(self, step: StepBuilder, sequence: Sequence, now_ns: int, out: OutcomeBuilder) -> None:
        """Preempt the rows of one adapter, all of lower classes, for the first waiting sequence of class <= high with
        an adapter that gets no number before. They are those of the lowest class with the least work lost.
        """
        replica, table = step.replica, step.replica.table
        victims = set(self._victims(replica, max(sequence.priority + 1, Priority.NORMAL)).tolist())
        found = [rows for rows in replica.adapters.rows() if len(rows) <= MAX_VICTIMS and victims.issuperset(rows)]
        if not found:
            return
        for row in min(
            found, key=lambda rows: (-int(table.priority[rows].min()), int(table.planned_tokens[rows].sum()))
        ):
            self.preempt(step, row, now_ns, out)
        replica.beneficiary = sequence

    def could_preempt_for(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether a row would be preempted for `sequence`, of class <= high, if memory became short."""
        takes = self._state.policy.relief.takes and sequence.priority <= Priority.HIGH
        return takes and self._victims(replica, max(sequence.priority + 1, Priority.NORMAL)).size > 0

    def with_blocks(self, step: StepBuilder, rows: Rows, now_ns: int, out: OutcomeBuilder) -> Rows:
        """Return those of the decoding `rows` that go on when there are too few blocks; preempt where that is needed.

        A row with a step unanswered sits out: the answer may end it, and no token past the end may cost another
        sequence its KV. Blocks of a swapped victim are free only when the copy is acknowledged; rows that need them
        sit out until then.
        """
        replica, relief = step.replica, self._state.policy.relief
        table = replica.table
        needs = (table.planned_tokens[rows] == table.capacity[rows]) & (
            table.reserved_blocks[rows] <= table.held_blocks[rows]
        )
        answered = table.unanswered_steps[rows] == 0
        needy, rows = rows[needs & answered], rows[~needs | answered]
        some_run = rows.size > needy.size or replica.inflight
        if relief.returns:
            step.lacks_blocks = True
            some_run = some_run or step.has_prompts or replica.available + replica.pool.draining > 0
        if relief.stalls and some_run:
            return self._sit_out(replica, rows, needy, now_ns)
        while needy.size > replica.available + replica.pool.draining:
            candidates = np.flatnonzero(self._may_be_preempted(replica))
            if not candidates.size:
                break
            victim = relief.choose(table, candidates)
            self.preempt(step, victim, now_ns, out)
            needy, rows = needy[needy != victim], rows[rows != victim]
            if relief.stalls:
                break
        return self._sit_out(replica, rows, needy, now_ns)

    def _sit_out(self, replica: Replica, rows: Rows, needy: Rows, now_ns: int) -> Rows:
        """Return `rows` without those of `needy` for which there is no block, the last ones in order."""
        room = max(replica.available, 0)
        if needy.size <= room:
            return rows
        needy = self._state.policy.order.sort(replica.table, needy, now_ns)
        left: Rows = rows[~np.isin(rows, needy[room:])]
        return left

    @staticmethod
    def _may_be_preempted(replica: Replica) -> Bool:
        """Return [high] bool: the row is neither pinned nor waiting for its KV."""
        table, high = replica.table, replica.table.high
        may: Bool = table.active[:high] & ~table.is_pinned[:high]
        may[replica.transfers.slots()] = False
        return may

    @classmethod
    def _victims(cls, replica: Replica, lowest: int) -> Rows:
        """Return rows of classes >= `lowest` in the order of preemption."""
        table = replica.table
        rows = np.flatnonzero(cls._may_be_preempted(replica) & (table.priority[: table.high] >= lowest))
        order = np.lexsort((-table.number[rows], table.planned_tokens[rows], -table.priority[rows]))
        victims: Rows = rows[order]
        return victims

    @staticmethod
    def _frees(replica: Replica, victims: Rows) -> Int64:
        """Return [n] blocks, at least, that each victim makes available: those that it alone holds or has reserved."""
        table, refs = replica.table, replica.pool.refs
        reserved = np.maximum(table.reserved_blocks[victims] - table.held_blocks[victims], 0).astype(np.int64)
        alone = [int(np.count_nonzero(refs[table.blocks[s, : table.held_blocks[s]]] == 1)) for s in victims.tolist()]
        frees: Int64 = reserved + np.array(alone, np.int64)
        return frees

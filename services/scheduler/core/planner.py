"""Plan one iteration of one replica, from top to bottom.

`Scheduler.plan` calls `Planner.plan` whenever a replica may have another step in flight. The planner asks the policy
how much, preemption for room and admission for new sequences; the step builder takes the blocks. No clock, no I/O.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.admission import Admission
from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.placement.base import Verdict
from services.scheduler.core.placement.constraints import check
from services.scheduler.core.placement.disaggregation import KVHandover
from services.scheduler.core.placement.router import Router
from services.scheduler.core.preemption import Preempter
from services.scheduler.core.replica import Replica
from services.scheduler.core.state import MAX_AHEAD, SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.table import DECODING, PREFILLING, Bool
from services.scheduler.core.types import NO_ROWS, PREFILL, Int32, Priority, Rows, StepPlan

LOOK_PAST_LACKING = 64  # sequences without their adapter that one scan skips beside the others


class Planner:
    """Builds steps for any replica under one policy."""

    def __init__(self, state: SchedulerState, router: Router) -> None:
        self._state = state
        self._router = router
        self._preempter = Preempter(state, router)
        self._hand_over = KVHandover(state, router.placement)
        self._admission = Admission(state, router, self._preempter)

    def plan(self, replica: Replica, now_ns: int, out: OutcomeBuilder) -> StepPlan | None:
        """Return the next step of `replica`, or None when nothing can run or enough is in flight.

        1. Preempt first, so that freed slots and blocks are available below.
        2. Decodes next: a running sequence that sits out a step adds to its time between tokens.
        3. Chunks of running prompts before new sequences, as their blocks are reserved; a sequence that waits goes
           before those that it passes: an urgent one before lower classes, and where the order says so.
        4. New sequences take what is left of the token budget.
        """
        for microbatch in self._open(replica):
            if replica.speculation.possible and self._waits_for_answer(replica, microbatch):
                continue
            while True:
                step = self._build(replica, microbatch, now_ns, out)
                if step:
                    return self._commit(step)
                if (
                    not step.preemptions
                ):  # else all rows that were to run were preempted; those that kept memory run now
                    break
        return None

    def last_step(self, replica: Replica, keep: Int32, now_ns: int) -> StepPlan:
        """Return the last step of a replica: the copies that were ordered, and the host blocks to keep."""
        return StepBuilder(replica, 0, 0, 0, 0, now_ns).commit(keep)

    def _build(self, replica: Replica, microbatch: int, now_ns: int, out: OutcomeBuilder) -> StepBuilder:
        state, table = self._state, replica.table
        max_running = state.max_running(replica)
        max_seqs = state.policy.batch.max_step_seqs(table.count, max_running, replica.microbatches)
        max_tokens = replica.tokens.max_tokens(replica, state.step_tokens)
        step = StepBuilder(replica, microbatch, max_running, max_seqs, max_tokens, now_ns)
        if table.tbt_rows:
            self._preempter.for_latency_limits(step, now_ns, out)
        if state.policy.relief.early:
            self._admission.preempt_early(step, out)
        if len(state.waiting):
            state.policy.order.keep_slots(table, max_running, len(state.waiting))
            self._admission.make_room(step, out)
        self._admission.enter_loaded(step)
        if replica.limits.role == PREFILL:
            self._hand_over.plan(replica, now_ns, out)
        self._decodes(step, now_ns, out)
        if state.policy.batch.pooled:
            self._pool(step, now_ns, out)
            self._drafts(step, max_tokens)
            return step
        rows, passed = self._prompts(step), NO_ROWS
        if rows.size and (head := self._admission.head(step)) is not None:
            behind = self._admission.find_overtaken(step, rows, head)
            rows, passed = rows[~behind], rows[behind]
        self._chunks(step, rows)
        self._admit(step, passed, out)
        self._drafts(step, max_tokens)
        return step

    def _decodes(self, step: StepBuilder, now_ns: int, out: OutcomeBuilder) -> None:
        """Schedule one token for each decoding row, as far as sequences, tokens and blocks allow."""
        table = step.replica.table
        wants = self._wants(step)
        decodes: Bool = wants & self._decode_mask(step)
        rows = table.select(decodes, step.microbatch)
        step.has_prompts = rows.size < table.high and bool(np.count_nonzero(wants) > rows.size)
        if table.low_rows and table.low_yields:
            rows, decodes = self._limit_low(step, rows, decodes)
        limit = min(step.seqs_left, step.tokens_left)
        if rows.size > limit:
            rows = np.sort(self._state.policy.order.sort(table, rows, now_ns)[:limit])
            decodes = table.mask(rows)
        if not rows.size:
            return
        edge, reserved = step.missing_blocks(decodes)
        if edge.size - reserved > step.replica.available:
            rows = self._preempter.with_blocks(step, rows, now_ns, out)
            decodes = table.mask(rows)
            edge, reserved = step.missing_blocks(decodes)
        step.decode(decodes, rows, edge, reserved)

    def _drafts(self, step: StepBuilder, max_tokens: int) -> None:
        """Add drafts behind the decodes, in what prompts leave of the step."""
        replica, rows = step.replica, step.decodes
        if not rows.size or not replica.speculation.possible or replica.inflight_of.get(step.microbatch):
            return
        left, prompts = max_tokens - rows.size - step.prefill_tokens, step.prefill_tokens
        drafts = replica.speculation.drafts(rows, left, replica.available, step.context, prompts, step.microbatch)
        if drafts is not None:
            step.speculate(drafts)

    def _limit_low(self, step: StepBuilder, rows: Rows, decodes: Bool) -> tuple[Rows, Bool]:
        """Return the decodes, [n] rows and [high] mask, without those of class low that the policy lets wait.

        Those that wait longest for a token go first.
        """
        table = step.replica.table
        is_low = table.priority[rows] == Priority.LOW
        low = rows[is_low]
        most = step.replica.tokens.low_decodes(step.replica, rows[~is_low], low)
        if low.size <= most:
            return rows, decodes
        order = np.lexsort((table.number[low], table.last_token_ns[low], table.unanswered_steps[low]))
        rows = np.sort(np.concatenate((rows[~is_low], low[order[:most]])))
        return rows, table.mask(rows)

    def _waits_for_answer(self, replica: Replica, microbatch: int) -> bool:
        """Return whether the microbatch has drafts out, or should have some behind the answer to what is out."""
        if not replica.inflight_of.get(microbatch):
            return False
        if any(step.drafts is not None and step.microbatch == microbatch for step in replica.inflight.values()):
            return True
        table, high = replica.table, replica.table.high
        if table.tbt_rows and (table.phase[:high] == PREFILLING).any():
            return False  # prompts take what the limits leave
        decoding = (table.phase[:high] == DECODING) & (table.known_tokens[:high] < table.limit[:high])
        if replica.microbatches > 1:
            decoding &= (table.unanswered_steps[:high] == 0) | (table.microbatch[:high] == microbatch)
        rows = decoding.nonzero()[0]
        tokens = replica.tokens.max_tokens(replica, self._state.step_tokens) - rows.size
        return replica.speculation.worth_waiting(rows, tokens, int(table.planned_tokens[rows].sum()), microbatch)

    def _pool(self, step: StepBuilder, now_ns: int, out: OutcomeBuilder) -> None:
        """Let sequences enter into what the running prompts leave of the budget; then give all prompts their chunks."""
        table, policy = step.replica.table, self._state.policy
        self._admission.budget(step)
        left = step.tokens_left
        rows = self._prompts(step)
        if rows.size:
            rows = policy.order.sort(table, rows, now_ns)
            rest = (table.known_tokens[rows] - table.planned_tokens[rows]).astype(np.int64)
            step.tokens_left -= int(policy.batch.chunks(rest, rest, left, True).sum())
        self._admit(step, NO_ROWS, out)
        step.tokens_left = left
        step.has_prompts |= bool(step.enters)
        self._chunks(step, self._prompts(step))

    def _prompts(self, step: StepBuilder) -> Rows:
        """Return the rows that have a part of a prompt to compute."""
        if not step.has_prompts:
            return NO_ROWS
        return np.flatnonzero(self._wants(step) & self._prefill_mask(step))

    def _chunks(self, step: StepBuilder, rows: Rows) -> None:
        """Schedule further chunks of prompts that run already."""
        if not rows.size or step.seqs_left <= 0 or step.tokens_left <= 0:
            return
        policy, table = self._state.policy, step.replica.table
        self._admission.budget(step)
        if step.tokens_left <= 0:
            return
        rows = policy.order.sort(table, rows, step.now_ns)[: step.seqs_left]
        before = table.planned_tokens[rows].astype(np.int64)
        rest = table.known_tokens[rows] - before
        lengths = step.chunks(policy.batch, rest, before)
        if lengths.size:
            step.schedule(rows[: lengths.size], lengths)

    def _admit(self, step: StepBuilder, passed: Rows, out: OutcomeBuilder) -> None:
        """Offer waiting sequences to the step until a constraint stops, admission refuses or none is left.

        passed: running prompts that the first of them goes before. Their chunks come before the first sequence that
        does not.
        """
        admission, router, replica = self._admission, self._router, step.replica
        batch = admission.open(step)
        if batch is None:
            self._chunks(step, passed)
            return
        with batch.scan as scan:
            more = True
            while more:
                passed_no_more = False
                for sequence in [batch.beneficiary] if batch.beneficiary is not None else scan:
                    if passed.size and not admission.find_overtaken(step, passed, sequence).all():
                        passed_no_more = True
                        break
                    lacking = len(step.missing_adapters)
                    verdict = check(step, sequence)
                    if lacking < len(step.missing_adapters) <= LOOK_PAST_LACKING:
                        scan.look_further()
                    if verdict is Verdict.STOP:
                        admission.on_stop(batch, sequence)
                        break
                    if verdict is Verdict.SKIP or (not router.prefers(replica, sequence) and scan.defer(sequence)):
                        continue
                    if not admission.offer(batch, sequence):
                        break
                else:
                    admission.none_left(batch)
                offered = bool(batch.taken_sequences)
                more = admission.enter(batch, out)
                if passed_no_more:
                    self._chunks(step, passed)
                    passed = NO_ROWS
                    more = (more or not offered) and admission.still_room(batch)
        self._chunks(step, passed)
        for digest in step.missing_adapters:  # now that those that entered have their rows
            replica.adapters.seek(digest)

    def _commit(self, step: StepBuilder) -> StepPlan:
        """Commit the step; the policy's parts learn what it holds."""
        state, replica = self._state, step.replica
        plan = step.commit()
        state.counters.iteration += 1
        replica.memory.on_step(replica, step.preemptions)
        replica.tokens.on_step(replica, plan.decode_tokens, plan.decode_tokens + plan.prefill_tokens, len(plan.enters))
        if state.policy.order.counts_tokens:
            rows, tokens = step.scheduled_rows
            state.policy.order.count_served(replica.table.tenant[rows], replica.table.priority[rows], tokens)
        return plan

    def _open(self, replica: Replica) -> list[int]:
        """Return the microbatches that may be planned, that with least in flight and planned longest ago first."""
        lookahead, inflight, last = self._state.lookahead, replica.inflight_of, replica.last_planned
        if replica.microbatches == 1:
            return [0] if inflight.get(0, 0) <= lookahead or self._runs_dry(replica) else []
        free = [m for m in range(replica.microbatches) if inflight.get(m, 0) <= lookahead]
        return sorted(free, key=lambda m: (inflight.get(m, 0), last.get(m, 0)))

    def _runs_dry(self, replica: Replica) -> bool:
        """Return whether the steps in flight may be over before the answer to one of them has brought another.

        Each of them is no larger than the step that was answered last, so it takes about as long at most.
        """
        state, sent = self._state, replica.inflight.values()
        if not state.ahead_ns or not state.lookahead or len(state.waiting) or len(sent) >= MAX_AHEAD:
            return False
        tokens, step_ns = replica.last_answered
        return len(sent) * step_ns < state.ahead_ns and all(step.tokens <= tokens for step in sent)

    def _decode_mask(self, step: StepBuilder) -> Bool:
        """Return [high] bool: the row decodes.

        The last token of a prompt, when it is left alone, is a decode too, except in a pooled batch.
        """
        table, high = step.replica.table, step.replica.table.high
        decoding: Bool = table.phase[:high] == DECODING
        if self._state.policy.batch.pooled:
            decoding &= table.known_tokens[:high] > table.entry_tokens[:high]
        return decoding

    def _prefill_mask(self, step: StepBuilder) -> Bool:
        """Return [high] bool: the row has a part of its prompt to compute, or of what it computes again."""
        table, high = step.replica.table, step.replica.table.high
        prefilling: Bool = table.phase[:high] == PREFILLING
        if self._state.policy.batch.pooled:
            prefilling |= (table.phase[:high] == DECODING) & (table.known_tokens[:high] == table.entry_tokens[:high])
        return prefilling

    @staticmethod
    def _wants(step: StepBuilder) -> Bool:
        """Return [high] bool: the row has something to run and may be in a step of this microbatch.

        A sequence is of the microbatch of its last step until that is answered; then any may take it, so the
        microbatches balance. No row is planned past its limit: known counts the placeholders.
        """
        table, high = step.replica.table, step.replica.table.high
        wants: Bool = table.known_tokens[:high] < table.limit[:high]
        if step.replica.microbatches > 1:
            wants &= (table.unanswered_steps[:high] == 0) | (table.microbatch[:high] == step.microbatch)
        return wants

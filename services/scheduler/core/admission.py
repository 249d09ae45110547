"""Admission: let waiting sequences enter a step.

The planner offers sequences that pass the constraints, in the order of the queue. A batch of them is looked up in the
prefix cache, checked against memory and entered together: a few vector operations for the batch, and Python code only
per sequence that enters or is set aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.kv.prefix_cache import MAX_ASIDE, PrefixCache, PrefixMatch
from services.scheduler.core.kv.prefix_index import Key
from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.placement.constraints import can_load
from services.scheduler.core.placement.router import Router
from services.scheduler.core.policy.base import Candidates, Pace
from services.scheduler.core.policy.budget import ALIGN
from services.scheduler.core.policy.queues import LOOKED_AT
from services.scheduler.core.preemption import Preempter
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.table import Bool, Int64
from services.scheduler.core.types import EMPTY, Enter, Int32, Priority, Rows
from services.scheduler.core.waiting import Scan

LOOK_PAST = 16  # sequences of each queue that one scan skips, at most
LOOK_AGAIN = 8  # iterations after which a refused head is judged again, even if the reason of the refusal still holds
NO_HIT = PrefixMatch(EMPTY, EMPTY)


@dataclass(slots=True)
class Batch:
    """Sequences that are offered to one step, judged together."""

    step: StepBuilder
    scan: Scan
    beneficiary: Sequence | None  # the only one that may enter: running sequences were preempted for it
    room: int = -1  # sequences that may still enter; -1 until the first is offered
    size: int = 0  # sequences of this batch, at most
    spent_tokens: int = 0  # tokens that the taken sequences may need
    taken_sequences: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Candidate:
    """A sequence of the batch, with the cached blocks of its prefix."""

    sequence: Sequence
    hit: PrefixMatch

    @property
    def loads(self) -> bool:
        """Whether KV has to be copied from a host tier before the sequence can run."""
        return self.sequence.is_swapped or self.hit.host.size > 0


class Admission:
    """Fills a step with waiting sequences."""

    def __init__(self, state: SchedulerState, router: Router, preempter: Preempter) -> None:
        self._state = state
        self._router = router
        self._preempter = preempter

    def preempt_early(self, step: StepBuilder, out: OutcomeBuilder) -> None:
        """Let the policy preempt before any row is scheduled; it learns of the head if that was refused."""
        state, replica = self._state, step.replica
        head = None if state.is_closed else self._head(replica, step.now_ns)
        full = replica.table.count >= step.max_running
        if head is not None and not full and not replica.memo.still_refused(head, replica, state.counters.iteration):
            head = None
        self._preempter.early(step, head, step.now_ns, out)

    def make_room(self, step: StepBuilder, out: OutcomeBuilder) -> None:
        """Preempt running sequences for an urgent head that was refused, or that has an adapter which they keep out.

        Called before any row is scheduled.
        """
        replica, state = step.replica, self._state
        memo, prefix_cache, adapters = replica.memo, replica.prefix_cache, replica.adapters
        crowded = adapters.are_crowded and replica.beneficiary is None
        if memo.refused_number < 0 and not crowded:
            return
        if not state.waiting.urgent or state.is_closed or not state.policy.relief.takes:
            return
        head = self._head(replica, step.now_ns)
        if head is None or head.priority > Priority.HIGH:
            return
        is_kept_out = crowded and adapters.keeps_out(head.record.request.adapter)
        if head.number != memo.refused_number and not is_kept_out:
            return
        if not self._router.placement.allows(replica, head):
            return
        alive = self._router.placement.alive
        if any(other.beneficiary is head for other in alive):
            return  # another replica has made room for it
        has_choice = len(alive) > 1
        if is_kept_out and has_choice and self._router.eligible_ns(replica, head, step.now_ns) > step.now_ns:
            return  # another replica is cheaper
        if prefix_cache is not None and prefix_cache.owner_of(head, prefix_cache.match([head])[0].size) >= 0:
            return  # it would be set aside, to wait for a prefix, although a slot was freed for it
        if step.tokens_left > replica.table.count:  # else no tokens are left for its chunk
            if is_kept_out:
                self._preempter.for_adapter(step, head, step.now_ns, out)
            else:
                self._preempter.for_urgent(step, head, memo.cost, step.now_ns, out)
            if replica.beneficiary is not None:
                memo.refused_number = -1

    def enter_loaded(self, step: StepBuilder) -> None:
        """Enter the rows that have received their KV from a host tier; they run from this step on."""
        replica = step.replica
        if not replica.transfers.has_arrivals:
            return
        table = replica.table
        for slot in replica.transfers.take_arrived():
            table.go(slot, replica.limits)
            blocks = table.blocks[slot, : table.held_blocks[slot]].copy()
            step.enters.append(_enter(replica, slot, blocks, int(table.planned_tokens[slot])))

    def head(self, step: StepBuilder) -> Sequence | None:
        """Return the waiting sequence that may enter next, or None."""
        if self._state.is_closed or not len(self._state.waiting):
            return None
        return step.replica.beneficiary or self._head(step.replica, step.now_ns)

    def find_overtaken(self, step: StepBuilder, rows: Rows, sequence: Sequence) -> Bool:
        """Return which of the running prompts `rows` [n] a waiting sequence goes before.

        One of class <= high that may take slots goes before lower classes; else the order decides.
        """
        state, table = self._state, step.replica.table
        passed = state.policy.order.find_overtaken(table, rows, sequence, step.now_ns)
        if state.policy.relief.takes and sequence.priority <= Priority.HIGH:
            passed |= table.priority[rows] > sequence.priority
        return passed

    def _head(self, replica: Replica, now_ns: int) -> Sequence | None:
        """Return the head of the queue; with roles the first head, of the replica's queues, that may enter."""
        placement, heads = self._router.placement, self._state.waiting.heads(replica.number, now_ns)
        if placement.has_roles:
            heads = [head for head in heads if placement.allows(replica, head)]
        return heads[0] if heads else None

    def open(self, step: StepBuilder) -> Batch | None:
        """Return an empty batch, or None when no waiting sequence can enter."""
        state, waiting, replica, now_ns = self._state, self._state.waiting, step.replica, step.now_ns
        prefix_cache, placement = replica.prefix_cache, self._router.placement
        if not len(waiting):
            replica.beneficiary = None  # it has ended, is parked or held
            return None
        if prefix_cache is not None:
            prefix_cache.expire(now_ns)
            for sequence in prefix_cache.ready:
                waiting.put_back(sequence, now_ns)
            prefix_cache.ready.clear()
        self._router.expire(now_ns)
        chosen = replica.beneficiary
        if chosen is not None and (chosen.state is not State.WAITING or not placement.allows(replica, chosen)):
            chosen = replica.beneficiary = None
        if state.is_closed and not placement.prefill_sources:
            return None
        if step.lacks_blocks:
            return None
        if step.preemptions and chosen is None and not state.policy.batch.pooled:
            return None
        if replica.table.count >= step.max_running and not (waiting.urgent and state.policy.relief.takes):
            return None
        if prefix_cache is not None and state.policy.order.prefixes and len(waiting) <= LOOKED_AT:
            prefix_cache.match([sequence for sequence in waiting if not sequence.is_swapped])
        look_past = LOOK_PAST
        if chosen is None and placement.chooses:
            memo = replica.memo
            if memo.none_at == waiting.changes and now_ns < memo.none_until_ns:
                return None
            if placement.quarantined_records and placement.dock == replica.number:
                if not placement.confined_waiting():
                    return None
                look_past = len(waiting)
        return Batch(step, waiting.scan(replica.number, now_ns, look_past, step.passed_over), chosen)

    def offer(self, batch: Batch, sequence: Sequence) -> bool:
        """Take a waiting sequence into the batch if there is room; return whether there is room for a further one."""
        step = batch.step
        if batch.room < 0 and not self._measure(batch, sequence):
            return False
        if sequence.is_pinned and batch.taken_sequences:  # a pinned sequence is judged alone
            return False
        batch.scan.take(sequence)
        for other in step.passed_over:
            other.route.passes += 1
        if sequence.is_swapped and not can_load(step.replica, sequence):
            self._router.evict(sequence)  # computing it again here is cheaper than waiting for that replica
        batch.taken_sequences.append(sequence)
        step.admitted_sequences.append(sequence)
        batch.spent_tokens += 0 if sequence.is_swapped else max(sequence.known_tokens - sequence.prefix.hits, 1)
        return (
            not sequence.is_pinned and len(batch.taken_sequences) < batch.size and batch.spent_tokens < step.tokens_left
        )

    def on_stop(self, batch: Batch, sequence: Sequence) -> None:
        """Measure the room with a sequence that stopped the scan: the room also bounds the chunks that follow."""
        if batch.room < 0:
            self._measure(batch, sequence)

    def _measure(self, batch: Batch, head: Sequence) -> bool:
        """Set how many sequences may enter when `head` is the first; return whether `head` may be offered to memory."""
        step, state, replica = batch.step, self._state, batch.step.replica
        max_running, running, queued = step.max_running, replica.table.count, len(state.waiting)
        rule = state.policy.batch
        step.seqs_left += rule.max_step_seqs(running + queued, max_running, replica.microbatches)
        step.seqs_left -= rule.max_step_seqs(running, max_running, replica.microbatches)
        free = max_running - running
        joins = rule.max_new_seqs(replica, queued, max_running, head.record.arrived_ns, step.now_ns)
        room = min(free, step.seqs_left, joins)
        if free <= 0 and not head.unanswered_steps:
            self._refuse(replica, head, 0)
        refused_before = replica.memo.refused_number >= 0
        batch.room = 0
        if room <= 0 or step.tokens_left <= 0:
            return False
        if replica.memo.still_refused(head, replica, state.counters.iteration):
            return False
        self.budget(step)
        if step.tokens_left <= 0:
            return False
        if batch.beneficiary is not None:
            room, replica.beneficiary = 1, None
        batch.room = room
        batch.size = 1 if refused_before else room  # after a refusal, try only the head: it is usually refused again
        return True

    def still_room(self, batch: Batch) -> bool:
        """Return whether more sequences may be offered after running prompts took chunks in between."""
        if batch.room > 0:
            batch.room = batch.size = min(batch.room, max(batch.step.seqs_left, 0))
        return batch.room != 0 and batch.step.tokens_left > 0

    def enter(self, batch: Batch, out: OutcomeBuilder) -> bool:
        """Enter as many sequences of the batch as memory and budget allow; return whether more may be offered."""
        taken, step, replica = batch.taken_sequences, batch.step, batch.step.replica
        if not taken:
            return False
        if replica.prefix_cache is None:
            candidates = [Candidate(sequence, NO_HIT) for sequence in taken]
        else:
            candidates = self._look_up(step, replica.prefix_cache, taken)
        entered = self._judge(step, candidates, out) if candidates else 0
        batch.taken_sequences, batch.spent_tokens = [], 0
        batch.room -= entered
        batch.size = batch.room
        if entered < len(candidates) or batch.beneficiary is not None or step.aside > MAX_ASIDE:
            return False
        return batch.room > 0 and step.tokens_left > 0  # sequences may need fewer tokens than `spent_tokens` assumed

    def none_left(self, batch: Batch) -> None:
        """Note that no waiting sequence may enter this replica now, and until when that holds."""
        router, step, memo = self._router, batch.step, batch.step.replica.memo
        if batch.beneficiary is not None or not router.placement.chooses:
            return
        moments = [step.now_ns]
        if (
            batch.scan.skipped_sequences
            and not step.passed_over
            and not any(s.unanswered_steps for s in batch.scan.skipped_sequences)
        ):
            moments = [
                router.eligible_ns(step.replica, sequence, step.now_ns) for sequence in batch.scan.skipped_sequences
            ]
        memo.none_at, memo.none_until_ns = self._state.waiting.changes, min(moments)

    def budget(self, step: StepBuilder, depth: int = 0) -> None:
        """Limit the tokens of the step to the policy's budget for prompts beside the decodes.

        Done once a step, and again for prompts that enter with `depth` cached tokens: they have left the queue by then,
        and still count as waiting.
        """
        if depth or not step.has_budget:
            replica = step.replica
            if not step.has_budget:
                step.has_budget = True
                count, tokens = self._state.waiting.totals(replica.table.low_yields)
                step.waiting_count = self._that_fit(step, count, tokens) // max(len(self._router.placement.alive), 1)
                step.waiting_tokens = tokens * step.waiting_count // count if count else 0
                if replica.table.low_yields and replica.table.low_rows and (count or replica.beneficiary is not None):
                    # The share above may be none, and a swapped sequence counts no tokens; one may enter all the same.
                    step.waiting_count, step.waiting_tokens = (
                        max(step.waiting_count, 1),
                        max(step.waiting_tokens, ALIGN),
                    )
            budget = replica.tokens.budget(
                replica,
                step.decodes,
                step.now_ns,
                self._state.step_tokens,
                depth,
                step.waiting_count,
                step.waiting_tokens,
            )
            step.tokens_left = min(step.tokens_left, budget - step.decodes.size - step.prefill_tokens)

    @staticmethod
    def _that_fit(step: StepBuilder, count: int, tokens: int) -> int:
        """Return how many of `count` waiting sequences of `tokens` find slots and free memory on the step's replica.

        0 after a refusal: the sequences behind the refused one would not be in memory sooner for a faster prompt.
        """
        replica = step.replica
        if not count or replica.memo.refused_number >= 0:
            return 0
        room = replica.available * replica.limits.block_size
        free = step.max_running - replica.table.count
        return max(min(count, free, room * count // tokens if tokens else count), 0)

    def _refuse(self, replica: Replica, head: Sequence, cost: int) -> None:
        replica.memo.refuse(head, replica, cost, self._state.counters.iteration + LOOK_AGAIN)

    def _look_up(self, step: StepBuilder, prefix_cache: PrefixCache, taken: list[Sequence]) -> list[Candidate]:
        """Return candidates with their cached blocks.

        If a running sequence computes the next blocks of a sequence now, that one is set aside until they are there.
        """
        hits = prefix_cache.match(taken)
        candidates: list[Candidate] = []
        starting: set[Key] = set()  # keys of the blocks that sequences entering now compute first
        for sequence, hit in zip(taken, hits, strict=True):
            if sequence.is_swapped:
                candidates.append(Candidate(sequence, NO_HIT))
                continue
            blocks = hit.gpu.size + hit.host.size
            owner = prefix_cache.owner_of(sequence, blocks)
            if owner >= 0:
                prefix_cache.wait(sequence, owner, step.now_ns + self._prefill_ns(step, owner))
                self._set_aside(step, sequence)
                continue
            key = prefix_cache.next_key(sequence, blocks)
            if key in starting and sequence.is_scored:
                # Ready at once: it is looked up again when the first one has its slot.
                prefix_cache.ready.append(sequence)
                self._set_aside(step, sequence)
                continue
            if key:
                starting.add(key)
            candidates.append(Candidate(sequence, hit))
        return candidates

    def _set_aside(self, step: StepBuilder, sequence: Sequence) -> None:
        step.aside += 1
        step.admitted_sequences.remove(sequence)
        self._state.waiting.set_aside(sequence)

    def _prefill_ns(self, step: StepBuilder, slot: int) -> int:
        """Return the predicted time (ns) of the rest of a running prompt, in steps like this one; 1 s if unknown."""
        replica = step.replica
        table = replica.table
        rest, budget = int(table.known_tokens[slot] - table.planned_tokens[slot]), max(step.tokens_left, 1)
        steps = -(-rest // budget) + self._state.lookahead + 1
        tokens = step.decodes.size + min(rest, budget)
        return int(steps * replica.model.predict(tokens, step.context, rest * rest / 2 / steps)) or 1_000_000_000

    def _judge(self, step: StepBuilder, candidates: list[Candidate], out: OutcomeBuilder) -> int:
        """Enter as many of the first candidates as memory and budget allow; return how many.

        The rest return to their places in the queue.
        """
        state, replica = self._state, step.replica
        entrants = self._entrants(replica, candidates)
        if depth := max(entrants.cached_tokens.tolist()):  # attention also reads cached tokens
            self.budget(step, depth)
        if candidates[0].sequence.is_pinned:
            reserved: Int64 = np.array([replica.blocks_for(int(entrants.limit[0]))], np.int64)
        else:
            max_tokens = replica.tokens.max_tokens(replica, state.step_tokens)
            reserved = replica.memory.admit(replica, entrants, Pace(state.lookahead, max_tokens))
        if not reserved.size and self._preempter.could_preempt_for(replica, candidates[0].sequence):
            reserved = np.array([replica.blocks_for(int(entrants.known_tokens[0]))], np.int64)  # preempts later
        costs = reserved - entrants.shared_blocks[: reserved.size]
        count = int(costs.cumsum().searchsorted(replica.available, side="right"))
        if not count:
            cost = int(costs[0]) if costs.size else replica.blocks_for(candidates[0].sequence.known_tokens)
            self._refuse(replica, candidates[0].sequence, cost)
        entering, lengths = self._chunks(step, candidates[:count], entrants)
        for candidate in candidates[len(entering) :]:
            step.admitted_sequences.remove(candidate.sequence)
            state.waiting.push(candidate.sequence, step.now_ns)
        if entering:
            state.policy.batch.on_enter(replica, len(entering))
            self._enter_all(step, entering, reserved, lengths, out)
        return len(entering)

    @staticmethod
    def _entrants(replica: Replica, candidates: list[Candidate]) -> Candidates:
        """Return the columns of `candidates` for the memory policy."""
        limits, refs = replica.limits, replica.pool.refs
        rows = []
        for candidate in candidates:
            sequence, hit = candidate.sequence, candidate.hit
            cached = sequence.computed_tokens or hit.size * limits.block_size
            shared = np.count_nonzero(refs.take(hit.gpu)) if hit.gpu.size else 0
            rows.append((sequence.known_tokens, sequence.longest(limits) - 1, cached, shared, sequence.prompt.size))
        return Candidates(*np.array(rows, np.int64).T)

    def _chunks(
        self, step: StepBuilder, candidates: list[Candidate], entrants: Candidates
    ) -> tuple[list[Candidate], Int64]:
        """Return the first candidates for which tokens are left, and the chunk lengths of those without a load.

        A pooled batch counts their tokens only: they get their chunks with all other prompts.
        """
        if not candidates:
            return [], np.zeros(0, np.int64)
        before = entrants.cached_tokens[: len(candidates)]
        rest = entrants.known_tokens[: len(candidates)] - before
        runs = [i for i, candidate in enumerate(candidates) if not candidate.loads]
        if not runs:
            return candidates, np.zeros(0, np.int64)
        if len(runs) < len(candidates):
            rest, before = rest[runs], before[runs]
        batch = self._state.policy.batch
        if batch.pooled:
            lengths = batch.entry_tokens(rest, step.tokens_left)
            step.tokens_left -= int(lengths.sum())
        else:
            lengths = step.chunks(batch, rest, before)
        if lengths.size < len(runs):
            candidates = candidates[: runs[lengths.size]]
        return candidates, lengths[:0] if batch.pooled else lengths

    def _enter_all(
        self, step: StepBuilder, entering: list[Candidate], reserved: Int64, lengths: Int64, out: OutcomeBuilder
    ) -> None:  # fmt: skip
        state, replica = self._state, step.replica
        table, limits = replica.table, replica.limits
        slots = table.enter([c.sequence for c in entering], replica.next_step, step.microbatch, limits, step.now_ns)
        sizes = [c.hit.gpu.size for c in entering]
        if any(sizes):  # share all before taking any: a cached block that was found must not be evicted
            blocks = np.concatenate([c.hit.gpu for c in entering])
            replica.pool.share(blocks)
            table.fill(slots, np.array(sizes, np.int32), blocks)
            table.planned_tokens[slots] = table.capacity[slots]
        run = []
        for slot, candidate in zip(slots.tolist(), entering, strict=True):
            sequence = candidate.sequence
            replica.adapters.on_enter(slot, sequence.record.request.adapter)
            if sequence.lost_tokens:
                state.counters.recomputed_tokens += max(
                    min(sequence.lost_tokens, sequence.known_tokens) - sequence.prefix.hits, 0
                )
                sequence.lost_tokens = 0
            if candidate.loads:
                self._load(replica, slot, candidate)
            else:
                held = candidate.hit.gpu
                step.enters.append(_enter(replica, slot, held, held.size * limits.block_size))
                run.append(slot)
            sequence.replica, sequence.route.passes = replica.number, 0
            if not sequence.record.has_started:
                sequence.record.has_started = True
                out.started_ids.append(sequence.record.request.id)
            request = sequence.record.request
            if limits.identity and request.identity != limits.identity:
                request.identity = out.identities[request.id] = limits.identity
        replica.reserve(slots, reserved[: slots.size])
        if self._router.placement.chooses:
            self._router.on_enter([c.sequence for c in entering])
        if replica.prefix_cache is not None:
            replica.prefix_cache.on_enter(slots, [c.sequence for c in entering], [c.hit for c in entering])
        if run:
            rows = slots if len(run) == slots.size else np.array(run)
            if state.policy.batch.pooled:
                table.set_phase(rows)
            else:
                step.schedule(rows, lengths)

    @staticmethod
    def _load(replica: Replica, slot: int, candidate: Candidate) -> None:
        """Take blocks for KV in a host tier, here or of a peer, and order the copies; the row waits for them."""
        table, sequence, saved = replica.table, candidate.sequence, candidate.sequence.saved_kv
        host = saved.blocks if saved is not None else candidate.hit.host
        gpu = replica.pool.take(host.size)
        table.append(slot, gpu)
        replica.transfers.load(slot, host, gpu, saved, replica.peers.source(sequence))
        if saved is not None:
            table.planned_tokens[slot] = table.filled_tokens[slot] = saved.tokens
        else:
            table.planned_tokens[slot] = int(table.held_blocks[slot]) * table.block_size
        table.hold(slot, sequence)
        sequence.saved_kv = None


def _enter(replica: Replica, slot: int, blocks: Int32, computed: int) -> Enter:
    """Return the entry of the sequence of a row for its worker. computed: its first tokens, with KV in `blocks`."""
    sequence: Sequence = replica.table.sequence[slot]
    if sequence.cached_tokens < 0:
        sequence.cached_tokens = computed
    record, prompt = sequence.record, sequence.prompt.size
    tokens, scored = sequence.tokens(), sequence.scored_tokens
    return Enter(
        slot, record.request, sequence.choice, tokens, prompt, computed, blocks, record.tenant, scored,
        replica.adapters.number(slot),
    )  # fmt: skip

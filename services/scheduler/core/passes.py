"""One iteration in its passes: run what is running, decode first; then admit. (Retiring is apply()'s part.)

Called by Core.plan. Decodes are vector operations over the slot table; Python runs only for the sequences that prefill,
enter, or yield.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.outcome import Collector
from services.scheduler.core.placer import Placer
from services.scheduler.core.policy import Pace, Policy
from services.scheduler.core.replica import InFlight, Last, Replica
from services.scheduler.core.table import Bool
from services.scheduler.core.types import EMPTY, Enter, Int32, StepPlan


@dataclass(slots=True)
class Draft:
    """A step while it is planned. The decodes are columns, the other chunks lists."""

    microbatch: int
    seats: int  # sequences that may still join
    left: int  # tokens that may still be spent
    slots: Int32 = field(default_factory=lambda: EMPTY)
    starts: Int32 = field(default_factory=lambda: EMPTY)
    append_slots: list[Int32] = field(default_factory=list)
    append_blocks: list[Int32] = field(default_factory=list)
    chunks: list[tuple[int, int, int, bool]] = field(default_factory=list)  # slot, start, length, samples
    enters: list[Enter] = field(default_factory=list)
    prefill: int = 0
    prompts: bool = False  # some have more than one token to run
    preempted: bool = False


@dataclass(slots=True)
class Counters:
    """What happened since the start, for the stats."""

    iteration: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


class Passes:
    """Plans steps for any replica with one policy and one Placer."""

    def __init__(
        self, policy: Policy, placer: Placer, max_seqs: int, microbatches: int, lookahead: int, step_tokens: int
    ) -> None:
        self.policy = policy
        self.counters = Counters()
        self._placer = placer
        self._max_seqs = max_seqs
        self._microbatches = microbatches
        self._lookahead = lookahead
        self._step_tokens = step_tokens
        self._ones: Int32 = np.ones(0, np.int32)
        self._true: Bool = np.ones(0, np.bool_)

    def iterate(self, replica: Replica, now_ns: int, known: Collector) -> StepPlan | None:
        """The next step of `replica`, or None: nothing can run, or as much is in flight as may be."""
        for microbatch in self._open(replica):
            while True:
                draft = self._draft(replica, microbatch)
                self._decode(replica, draft, now_ns, known)
                self._prefill(replica, draft, now_ns)
                if not draft.preempted:
                    self._admit(replica, draft, now_ns, known)
                if draft.slots.size or draft.chunks:
                    return self._seal(replica, draft)
                if not draft.preempted:  # else: all who were to run have yielded; those who kept memory run now
                    break
        return None

    def _open(self, replica: Replica) -> list[int]:
        """Microbatches that may be planned again, the one with least in flight and planned longest ago first."""
        inflight, last = replica.inflight_of, replica.last_planned
        if self._microbatches == 1:
            return [0] if inflight.get(0, 0) <= self._lookahead else []
        free = [m for m in range(self._microbatches) if inflight.get(m, 0) <= self._lookahead]
        return sorted(free, key=lambda m: (inflight.get(m, 0), last.get(m, 0)))

    def _most(self, replica: Replica) -> int:
        """Sequences that may run at once."""
        return min(self._max_seqs or replica.limits.slots, replica.limits.slots)

    def _draft(self, replica: Replica, microbatch: int) -> Draft:
        seats = self._seats(replica, replica.table.count)
        return Draft(microbatch, seats, self.policy.tokens.budget(replica, self._step_tokens))

    def _seats(self, replica: Replica, sequences: int) -> int:
        """Sequences in one step when `sequences` run."""
        return self.policy.batch.seats(sequences, self._most(replica), self._microbatches)

    def _wants(self, replica: Replica, microbatch: int) -> Bool:
        """[high] bool: who has something to run and may be in a step of this microbatch.

        A sequence is of the microbatch of its last step until that is answered; then any may take it, so the
        microbatches balance. Nobody is planned past his limit: known counts the placeholders.
        """
        table, high = replica.table, replica.table.high
        wants: Bool = table.known[:high] < table.limit[:high]
        if self._microbatches > 1:
            wants &= (table.unanswered[:high] == 0) | (table.microbatch[:high] == microbatch)
        return wants

    def _decode(self, replica: Replica, draft: Draft, now_ns: int, known: Collector) -> None:
        """One token for every sequence that lacks one, and its next block where it crosses a boundary."""
        table, high = replica.table, replica.table.high
        wants = self._wants(replica, draft.microbatch)
        one = table.known[:high] - table.planned[:high] == 1
        one &= wants
        count = int(np.count_nonzero(one))
        draft.prompts = count < high and count < int(np.count_nonzero(wants))
        if not count:
            return
        slots = table.first_rows(high) if count == high else np.flatnonzero(one).astype(np.int32)
        most = min(draft.seats, draft.left)
        if count > most:
            slots = np.sort(self.policy.order.sort(table, slots, now_ns)[:most])
        edge = self._edge(replica, slots)
        if edge.size:
            promised = int(np.count_nonzero(table.promised[edge] > table.held[edge]))
            if edge.size - promised > replica.available:
                slots = self._relieve(replica, draft, slots, known)
                edge = self._edge(replica, slots)
                promised = int(np.count_nonzero(table.promised[edge] > table.held[edge]))
            blocks = replica.pool.take(edge.size)
            replica.outstanding -= promised
            held = table.held[edge]
            table.blocks[edge, held] = blocks
            held += 1
            table.held[edge] = held
            table.capacity[edge] = held * table.block_size
            draft.append_slots.append(edge)
            draft.append_blocks.append(blocks)
        rows = table.rows(slots)
        draft.slots, draft.starts = slots, table.planned[rows].copy()
        table.planned[rows] += 1
        table.known[rows] += 1
        table.unanswered[rows] += 1
        if self._microbatches > 1:
            table.microbatch[rows] = draft.microbatch
        draft.seats -= slots.size
        draft.left -= slots.size

    @staticmethod
    def _edge(replica: Replica, slots: Int32) -> Int32:
        """Those of `slots` whose next token needs another block."""
        rows = replica.table.rows(slots)
        edge: Int32 = slots[replica.table.planned[rows] == replica.table.capacity[rows]]
        return edge

    def _relieve(self, replica: Replica, draft: Draft, slots: Int32, known: Collector) -> Int32:
        """Too few blocks for the next tokens of `slots`: some wait, some are preempted; the rest is returned.

        Who has a step unanswered sits out: the answer may end him, and no over-run token may cost anybody his KV.
        """
        table = replica.table
        needs = table.planned[slots] == table.capacity[slots]
        needs &= table.promised[slots] <= table.held[slots]
        needy = slots[needs & (table.unanswered[slots] == 0)]
        slots = slots[~needs | (table.unanswered[slots] == 0)]
        while needy.size > replica.available:
            high = table.high
            victims = np.flatnonzero(table.active[:high] & ~table.pinned[:high]).astype(np.int32)
            victim = self.policy.relief.victim(table, victims)
            self._preempt(replica, victim, known)
            draft.preempted = True
            needy = needy[needy != victim]
            slots = slots[slots != victim]
        return slots

    def _preempt(self, replica: Replica, slot: int, known: Collector) -> None:
        """By recompute: KV and slot are given up, arrival and tokens are kept."""
        self.counters.preemptions += 1
        self.counters.recomputed_tokens += int(replica.table.planned[slot])
        sequence = replica.preempt(slot)
        sequence.preemptions += 1
        known.checkpoint(sequence)
        self._placer.push(sequence)

    def _prefill(self, replica: Replica, draft: Draft, now_ns: int) -> None:
        """Further chunks of the prompts that run already, before anybody else enters."""
        if not draft.prompts or draft.seats <= 0 or draft.left <= 0:
            return
        table, high = replica.table, replica.table.high
        more = table.known[:high] - table.planned[:high] > 1
        more &= self._wants(replica, draft.microbatch)
        for slot in self.policy.order.sort(table, np.flatnonzero(more).astype(np.int32), now_ns).tolist():
            if draft.seats <= 0 or draft.left <= 0 or not self._chunk(replica, draft, slot):
                break

    def _admit(self, replica: Replica, draft: Draft, now_ns: int, known: Collector) -> None:
        """The waiting enter in order, until the first for whom there is no slot, budget or memory.

        One who was preempted does not enter while a step of his is unanswered, and holds his place meanwhile.
        """
        if not len(self._placer):
            return
        table, limits, batch = replica.table, replica.limits, self.policy.batch
        pace = Pace(self.policy.tokens.budget(replica, self._step_tokens), self._lookahead)
        most = self._most(replica)
        running = table.count
        draft.seats += self._seats(replica, running + len(self._placer)) - self._seats(replica, running)
        while draft.seats > 0 and draft.left > 0 and table.count < most:
            sequence = self._placer.head(now_ns)
            if sequence is None or sequence.unanswered or sequence.misfit(limits):
                break
            if not batch.chunk(sequence.known, draft.left, not draft.prefill):
                break
            if sequence.pinned:
                blocks = replica.blocks_for(sequence.longest(limits) - 1)
            else:
                blocks = self.policy.memory.promise(replica, sequence, pace)
            if blocks < 0 or blocks > replica.available:
                break
            self._placer.pop(sequence)
            slot = table.enter(sequence, replica.next_step, draft.microbatch, limits, now_ns)
            sequence.replica = replica.number
            replica.promise(slot, blocks)
            request = sequence.record.request
            draft.enters.append(
                Enter(slot, request, sequence.choice, sequence.tokens(), sequence.prompt.size, 0, EMPTY)
            )
            if not sequence.record.started:
                sequence.record.started = True
                known.started.append(request.id)
            self._chunk(replica, draft, slot)

    def _chunk(self, replica: Replica, draft: Draft, slot: int) -> bool:
        """The next chunk of one prompt, with its blocks; False when the batch gives it none in this step.

        The blocks of what was known at entry are promised, so they are there.
        """
        table = replica.table
        start, known = int(table.planned[slot]), int(table.known[slot])
        length = self.policy.batch.chunk(known - start, draft.left, not draft.prefill)
        if length <= 0:
            return False
        blocks = replica.blocks_for(start + length) - int(table.held[slot])
        if blocks > 0:
            taken = replica.grow(slot, blocks)
            draft.append_slots.append(np.full(blocks, slot, np.int32))
            draft.append_blocks.append(taken)
        samples = start + length == known
        table.planned[slot] = start + length
        table.known[slot] += samples
        table.unanswered[slot] += 1
        table.microbatch[slot] = draft.microbatch
        draft.chunks.append((slot, start, length, samples))
        draft.prefill += length
        draft.left -= length
        draft.seats -= 1
        return True

    def _seal(self, replica: Replica, draft: Draft) -> StepPlan:
        """The draft as a StepPlan, in flight from now on."""
        decodes = draft.slots.size
        if self._ones.size < decodes:
            self._ones, self._true = np.ones(2 * decodes, np.int32), np.ones(2 * decodes, np.bool_)
        slots, starts = draft.slots, draft.starts
        lengths, samples = self._ones[:decodes], self._true[:decodes]
        sampled = slots
        if draft.chunks:
            more = np.array(draft.chunks, np.int32).reshape(-1, 4)
            slots = np.concatenate([slots, more[:, 0]])
            starts = np.concatenate([starts, more[:, 1]])
            lengths = np.concatenate([lengths, more[:, 2]])
            samples = np.concatenate([samples, more[:, 3] > 0])
            sampled = slots[samples]
        step = InFlight(replica.next_step, draft.microbatch, replica.table.roster, slots, sampled)
        freed, replica.freed = replica.freed, []
        replica.sent(step)
        self.counters.iteration += 1
        replica.last = Last(decodes + draft.prefill, decodes, draft.prefill)
        return StepPlan(
            id=step.id,
            replica=replica.number,
            free_slots=np.array(freed, np.int32) if freed else EMPTY,
            swap_out_gpu=EMPTY,
            swap_out_host=EMPTY,
            swap_in_host=EMPTY,
            swap_in_gpu=EMPTY,
            enters=draft.enters,
            append_slots=_join(draft.append_slots),
            append_blocks=_join(draft.append_blocks),
            chunk_slots=slots,
            chunk_starts=starts,
            chunk_lengths=lengths,
            samples=samples,
            microbatch=draft.microbatch,
            decode_tokens=decodes,
            prefill_tokens=draft.prefill,
        )


def _join(columns: list[Int32]) -> Int32:
    """One column of several."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns) if columns else EMPTY

"""The admission pass: the waiting enter.

Called by passes.py after the decodes. Candidates are looked up, judged and entered together: a few vector operations
for all of them, and Python only per sequence that enters or is put aside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.scheduler.core.draft import Draft, Shared
from services.scheduler.core.guard import Guard
from services.scheduler.core.outcome import Collector
from services.scheduler.core.pick import Picker
from services.scheduler.core.policy.base import Candidates, Pace
from services.scheduler.core.policy.queues import LOOKED_AT
from services.scheduler.core.prompts import LOWEST, Prompts
from services.scheduler.core.replica import Refusal, Replica
from services.scheduler.core.roles import reads
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.sharing import MOST_ASIDE, Hit, Sharing
from services.scheduler.core.table import Int64
from services.scheduler.core.types import EMPTY, Enter, Int32, Priority

LOOK_AGAIN = 8  # iterations after which a refused head is judged again though nothing changed that it was refused for
NO_HIT = Hit(EMPTY, EMPTY, 0)


@dataclass(slots=True)
class Candidate:
    """One of the waiting, with what is cached for it."""

    sequence: Sequence
    hit: Hit

    @property
    def loads(self) -> bool:
        """Has its KV to come from the host tier first?"""
        return self.sequence.swapped or self.hit.host.size > 0


@dataclass(slots=True)
class Found:
    """The GPU blocks that were found for candidates, one candidate's after another's."""

    blocks: Int32
    sizes: Int64  # [n]
    ends: Int64  # [n]

    @classmethod
    def of(cls, candidates: list[Candidate]) -> Found:
        """What was found for these."""
        sizes: Int64 = np.array([candidate.hit.gpu.size for candidate in candidates], np.int64)
        ends: Int64 = np.cumsum(sizes)
        blocks = np.concatenate([candidate.hit.gpu for candidate in candidates]) if ends[-1] else EMPTY
        return cls(blocks, sizes, ends)


class Admission:
    """Fills a draft with sequences that enter."""

    def __init__(self, shared: Shared, guard: Guard, prompts: Prompts) -> None:
        self._shared = shared
        self._guard = guard
        self._prompts = prompts
        self._picker = Picker(shared)

    def make_room(self, replica: Replica, draft: Draft, now_ns: int, known: Collector) -> None:
        """Before anything is planned: running sequences yield to an urgent head that was refused."""
        refusal, shared, sharing = replica.refusal, self._shared, replica.sharing
        if refusal is None or not shared.placer.urgent or shared.closed or not shared.policy.relief.takes:
            return
        head = self._picker.first(replica, now_ns)
        if head is None or head.number != refusal.number or head.priority > Priority.HIGH:
            return
        if not shared.routing.may_enter(replica, head):
            return
        if sharing is not None and sharing.owner_of(head, sharing.find([head])[0].size) >= 0:
            return  # it would be set aside with the slot
        if draft.left > replica.table.count:  # else it could not have a chunk
            self._guard.take(replica, draft, head, refusal.cost, now_ns, known)
            if replica.beneficiary is not None:
                replica.refusal = None

    def enter_loaded(self, replica: Replica, draft: Draft) -> None:
        """Those whose KV has come from the host tier take part from this step on."""
        if not replica.transfers.arrived:
            return
        table = replica.table
        for slot in replica.transfers.take_arrived():
            sequence: Sequence = table.sequence[slot]
            table.go(slot, replica.limits)
            enter = _enter(slot, sequence, table.blocks[slot, : table.held[slot]].copy(), table.block_size)
            enter.computed = int(table.planned[slot])
            draft.enters.append(enter)

    def urgent(self, replica: Replica, now_ns: int) -> int:
        """The class of a waiting sequence of class <= high that may enter: its prompt goes before running ones of lower
        classes; the lowest class where there is none."""
        shared = self._shared
        if not (shared.placer.urgent and shared.policy.relief.takes) or shared.closed:
            return LOWEST
        head = replica.beneficiary or self._picker.first(replica, now_ns)
        return head.priority if head is not None and head.priority <= Priority.HIGH else LOWEST

    def admit(self, replica: Replica, draft: Draft, now_ns: int, known: Collector) -> None:
        """The waiting enter in order, until the first for whom there is no slot, budget or memory.

        One who was preempted does not enter while a step of his is unanswered, and holds his place meanwhile.
        """
        self._admit(replica, draft, now_ns, known)
        if draft.passed:
            self._shared.placer.put_back(draft.passed, now_ns)
            draft.passed.clear()
            draft.free.clear()

    def _admit(self, replica: Replica, draft: Draft, now_ns: int, known: Collector) -> None:
        shared, placer, sharing = self._shared, self._shared.placer, replica.sharing
        if sharing is not None:
            sharing.expire(now_ns)
            for sequence in sharing.ready:
                placer.back(sequence, now_ns)
            sharing.ready.clear()
        beneficiary = replica.beneficiary
        if beneficiary is not None and (
            beneficiary.state is not State.WAITING or not shared.routing.may_enter(replica, beneficiary)
        ):
            beneficiary = replica.beneficiary = None
        if shared.closed and not shared.routing.hands:
            return
        if not len(placer) or (draft.preempted and beneficiary is None):
            return
        most = shared.most(replica)
        if replica.table.count >= most and not (placer.urgent and shared.policy.relief.takes):
            return
        if sharing is not None and shared.policy.order.prefixes and len(placer) <= LOOKED_AT:
            sharing.find([sequence for sequence in placer if not sequence.swapped])
        head = beneficiary or self._picker.next(replica, draft, now_ns)
        if head is None:
            return
        running, waiting = replica.table.count, len(placer)
        draft.seats += shared.seats(replica, running + waiting) - shared.seats(replica, running)
        free = most - running
        joins = shared.policy.batch.max_new_seqs(replica, waiting, most, head.record.arrived_ns, now_ns)
        room = min(free, draft.seats, joins)
        if free <= 0 and not head.unanswered:
            self._refuse(replica, head, 0)
        again = replica.refusal is not None
        if room <= 0 or draft.left <= 0 or self._still_refused(replica, head):
            return
        self._prompts.budget(replica, draft, now_ns)
        if draft.left <= 0:
            return
        if beneficiary is not None:
            room, replica.beneficiary = 1, None
        while room > 0 and draft.left > 0:  # again where some need less than it seemed, or are judged by other rules
            # Where the head was refused before, he alone is asked first: most often he is refused again.
            candidates = self._candidates(replica, draft, 1 if again else room, beneficiary, now_ns)
            again = False
            if candidates is None:
                break
            entered = self._judge(replica, draft, candidates, now_ns, known) if candidates else 0
            if entered < len(candidates) or beneficiary is not None or draft.aside > MOST_ASIDE:
                break
            room -= entered

    def _still_refused(self, replica: Replica, head: Sequence) -> bool:
        """Would the head be refused as in the last step? Nobody has left, and blocks have not become more."""
        refusal = replica.refusal
        if refusal is None:
            return False
        same = refusal.number == head.number and refusal.roster == replica.table.roster
        if same and replica.available <= refusal.available and self._shared.counters.iteration < refusal.again:
            return True
        replica.refusal = None
        return False

    def _refuse(self, replica: Replica, head: Sequence, cost: int) -> None:
        again = self._shared.counters.iteration + LOOK_AGAIN
        replica.refusal = Refusal(head.number, replica.table.roster, replica.available, cost, again)

    def _candidates(
        self, replica: Replica, draft: Draft, room: int, beneficiary: Sequence | None, now_ns: int
    ) -> list[Candidate] | None:
        """The first of the waiting, at most `room` and about as many as the budget takes, or the one for whom others
        yielded; they are popped. None if nobody may be asked, an empty list if all were set aside."""
        shared, placer = self._shared, self._shared.placer
        taken: list[Sequence] = []
        spent = 0
        while len(taken) < room and spent < draft.left:
            sequence = beneficiary or self._picker.next(replica, draft, now_ns)
            if sequence is None or sequence.unanswered or (sequence.pinned and taken):  # pinned: judged alone
                break
            placer.pop(sequence)
            draft.chosen = None
            for other in draft.free:
                other.route.passed += 1
            if sequence.swapped and not reads(replica, sequence):
                shared.routing.evict(sequence)  # to compute it again here is cheaper than to wait there
            taken.append(sequence)
            spent += 0 if sequence.swapped else max(sequence.known - sequence.prefix.hits, 1)
            if sequence.pinned:
                break
        if not taken:
            return None
        if replica.sharing is None:
            return [Candidate(sequence, NO_HIT) for sequence in taken]
        return self._look_up(replica, replica.sharing, draft, taken, now_ns)

    def _look_up(
        self, replica: Replica, sharing: Sharing, draft: Draft, taken: list[Sequence], now_ns: int
    ) -> list[Candidate]:
        """What is cached for each; those whose next blocks somebody computes now are set aside until they are there."""
        hits = sharing.find(taken)
        candidates: list[Candidate] = []
        starting: set[int] = set()  # keys of the first blocks to compute of those who start in this step
        for sequence, hit in zip(taken, hits, strict=True):
            if sequence.swapped:
                candidates.append(Candidate(sequence, Hit(EMPTY, EMPTY, sharing.root(sequence))))
                continue
            blocks = hit.gpu.size + hit.host.size
            owner = sharing.owner_of(sequence, blocks)
            if owner >= 0:
                draft.aside += 1
                until = now_ns + self._prefill_ns(replica, draft, owner)
                sharing.wait(sequence, owner, until)
                self._shared.placer.aside(sequence)
                continue
            key = sharing.next_key(sequence, blocks)
            if key in starting:  # looks again when the first has its slot
                draft.aside += 1
                sharing.ready.append(sequence)
                self._shared.placer.aside(sequence)
                continue
            if key:
                starting.add(key)
            candidates.append(Candidate(sequence, hit))
        return candidates

    def _prefill_ns(self, replica: Replica, draft: Draft, slot: int) -> int:
        """How long the rest of a running prompt is predicted to take, at the pace of this step; 1 s if unknown."""
        table = replica.table
        rest, budget = int(table.known[slot] - table.planned[slot]), max(draft.left, 1)
        steps = -(-rest // budget) + self._shared.lookahead + 1
        tokens = draft.slots.size + min(rest, budget)
        return int(steps * replica.model.predict(tokens, draft.context, rest * rest / 2 / steps)) or 1_000_000_000

    def _judge(self, replica: Replica, draft: Draft, candidates: list[Candidate], now_ns: int, known: Collector) -> int:
        """As many of the first candidates enter as memory and budget allow; the others stand where they stood."""
        shared = self._shared
        found = Found.of(candidates)
        entrants = self._entrants(replica, candidates, found)
        if depth := int(entrants.cached.max()):  # attention reads what is cached too
            self._prompts.budget(replica, draft, now_ns, depth)
        if candidates[0].sequence.pinned:
            promised: Int64 = np.array([replica.blocks_for(int(entrants.limit[0]))], np.int64)
        else:
            most = replica.tokens.max_tokens(replica, shared.step_tokens)
            promised = replica.memory.admit(replica, entrants, Pace(shared.lookahead, most))
        if not promised.size and self._guard.could_take(replica, candidates[0].sequence):
            promised = np.array([replica.blocks_for(int(entrants.known[0]))], np.int64)  # lower ones yield later
        costs = promised - entrants.shared[: promised.size]
        count = int(np.searchsorted(np.cumsum(costs), replica.available, side="right"))
        if not count:
            cost = int(costs[0]) if costs.size else replica.blocks_for(candidates[0].sequence.known)
            self._refuse(replica, candidates[0].sequence, cost)
        entering, lengths = self._chunks(draft, candidates[:count], entrants)
        for candidate in candidates[len(entering) :]:
            shared.placer.push(candidate.sequence, now_ns)
        if entering:
            shared.policy.batch.joined(replica, len(entering))
            self._enter_all(replica, draft, entering, found, promised, lengths, now_ns, known)
        return len(entering)

    @staticmethod
    def _entrants(replica: Replica, candidates: list[Candidate], found: Found) -> Candidates:
        limits, size = replica.limits, replica.limits.block_size
        rows = []
        for candidate in candidates:
            sequence, hit = candidate.sequence, candidate.hit
            cached = sequence.computed if sequence.swapped else (hit.gpu.size + hit.host.size) * size
            request, prompt = sequence.record.request, sequence.prompt.size
            rows.append(
                (prompt + sequence.outputs.size, sequence.longest(limits) - 1, cached, request.priority, prompt)
            )
        known, limit, cached_, priority, prompts = np.array(rows, np.int64).T
        shared = np.zeros(known.size, np.int64)
        if found.blocks.size:
            held = np.append(0, np.cumsum(replica.pool.refs.take(found.blocks) > 0))
            shared = held[found.ends] - held[found.ends - found.sizes]
        return Candidates(known, limit, cached_, shared, priority.astype(np.int32), prompts)

    def _chunks(self, draft: Draft, candidates: list[Candidate], entrants: Candidates) -> tuple[list[Candidate], Int64]:
        """Who may enter with the tokens that are left, and the first chunks of those that need not load."""
        if not candidates:
            return [], np.zeros(0, np.int64)
        before = entrants.cached[: len(candidates)]
        rest = entrants.known[: len(candidates)] - before
        runs = np.array([not candidate.loads for candidate in candidates])
        if not runs.any():
            return candidates, np.zeros(0, np.int64)
        lengths = self._shared.policy.batch.chunks(rest[runs], before[runs], draft.left, not draft.prefill, draft.empty)
        if lengths.size < int(runs.sum()):
            candidates = candidates[: int(np.flatnonzero(runs)[lengths.size])]
        return candidates, lengths

    def _enter_all(
        self, replica: Replica, draft: Draft, entering: list[Candidate], found: Found, promised: Int64,
        lengths: Int64, now_ns: int, known: Collector,
    ) -> None:  # fmt: skip
        shared, table, limits, sizes = self._shared, replica.table, replica.limits, found.sizes[: len(entering)]
        blocks = found.blocks[: int(sizes.sum())]
        slots = table.enter([c.sequence for c in entering], replica.next_step, draft.microbatch, limits, now_ns)
        if blocks.size:  # shared before any is taken, so that none that was found is taken for another
            replica.pool.share(blocks)
            table.fill(slots, sizes.astype(np.int32), blocks)
            table.planned[slots] = table.capacity[slots]
        run = []
        for slot, candidate in zip(slots.tolist(), entering, strict=True):
            sequence = candidate.sequence
            if sequence.lost:
                shared.counters.recomputed_tokens += max(min(sequence.lost, sequence.known) - sequence.prefix.hits, 0)
                sequence.lost = 0
            if candidate.loads:
                self._load(replica, slot, candidate)
            else:
                draft.enters.append(_enter(slot, sequence, candidate.hit.gpu, limits.block_size))
                run.append(slot)
            sequence.replica = replica.number
            if not sequence.record.started:
                sequence.record.started = True
                known.started.append(sequence.record.request.id)
        replica.promise(slots, promised[: slots.size])
        if shared.routing.chooses:
            shared.routing.entered([c.sequence for c in entering])
        if replica.sharing is not None:
            replica.sharing.entered(slots, [c.sequence for c in entering], [c.hit for c in entering])
        if run:
            self._prompts.run(replica, draft, slots if len(run) == slots.size else np.array(run), lengths)

    @staticmethod
    def _load(replica: Replica, slot: int, candidate: Candidate) -> None:
        """The row gets blocks for its KV on the host, of this replica or a peer, and waits until it is there."""
        table, sequence, saved = replica.table, candidate.sequence, candidate.sequence.saved
        host = saved.blocks if saved is not None else candidate.hit.host
        gpu = replica.pool.take(host.size)
        table.append(slot, gpu)
        replica.transfers.load(slot, host, gpu, saved, replica.peers.source(sequence))
        if saved is not None:
            table.planned[slot] = table.filled[slot] = saved.tokens
        else:
            table.planned[slot] = int(table.held[slot]) * table.block_size
        table.hold(slot, sequence)
        sequence.saved = None


def _enter(slot: int, sequence: Sequence, blocks: Int32, block_size: int) -> Enter:
    """How the worker is told of a sequence all of whose `blocks` hold computed KV."""
    request, prompt = sequence.record.request, sequence.prompt.size
    return Enter(slot, request, sequence.choice, sequence.tokens(), prompt, blocks.size * block_size, blocks)

"""Admission: waiting sequences enter a step.

Called by the planner after the decodes and the chunks. Candidates are looked up, judged and entered together: a few
vector operations for all of them, and Python only per sequence that enters or is set aside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.scheduler.core.kv.prefix_cache import MOST_ASIDE, PrefixCache, PrefixMatch
from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.placement.eligibility import reads
from services.scheduler.core.placement.router import MOST_PASSED, Router
from services.scheduler.core.policy.base import Candidates, Pace
from services.scheduler.core.policy.queues import LOOKED_AT
from services.scheduler.core.preemption import Preempter
from services.scheduler.core.replica import Refusal, Replica
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.table import Int64
from services.scheduler.core.types import EMPTY, Enter, Int32, Priority
from services.scheduler.core.waiting import Takers

Head = tuple[Sequence, Takers | None]  # of a queue, and which
LAST = (1 << 62, True, 0, 0)  # behind every rank
LOOK_PAST = 16  # waiting sequences of a queue at most that are for other replicas
LOOK_AGAIN = 8  # iterations after which a refused head is judged again though nothing changed that it was refused for
NO_HIT = PrefixMatch(EMPTY, EMPTY)


@dataclass(slots=True)
class Candidate:
    """One of the waiting, with what is cached for it."""

    sequence: Sequence
    hit: PrefixMatch

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
    """Fills a step with sequences that enter."""

    def __init__(self, state: SchedulerState, router: Router, preempter: Preempter) -> None:
        self._state = state
        self._router = router
        self._preempter = preempter
        self._picker = Picker(state, router)

    def make_room(self, step: StepBuilder, now_ns: int, out: OutcomeBuilder) -> None:
        """Before anything is planned: running sequences yield to an urgent head that was refused."""
        replica, state = step.replica, self._state
        refusal, prefix_cache = replica.refusal, replica.prefix_cache
        if refusal is None or not state.waiting.urgent or state.closed or not state.policy.relief.takes:
            return
        head = self._picker.first(replica, now_ns)
        if head is None or head.number != refusal.number or head.priority > Priority.HIGH:
            return
        if not self._router.may_enter(replica, head):
            return
        if prefix_cache is not None and prefix_cache.owner_of(head, prefix_cache.match([head])[0].size) >= 0:
            return  # it would be set aside with the slot
        if step.tokens_left > replica.table.count:  # else it could not have a chunk
            self._preempter.for_urgent(step, head, refusal.cost, now_ns, out)
            if replica.beneficiary is not None:
                replica.refusal = None

    def enter_loaded(self, step: StepBuilder) -> None:
        """Those whose KV has come from the host tier take part from this step on."""
        replica = step.replica
        if not replica.transfers.arrived:
            return
        table = replica.table
        for slot in replica.transfers.take_arrived():
            sequence: Sequence = table.sequence[slot]
            table.go(slot, replica.limits)
            enter = _enter(slot, sequence, table.blocks[slot, : table.held[slot]].copy(), table.block_size)
            enter.computed = int(table.planned[slot])
            step.enters.append(enter)

    def urgent_class(self, replica: Replica, now_ns: int) -> int:
        """The class of a waiting sequence of class <= high that may enter: its prompt goes before running ones of lower
        classes; the lowest class where there is none."""
        state = self._state
        if not (state.waiting.urgent and state.policy.relief.takes) or state.closed:
            return Priority.LOW
        head = replica.beneficiary or self._picker.first(replica, now_ns)
        return head.priority if head is not None and head.priority <= Priority.HIGH else Priority.LOW

    def admit(self, step: StepBuilder, now_ns: int, out: OutcomeBuilder) -> None:
        """The waiting enter in order, until the first for whom there is no slot, budget or memory.

        One who was preempted does not enter while a step of his is unanswered, and holds his place meanwhile.
        """
        self._admit(step.replica, step, now_ns, out)
        if step.skipped:
            self._state.waiting.put_back(step.skipped, now_ns)
            step.skipped.clear()
            step.able.clear()

    def _admit(self, replica: Replica, step: StepBuilder, now_ns: int, out: OutcomeBuilder) -> None:
        state, waiting, prefix_cache = self._state, self._state.waiting, replica.prefix_cache
        if prefix_cache is not None:
            prefix_cache.expire(now_ns)
            for sequence in prefix_cache.ready:
                waiting.back(sequence, now_ns)
            prefix_cache.ready.clear()
        beneficiary = replica.beneficiary
        if beneficiary is not None and (
            beneficiary.state is not State.WAITING or not self._router.may_enter(replica, beneficiary)
        ):
            beneficiary = replica.beneficiary = None
        if state.closed and not self._router.hands:
            return
        if not len(waiting) or (step.preempted and beneficiary is None):
            return
        most = state.max_running(replica)
        if replica.table.count >= most and not (waiting.urgent and state.policy.relief.takes):
            return
        if prefix_cache is not None and state.policy.order.prefixes and len(waiting) <= LOOKED_AT:
            prefix_cache.match([sequence for sequence in waiting if not sequence.swapped])
        head = beneficiary or self._picker.next(replica, step, now_ns)
        if head is None:
            return
        running, queued = replica.table.count, len(waiting)
        step.seqs_left += state.max_step_seqs(replica, running + queued) - state.max_step_seqs(replica, running)
        free = most - running
        joins = state.policy.batch.max_new_seqs(replica, queued, most, head.record.arrived_ns, now_ns)
        room = min(free, step.seqs_left, joins)
        if free <= 0 and not head.unanswered:
            self._refuse(replica, head, 0)
        again = replica.refusal is not None
        if room <= 0 or step.tokens_left <= 0 or self._still_refused(replica, head):
            return
        self.budget(step, now_ns)
        if step.tokens_left <= 0:
            return
        if beneficiary is not None:
            room, replica.beneficiary = 1, None
        while (
            room > 0 and step.tokens_left > 0
        ):  # again where some need less than it seemed, or are judged by other rules
            # Where the head was refused before, he alone is asked first: most often he is refused again.
            candidates = self._candidates(replica, step, 1 if again else room, beneficiary, now_ns)
            again = False
            if candidates is None:
                break
            entered = self._judge(replica, step, candidates, now_ns, out) if candidates else 0
            if entered < len(candidates) or beneficiary is not None or step.aside > MOST_ASIDE:
                break
            room -= entered

    def budget(self, step: StepBuilder, now_ns: int, depth: int = 0) -> None:
        """Bound the step by what the policy leaves for prompts beside the decodes: once a step, and again for prompts
        that enter with `depth` tokens cached."""
        if depth or not step.budgeted:
            step.budgeted = True
            replica = step.replica
            budget = replica.tokens.budget(replica, step.decodes, now_ns, self._state.step_tokens, depth)
            step.tokens_left = min(step.tokens_left, budget - step.decodes.size - step.prefill_tokens)

    def _still_refused(self, replica: Replica, head: Sequence) -> bool:
        """Would the head be refused as in the last step? Nobody has left, and blocks have not become more."""
        refusal = replica.refusal
        if refusal is None:
            return False
        same = refusal.number == head.number and refusal.roster == replica.table.roster
        if same and replica.available <= refusal.available and self._state.counters.iteration < refusal.again:
            return True
        replica.refusal = None
        return False

    def _refuse(self, replica: Replica, head: Sequence, cost: int) -> None:
        again = self._state.counters.iteration + LOOK_AGAIN
        replica.refusal = Refusal(head.number, replica.table.roster, replica.available, cost, again)

    def _candidates(
        self, replica: Replica, step: StepBuilder, room: int, beneficiary: Sequence | None, now_ns: int
    ) -> list[Candidate] | None:
        """The first of the waiting, at most `room` and about as many as the budget takes, or the one for whom others
        yielded; they are popped. None if nobody may be asked, an empty list if all were set aside."""
        waiting = self._state.waiting
        taken: list[Sequence] = []
        spent = 0
        while len(taken) < room and spent < step.tokens_left:
            sequence = beneficiary or self._picker.next(replica, step, now_ns)
            if sequence is None or sequence.unanswered or (sequence.pinned and taken):  # pinned: judged alone
                break
            waiting.pop(sequence)
            step.chosen = None
            for other in step.able:
                other.route.passed += 1
            if sequence.swapped and not reads(replica, sequence):
                self._router.evict(sequence)  # to compute it again here is cheaper than to wait there
            taken.append(sequence)
            spent += 0 if sequence.swapped else max(sequence.known - sequence.prefix.hits, 1)
            if sequence.pinned:
                break
        if not taken:
            return None
        if replica.prefix_cache is None:
            return [Candidate(sequence, NO_HIT) for sequence in taken]
        return self._look_up(replica, replica.prefix_cache, step, taken, now_ns)

    def _look_up(
        self, replica: Replica, prefix_cache: PrefixCache, step: StepBuilder, taken: list[Sequence], now_ns: int
    ) -> list[Candidate]:
        """What is cached for each; those whose next blocks somebody computes now are set aside until they are there."""
        hits = prefix_cache.match(taken)
        candidates: list[Candidate] = []
        starting: set[int] = set()  # keys of the first blocks to compute of those who start in this step
        for sequence, hit in zip(taken, hits, strict=True):
            if sequence.swapped:
                candidates.append(Candidate(sequence, NO_HIT))
                continue
            blocks = hit.gpu.size + hit.host.size
            owner = prefix_cache.owner_of(sequence, blocks)
            if owner >= 0:
                step.aside += 1
                until = now_ns + self._prefill_ns(replica, step, owner)
                prefix_cache.wait(sequence, owner, until)
                self._state.waiting.aside(sequence)
                continue
            key = prefix_cache.next_key(sequence, blocks)
            if key in starting:  # looks again when the first has its slot
                step.aside += 1
                prefix_cache.ready.append(sequence)
                self._state.waiting.aside(sequence)
                continue
            if key:
                starting.add(key)
            candidates.append(Candidate(sequence, hit))
        return candidates

    def _prefill_ns(self, replica: Replica, step: StepBuilder, slot: int) -> int:
        """How long the rest of a running prompt is predicted to take, at the pace of this step; 1 s if unknown."""
        table = replica.table
        rest, budget = int(table.known[slot] - table.planned[slot]), max(step.tokens_left, 1)
        steps = -(-rest // budget) + self._state.lookahead + 1
        tokens = step.decodes.size + min(rest, budget)
        return int(steps * replica.model.predict(tokens, step.context, rest * rest / 2 / steps)) or 1_000_000_000

    def _judge(
        self, replica: Replica, step: StepBuilder, candidates: list[Candidate], now_ns: int, out: OutcomeBuilder
    ) -> int:
        """As many of the first candidates enter as memory and budget allow; the others stand where they stood."""
        state = self._state
        found = Found.of(candidates)
        entrants = self._entrants(replica, candidates, found)
        if depth := int(entrants.cached.max()):  # attention reads what is cached too
            self.budget(step, now_ns, depth)
        if candidates[0].sequence.pinned:
            reserved: Int64 = np.array([replica.blocks_for(int(entrants.limit[0]))], np.int64)
        else:
            most = replica.tokens.max_tokens(replica, state.step_tokens)
            reserved = replica.memory.admit(replica, entrants, Pace(state.lookahead, most))
        if not reserved.size and self._preempter.could_preempt_for(replica, candidates[0].sequence):
            reserved = np.array([replica.blocks_for(int(entrants.known[0]))], np.int64)  # lower ones yield later
        costs = reserved - entrants.shared[: reserved.size]
        count = int(np.searchsorted(np.cumsum(costs), replica.available, side="right"))
        if not count:
            cost = int(costs[0]) if costs.size else replica.blocks_for(candidates[0].sequence.known)
            self._refuse(replica, candidates[0].sequence, cost)
        entering, lengths = self._chunks(step, candidates[:count], entrants)
        for candidate in candidates[len(entering) :]:
            state.waiting.push(candidate.sequence, now_ns)
        if entering:
            state.policy.batch.joined(replica, len(entering))
            self._enter_all(replica, step, entering, found, reserved, lengths, now_ns, out)
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

    def _chunks(
        self, step: StepBuilder, candidates: list[Candidate], entrants: Candidates
    ) -> tuple[list[Candidate], Int64]:
        """Who may enter with the tokens that are left, and the first chunks of those that need not load."""
        if not candidates:
            return [], np.zeros(0, np.int64)
        before = entrants.cached[: len(candidates)]
        rest = entrants.known[: len(candidates)] - before
        runs = np.array([not candidate.loads for candidate in candidates])
        if not runs.any():
            return candidates, np.zeros(0, np.int64)
        lengths = self._state.policy.batch.chunks(
            rest[runs], before[runs], step.tokens_left, not step.prefill_tokens, step.empty
        )
        if lengths.size < int(runs.sum()):
            candidates = candidates[: int(np.flatnonzero(runs)[lengths.size])]
        return candidates, lengths

    def _enter_all(
        self, replica: Replica, step: StepBuilder, entering: list[Candidate], found: Found, reserved: Int64,
        lengths: Int64, now_ns: int, out: OutcomeBuilder,
    ) -> None:  # fmt: skip
        state, table, limits, sizes = self._state, replica.table, replica.limits, found.sizes[: len(entering)]
        blocks = found.blocks[: int(sizes.sum())]
        slots = table.enter([c.sequence for c in entering], replica.next_step, step.microbatch, limits, now_ns)
        if blocks.size:  # shared before any is taken, so that none that was found is taken for another
            replica.pool.share(blocks)
            table.fill(slots, sizes.astype(np.int32), blocks)
            table.planned[slots] = table.capacity[slots]
        run = []
        for slot, candidate in zip(slots.tolist(), entering, strict=True):
            sequence = candidate.sequence
            if sequence.lost:
                state.counters.recomputed_tokens += max(min(sequence.lost, sequence.known) - sequence.prefix.hits, 0)
                sequence.lost = 0
            if candidate.loads:
                self._load(replica, slot, candidate)
            else:
                step.enters.append(_enter(slot, sequence, candidate.hit.gpu, limits.block_size))
                run.append(slot)
            sequence.replica = replica.number
            if not sequence.record.started:
                sequence.record.started = True
                out.started.append(sequence.record.request.id)
        replica.reserve(slots, reserved[: slots.size])
        if self._router.chooses:
            self._router.entered([c.sequence for c in entering])
        if replica.prefix_cache is not None:
            replica.prefix_cache.entered(slots, [c.sequence for c in entering], [c.hit for c in entering])
        if run:
            step.schedule(slots if len(run) == slots.size else np.array(run), lengths)

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


class Picker:
    """Looks at the waiting from the head. Those before the chosen stand aside in the step until the pass ends."""

    def __init__(self, state: SchedulerState, router: Router) -> None:
        self._state = state
        self._router = router

    def first(self, replica: Replica, now_ns: int) -> Sequence | None:
        """The head, whoever is to take it; with roles the first of those heads that may enter here."""
        waiting, router = self._state.waiting, self._router
        if not router.roles:
            return waiting.head(now_ns)
        heads = [waiting.head(now_ns, turn) for turn in waiting.turns(replica.number)]
        able = [head for head in heads if head is not None and router.may_enter(replica, head)]
        return min(able, key=lambda head: waiting.rank(head, now_ns), default=None)

    def next(self, replica: Replica, step: StepBuilder, now_ns: int) -> Sequence | None:
        """The first of the waiting that is for this replica: his own among the first LOOK_PAST, else one that has
        waited long enough for another. With roles of several queues, by rank."""
        waiting, router = self._state.waiting, self._router
        if not router.chooses:
            return waiting.head(now_ns)
        heads = [
            (head, turn) for turn in waiting.turns(replica.number) if (head := waiting.head(now_ns, turn)) is not None
        ]
        if not heads:
            return None
        if step.chosen is not None:
            return step.chosen
        changes, until_ns = replica.nobody
        if changes == waiting.changes and now_ns < until_ns:
            return None
        on_dock = bool(router.confined) and router.dock == replica.number
        if on_dock and not router.waiting_on_dock():
            return None
        most = len(waiting) if on_dock else LOOK_PAST
        late = next((sequence for sequence in step.able if sequence.route.passed >= MOST_PASSED), None)
        head = self._best(replica, step, heads, most, now_ns) if late is None else None
        if head is not None and head.unanswered:
            return head
        if late is not None or (head is None and step.able):
            head = late or step.able[0]
            step.able.remove(head)
            step.skipped.remove(head)
            waiting.put_back([head], now_ns)
        elif head is None:
            owing = any(sequence.unanswered for sequence in step.skipped)
            moments = [router.since(replica, sequence, now_ns) for sequence in step.skipped if not owing]
            replica.nobody = (waiting.changes, min(moments, default=now_ns))
        step.chosen = head
        return head

    def _best(self, replica: Replica, step: StepBuilder, heads: list[Head], most: int, now_ns: int) -> Sequence | None:
        """Of what _walk() finds in the queues with these heads."""
        if len(heads) == 1:
            return self._walk(replica, step, heads[0][1], most, now_ns)
        best, best_rank = None, LAST
        for rank, turn in sorted((self._state.waiting.rank(head, now_ns), turn) for head, turn in heads):
            if rank >= best_rank:
                break
            found = self._walk(replica, step, turn, most, now_ns)
            if found is not None and (its := self._state.waiting.rank(found, now_ns)) < best_rank:
                best, best_rank = found, its
        return best

    def _walk(
        self, replica: Replica, step: StepBuilder, turn: Takers | None, most: int, now_ns: int
    ) -> Sequence | None:
        """The first of one queue that it should take before those behind it, or that owes it a step; at most so many
        are passed over."""
        waiting, router = self._state.waiting, self._router
        passed = sum(waiting.turn(other) == turn for other in step.skipped)
        head = waiting.head(now_ns, turn)
        while head is not None and not router.own(replica, head, now_ns):
            if head.unanswered and head.replica == replica.number:
                return head
            if passed >= most:
                return None
            if router.takes(replica, head, now_ns):
                step.able.append(head)
            waiting.pass_over(head)
            step.skipped.append(head)
            passed += 1
            head = waiting.head(now_ns, turn)
        return head


def _enter(slot: int, sequence: Sequence, blocks: Int32, block_size: int) -> Enter:
    """How the worker is told of a sequence all of whose `blocks` hold computed KV."""
    request, prompt = sequence.record.request, sequence.prompt.size
    return Enter(slot, request, sequence.choice, sequence.tokens(), prompt, blocks.size * block_size, blocks)

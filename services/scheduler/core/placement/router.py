"""The price of a replica for a waiting sequence: where is it predicted to be done first?

Decided late, when a replica with room looks at the sequence. For each sequence and replica there is a moment from which
it may enter: at once where the request is predicted to be done first (cached prefix against the work that is there, in
ns of the replica's own step-time model), elsewhere only after as long as it would lose there. So no sequence waits for
a better replica longer than that is worth. One replica takes all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.kv.prefix_index import Keys
from services.scheduler.core.placement.base import MAX_PASSED, Constraint, Verdict
from services.scheduler.core.placement.constraints import Placement, can_load
from services.scheduler.core.placement.peers import can_read
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.types import DECODE, Finish

NEVER = 1 << 62  # ns
CROWD = 0.125  # by how much a full replica counts as slower than its step times say: else the first would fill first
WEIGHT = 3  # what a token to compute counts: others wait for it, too
DECODE_STEPS = 64  # of a sequence's decode that are predicted; when it ends by itself nobody knows
TIMED = 8  # steps of a replica, from which its speed is taken to be its own
GUARD = 1.3  # prefixes count only for a replica with at most so many times the mean work of all,
SLACK = 4  # and so many sequences, which are always let through
UNSEEN = (1e6, 5e4, 0.0, 0.0)  # ns, ns a token, ...: a replica's speed while no step of any was timed
STARTING = 1024  # prefixes that somebody was sent to compute, remembered until they are found in a cache
LEAST_KEYS = 2  # blocks that a prefix must share with one that is being computed


@dataclass(slots=True)
class Load:
    """The work of one replica when it was last looked at."""

    made_of: tuple[int, int, int]
    running: int
    most: int  # sequences that may run
    busy_ns: float  # until what is in flight and the prompts under way have run
    step_ns: float  # a decode step of those that run
    chunk: int  # tokens of prompts that a step has room for
    token_ns: float  # a token of a prompt in such steps
    pair_ns: float  # a (query, key) pair of a prompt
    slot_ns: float  # between two ends of those that run
    row_ns: float  # what one more sequence adds to a decode step
    share_ns: float  # one sequence's part of a full batch's step: the replica's speed


class Router:
    """Knows from when on a waiting sequence may enter which replica."""

    def __init__(self, state: SchedulerState, affinity: float = 1.0) -> None:
        """affinity: what a cached token counts, in tokens computed; 0 chooses by load alone."""
        self.placement = Placement(state)
        self._state = state
        self._affinity = affinity
        self._loads: dict[int, Load] = {}
        self._sent: dict[int, dict[Sequence, int]] = {}  # replica -> sequences that should run there: their tokens
        self._starting: OrderedDict[int, tuple[int, Keys]] = OrderedDict()  # next key -> replica, all keys

    def joined(self, replica: Replica, alive: list[Replica]) -> None:
        """Take in `replica`, one of those that are `alive` now, and give it its constraints.

        It becomes the dock if one is needed and no other replica fits more of the confined sequences.
        """
        placement = self.placement
        replica.constraints = [*placement.constraints, Price(self)]
        for other in alive:
            if other is not replica and can_read(replica.limits, other.limits):
                replica.peers.joined(other)
            if other is not replica and can_read(other.limits, replica.limits):
                other.peers.joined(replica)
        self.changed(alive)
        most = max(map(placement.confined_fitting, alive))
        if placement.dock < 0 and placement.confined_fitting(replica) == most > 0:
            placement.dock = replica.number
            self.changed(alive)

    def confine(self, records: Mapping[str, Record]) -> None:
        """Confine these requests to the dock (Scheduler.confine)."""
        self.placement.confined = records
        self.changed(self.placement.alive)

    def assign_dock(self) -> Replica | None:
        """Return the replica that becomes the dock: of those that fit most the one with least to do.

        None if none is needed, there is one already, or no replica fits any confined sequence.
        """
        placement = self.placement
        if not placement.confined or placement.dock >= 0 or not placement.alive:
            return None
        chosen = max(placement.alive, key=lambda r: (placement.confined_fitting(r), -r.table.count))
        if not placement.confined_fitting(chosen):
            return None
        placement.dock = chosen.number
        self.changed(placement.alive)
        return chosen

    def evict(self, sequence: Sequence) -> None:
        """Give up the KV of a sequence in the host tier of the replica where it ran."""
        for replica in self.placement.alive:
            if sequence.saved_at(replica.number):
                replica.evict(sequence)

    def close(self, closed: bool) -> None:
        """Let no sequence enter but handed-over ones, or all again: the policy is about to change, or has changed."""
        self._state.closed = closed
        self.changed(self.placement.alive)

    def changed(self, alive: list[Replica]) -> None:
        """Take over the set of replicas, or what is known of their host tiers: earlier decisions are void."""
        placement = self.placement
        placement.changed(alive)
        self._loads.clear()
        self._starting.clear()
        self._sent = {replica.number: {} for replica in alive}
        self._state.waiting.changes += 1
        self._state.waiting.split(placement.takers if placement.has_roles else None)

    def examine(self, sequence: Sequence) -> tuple[Finish, str]:
        """Return RUNNING if a sequence can go on with the replicas there are (or none is yet), else its end and why."""
        if not sequence.prompt.size:
            return Finish.ERROR, "the prompt is empty: it must have at least one token"
        reasons = [sequence.misfit(replica.limits) for replica in self.placement.alive]
        if reasons and all(reasons):
            return Finish.ERROR, reasons[0]
        return sequence.verdict(self.placement.longest(sequence) if reasons else sequence.wanted), ""

    @property
    def for_prompts(self) -> list[Replica]:
        """The replicas that compute prompts."""
        placement = self.placement
        return [r for r in placement.alive if r.limits.role != DECODE or r.number not in placement.fed]

    def prefers(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether `replica` should take a sequence before those behind it.

        It should if no other replica is better, enough of them have gone before, or running ones made room for it.
        """
        offers = sequence.route.offers
        if len(self.placement.alive) == 1 or sequence.route.passed >= MAX_PASSED or not offers:
            return True
        if sequence is replica.beneficiary:
            return True
        return offers.get(replica.number, NEVER) <= min(offers.values())

    def since(self, replica: Replica, sequence: Sequence, now_ns: int) -> int:
        """Return the moment from which `replica` may take a sequence; decided at the first call."""
        if sequence.route.generation != self.placement.generation:
            self._decide(sequence, now_ns)
        return sequence.route.offers.get(replica.number, NEVER)

    def entered(self, sequences: list[Sequence]) -> None:
        """Forget what was decided of sequences that have slots now."""
        for sequence in sequences:
            sequence.route.generation = -1
            for sent in self._sent.values():
                sent.pop(sequence, None)

    def _decide(self, sequence: Sequence, now_ns: int) -> None:
        placement = self.placement
        able = [replica for replica in placement.alive if placement.allows(replica, sequence)]
        sequence.route.generation, sequence.route.offers = placement.generation, {}
        if not able:
            sequence.route.generation = -1  # decided again: it owes a step, or no replica may run it
            return
        hits = [self._hit(replica, sequence) for replica in able]
        costs = [self._cost(replica, sequence, hit) for replica, hit in zip(able, hits, strict=True)]
        best = min(range(len(able)), key=costs.__getitem__)
        if len(able) > 1 and self._overloaded(able[best]):
            costs = [self._cost(replica, sequence, 0) for replica in able]
            best = min(range(len(able)), key=costs.__getitem__)
        for replica, cost in zip(able, costs, strict=True):
            sequence.route.offers[replica.number] = now_ns + int(cost - costs[best])
        if sequence.swapped and any(self._saving(replica, sequence) for replica in placement.alive):
            sequence.route.generation = -1  # asked again when others can read its KV, too
        self._send(able[best], sequence, hits[best])

    @staticmethod
    def _saving(replica: Replica, sequence: Sequence) -> bool:
        source = replica.peers.source(sequence)
        return source is not None and not source.transfers.saved(sequence)

    def _send(self, replica: Replica, sequence: Sequence, hit: int) -> None:
        """Notes that it is about to run there, for those who are decided before it does."""
        self._sent[replica.number][sequence] = max(sequence.known - hit, 1)
        done = hit // replica.limits.block_size
        if replica.prefix_cache is not None and sequence.prefix.keys.size - done >= LEAST_KEYS:
            self._starting[int(sequence.prefix.keys[done])] = (replica.number, sequence.prefix.keys)
            if len(self._starting) > STARTING:
                self._starting.popitem(last=False)

    def _hit(self, replica: Replica, sequence: Sequence) -> int:
        """Tokens that need not be computed there: cached ones, and those that somebody there computes or soon will."""
        size = replica.limits.block_size
        if can_load(replica, sequence):
            return sequence.computed
        if replica.prefix_cache is None or not self._affinity:
            return 0
        blocks = replica.prefix_cache.match_length(sequence.prefix.keys)
        if sequence.prefix.keys.size - blocks >= LEAST_KEYS:
            computing = replica.prefix_cache.computing(int(sequence.prefix.keys[blocks]))
            number, starting = self._starting.get(int(sequence.prefix.keys[blocks]), (-1, None))
            theirs = computing if computing is not None else starting if number == replica.number else None
            if theirs is not None:
                both = min(theirs.size, sequence.prefix.keys.size)
                differ = theirs[:both] != sequence.prefix.keys[:both]
                blocks = max(blocks, int(differ.argmax()) if differ.any() else both)
        return min(int(blocks * size * self._affinity), sequence.known - 1)

    def _cost(self, replica: Replica, sequence: Sequence, hit: int) -> float:
        """ns until the request would be done there, or DECODE_STEPS of its output; and what it costs the others."""
        load, sent = self._load(replica), self._sent_to(replica)
        others = [tokens for other, tokens in sent.items() if other is not sequence]
        ahead, rest = len(others), max(sequence.known - hit, 1)
        crowd = load.running + ahead
        steps = min(sequence.record.request.max_tokens - sequence.outputs.size, DECODE_STEPS)
        if replica.number in self.placement.feeding and not sequence.swapped:
            steps = 0  # it is decoded elsewhere
        cost = load.busy_ns + sum(others) * load.token_ns
        cost += max(rest / load.chunk, 1.0) * load.step_ns
        cost += WEIGHT * rest * (load.token_ns + load.pair_ns * (hit + rest / 2))
        cost += steps * load.step_ns * (1 + CROWD * crowd / load.most)
        cost += steps * crowd * load.row_ns  # what those who run there lose
        if can_load(replica, sequence):
            cost += replica.swap_ns_per_block * (sequence.saved.blocks.size if sequence.saved is not None else 0)
        lacking = crowd + 1 - load.most
        if lacking > 0 or replica.available < replica.blocks_for(rest):
            cost += max(lacking, 1) * load.slot_ns
        return cost

    def _sent_to(self, replica: Replica) -> dict[Sequence, int]:
        sent = self._sent[replica.number]
        for gone in [sequence for sequence in sent if sequence.state is not State.WAITING]:
            del sent[gone]
        return sent

    def _overloaded(self, best: Replica) -> bool:
        """Would one more be over what the guard lets through?"""
        work = {
            r.number: (self._load(r).running + len(self._sent_to(r))) * self._load(r).share_ns
            for r in self.placement.alive
        }
        mean = sum(work.values()) / len(work)
        share_ns = self._load(best).share_ns
        return work[best.number] + share_ns > GUARD * mean + SLACK * share_ns

    def _load(self, replica: Replica) -> Load:
        table = replica.table
        made_of = (replica.next_step, table.roster, len(replica.inflight))
        load = self._loads.get(replica.number)
        if load is not None and load.made_of == made_of:
            return load
        high, most = table.high, self._state.max_running(replica)
        known, planned = table.known[:high], table.planned[:high]
        owed = known - planned
        prompts = int(owed.sum(where=owed > 1))
        base, per_token, per_context, per_pair = self._speed(replica)
        running, context = table.count, int(planned.sum())
        step_ns = base + per_token * running + per_context * context
        chunk = max(replica.tokens.max_tokens(replica, self._state.step_tokens) - running, 1)
        token_ns = per_token + step_ns / chunk
        flying = sum(
            base + per_token * step.tokens + per_context * step.decode_context + per_pair * step.prefill_context
            for step in replica.inflight.values()
        )
        left = float(np.maximum(table.limit[:high] - known, 0).sum()) / max(running, 1)  # steps, of one on average
        load = Load(
            made_of, running, most, flying + prompts * token_ns, step_ns, chunk, token_ns, per_pair,
            step_ns * left / max(running, 1), per_token + per_context * context / max(running, 1),
            per_token + base / most,
        )  # fmt: skip
        self._loads[replica.number] = load
        return load

    def _speed(self, replica: Replica) -> tuple[float, float, float, float]:
        """The coefficients of its model; until TIMED of its steps were timed those of the one with most: the first
        steps tell little, and who seems slow by them would not be asked again."""
        known = (
            replica if replica.model.observed >= TIMED else max(self.placement.alive, key=lambda r: r.model.observed)
        )
        return known.model.coefficients if known.model.observed else UNSEEN


class Price(Constraint[StepBuilder]):
    """A sequence waits for a better replica as long as that is worth, unless sequences were preempted for it here."""

    elsewhere = True

    def __init__(self, router: Router) -> None:
        self._router = router

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        replica, router = step.replica, self._router
        if len(router.placement.alive) == 1 or sequence is replica.beneficiary:
            return Verdict.OK
        if sequence.record.request.id in router.placement.confined:
            return Verdict.OK
        return Verdict.OK if step.now_ns >= router.since(replica, sequence, step.now_ns) else Verdict.SKIP

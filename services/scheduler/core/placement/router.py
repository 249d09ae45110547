"""Which replica does a waiting sequence go to? Decided late, when a replica with room looks at it.

All who wait stand in the one order of the Placer. A replica that plans walks it from the head and takes whom it should
take. For each sequence and replica there is a moment from which it may: at once where the request is predicted to be
done first (cached prefix against the work that is there, in ns of the replica's own step-time model), elsewhere only
after as long as it would lose there. So nobody waits for a favourite longer than that is worth. One replica takes all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.kv.prefix_index import Keys
from services.scheduler.core.placement.eligibility import feeds, handed, reads, suits
from services.scheduler.core.placement.peers import can_read
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.types import DECODE, PREFILL, Finish

NEVER = 1 << 62  # ns
CROWD = 0.125  # by how much a full replica counts as slower than its step times say: else the first would fill first
WEIGHT = 3  # what a token to compute counts: others wait for it, too
DECODE_STEPS = 64  # of a sequence's decode that are predicted; when it ends by itself nobody knows
TIMED = 8  # steps of a replica, from which its speed is taken to be its own
GUARD = 1.3  # prefixes count only for a replica with at most so many times the mean work of all,
SLACK = 4  # and so many sequences, which are always let through
UNSEEN = (1e6, 5e4, 0.0, 0.0)  # ns, ns a token, ...: a replica's speed while no step of any was timed
MOST_PASSED = 16  # later ones that go before a sequence while it may be taken and its own replica has no room
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
    """The replicas that are there, who may enter where, and since when."""

    def __init__(self, state: SchedulerState, affinity: float = 1.0) -> None:
        """affinity: what a cached token counts, in tokens computed; 0: by load alone."""
        self._state = state
        self._affinity = affinity
        self.alive: list[Replica] = []
        self.roles = False  # has any of several replicas one?
        self.hands: set[int] = set()  # prefill replicas whose KV another one can load
        self._fed: set[int] = set()  # decode replicas that a prefill replica has work for
        self._generation = 0  # of the set of replicas: older offers are void
        self._loads: dict[int, Load] = {}
        self._sent: dict[int, dict[Sequence, int]] = {}  # replica -> for whom it is the best, and tokens to compute
        self._starting: OrderedDict[int, tuple[int, Keys]] = OrderedDict()  # next key -> replica, all keys
        self.confined: Mapping[str, Record] = {}  # requests that run alone, on `dock`
        self.dock = -1  # -1: none, until one joins that fits or is assigned

    def joined(self, replica: Replica, alive: list[Replica]) -> None:
        """`replica` came, and is the dock if one is needed and no other fits more of those confined; these are there
        now."""
        for other in alive:
            if other is not replica and can_read(replica.limits, other.limits):
                replica.peers.joined(other)
            if other is not replica and can_read(other.limits, replica.limits):
                other.peers.joined(replica)
        self._changed(alive)
        if self.dock < 0 and self._fits(replica) == max(map(self._fits, alive)) > 0:
            self.dock = replica.number
            self._changed(alive)

    def lost(self, alive: list[Replica]) -> None:
        """One went; these are there now."""
        self._changed(alive)

    def confine(self, records: Mapping[str, Record]) -> None:
        """See Core.confine."""
        self.confined = records
        self._changed(self.alive)

    def assign_dock(self) -> Replica | None:
        """The replica that is the dock from now on: of those that fit most the one with least to do. None if none is
        needed, or there is one, or none fits any."""
        if not self.confined or self.dock >= 0 or not self.alive:
            return None
        chosen = max(self.alive, key=lambda replica: (self._fits(replica), -replica.table.count))
        if not self._fits(chosen):
            return None
        self.dock = chosen.number
        self._changed(self.alive)
        return chosen

    def _fits(self, replica: Replica) -> int:
        """How many of the sequences that are confined run there or could."""
        found = 0
        for sequence in [s for record in self.confined.values() for s in record.sequences]:
            runs = sequence.state is State.RUNNING and sequence.replica == replica.number
            found += sequence.state is not State.ENDED and (runs or self._holds(replica, sequence))
        return found

    def evict(self, sequence: Sequence) -> None:
        """It gives up its KV in the host tier of the replica where it ran."""
        for replica in self.alive:
            if sequence.saved_at(replica.number):
                replica.evict(sequence)

    def regroup(self) -> None:
        """It is known of a replica now whether it can read the host tier of another one."""
        self._changed(self.alive)

    def close(self, closed: bool) -> None:
        """From now on nobody enters but who was handed over, as his stream goes on; or, all may."""
        self._state.closed = closed
        self._changed(self.alive)

    def _changed(self, alive: list[Replica]) -> None:
        self.alive = alive
        self.roles = len(alive) > 1 and any(replica.limits.role for replica in alive)
        prefill = [replica for replica in alive if replica.limits.role == PREFILL]
        others = [replica for replica in alive if replica.limits.role != PREFILL]
        self.hands = {owner.number for owner in prefill if any(feeds(owner, other) for other in others)}
        self._fed = {other.number for other in others if any(feeds(owner, other) for owner in prefill)}
        if not any(replica.number == self.dock and self._fits(replica) for replica in alive):
            self.dock = -1  # those who are left wait for one that they fit
        self._generation += 1
        self._loads.clear()
        self._starting.clear()
        self._sent = {replica.number: {} for replica in alive}
        self._state.waiting.changes += 1
        self._state.waiting.split(self._takers if self.roles else None)

    def examine(self, sequence: Sequence) -> tuple[Finish, str]:
        """RUNNING if it can go on with the replicas that are there (or none is yet), else how it ends, and why."""
        if not sequence.prompt.size:
            return Finish.ERROR, "the prompt is empty: it must have at least one token"
        reasons = [sequence.misfit(replica.limits) for replica in self.alive]
        if reasons and all(reasons):
            return Finish.ERROR, reasons[0]
        return sequence.verdict(self._reach(sequence) if reasons else sequence.wanted), ""

    @property
    def chooses(self) -> bool:
        """Is there anything to decide?"""
        return len(self.alive) > 1 or bool(self.confined)

    def may_enter(self, replica: Replica, sequence: Sequence) -> bool:
        """Could this replica ever run the waiting `sequence`, does it owe no step, and can its KV be read if it lies
        with another?"""
        if sequence.unanswered or not self.could(replica, sequence):
            return False
        if self._state.closed and not handed(replica, sequence):
            return False
        if sequence.swapped and not sequence.saved_at(replica.number):
            source = replica.peers.source(sequence)
            if source is None and replica.available < replica.blocks_for(sequence.known):
                return False  # nobody gives up his KV to wait for memory elsewhere
            if source is not None and not source.transfers.saved(sequence):
                return False
        return not self.roles or suits(replica, sequence, self.alive, self.could)

    def _takers(self, sequence: Sequence) -> frozenset[int]:
        """Who may take the swapped `sequence`, now or when its copies are there."""
        able = [r for r in self.alive if self.could(r, sequence) and suits(r, sequence, self.alive, self.could)]
        return frozenset(replica.number for replica in able)

    def could(self, replica: Replica, sequence: Sequence) -> bool:
        """May this replica run `sequence`, whatever its role, and to its end?"""
        if self.confined and (sequence.record.request.id in self.confined) != (replica.number == self.dock):
            return False
        if sequence.saved_at(replica.number):
            return True
        return self._holds(replica, sequence)

    def goes(self, sequence: Sequence, takers: list[Replica]) -> bool:
        """Could one of these go on with a running sequence? Asked in each step: who finds none is known by it, until
        there are other replicas."""
        if sequence.route.stays == self._generation:
            return False
        if any(self.could(taker, sequence) for taker in takers):
            return True
        sequence.route.stays = self._generation
        return False

    def _holds(self, replica: Replica, sequence: Sequence) -> bool:
        """Is there room for all of it, or as much as on any other? It must not end early."""
        limits = replica.limits
        if sequence.misfit(limits):
            return False
        return len(self.alive) == 1 or sequence.longest(limits) >= self._reach(sequence)

    @property
    def for_prompts(self) -> list[Replica]:
        """Those that compute prompts."""
        return [r for r in self.alive if r.limits.role != DECODE or r.number not in self._fed]

    def _reach(self, sequence: Sequence) -> int:
        """Tokens that it can come to where it can come furthest."""
        return max((sequence.longest(r.limits) for r in self.alive if not sequence.misfit(r.limits)), default=0)

    def takes(self, replica: Replica, sequence: Sequence, now_ns: int) -> bool:
        """Should this replica take the waiting `sequence` now?"""
        if not self.may_enter(replica, sequence):
            return False
        if len(self.alive) == 1 or sequence.record.request.id in self.confined:
            return True
        return now_ns >= self.since(replica, sequence, now_ns)

    def own(self, replica: Replica, sequence: Sequence, now_ns: int) -> bool:
        """Should it take this one before all that stand behind it? It is its best, or enough have gone before."""
        if not self.takes(replica, sequence, now_ns):
            return False
        if len(self.alive) == 1 or sequence.route.passed >= MOST_PASSED or not sequence.route.offers:
            return True
        return sequence.route.offers.get(replica.number, NEVER) <= min(sequence.route.offers.values())

    def since(self, replica: Replica, sequence: Sequence, now_ns: int) -> int:
        """The moment from which this replica may take it; decided when it is asked for first."""
        if sequence.route.generation != self._generation:
            self._decide(sequence, now_ns)
        return sequence.route.offers.get(replica.number, NEVER)

    def entered(self, sequences: list[Sequence]) -> None:
        """They have slots now: what was decided of them is done."""
        for sequence in sequences:
            sequence.route.generation, sequence.route.passed = -1, 0
            for sent in self._sent.values():
                sent.pop(sequence, None)

    def waiting_on_dock(self) -> bool:
        """Does anybody wait who may run on the dock alone?"""
        return any(s.state is State.WAITING for record in self.confined.values() for s in record.sequences)

    def _decide(self, sequence: Sequence, now_ns: int) -> None:
        able = [replica for replica in self.alive if self.may_enter(replica, sequence)]
        sequence.route.generation, sequence.route.offers = self._generation, {}
        if not able:
            sequence.route.generation = -1  # asked again: it owes a step, or nobody is allowed to run it
            return
        hits = [self._hit(replica, sequence) for replica in able]
        costs = [self._cost(replica, sequence, hit) for replica, hit in zip(able, hits, strict=True)]
        best = min(range(len(able)), key=costs.__getitem__)
        if len(able) > 1 and self._overloaded(able[best]):
            costs = [self._cost(replica, sequence, 0) for replica in able]
            best = min(range(len(able)), key=costs.__getitem__)
        for replica, cost in zip(able, costs, strict=True):
            sequence.route.offers[replica.number] = now_ns + int(cost - costs[best])
        if sequence.swapped and any(self._saving(replica, sequence) for replica in self.alive):
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
        if reads(replica, sequence):
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
        if replica.number in self.hands and not sequence.swapped:
            steps = 0  # it is decoded elsewhere
        cost = load.busy_ns + sum(others) * load.token_ns
        cost += max(rest / load.chunk, 1.0) * load.step_ns
        cost += WEIGHT * rest * (load.token_ns + load.pair_ns * (hit + rest / 2))
        cost += steps * load.step_ns * (1 + CROWD * crowd / load.most)
        cost += steps * crowd * load.row_ns  # what those who run there lose
        if reads(replica, sequence):
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
        work = {r.number: (self._load(r).running + len(self._sent_to(r))) * self._load(r).share_ns for r in self.alive}
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
        known = replica if replica.model.observed >= TIMED else max(self.alive, key=lambda r: r.model.observed)
        return known.model.coefficients if known.model.observed else UNSEEN

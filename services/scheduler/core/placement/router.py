"""Route waiting sequences: predict on which replica a sequence is done first, and from when another one may take it.

A sequence is routed when a replica has room for it, not when it arrives. The cost of a replica is the predicted time
until the request is done there: cached prefixes save work, and work that is there already adds to it, in ns of the
replica's own step-time model. The cheapest replica may take the sequence at once. Any other replica may take it after a
delay equal to the difference in cost, so a sequence waits for a better replica only as long as that pays. With one
replica every sequence enters there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.kv.prefix_index import Key, Keys
from services.scheduler.core.placement.base import MAX_PASSED, Constraint, Verdict
from services.scheduler.core.placement.constraints import AdapterLoaded, Placement, can_load
from services.scheduler.core.placement.peers import can_go_on, can_read
from services.scheduler.core.policy.step_time import StepTime
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.types import DECODE, Finish

NEVER = 1 << 62  # ns
CROWD = 0.125  # share by which decode steps of a full replica count as slower; without it one replica would fill first
WEIGHT = 3  # factor on the compute time of a prompt, because the running sequences wait for it, too
DECODE_STEPS = 64  # decode steps that a cost includes at most: the end of an output is not known
TIMED = 8  # timed steps from which a replica's own step-time model is used
GUARD = 1.3  # cached prefixes count only while the chosen replica has at most GUARD times the mean work of all replicas
SLACK = 4  # sequences by which its work may exceed that bound
UNSEEN = StepTime()  # of each replica, while none has TIMED steps
UNSEEN.c0, UNSEEN.c1 = 1e6, 5e4
LOAD_NS = 100_000_000  # what loading an adapter costs: some 100 MB are read, hashed and packed
STARTING = 1024  # prefixes remembered that a routed sequence is about to compute; the oldest are forgotten
LEAST_KEYS = 2  # blocks that a prefix must share with one that is being computed, at least


@dataclass(slots=True)
class ReplicaLoad:
    """The work of one replica, valid while `made_of` is unchanged."""

    made_of: tuple[int, int, int]  # next step, roster of the table, steps in flight
    running_sequences: int  # sequences
    max_running: int  # sequences
    busy_ns: float  # time of the steps in flight and of the rest of the running prompts
    step_ns: float  # time of a decode step of the running sequences
    chunk: int  # prompt tokens that a step has room for
    token_ns: float  # time of a prompt token in such steps
    pair_ns: float  # time of a (query, key) pair of a prompt
    slot_ns: float  # mean time between two ends of running sequences
    row_ns: float  # time that one more sequence adds to a decode step
    share_ns: float  # one sequence's part of a full decode step: the replica's speed


class Router:
    """Decides from when on a waiting sequence may enter which replica."""

    def __init__(self, state: SchedulerState, affinity: float = 1.0) -> None:
        """affinity: computed tokens that a cached token is worth; 0 chooses by load alone."""
        self.placement = Placement(state)
        self._state = state
        self._affinity = affinity
        self._loads: dict[int, ReplicaLoad] = {}
        self._routed_tokens: dict[
            int, dict[Sequence, int]
        ] = {}  # replica -> sequences routed there -> tokens to compute
        self._starting_prefixes: OrderedDict[Key, tuple[int, Keys]] = OrderedDict()  # next key -> replica, all keys

    def add_replica(self, replica: Replica, alive: list[Replica]) -> None:
        """Add `replica`, one of the `alive` ones, and give it its constraints.

        It becomes the dock if one is needed, it fits a confined sequence, and no other replica fits more of them.
        """
        placement = self.placement
        replica.constraints = [*placement.constraints, Price(self), AdapterLoaded()]
        for keeper in placement.keepers:
            if can_go_on(replica.limits, keeper.limits):
                replica.peers.add(keeper)
        for other in alive:
            if other is not replica and can_read(replica.limits, other.limits):
                replica.peers.add(other)
            if other is not replica and can_read(other.limits, replica.limits):
                other.peers.add(replica)
        self.update_replicas(alive)
        best = max(map(placement.confined_fitting, alive))
        if placement.dock < 0 and placement.confined_fitting(replica) == best > 0:
            placement.dock = replica.number
            self.update_replicas(alive)

    def begin_keeping(self, replica: Replica) -> None:
        """Let no other replica read the host tier of one with a worker that leaves, until that is settled."""
        replica.is_keeping = True
        self.placement.keepers.append(replica)

    def end_keeping(self, replica: Replica, alive: list[Replica]) -> None:
        """Let the others read what the worker of a lost replica has left behind, until no sequence needs it."""
        replica.is_keeping = False
        for other in alive:
            if not other.peers.knows(replica.number) and can_go_on(other.limits, replica.limits):
                other.peers.add(replica)

    def forget_keepers(self) -> None:
        """Forget host tiers of lost replicas that no sequence needs any more; their readers let them go."""
        for replica in [r for r in self.placement.keepers if not (r.is_keeping or r.host.referenced)]:
            self.placement.keepers.remove(replica)
            for other in self.placement.alive:
                other.peers.remove(replica)

    def confine(self, records: Mapping[str, Record]) -> None:
        """Confine these requests to the dock (Scheduler.confine)."""
        self.placement.quarantined_records = records
        self.update_replicas(self.placement.alive)

    def assign_dock(self) -> Replica | None:
        """Make a replica the dock and return it: of those that fit most confined sequences, the one with fewest rows.

        Return None if no dock is needed, there is one already, or no replica fits any confined sequence.
        """
        placement = self.placement
        if not placement.quarantined_records or placement.dock >= 0 or not placement.alive:
            return None
        chosen = max(placement.alive, key=lambda r: (placement.confined_fitting(r), -r.table.count))
        if not placement.confined_fitting(chosen):
            return None
        placement.dock = chosen.number
        self.update_replicas(placement.alive)
        return chosen

    def evict(self, sequence: Sequence) -> None:
        """Give up the KV of a sequence in the host tier of the replica where it ran."""
        for replica in [*self.placement.alive, *self.placement.keepers]:
            if sequence.saved_at(replica.number):
                replica.evict(sequence)

    def close(self, closed: bool) -> None:
        """Close admission to all but handed-over sequences, or open it again.

        The policy is about to change, or has changed.
        """
        self._state.is_closed = closed
        self.update_replicas(self.placement.alive)

    def update_replicas(self, alive: list[Replica]) -> None:
        """Update the set of replicas and the host tiers that each can read. All earlier decisions become invalid.

        Call it too when a replica refuses an adapter, or may load it again.
        """
        placement = self.placement
        placement.update(alive)
        self._loads.clear()
        self._starting_prefixes.clear()
        self._routed_tokens = {replica.number: {} for replica in alive}
        self._state.waiting.changes += 1
        self._state.waiting.split(placement.takers if placement.has_roles else None)

    def expire(self, now_ns: int) -> None:
        """Let replicas load adapters again that they refused a while ago."""
        if any([replica.adapters.expire(now_ns) for replica in self.placement.alive]):
            self.update_replicas(self.placement.alive)

    def examine(self, sequence: Sequence) -> tuple[Finish, str]:
        """Return how a sequence has to end on the replicas there are, and why; RUNNING if it can go on.

        Without any replica it can go on unless its prompt is empty or it has all its tokens.
        """
        if not sequence.prompt.size:
            return Finish.ERROR, "the prompt is empty: it must have at least one token"
        reasons = [sequence.misfit(replica.limits) for replica in self.placement.alive]
        if reasons and all(reasons):
            return Finish.ERROR, reasons[0]
        finish = sequence.verdict(self.placement.longest(sequence) if reasons else sequence.max_total_tokens)
        if finish is Finish.RUNNING and (refusal := self.placement.refusal(sequence)):
            return Finish.ERROR, refusal
        return finish, ""

    @property
    def for_prompts(self) -> list[Replica]:
        """The replicas that compute prompts."""
        placement = self.placement
        return [r for r in placement.alive if r.limits.role != DECODE or r.number not in placement.decode_targets]

    def prefers(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether `replica` should take a sequence before the sequences behind it in the queue.

        True if no other replica is cheaper, MAX_PASSED later sequences have entered before it, or running sequences
        were preempted for it here.
        """
        offers = sequence.route.offers
        if len(self.placement.alive) == 1 or sequence.route.passes >= MAX_PASSED or not offers:
            return True
        if sequence is replica.beneficiary:
            return True
        return offers.get(replica.number, NEVER) <= min(offers.values())

    def eligible_ns(self, replica: Replica, sequence: Sequence, now_ns: int) -> int:
        """Return the moment (ns) from which `replica` may take a sequence; NEVER if it may not.

        Decided at the first call, and again when the set of replicas has changed.
        """
        if sequence.route.generation != self.placement.generation:
            self._decide(sequence, now_ns)
        return sequence.route.offers.get(replica.number, NEVER)

    def on_enter(self, sequences: list[Sequence]) -> None:
        """Forget the decisions for sequences that have slots now."""
        for sequence in sequences:
            sequence.route.generation = -1
            for sent in self._routed_tokens.values():
                sent.pop(sequence, None)

    def _decide(self, sequence: Sequence, now_ns: int) -> None:
        """Set the offers of a sequence: for each replica that may take it, the moment from which."""
        placement = self.placement
        able = [replica for replica in placement.alive if placement.allows(replica, sequence)]
        sequence.route.generation, sequence.route.offers = placement.generation, {}
        if not able:
            sequence.route.generation = -1  # decide again later: it owes a step, or no replica may run it
            return
        hits = [self._cached_tokens(replica, sequence) for replica in able]
        costs = [self._cost(replica, sequence, hit) for replica, hit in zip(able, hits, strict=True)]
        best = min(range(len(able)), key=costs.__getitem__)
        if len(able) > 1 and self._is_overloaded(able[best]):
            costs = [self._cost(replica, sequence, 0) for replica in able]
            best = min(range(len(able)), key=costs.__getitem__)
        for replica, cost in zip(able, costs, strict=True):
            sequence.route.offers[replica.number] = now_ns + int(cost - costs[best])
        if sequence.is_swapped and any(self._is_saving(replica, sequence) for replica in placement.alive):
            sequence.route.generation = -1  # decide again when its copies are made and peers can read its KV
        self._send(able[best], sequence, hits[best])

    @staticmethod
    def _is_saving(replica: Replica, sequence: Sequence) -> bool:
        source = replica.peers.source(sequence)
        return source is not None and not source.transfers.is_saved(sequence)

    def _send(self, replica: Replica, sequence: Sequence, hit: int) -> None:
        """Record that a sequence is about to run on `replica`, for decisions that are made before it does."""
        self._routed_tokens[replica.number][sequence] = max(sequence.known_tokens - hit, 1)
        done = hit // replica.limits.block_size
        if replica.prefix_cache is not None and len(sequence.prefix.keys) - done >= LEAST_KEYS:
            self._starting_prefixes[sequence.prefix.keys[done]] = (replica.number, sequence.prefix.keys)
            if len(self._starting_prefixes) > STARTING:
                self._starting_prefixes.popitem(last=False)

    def _cached_tokens(self, replica: Replica, sequence: Sequence) -> int:
        """Return the tokens that need not be computed on `replica`.

        These are the cached ones, and those that another sequence computes there or was routed there to compute.
        """
        size = replica.limits.block_size
        if can_load(replica, sequence):
            return sequence.computed_tokens
        if replica.prefix_cache is None or not self._affinity or not sequence.is_scored:
            return 0
        keys = sequence.prefix.keys
        blocks = replica.prefix_cache.match_length(keys)
        if len(keys) - blocks >= LEAST_KEYS:
            computing = replica.prefix_cache.pending_keys(keys[blocks])
            number, starting = self._starting_prefixes.get(keys[blocks], (-1, None))
            theirs = computing if computing is not None else starting if number == replica.number else None
            if theirs is not None:
                blocks = max(blocks, sum(a == b for a, b in zip(theirs, keys, strict=False)))
        return min(int(blocks * size * self._affinity), sequence.known_tokens - 1)

    def _cost(self, replica: Replica, sequence: Sequence, hit: int) -> float:
        """Return the cost of running a sequence on `replica`, in ns.

        It is the time until the request is done, with at most DECODE_STEPS of its output, and the time that the other
        sequences there lose. hit: tokens that need not be computed.
        """
        load, sent = self._load(replica), self._sent_to(replica)
        others = [tokens for other, tokens in sent.items() if other is not sequence]
        ahead, rest = len(others), max(sequence.known_tokens - hit, 1)
        crowd = load.running_sequences + ahead
        steps = min(sequence.record.request.max_tokens - sequence.outputs.size, DECODE_STEPS)
        if replica.number in self.placement.prefill_sources and not sequence.is_swapped:
            steps = 0  # another replica decodes it
        cost = load.busy_ns + sum(others) * load.token_ns
        cost += max(rest / load.chunk, 1.0) * load.step_ns
        cost += WEIGHT * rest * (load.token_ns + load.pair_ns * (hit + rest / 2))
        cost += steps * load.step_ns * (1 + CROWD * crowd / load.max_running)
        cost += steps * crowd * load.row_ns  # the time that the sequences there lose
        if can_load(replica, sequence):
            cost += replica.swap_ns_per_block * (sequence.saved_kv.blocks.size if sequence.saved_kv is not None else 0)
        adapter = sequence.record.request.adapter
        if not replica.adapters.holds(adapter):
            cost += LOAD_NS
        lacking = crowd + 1 - load.max_running
        is_kept_out = replica.adapters.keeps_out(adapter)
        if lacking > 0 or replica.available < replica.blocks_for(rest) or is_kept_out:
            # An adapter's place is free when all sequences that have it have ended, a slot when one has.
            cost += max(lacking, load.running_sequences if is_kept_out else 1, 1) * load.slot_ns
        return cost

    def _sent_to(self, replica: Replica) -> dict[Sequence, int]:
        """Return the waiting sequences that were routed to `replica`, and the tokens that each has to compute."""
        sent = self._routed_tokens[replica.number]
        for gone in [sequence for sequence in sent if sequence.state is not State.WAITING]:
            del sent[gone]
        return sent

    def _is_overloaded(self, best: Replica) -> bool:
        """Return whether one more sequence on `best` would exceed GUARD times the mean work and SLACK sequences."""
        work = {
            r.number: (self._load(r).running_sequences + len(self._sent_to(r))) * self._load(r).share_ns
            for r in self.placement.alive
        }
        mean = sum(work.values()) / len(work)
        share_ns = self._load(best).share_ns
        return work[best.number] + share_ns > GUARD * mean + SLACK * share_ns

    def _load(self, replica: Replica) -> ReplicaLoad:
        table = replica.table
        made_of = (replica.next_step, table.roster, len(replica.inflight))
        load = self._loads.get(replica.number)
        if load is not None and load.made_of == made_of:
            return load
        high, max_running = table.high, self._state.max_running(replica)
        known, planned = table.known_tokens[:high], table.planned_tokens[:high]
        owed = known - planned
        prompts = int(owed.sum(where=owed > 1))
        model = self._model(replica)
        running, context = table.count, int(planned.sum())
        step_ns = model.predict(running, context)
        chunk = max(replica.tokens.max_tokens(replica, self._state.step_tokens) - running, 1)
        token_ns = model.predict(running + chunk, context) / chunk
        flying = sum(
            model.predict(step.tokens, step.decode_context, step.prefill_context) for step in replica.inflight.values()
        )
        left = float(np.maximum(table.limit[:high] - known, 0).sum()) / max(running, 1)  # mean steps left of a sequence
        row_ns = model.predict(running + 1, context + context // max(running, 1)) - step_ns
        load = ReplicaLoad(
            made_of, running, max_running, flying + prompts * token_ns, step_ns, chunk, token_ns, model.c3,
            step_ns * left / max(running, 1), row_ns, model.predict(max_running) / max_running,
        )  # fmt: skip
        self._loads[replica.number] = load
        return load

    def _model(self, replica: Replica) -> StepTime:
        """Return the replica's step-time model.

        Until TIMED of its steps were timed, it counts as fast as the fastest of the others: its first steps say little,
        and a replica that seems slow would get no further sequences to show that it is not.
        """
        if replica.model.observations >= TIMED:
            return replica.model
        timed = (other.model for other in self.placement.alive if other.model.observations >= TIMED)
        return min(timed, key=lambda model: model.predict(1), default=UNSEEN)


class Price(Constraint[StepBuilder]):
    """Let a sequence wait for a cheaper replica as long as that pays, unless sequences were preempted for it here."""

    elsewhere = True

    def __init__(self, router: Router) -> None:
        self._router = router

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        replica, router = step.replica, self._router
        if len(router.placement.alive) == 1 or sequence is replica.beneficiary:
            return Verdict.OK
        if sequence.record.request.id in router.placement.quarantined_records:
            return Verdict.OK
        return Verdict.OK if step.now_ns >= router.eligible_ns(replica, sequence, step.now_ns) else Verdict.SKIP

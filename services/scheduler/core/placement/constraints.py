"""Constraints on the replica that may run a waiting sequence, and the set of replicas that they depend on.

`check` evaluates the constraints of the replica that plans a step. The router and the hand-over also evaluate, for any
replica, the rules that depend only on the sequence and the set of replicas (Placement.allows, Placement.could).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from services.scheduler.core.placement.base import MAX_PASSED, Constraint, Verdict
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.types import DECODE, PREFILL


def check(step: StepBuilder, sequence: Sequence) -> Verdict:
    """Return the first verdict of the constraints of the step's replica that is not OK, or OK.

    A SKIP that concerns this step alone (Constraint.elsewhere) becomes STOP after MAX_PASSED later sequences have
    entered before the skipped one. For an adapter it stops only later sequences that have one: rows of the base keep
    no number from it.
    """
    for constraint in step.replica.constraints:
        verdict = constraint.check(step, sequence)
        if verdict is Verdict.OK:
            continue
        if isinstance(constraint, AdapterLoaded):
            step.missing_adapters.append(sequence.record.request.adapter)
        if verdict is Verdict.SKIP and not constraint.elsewhere:
            if sequence.route.passes >= MAX_PASSED:
                if not isinstance(constraint, AdapterLoaded):
                    return Verdict.STOP
                step.base_only = True
            if sequence not in step.passed_over:
                step.passed_over.append(sequence)
        return verdict
    return Verdict.OK


class Placement:
    """The replicas that are alive, their roles and the quarantine, and the rules that follow from them.

    A prefill replica takes sequences with tokens to compute and runs them until the first token is sampled. A decode
    replica that can read its host tier loads the KV and goes on. No sequence waits for a role: where the counterpart is
    missing, a replica does both.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.alive: list[Replica] = []
        # Those with a worker that is asked to keep KV, and lost ones with kept KV, while a sequence needs it.
        self.keepers: list[Replica] = []
        self.elsewhere: frozenset[str] = frozenset()  # identities of other shards' workers; one empty: not known
        self.generation = 0  # number of the current set of replicas
        self.has_roles = False  # whether there are several replicas and any has a role
        self.prefill_sources: set[int] = set()  # prefill replicas with a host tier that another replica can read
        self.decode_targets: set[int] = set()  # replicas that can load what a prefill replica computed
        self.quarantined_records: Mapping[str, Record] = {}  # requests in quarantine: they run on `dock` only
        self.dock = -1  # replica number; -1 means none, until a replica joins that fits or one is assigned
        self._quarantine = QuarantineRule(self)
        self._fits = Fits(self)
        self._identity = SameIdentity()
        self._adapter = AdapterNotRefused(self)
        self._open, self._readable, self._role = OpenPolicy(), KVReadable(self), Role(self)
        self._state = state
        self.rules: list[Rule] = []  # those that can refuse a sequence now

    @property
    def constraints(self) -> list[Constraint[StepBuilder]]:
        """New constraints of one replica, without its price."""
        return [OwesStep(), Permitted(self)]

    @property
    def chooses(self) -> bool:
        """Whether placement has a choice: several replicas, or a quarantine."""
        return len(self.alive) > 1 or bool(self.quarantined_records)

    def update(self, alive: list[Replica]) -> None:
        """Update the set of replicas, and the roles and host tiers that are known."""
        self.alive = alive
        self.generation += 1
        self.has_roles = len(alive) > 1 and any(replica.limits.role for replica in alive)
        prefill = [replica for replica in alive if replica.limits.role == PREFILL]
        others = [replica for replica in alive if replica.limits.role != PREFILL]
        self.prefill_sources = {owner.number for owner in prefill if any(feeds(owner, other) for other in others)}
        self.decode_targets = {other.number for other in others if any(feeds(owner, other) for owner in prefill)}
        if not any(replica.number == self.dock and self.confined_fitting(replica) for replica in alive):
            self.dock = -1  # the confined sequences that are left wait for a replica that fits them
        several = len(alive) > 1
        refusing = {
            self._quarantine: bool(self.quarantined_records),
            self._fits: several,  # a sequence that does not fit the only one has ended already
            self._identity: True,
            self._adapter: several,
            self._open: self._state.is_closed,
            self._readable: True,
            self._role: self.has_roles,
        }
        self.rules = [rule for rule, can_refuse in refusing.items() if can_refuse]

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may enter `replica`, apart from the step and the price."""
        return not sequence.unanswered_steps and all(rule.allows(replica, sequence) for rule in self.rules)

    def could(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether `replica` may run a sequence to its end, whatever its role."""
        return self._runs(replica, sequence) and self._adapter.allows(replica, sequence)

    def may_load(self, sequence: Sequence) -> bool:
        """Return whether a replica that may run a sequence has not refused its adapter."""
        adapter = sequence.record.request.adapter
        return any(not r.adapters.refuses(adapter) and self._runs(r, sequence) for r in self.alive)

    def refusal(self, sequence: Sequence) -> str:
        """Return why all replicas that may run a sequence refused its adapter; empty if that is not so or not known."""
        adapter = sequence.record.request.adapter
        reasons = [reason for replica in self.alive if (reason := replica.adapters.reason(adapter))]
        return reasons[0] if reasons and not self.may_load(sequence) else ""

    def takers(self, sequence: Sequence) -> frozenset[int]:
        """Return the numbers of the replicas that may load a swapped sequence, now or when its copies are complete."""
        able = [r for r in self.alive if self.could(r, sequence) and self._role.allows(r, sequence)]
        return frozenset(replica.number for replica in able)

    def longest(self, sequence: Sequence) -> int:
        """Return the most tokens that a sequence can reach on any replica; 0 if it fits none."""
        return max((sequence.longest(r.limits) for r in self.alive if not sequence.misfit(r.limits)), default=0)

    def confined_fitting(self, replica: Replica) -> int:
        """Return how many of the confined sequences run on `replica` or fit it."""
        fitting = 0
        for sequence in [s for record in self.quarantined_records.values() for s in record.sequences]:
            runs = sequence.state is State.RUNNING and sequence.replica == replica.number
            fits = self._identity.allows(replica, sequence) and self._fits.holds(replica, sequence)
            fitting += sequence.state is not State.ENDED and (runs or fits)
        return fitting

    def confined_waiting(self) -> bool:
        """Return whether a confined sequence waits."""
        return any(s.state is State.WAITING for record in self.quarantined_records.values() for s in record.sequences)

    def _runs(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether `replica` may run a sequence, whatever its adapter."""
        rules = self._quarantine, self._fits, self._identity
        return all(rule.allows(replica, sequence) for rule in rules)

    def strands(self, sequence: Sequence) -> bool:
        """Return whether all replicas would give a sequence other numbers than those that its tokens are of.

        Without a replica here: whether all workers of other shards would.
        """
        identity = sequence.record.request.identity
        if not identity or not sequence.record.has_tokens:
            return False
        if not self.alive:
            return bool(self.elsewhere) and not {"", identity} & self.elsewhere
        return not any(self._identity.allows(replica, sequence) for replica in self.alive)


class OwesStep(Constraint[StepBuilder]):
    """Let a preempted sequence enter only when all its steps are answered.

    Until then no later sequence enters the replica where it ran.
    """

    elsewhere = True

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        if not sequence.unanswered_steps:
            return Verdict.OK
        return Verdict.STOP if sequence.replica == step.replica.number else Verdict.SKIP


class AdapterLoaded(Constraint[StepBuilder]):
    """Let a sequence enter when the worker has its adapter: at most as many adapters as it holds are in a step.

    Sequences of the base always may; the others wait behind one that was passed over too often (StepBuilder.base_only).
    """

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        adapter = sequence.record.request.adapter
        if not adapter or (step.replica.adapters.usable(adapter) and not step.base_only):
            return Verdict.OK
        return Verdict.SKIP


class Permitted(Constraint[StepBuilder]):
    """Require that the rules of placement let the sequence enter the replica."""

    elsewhere = True

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        for rule in self._placement.rules:
            if not rule.allows(step.replica, sequence):
                return Verdict.SKIP
        return Verdict.OK


class Rule(ABC):
    """A rule that depends on the replica and the sequence alone, not on the step."""

    @abstractmethod
    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether the waiting `sequence` may enter `replica`."""


class QuarantineRule(Rule):
    """Let confined sequences run on the dock only, and no other sequence there."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        placement = self._placement
        if not placement.quarantined_records:
            return True
        return (sequence.record.request.id in placement.quarantined_records) == (replica.number == placement.dock)


class Fits(Rule):
    """Require that the replica can run a sequence as far as any replica can, so that it does not end early."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        return sequence.saved_at(replica.number) or self.holds(replica, sequence)

    def holds(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether a sequence without KV fits `replica`."""
        limits, placement = replica.limits, self._placement
        if sequence.misfit(limits):
            return False
        return len(placement.alive) == 1 or sequence.longest(limits) >= placement.longest(sequence)


class SameIdentity(Rule):
    """Let a request with tokens go on only where they would have been the same; one without any may run anywhere."""

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        before, here = sequence.record.request.identity, replica.limits.identity
        return not before or not here or before == here or not sequence.record.has_tokens


class AdapterNotRefused(Rule):
    """Keep a sequence from a replica that could not load its adapter, as long as another one may load it.

    When all have refused it, the sequence enters any of them and fails there: the worker tells why.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        return not replica.adapters.refuses(sequence.record.request.adapter) or not self._placement.may_load(sequence)


class OpenPolicy(Rule):
    """While the policy is about to change, let only handed-over sequences enter: their streams have begun."""

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        source = replica.peers.source(sequence)
        handed_over = source is not None and source.limits.role == PREFILL and replica.limits.role != PREFILL
        return handed_over and has_all_kv(sequence)


class KVReadable(Rule):
    """Require that this replica can read the KV of a swapped sequence and that all its copies are complete.

    KV in the host tier of this replica can always be read. A replica that cannot read the KV takes the sequence only if
    it has memory to compute it again.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        saved = sequence.saved_kv
        if saved is None or saved.replica == replica.number:
            return True
        source = replica.peers.source(sequence)
        if source is None:
            keeper = next((other for other in self._placement.keepers if other.number == saved.replica), None)
            if keeper is not None and (keeper.is_keeping or replica.peers.expects(keeper.number)):
                return False  # in a moment it can be loaded
            return replica.available >= replica.blocks_for(sequence.known_tokens)
        return source.transfers.is_saved(sequence)


class Role(Rule):
    """Let a prefill replica compute prompts, and a decode replica load KV that a prefill replica has computed.

    A replica does the other one's work where no such replica can take the sequence.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        placement, role = self._placement, replica.limits.role
        if role == PREFILL:
            return not has_all_kv(sequence) or not any(
                other.limits.role != PREFILL and can_load(other, sequence) and placement.could(other, sequence)
                for other in placement.alive
            )
        if role != DECODE:
            return True
        if can_load(replica, sequence) and (has_all_kv(sequence) or sequence.saved_at(replica.number)):
            return True
        return not any(
            (feeds(other, replica) or sequence.saved_at(other.number)) and placement.could(other, sequence)
            for other in placement.alive
        )


def can_load(replica: Replica, sequence: Sequence) -> bool:
    """Return whether KV of a waiting sequence is in a host tier that `replica` can read, or is on its way there."""
    return sequence.saved_at(replica.number) or replica.peers.source(sequence) is not None


def has_all_kv(sequence: Sequence) -> bool:
    """Return whether a swapped sequence lacks only the KV of its last token, and of drafts that turned out right since.

    Otherwise it was swapped out in the middle of its prompt, and a prefill replica goes on with it.
    """
    return sequence.saved_kv is not None and sequence.saved_kv.is_all


def feeds(prefill: Replica, replica: Replica) -> bool:
    """Return whether `prefill` is a prefill replica and `replica` can read its host tier, or may yet map it."""
    return prefill.limits.role == PREFILL and replica.peers.may_read(prefill)

"""Which replica may run a waiting sequence, rule by rule, and the set of replicas that the rules are about.

`check` asks the list of the step's replica. The rules that follow from the sequence and the set of replicas alone are
asked by the router and the hand-over as well, for any replica (Placement.allows, Placement.could).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from services.scheduler.core.placement.base import MAX_PASSED, Constraint, Verdict
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.step import StepBuilder
from services.scheduler.core.types import DECODE, PREFILL


def check(step: StepBuilder, sequence: Sequence) -> Verdict:
    """Return the first verdict of the constraints of the step's replica that is not OK, or OK.

    STOP instead of SKIP for a sequence in front of which MAX_PASSED have entered that it could have been one of.
    """
    for constraint in step.replica.constraints:
        verdict = constraint.check(step, sequence)
        if verdict is Verdict.OK:
            continue
        if verdict is Verdict.SKIP and not constraint.elsewhere:
            if sequence.route.passed >= MAX_PASSED:
                return Verdict.STOP
            if sequence not in step.passed_over:
                step.passed_over.append(sequence)
        return verdict
    return Verdict.OK


class Placement:
    """The replicas that are there, their roles and the quarantine, and the rules that follow from them.

    A prefill replica takes what has to be computed and runs it until its first token is sampled; a decode replica that
    can read its host tier loads the KV and goes on. No role is ever waited for: where the counterpart is missing a
    replica does both.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.alive: list[Replica] = []
        self.generation = 0  # of the set of replicas
        self.has_roles = False  # several replicas, and any has a role
        self.feeding: set[int] = set()  # prefill replicas whose KV another replica can load
        self.fed: set[int] = set()  # replicas that can load what a prefill replica computed
        self.confined: Mapping[str, Record] = {}  # requests in quarantine: they run on `dock` and nowhere else
        self.dock = -1  # replica; -1: none, until one joins that fits or is assigned
        self._quarantine = Quarantine(self)
        self._fits = Fits(self)
        self._role = Role(self)
        self._rules: tuple[Rule, ...] = (self._quarantine, self._fits, OpenPolicy(state), KVReadable(), self._role)

    @property
    def constraints(self) -> list[Constraint[StepBuilder]]:
        """The constraints that every replica begins with."""
        return [OwesStep(), *self._rules]

    @property
    def chooses(self) -> bool:
        """Whether there is anything to decide: several replicas, or a quarantine."""
        return len(self.alive) > 1 or bool(self.confined)

    def changed(self, alive: list[Replica]) -> None:
        """Take over the set of replicas, or what is known of their roles and host tiers."""
        self.alive = alive
        self.generation += 1
        self.has_roles = len(alive) > 1 and any(replica.limits.role for replica in alive)
        prefill = [replica for replica in alive if replica.limits.role == PREFILL]
        others = [replica for replica in alive if replica.limits.role != PREFILL]
        self.feeding = {owner.number for owner in prefill if any(feeds(owner, other) for other in others)}
        self.fed = {other.number for other in others if any(feeds(owner, other) for owner in prefill)}
        if not any(replica.number == self.dock and self.confined_fitting(replica) for replica in alive):
            self.dock = -1  # the confined that are left wait for a replica that they fit

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may enter `replica`, whatever the step and the price."""
        return not sequence.unanswered and all(rule.allows(replica, sequence) for rule in self._rules)

    def could(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether `replica` may run a sequence to its end, whatever its role."""
        return self._quarantine.allows(replica, sequence) and self._fits.allows(replica, sequence)

    def takers(self, sequence: Sequence) -> frozenset[int]:
        """Return the replicas that may load a swapped sequence, now or when its copies are there."""
        able = [r for r in self.alive if self.could(r, sequence) and self._role.allows(r, sequence)]
        return frozenset(replica.number for replica in able)

    def longest(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence can come to on the replica where it comes furthest; 0 if it fits none."""
        return max((sequence.longest(r.limits) for r in self.alive if not sequence.misfit(r.limits)), default=0)

    def confined_fitting(self, replica: Replica) -> int:
        """Return how many of the confined sequences run on `replica` or could."""
        found = 0
        for sequence in [s for record in self.confined.values() for s in record.sequences]:
            runs = sequence.state is State.RUNNING and sequence.replica == replica.number
            found += sequence.state is not State.ENDED and (runs or self._fits.holds(replica, sequence))
        return found

    def confined_waiting(self) -> bool:
        """Return whether a confined sequence waits."""
        return any(s.state is State.WAITING for record in self.confined.values() for s in record.sequences)


class OwesStep(Constraint[StepBuilder]):
    """A preempted sequence enters only when all its steps are answered, and holds its place on that replica."""

    elsewhere = True

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        if not sequence.unanswered:
            return Verdict.OK
        return Verdict.STOP if sequence.replica == step.replica.number else Verdict.SKIP


class Rule(Constraint[StepBuilder]):
    """A constraint that follows from the replica and the sequence alone."""

    elsewhere = True

    @abstractmethod
    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether the waiting `sequence` may enter `replica`."""

    def check(self, step: StepBuilder, sequence: Sequence) -> Verdict:
        return Verdict.OK if self.allows(step.replica, sequence) else Verdict.SKIP


class Quarantine(Rule):
    """Confined sequences run on the dock and nowhere else, and no other sequence runs there."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        placement = self._placement
        if not placement.confined:
            return True
        return (sequence.record.request.id in placement.confined) == (replica.number == placement.dock)


class Fits(Rule):
    """The replica has room for all of the sequence, or as much as any other: it must not end early."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        if len(self._placement.alive) == 1:  # what fits no replica has ended
            return True
        return sequence.saved_at(replica.number) or self.holds(replica, sequence)

    def holds(self, replica: Replica, sequence: Sequence) -> bool:
        """Return whether a sequence without KV fits."""
        limits, placement = replica.limits, self._placement
        if sequence.misfit(limits):
            return False
        return len(placement.alive) == 1 or sequence.longest(limits) >= placement.longest(sequence)


class OpenPolicy(Rule):
    """While the policy is about to change only handed-over sequences enter, as their streams go on."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        if not self._state.closed:
            return True
        source = replica.peers.source(sequence)
        handed_over = source is not None and source.limits.role == PREFILL and replica.limits.role != PREFILL
        return handed_over and has_all_kv(sequence)


class KVReadable(Rule):
    """The KV of a swapped sequence lies here, or where this replica can read it, and all copies are made.

    KV that cannot be read is given up only where there is memory to compute it again.
    """

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        saved = sequence.saved
        if saved is None or saved.replica == replica.number:
            return True
        source = replica.peers.source(sequence)
        if source is None:
            return replica.available >= replica.blocks_for(sequence.known)
        return source.transfers.saved(sequence)


class Role(Rule):
    """A prefill replica computes prompts, a decode replica loads what one has computed."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def allows(self, replica: Replica, sequence: Sequence) -> bool:
        placement, role = self._placement, replica.limits.role
        if not placement.has_roles:
            return True
        if role == PREFILL:
            return not (sequence.swapped and has_all_kv(sequence)) or not any(
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
    """Return whether the KV of a waiting sequence lies in a host tier that `replica` can read, or will."""
    return sequence.saved_at(replica.number) or replica.peers.source(sequence) is not None


def has_all_kv(sequence: Sequence) -> bool:
    """Return whether only the KV of the last known token of a waiting sequence is missing.

    Else it was swapped out in the middle of its prompt, which prefill replicas go on with.
    """
    return sequence.computed >= sequence.known - 1


def feeds(prefill: Replica, replica: Replica) -> bool:
    """Return whether the first one is a prefill replica whose KV the second one can read, or may yet."""
    return prefill.limits.role == PREFILL and replica.peers.hopes(prefill)

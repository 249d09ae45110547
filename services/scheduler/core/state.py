"""What all passes of the planner share: the policy, the waiting sequences, the settings and the counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.policy.base import Policy
from services.scheduler.core.replica import Replica
from services.scheduler.core.waiting import WaitingQueue

MAX_AHEAD = 4
"""Steps that a replica may have in flight where they are short."""


@dataclass(slots=True)
class Counters:
    """What happened since the start, for the stats."""

    iteration: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    handovers: int = 0  # sequences that a prefill replica has swapped out for another replica to decode
    handed_blocks: int = 0  # blocks of these sequences
    not_handed: int = 0  # sequences that stayed on a prefill replica because its host tier had no room


@dataclass(slots=True)
class SchedulerState:
    """Shared by planner, results and router of one scheduler."""

    policy: Policy
    waiting: WaitingQueue
    max_seqs: int
    lookahead: int
    ahead_ns: int
    step_tokens: int
    counters: Counters = field(default_factory=Counters)
    is_closed: bool = False  # the policy is about to change: only handed-over sequences enter (Router.close)

    def max_running(self, replica: Replica) -> int:
        """Return how many sequences may run at once on a replica."""
        slots = replica.limits.slots
        return self.policy.batch.max_running(min(self.max_seqs or slots, slots))

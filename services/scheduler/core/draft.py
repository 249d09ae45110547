"""A step while it is planned, and what all passes share: the policy, the waiting, the settings, the counters.

Used by passes.py (the frame), decode.py, admit.py and guard.py. A draft is discarded only when it holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.outcome import Collector
from services.scheduler.core.placer import Placer
from services.scheduler.core.policy.base import Mode, Policy
from services.scheduler.core.replica import KV, Replica
from services.scheduler.core.routing import Routing
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import Bool
from services.scheduler.core.types import DECODE, EMPTY, NO_ROWS, Enter, Int32, Rows


@dataclass(slots=True)
class Draft:
    """The decodes are whole columns; the other chunks come in groups of columns."""

    microbatch: int
    seats: int  # sequences that may still join
    left: int  # tokens that may still be spent
    slots: Rows = field(default_factory=lambda: NO_ROWS)
    starts: Int32 = field(default_factory=lambda: EMPTY)
    context: int = 0  # sum of starts
    append_slots: list[Rows] = field(default_factory=list)
    append_blocks: list[Int32] = field(default_factory=list)
    chunk_slots: list[Rows] = field(default_factory=list)
    chunk_starts: list[Int32] = field(default_factory=list)
    chunk_lengths: list[Int32] = field(default_factory=list)
    chunk_samples: list[Bool] = field(default_factory=list)
    enters: list[Enter] = field(default_factory=list)
    prefill: int = 0
    prefill_context: float = 0.0
    prompts: bool = False  # some that run have more than one token to go
    budgeted: bool = False  # `left` is what the policy leaves for prompts
    aside: int = 0  # who were set aside for a prefix that others compute
    preempted: int = 0
    chosen: Sequence | None = None  # of the waiting, for this replica, and not popped yet
    free: list[Sequence] = field(default_factory=list)  # of `passed`, who might be taken here, too
    passed: list[Sequence] = field(default_factory=list)  # the waiting before the first that this replica should take

    @property
    def empty(self) -> bool:
        """Nobody has anything to run in it yet."""
        return not self.slots.size and not self.chunk_slots


@dataclass(slots=True)
class Counters:
    """What happened since the start, for the stats."""

    iteration: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    handed: int = 0  # sequences that a prefill replica has swapped out for others to decode
    handed_blocks: int = 0  # theirs
    not_handed: int = 0  # sequences that went on where they were, as its host tier had no room


@dataclass(slots=True)
class Shared:
    """What every pass has to know."""

    policy: Policy
    placer: Placer
    max_seqs: int
    lookahead: int
    step_tokens: int
    counters: Counters = field(default_factory=Counters)
    closed: bool = False  # the policy is about to change: nobody enters but who was handed over (Routing.close)
    affinity: float = 1.0
    routing: Routing = field(init=False)

    def __post_init__(self) -> None:
        self.routing = Routing(self, self.affinity)

    def most(self, replica: Replica) -> int:
        """Sequences that may run at once."""
        slots = replica.limits.slots
        return self.policy.batch.max_running(min(self.max_seqs or slots, slots))

    def seats(self, replica: Replica, sequences: int) -> int:
        """Sequences in one step when `sequences` run."""
        return self.policy.batch.max_step_seqs(sequences, self.most(replica), replica.microbatches)

    def wants(self, replica: Replica, microbatch: int) -> Bool:
        """[high] bool: who has something to run and may be in a step of this microbatch.

        A sequence is of the microbatch of its last step until that is answered; then any may take it, so the
        microbatches balance. Nobody is planned past his limit: known counts the placeholders.
        """
        table, high = replica.table, replica.table.high
        wants: Bool = table.known[:high] < table.limit[:high]
        if replica.microbatches > 1:
            wants &= (table.unanswered[:high] == 0) | (table.microbatch[:high] == microbatch)
        return wants

    def preempt(
        self, replica: Replica, draft: Draft, slot: int, now_ns: int, known: Collector, how: Mode | None = None
    ) -> None:
        """Slot and blocks are given up, arrival and tokens are kept; the KV goes to the host tier or is lost."""
        if how is None:
            decodes = self.routing.roles and replica.limits.role == DECODE  # what loses its KV goes back to a prefill
            how = Mode.SWAP if decodes else self.policy.relief.mode(replica, slot)
        self.counters.preemptions += 1
        draft.preempted += 1
        fresh = len(draft.enters)
        sequence = replica.release(slot, KV.SWAP if how is Mode.SWAP else KV.DROP)
        if fresh:
            draft.enters = [enter for enter in draft.enters if enter.slot != slot]
            if len(draft.enters) < fresh:  # the worker was not told of it yet
                replica.freed.remove(slot)
        sequence.preemptions += 1
        self.placer.requeue(sequence, now_ns, known)

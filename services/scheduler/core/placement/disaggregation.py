"""Hand-over of sequences from prefill replicas to replicas that decode."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.placement.constraints import Placement
from services.scheduler.core.placement.peers import obstacle
from services.scheduler.core.replica import KV, Replica
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.table import DECODING
from services.scheduler.core.types import DECODE, PREFILL
from services.scheduler.core.waiting import WaitingQueue


class KVHandover:
    """Plans which sequences leave a prefill replica."""

    def __init__(self, state: SchedulerState, placement: Placement) -> None:
        self._state = state
        self._placement = placement

    def plan(self, replica: Replica, now_ns: int, out: OutcomeBuilder) -> None:
        """Release rows that have sampled and go on on another replica; the step carries their swap-outs.

        A row stays, and decodes here until the next step, if the host tier has no room for it or other sequences wait
        for its prefix.
        """
        readers = [r for r in self._placement.alive if replica is r.peers.readable.get(replica.number)]
        takers = [reader for reader in readers if reader.limits.role != PREFILL]
        if not takers or self._state.is_closed:  # closed: no sequence may enter another replica
            return
        table, high, counters, host = replica.table, replica.table.high, self._state.counters, replica.host
        ready = (table.known_tokens[:high] > table.entry_tokens[:high]) & (
            table.known_tokens[:high] < table.limit[:high]
        )
        ready &= table.phase[:high] == DECODING
        first = table.known_tokens[:high] == table.entry_tokens[:high] + 1
        ready &= (
            table.held_blocks[:high] <= host.free + host.cached
        ) | first  # many rows decode here where the tier is full
        slots = np.flatnonzero(ready)
        for slot in slots[np.argsort(table.arrival_ns[slots], kind="stable")].tolist():
            sequence: Sequence = table.sequence[slot]
            if not replica.can_swap(slot):
                counters.not_handed += int(first[slot] and self._goes_on(sequence, takers))
                continue
            if replica.prefix_cache is not None and replica.prefix_cache.is_awaited(slot):
                continue
            if not self._goes_on(sequence, takers):
                continue
            counters.handovers += 1
            counters.handed_blocks += int(table.held_blocks[slot])
            replica.release(slot, KV.HAND_OVER)
            replica.handovers.append(sequence)
            self._state.waiting.requeue(sequence, now_ns, out, aside=True)

    def _goes_on(self, sequence: Sequence, takers: list[Replica]) -> bool:
        """Return whether one of `takers` could go on with a running sequence.

        Called in each step, so a False is kept with the sequence until the set of replicas changes.
        """
        placement = self._placement
        if sequence.route.stays == placement.generation:
            return False
        if any(placement.could(taker, sequence) for taker in takers):
            return True
        sequence.route.stays = placement.generation
        return False


def requeue_handed_over(replica: Replica, waiting: WaitingQueue, now_ns: int) -> None:
    """Put handed-over sequences into the queue when their steps are answered and their copies are complete."""
    owing = []
    for sequence in replica.handovers:
        if sequence.state is State.WAITING and (sequence.unanswered_steps or not replica.transfers.is_saved(sequence)):
            owing.append(sequence)
        else:
            waiting.put_back(sequence, now_ns)
    replica.handovers = owing


def unreadable(replicas: Collection[Replica]) -> list[tuple[Replica, Replica, str]]:
    """Return (decode replica, prefill replica, reason) where the first cannot read the host tier of the second."""
    obstacles = []
    for reader in (r for r in replicas if r.limits.role == DECODE):
        for owner in (r for r in replicas if r.limits.role == PREFILL):
            if not reader.peers.may_read(owner):
                why = obstacle(reader.limits, owner.limits) or "it could not map the other one's host tier"
                obstacles.append((reader, owner, why))
    return obstacles

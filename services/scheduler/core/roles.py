"""Prefill and decode replicas apart: who takes whom, and the hand-over.

A replica with the role prefill takes what has to be computed and runs it until its first token is sampled; then it
swaps the sequence out, and one with the role decode, which can read its host tier (peers.py), loads it and goes on.
No role is ever waited for: where a counterpart is missing a replica does both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.outcome import Collector
from services.scheduler.core.placer import Placer
from services.scheduler.core.replica import KV, Replica
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.table import DECODING
from services.scheduler.core.types import DECODE, PREFILL

if TYPE_CHECKING:
    from services.scheduler.core.draft import Shared

Could = Callable[[Replica, Sequence], bool]


def reads(replica: Replica, sequence: Sequence) -> bool:
    """Is the KV of the waiting `sequence` in a host tier that this replica can read, or will it be?"""
    return sequence.saved_at(replica.number) or replica.peers.source(sequence) is not None


def handed(replica: Replica, sequence: Sequence) -> bool:
    """Has a prefill replica swapped it out for one such as this, which can read it?"""
    source = replica.peers.source(sequence)
    if source is None or source.limits.role != PREFILL or replica.limits.role == PREFILL:
        return False
    return prefilled(sequence)


def prefilled(sequence: Sequence) -> bool:
    """Is the KV of all that a waiting sequence knows there, but for its last token? Else it was swapped out in the
    middle of its prompt, which prefill replicas go on with."""
    return sequence.computed >= sequence.known - 1


def feeds(prefill: Replica, replica: Replica) -> bool:
    """Is it a prefill replica whose KV this one can read? A decode replica that none feeds does both."""
    return prefill.limits.role == PREFILL and replica.peers.hopes(prefill)


def suits(replica: Replica, sequence: Sequence, alive: Iterable[Replica], could: Could) -> bool:
    """May this replica take the waiting `sequence` by its role? could: might a replica run it at all?"""
    role = replica.limits.role
    if role == PREFILL:
        return not (sequence.swapped and prefilled(sequence)) or not any(
            other.limits.role != PREFILL and reads(other, sequence) and could(other, sequence) for other in alive
        )
    if role != DECODE:
        return True
    if reads(replica, sequence) and (prefilled(sequence) or sequence.saved_at(replica.number)):
        return True
    return not any(
        (feeds(other, replica) or sequence.saved_at(other.number)) and could(other, sequence) for other in alive
    )


class HandOver:
    """Plans what leaves a prefill replica."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def plan(self, replica: Replica, now_ns: int, known: Collector) -> None:
        """Those who have sampled and go on leave for a replica that decodes; its step has their swap-outs. Who finds no
        room in the host tier, or whose prefix others wait for, decodes here until the next step."""
        takers = [r for r in self._shared.routing.alive if replica is r.peers.readable.get(replica.number)]
        takers = [taker for taker in takers if taker.limits.role != PREFILL]
        if not takers or self._shared.closed:  # closed: nobody may enter elsewhere
            return
        table, high, counters = replica.table, replica.table.high, self._shared.counters
        host, routing = replica.host, self._shared.routing
        ready = (table.known[:high] > table.entered[:high]) & (table.known[:high] < table.limit[:high])
        ready &= table.phase[:high] == DECODING
        first = table.known[:high] == table.entered[:high] + 1
        ready &= (table.held[:high] <= host.free + host.cached) | first  # many decode here where the tier is full
        slots = np.flatnonzero(ready)
        for slot in slots[np.argsort(table.arrived[slots], kind="stable")].tolist():
            sequence: Sequence = table.sequence[slot]
            if not replica.can_swap(slot):
                counters.not_handed += int(first[slot] and routing.goes(sequence, takers))
                continue
            if replica.sharing is not None and replica.sharing.awaited(slot):
                continue
            if not routing.goes(sequence, takers):
                continue
            counters.handed += 1
            counters.handed_blocks += int(table.held[slot])
            replica.release(slot, KV.HAND_OVER)
            replica.handed.append(sequence)
            self._shared.placer.requeue(sequence, now_ns, known, aside=True)


def release(replica: Replica, placer: Placer, now_ns: int) -> None:
    """Those handed over whose last token and copies are there stand in the queue."""
    owing = []
    for sequence in replica.handed:
        if sequence.state is State.WAITING and (sequence.unanswered or not replica.transfers.saved(sequence)):
            owing.append(sequence)
        else:
            placer.back(sequence, now_ns)
    replica.handed = owing

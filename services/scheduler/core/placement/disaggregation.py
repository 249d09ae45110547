"""Hand-over of sequences from prefill replicas to those that decode."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.placement.router import Router
from services.scheduler.core.replica import KV, Replica
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.table import DECODING
from services.scheduler.core.types import PREFILL
from services.scheduler.core.waiting import WaitingQueue


class HandOver:
    """Plans what leaves a prefill replica."""

    def __init__(self, state: SchedulerState, router: Router) -> None:
        self._state = state
        self._router = router

    def plan(self, replica: Replica, now_ns: int, out: OutcomeBuilder) -> None:
        """Those who have sampled and go on leave for a replica that decodes; its step has their swap-outs. Who finds no
        room in the host tier, or whose prefix others wait for, decodes here until the next step."""
        takers = [r for r in self._router.alive if replica is r.peers.readable.get(replica.number)]
        takers = [taker for taker in takers if taker.limits.role != PREFILL]
        if not takers or self._state.closed:  # closed: nobody may enter elsewhere
            return
        table, high, counters = replica.table, replica.table.high, self._state.counters
        host, router = replica.host, self._router
        ready = (table.known[:high] > table.entered[:high]) & (table.known[:high] < table.limit[:high])
        ready &= table.phase[:high] == DECODING
        first = table.known[:high] == table.entered[:high] + 1
        ready &= (table.held[:high] <= host.free + host.cached) | first  # many decode here where the tier is full
        slots = np.flatnonzero(ready)
        for slot in slots[np.argsort(table.arrived[slots], kind="stable")].tolist():
            sequence: Sequence = table.sequence[slot]
            if not replica.can_swap(slot):
                counters.not_handed += int(first[slot] and router.goes(sequence, takers))
                continue
            if replica.prefix_cache is not None and replica.prefix_cache.awaited(slot):
                continue
            if not router.goes(sequence, takers):
                continue
            counters.handed += 1
            counters.handed_blocks += int(table.held[slot])
            replica.release(slot, KV.HAND_OVER)
            replica.handed.append(sequence)
            self._state.waiting.requeue(sequence, now_ns, out, aside=True)


def release(replica: Replica, waiting: WaitingQueue, now_ns: int) -> None:
    """Those handed over whose last token and copies are there stand in the queue."""
    owing = []
    for sequence in replica.handed:
        if sequence.state is State.WAITING and (sequence.unanswered or not replica.transfers.saved(sequence)):
            owing.append(sequence)
        else:
            waiting.back(sequence, now_ns)
    replica.handed = owing

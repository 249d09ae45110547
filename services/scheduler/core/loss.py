"""A worker is gone: what its replica held waits again, with the tokens that were applied.

Called by Core.lose. Swapped KV goes with the worker, steps in flight are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.scheduler.core.outcome import Collector
from services.scheduler.core.placer import Placer
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, State
from services.scheduler.core.types import EMPTY


def lose(lost: Replica, records: Iterable[Record], placer: Placer, known: Collector, now_ns: int) -> None:
    """Empties `lost` into the waiting. records: of all requests."""
    lost.alive = False
    lost.inflight.clear()
    lost.inflight_of.clear()
    for departed in [gone for each in lost.departed.values() for gone in each]:
        departed.sequence.unanswered = 0
    lost.departed.clear()
    placer.changes += 1  # those who owed a step may enter now
    for slot in np.flatnonzero(lost.table.active).tolist():
        lost_tokens = int(lost.table.planned[slot])
        sequence = lost.leave(slot)
        sequence.unanswered, sequence.lost = 0, lost_tokens
        known.checkpoint(sequence)
        placer.push(sequence, now_ns)
    for sequence in [s for record in records for s in record.sequences]:
        if sequence.swapped and sequence.replica == lost.number:
            sequence.host, sequence.computed, sequence.lost = EMPTY, 0, sequence.computed
            if sequence.state is State.WAITING:
                placer.unswapped()
    if lost.sharing is not None:
        for sequence in lost.sharing.ready:
            placer.back(sequence, now_ns)
    lost.freed.clear()


def clear(replica: Replica, but: Iterable[Record], placer: Placer, known: Collector, now_ns: int) -> None:
    """What runs there waits again, but for the sequences of these requests and those whose KV is just coming back."""
    stay = {id(record) for record in but}
    for slot in np.flatnonzero(replica.table.active).tolist():
        sequence = replica.table.sequence[slot]
        if id(sequence.record) not in stay and replica.set_aside(slot):
            known.checkpoint(sequence)
            placer.push(sequence, now_ns)

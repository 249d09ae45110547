"""Loss of a worker: what its replica held waits again, with the tokens that were applied.

Called by Scheduler.lose. Swapped KV goes with the worker, steps in flight are forgotten. What it was loading from the
host tier of another replica is still there; what another one was loading from its tier may be anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, State
from services.scheduler.core.waiting import WaitingQueue


def lose(
    lost: Replica,
    others: Iterable[Replica],
    records: Iterable[Record],
    waiting: WaitingQueue,
    out: OutcomeBuilder,
    now_ns: int,
) -> None:
    """Let all sequences of `lost` wait again.

    others: the replicas that are left. records: of all requests.
    """
    lost.inflight.clear()
    lost.inflight_of.clear()
    for departed in [gone for each in lost.departed.values() for gone in each]:
        departed.sequence.unanswered = 0
    lost.departed.clear()
    waiting.changes += 1  # sequences that owed it a step may enter now
    for slot in np.flatnonzero(lost.table.active).tolist():
        load = lost.transfers.from_peer(slot)
        sequence = lost.release(slot)
        sequence.unanswered = 0
        if load is not None:
            load.tier = None  # the sequence has its references again
            sequence.saved, sequence.lost = load.saved, 0
        waiting.requeue(sequence, now_ns, out)
    lost.departed.clear()
    lost.transfers.let_go()
    for other in others:
        other.peers.lost(lost)
        for slot in other.transfers.abandon(lost.number):
            waiting.requeue(other.release(slot), now_ns, out)
    for sequence in [s for record in records for s in record.sequences]:
        if sequence.saved_at(lost.number):
            sequence.lost = sequence.computed
            if sequence.state is State.WAITING:
                waiting.lose_saved(sequence, now_ns)
            else:
                sequence.saved = None
    aside = lost.handed + (lost.prefix_cache.ready if lost.prefix_cache is not None else [])
    for sequence in aside:
        waiting.put_back(sequence, now_ns)
    lost.handed.clear()
    lost.freed.clear()


def clear(replica: Replica, but: Iterable[Record], waiting: WaitingQueue, out: OutcomeBuilder, now_ns: int) -> None:
    """Let what runs on `replica` wait again, except sequences of the requests `but` and those that load their KV."""
    stay = {id(record) for record in but}
    for slot in np.flatnonzero(replica.table.active).tolist():
        sequence = replica.table.sequence[slot]
        if id(sequence.record) not in stay and not replica.transfers.loads(slot):
            waiting.requeue(replica.release(slot), now_ns, out)

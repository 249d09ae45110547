"""A worker is gone: what its replica held waits again, with the tokens that were applied.

Called by Core.lose. Swapped KV goes with the worker, steps in flight are forgotten. What it was loading from the host
tier of another replica is still there; what another one was loading from its tier may be anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.scheduler.core.outcome import Collector
from services.scheduler.core.placer import Placer
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, State
from services.scheduler.core.types import EMPTY


def lose(
    lost: Replica, others: Iterable[Replica], records: Iterable[Record], placer: Placer, known: Collector, now_ns: int
) -> None:
    """Empties `lost` into the waiting. others: the replicas that are left; records: of all requests."""
    lost.inflight.clear()
    lost.inflight_of.clear()
    for departed in [gone for each in lost.departed.values() for gone in each]:
        departed.sequence.unanswered = 0
    lost.departed.clear()
    placer.changes += 1  # those who owed a step may enter now
    for slot in np.flatnonzero(lost.table.active).tolist():
        load = lost.transfers.from_peer(slot)
        sequence = lost.release(slot)
        sequence.unanswered = 0
        if load is not None:
            load.tier = None  # the sequence has its references again
            sequence.saved, sequence.lost = load.saved, 0
        placer.requeue(sequence, now_ns, known)
    lost.departed.clear()
    lost.transfers.let_go()
    for other in others:
        other.peers.lost(lost)
        for slot in other.transfers.abandon(lost.number):
            placer.requeue(other.release(slot), now_ns, known)
    for sequence in [s for record in records for s in record.sequences]:
        if sequence.saved_at(lost.number):
            sequence.lost = sequence.computed
            if sequence.state is State.WAITING:
                placer.unswapped(sequence, now_ns)
            else:
                sequence.saved = None
    aside = lost.handed + (lost.sharing.ready if lost.sharing is not None else [])
    for sequence in aside:
        placer.back(sequence, now_ns)
    lost.handed.clear()
    lost.freed.clear()


def clear(replica: Replica, but: Iterable[Record], placer: Placer, known: Collector, now_ns: int) -> None:
    """What runs there waits again, but for the sequences of these requests and those whose KV is just coming back."""
    stay = {id(record) for record in but}
    for slot in np.flatnonzero(replica.table.active).tolist():
        sequence = replica.table.sequence[slot]
        if id(sequence.record) not in stay and not replica.transfers.loads(slot):
            placer.requeue(replica.release(slot), now_ns, known)


def check_replicas(alive: list[Replica], records: Iterable[Record], lookahead: int) -> None:
    """Raise RuntimeError when a replica breaks an invariant of docs/protocol.md#steps."""
    saved = [s.saved for record in records for s in record.sequences if s.saved is not None]
    for replica in alive:
        held = [kv.blocks for kv in saved if kv.replica == replica.number]
        held += [blocks for other in alive for blocks in other.transfers.held_of(replica.host)]
        replica.check(lookahead, np.concatenate([EMPTY, *held]))

"""Invariants that span several objects of the scheduler; each class checks its own state in a method `check`.

Called by Scheduler.check in tests and in the chaos harness, never in a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Record, State
from services.scheduler.core.types import EMPTY, Int32


def check_replicas(alive: list[Replica], keepers: list[Replica], records: Iterable[Record], lookahead: int) -> None:
    """Raise RuntimeError on a broken invariant of the replicas, or of the host tiers of lost ones that have kept KV."""
    saved = [s.saved_kv for record in records for s in record.sequences if s.saved_kv is not None]
    for replica in [*alive, *(replica for replica in keepers if not replica.alive)]:
        held = [kv.blocks for kv in saved if kv.replica == replica.number]
        held += [blocks for other in alive for blocks in other.transfers.held_of(replica.host)]
        if replica.alive:
            check_replica(replica, lookahead, np.concatenate([EMPTY, *held]))
        else:
            replica.host.check(np.concatenate([EMPTY, *held]))


def check_replica(replica: Replica, lookahead: int, host: Int32) -> None:
    """Raise RuntimeError on a broken invariant of one replica.

    host: blocks of its host tier that sequences and loads, here and at other replicas, refer to, once a reference.
    """
    table, pool = replica.table, replica.pool
    table.check(lookahead + 1)
    tables = [table.blocks[s, : table.held_blocks[s]] for s in np.flatnonzero(table.active)]
    pool.check(np.concatenate([*tables, replica.transfers.referenced_blocks]))
    replica.host.check(host)
    replica.transfers.check()
    replica.adapters.check()
    owed = int(np.maximum(table.reserved_blocks - table.held_blocks, 0)[table.active].sum())
    if owed != replica.reserved_blocks or owed > pool.free + pool.cached:
        raise RuntimeError(f"{owed} blocks are reserved, {replica.reserved_blocks} are counted, {pool.free} are free")
    if len(replica.inflight) > replica.microbatches * (lookahead + 1):
        raise RuntimeError(f"{len(replica.inflight)} steps in flight")
    if any(gone.sequence.slot >= 0 for each in replica.departures.values() for gone in each):
        raise RuntimeError("a preempted sequence has a slot again while a step of it is unanswered")
    unanswered = np.zeros(table.slots, np.int64)
    microbatches: dict[int, set[int]] = {}
    for step in replica.inflight.values():
        present = np.flatnonzero(step.chunk_mask & (table.generation[: step.chunk_mask.size] <= step.id))
        unanswered[present] += 1
        for slot in present.tolist():
            microbatches.setdefault(slot, set()).add(step.microbatch)
    if not np.array_equal(unanswered, table.unanswered_steps):
        raise RuntimeError("unanswered steps are counted wrongly")
    if any(len(several) > 1 for several in microbatches.values()):
        raise RuntimeError("a sequence is in flight in two microbatches")


def check_records(records: list[Record], running: int, waiting: int) -> None:
    """Raise RuntimeError when the states of all sequences are not what tables and queue say."""
    sequences = [s for record in records for s in record.sequences]
    counted = sum(s.state is State.RUNNING for s in sequences)
    if counted != running:
        raise RuntimeError(f"{counted} sequences run, the tables say {running}")
    if sum(s.state is State.WAITING for s in sequences) != waiting:
        raise RuntimeError("a waiting sequence is lost, or one of an ended request waits")
    if any(r.unfinished_sequences != sum(s.state is not State.ENDED for s in r.sequences) for r in records):
        raise RuntimeError("the sequences left of a request are counted wrongly")

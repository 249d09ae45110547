"""Which replica may take a waiting sequence, by where its KV lies and by the roles of the replicas.

A replica with the role prefill takes what has to be computed and runs it until its first token is sampled; one with the
role decode, which can read its host tier (peers.py), loads it and goes on. No role is ever waited for: where a
counterpart is missing a replica does both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from services.scheduler.core.placement.peers import obstacle
from services.scheduler.core.replica import Replica
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.types import DECODE, PREFILL

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


def unread(replicas: Collection[Replica]) -> list[tuple[Replica, Replica, str]]:
    """Return which decode replica cannot read which prefill replica, and why."""
    found = []
    for reader in (r for r in replicas if r.limits.role == DECODE):
        for owner in (r for r in replicas if r.limits.role == PREFILL):
            if not reader.peers.hopes(owner):
                why = obstacle(reader.limits, owner.limits) or "it could not map the other one's host tier"
                found.append((reader, owner, why))
    return found

"""Whose host tiers a replica can read: replicas that share a folder and lay their blocks out alike are peers.

Owned by Replica. A replica is told of each other one in its next step; when it has acknowledged a peer it may load what
was swapped out there. A sequence's KV then comes from wherever it lies, so a role (roles.py) is only a rule of who
takes whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.types import Int32, Limits, Peer

if TYPE_CHECKING:
    from services.scheduler.core.replica import Replica
    from services.scheduler.core.sequence import Sequence

News = dict[int, "Replica | None"]
NO_NEWS: News = {}  # shared: read only


def can_read(reader: Limits, owner: Limits) -> bool:
    """May one worker map the host tier of the other? They are different ones."""
    if not (reader.host_tier and owner.host_tier and owner.host_blocks):
        return False
    same_folder = reader.host_tier.partition("/")[0] == owner.host_tier.partition("/")[0]
    return same_folder and reader.kv_format == owner.kv_format and reader.block_size == owner.block_size


class Peers:
    """Of one replica. `readable`: the others, by number, whose host tier it has acknowledged."""

    def __init__(self) -> None:
        self.readable: dict[int, Replica] = {}
        self._told: dict[int, Replica] = {}
        self.news: News = {}  # for the next step; None: gone

    def joined(self, other: Replica) -> None:
        """`other` is there, and can be read."""
        self._told[other.number] = other
        self.news[other.number] = other

    def lost(self, other: Replica) -> None:
        """`other` is gone, if it was a peer at all."""
        if self._told.pop(other.number, None) is not None:
            self.readable.pop(other.number, None)
            self.news[other.number] = None

    def take_news(self) -> News:
        """What the step that is sealed tells."""
        news, self.news = self.news, {}
        return news

    def acknowledged(self, told: News, numbers: Int32) -> bool:
        """The worker has mapped these of the peers that a step has told of; True if one can be read now. What was lost
        or replaced meanwhile cannot."""
        before = len(self.readable)
        for number in numbers.tolist():
            other = told.get(number)
            if other is not None and self._told.get(number) is other:
                self.readable[number] = other
        return len(self.readable) > before

    def source(self, sequence: Sequence) -> Replica | None:
        """The peer in whose host tier its KV lies, whether all of it is there yet or not; None: in none."""
        return self.readable.get(sequence.replica) if sequence.swapped else None


def told(news: News) -> list[Peer]:
    """As the worker is told."""
    return [
        Peer(number, other.limits.host_tier, other.limits.host_blocks) if other is not None else Peer(number, "", 0)
        for number, other in news.items()
    ]

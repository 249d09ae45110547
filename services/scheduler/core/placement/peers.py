"""Whose host tiers a replica can read: replicas that share a folder and lay their blocks out alike are peers.

Owned by Replica. A replica is told of each other one in its next step; when it has acknowledged a peer it may load what
was swapped out there. A sequence's KV then comes from wherever it lies, so a role (roles.py) is only a rule of who
takes whom.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.types import Int32, Limits, Peer


class Reader(Protocol):
    """A replica, as far as other replicas read its host tier."""

    number: int
    limits: Limits


R = TypeVar("R", bound=Reader)
News = dict[int, R | None]
NO_NEWS: dict[int, Any] = {}  # shared: read only


def obstacle(reader: Limits, owner: Limits) -> str:
    """Why one worker cannot map the host tier of the other; empty where it may try. They are different ones."""
    if not reader.host_tier:
        return "it has no folder that it shares"
    if not (owner.host_tier and owner.host_blocks):
        return "the other one shares no host tier"
    if reader.host_tier.partition("/")[0] != owner.host_tier.partition("/")[0]:
        return "it shares another folder"
    if reader.kv_format != owner.kv_format:
        return f"another kv_format: {reader.kv_format} and {owner.kv_format}"
    if reader.block_size != owner.block_size:
        return f"other blocks: {reader.block_size} and {owner.block_size} tokens"
    return ""


def can_read(reader: Limits, owner: Limits) -> bool:
    """May one worker map the host tier of the other? They are different ones."""
    return not obstacle(reader, owner)


class Peers(Generic[R]):
    """Of one replica. `readable`: the others, by number, whose host tier it has acknowledged."""

    def __init__(self) -> None:
        self.readable: dict[int, R] = {}
        self._told: dict[int, R] = {}
        self._refused: dict[int, R] = {}  # of those told of, whom the worker could not map
        self.news: News[R] = {}  # for the next step; None: gone

    def joined(self, other: R) -> None:
        """`other` is there, and can be read."""
        self._told[other.number] = other
        self.news[other.number] = other

    def lost(self, other: R) -> None:
        """`other` is gone, if it was a peer at all."""
        if self._told.pop(other.number, None) is not None:
            self.readable.pop(other.number, None)
            self._refused.pop(other.number, None)
            self.news[other.number] = None

    def take_news(self) -> News[R]:
        """What the step that is sealed tells."""
        news, self.news = self.news, {}
        return news

    def acknowledged(self, told: News[R], numbers: Int32) -> bool:
        """The worker has mapped these of the peers that a step has told of; True if it is known now of one whether it
        can be read. What was lost or replaced meanwhile cannot."""
        mapped, learned = set(numbers.tolist()), False
        for number, other in told.items():
            if other is not None and self._told.get(number) is other:
                (self.readable if number in mapped else self._refused)[number] = other
                learned = True
        return learned

    def hopes(self, other: R) -> bool:
        """Can `other` be read, or will the worker say so yet?"""
        return self._told.get(other.number) is other and other.number not in self._refused

    def source(self, sequence: Sequence) -> R | None:
        """The peer in whose host tier its KV lies, whether all of it is there yet or not; None: in none."""
        return self.readable.get(sequence.saved.replica) if sequence.saved is not None else None


def to_wire(news: News[R]) -> list[Peer]:
    """As the worker is told."""
    return [
        Peer(number, other.limits.host_tier, other.limits.host_blocks) if other is not None else Peer(number, "", 0)
        for number, other in news.items()
    ]

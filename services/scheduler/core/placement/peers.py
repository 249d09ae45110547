"""Peers of a replica: other replicas with a host tier that it can read. They share a folder and a block layout.

Replica holds one object. The next step of a replica announces each new or lost peer to its worker. When the worker has
acknowledged a peer, the replica may load KV that was swapped out there. KV can then be loaded from any peer, so a role
(constraints.py) is only a rule about which replica takes which sequence.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.types import Int32, Limits, Peer


class Reader(Protocol):
    """The part of a replica that readers of its host tier need."""

    number: int
    limits: Limits
    is_keeping: bool


R = TypeVar("R", bound=Reader)
News = dict[int, R | None]
NO_NEWS: dict[int, Any] = {}  # shared: read only


def obstacle(reader: Limits, owner: Limits) -> str:
    """Return why `reader` cannot map the host tier of `owner`, another worker; empty if it may try."""
    if not reader.host_tier:
        return "it shares no folder"
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
    """Return whether `reader` may map the host tier of `owner`, another worker."""
    return not obstacle(reader, owner)


def can_go_on(reader: Limits, keeper: Limits) -> bool:
    """Return whether `reader` may map the KV that `keeper`, another worker, has kept, and computes the same bits."""
    return can_read(reader, keeper) and reader.numerics == keeper.numerics


class Peers(Generic[R]):
    """The peers of one replica. `readable`: by number, the replicas with a host tier that its worker has mapped."""

    def __init__(self) -> None:
        self.readable: dict[int, R] = {}
        self._announced_peers: dict[
            int, R
        ] = {}  # all peers that were announced to the worker, or will be in the next step
        self._refused_peers: dict[int, R] = {}  # peers that the worker could not map, or that have begun another Run
        self.news: News[R] = {}  # for the next step; None means that the peer is lost

    def add(self, other: R) -> None:
        """Add `other` as a peer and announce it in the next step."""
        self._announced_peers[other.number] = other
        self.news[other.number] = other

    def remove(self, other: R) -> None:
        """Remove `other` if it is a peer, and announce that in the next step."""
        if self._announced_peers.pop(other.number, None) is not None:
            self.readable.pop(other.number, None)
            self._refused_peers.pop(other.number, None)
            self.news[other.number] = None

    def take_news(self) -> News[R]:
        """Return and forget the news that the committed step carries."""
        news, self.news = self.news, {}
        return news

    def acknowledge(self, announced: News[R], numbers: Int32) -> bool:
        """Note which of the peers that a step announced the worker has mapped.

        announced: the news of that step. numbers: [n] peers that were mapped. A peer that was lost or replaced
        meanwhile is ignored. Return whether any other peer became readable or refused.
        """
        mapped, is_answered = set(numbers.tolist()), False
        for number, other in announced.items():
            if other is not None and self._announced_peers.get(number) is other:
                (self.readable if number in mapped else self._refused_peers)[number] = other
                is_answered = True
        return is_answered

    def taken_over(self, number: int) -> R | None:
        """Stop reading from a peer: another scheduler has begun a Run at its worker. Return it if it was readable."""
        other = self.readable.pop(number, None)
        if other is not None:
            self._refused_peers[number] = other
        return other

    def may_read(self, other: R) -> bool:
        """Return whether `other` can be read, or is a peer that the worker has not answered for yet."""
        return self._announced_peers.get(other.number) is other and other.number not in self._refused_peers

    def expects(self, number: int) -> bool:
        """Return whether the worker has not answered yet for a peer with that number."""
        return number in self._announced_peers and number not in self.readable and number not in self._refused_peers

    def knows(self, number: int) -> bool:
        """Return whether a peer with that number was announced."""
        return number in self._announced_peers

    def source(self, sequence: Sequence) -> R | None:
        """Return the readable peer that holds the KV of a sequence in its host tier, or None.

        Its copies may still be under way.
        """
        peer = self.readable.get(sequence.saved_kv.replica) if sequence.saved_kv is not None else None
        return None if peer is None or peer.is_keeping else peer


def to_wire(news: News[R]) -> list[Peer]:
    """Return the news as the step carries them to the worker."""
    return [
        Peer(number, other.limits.host_tier, other.limits.host_blocks, other.limits.run)
        if other is not None
        else Peer(number, "", 0)
        for number, other in news.items()
    ]

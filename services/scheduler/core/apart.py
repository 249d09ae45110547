"""The waiting whose KV lies in a host tier, while replicas have roles.

Not everybody may take them, so there is a queue for each set of replicas that may: those who wait for one do not hide
those that are for another. They had a slot before, so they stand by class and arrival alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.scheduler.core.policy.base import Order, Queue
from services.scheduler.core.policy.queues import ByClass, by_arrival
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.types import CLASSES

Takers = frozenset[int]  # numbers of replicas


class Apart:
    """Owned by the Placer. Made anew whenever the answers of `takers` may have changed."""

    def __init__(self, order: Order, takers: Callable[[Sequence], Takers]) -> None:
        """takers: who may take a sequence, now or when its KV can be read."""
        self._order = order
        self._takers = takers
        self._queues: dict[Takers, Queue] = {}
        self._turns: dict[int, tuple[Takers, ...]] = {}  # by replica
        self._of: dict[Sequence, Takers] = {}

    def another(self, order: Order) -> Apart:
        """An empty one for another policy's order."""
        return Apart(order, self._takers)

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def turns(self, replica: int) -> tuple[Takers, ...]:
        """The queues that are of interest to it."""
        return self._turns.get(replica, ())

    def takers(self, sequence: Sequence) -> Takers:
        """The queue in which it stands, or stood when it was passed over."""
        return self._of[sequence]

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """`sequence` waits here from now on, or again after pass_over()."""
        takers = self._of.get(sequence)
        if takers is None:
            takers = self._of[sequence] = self._takers(sequence)
        queue = self._queues.get(takers)
        if queue is None:
            queue = self._queues[takers] = empty(self._order)
            for replica in takers:
                self._turns[replica] = (*self.turns(replica), takers)
        queue.push(sequence, now_ns)

    def head(self, takers: Takers, now_ns: int) -> Sequence | None:
        """Who is next of one queue."""
        return self._queues[takers].head(now_ns)

    def pop(self, sequence: Sequence) -> None:
        """Takes the head of its queue out."""
        self._queues[self._of.pop(sequence)].pop(sequence)

    def pass_over(self, sequence: Sequence) -> None:
        """Takes it out until it is pushed again, in the same step."""
        self._queues[self._of[sequence]].drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """It waits here no more."""
        self._queues[self._of.pop(sequence)].drop(sequence)

    def check(self) -> None:
        """Raises RuntimeError when a sequence stands where those do not look who may take it."""
        if set(self._of) != set(self):
            raise RuntimeError("the swapped that wait are not those that are known to")
        for takers, queue in self._queues.items():
            for sequence in queue:
                if self._of[sequence] != takers or self._takers(sequence) != takers:
                    raise RuntimeError(f"{takers} look at {sequence.number}, {self._takers(sequence)} may take it")


def empty(order: Order) -> Queue:
    """A queue for those who had a slot before."""
    return ByClass([by_arrival() for _ in range(CLASSES)], order.age_ns) if order.by_class else by_arrival()

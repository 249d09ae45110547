"""Owner of every sequence that waits for a slot: new, preempted, of a lost replica, or set aside for a while.

The policy's queue holds them in order; here they are counted. While replicas have roles there is a second queue:
those whose KV lies in a host tier, which one role loads, do not stand in the way of those who have to be computed.
They had a slot before, so they stand in it by class and arrival alone; fairness between tenants is for those who come.
The passes look at the head and take it or leave it, so a sequence that does not fit holds back those behind it and
nobody starves by being overtaken.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.core.policy import Order, Queue
from services.scheduler.core.queues import ByClass, by_arrival
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.types import EMPTY

CLASSES = ("realtime", "high", "normal", "low")


class Placer:
    """The waiting. `counts`, `swapped_counts` and `class_tokens` (known tokens whose KV lies nowhere) by class and
    `swapped` are exact at any moment."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._queue = order.queue()  # once: the order remembers in it who was served, and who was taken out just now
        self._swapped: Queue | None = None  # apart from the others, while there are roles
        self._aside: dict[int, Sequence] = {}  # by number: counted here, and not in the queue
        self.counts = [0] * len(CLASSES)
        self.swapped_counts = [0] * len(CLASSES)
        self._waiting = 0
        self.class_tokens = [0] * len(CLASSES)
        self.swapped = 0
        self.changes = 0  # grows whenever another sequence may be at the head

    def __len__(self) -> int:
        return self._waiting

    @property
    def urgent(self) -> bool:
        """Does any of class <= high wait?"""
        return bool(self.counts[0] or self.counts[1])

    @property
    def tokens(self) -> int:
        """Known tokens of all that wait."""
        return sum(self.class_tokens)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queue
        if self._swapped is not None:
            yield from self._swapped
        yield from self._aside.values()

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """`sequence` waits from now on. A preempted one keeps its arrival, so it stands where it stood."""
        sequence.state = State.WAITING
        self.changes += 1
        self._of(sequence).push(sequence, now_ns)
        self._count(sequence, 1)

    def head(self, now_ns: int, swapped: bool = False) -> Sequence | None:
        """Who is next, of all classes; with roles of those who have to be computed, or of the swapped."""
        queue = self._swapped if swapped else self._queue
        return queue.head(now_ns) if queue is not None else None

    def _of(self, sequence: Sequence) -> Queue:
        return self._swapped if self._swapped is not None and sequence.swapped else self._queue

    def pop(self, sequence: Sequence) -> None:
        """Takes the head out: it enters a slot, or comes back by push() or aside()."""
        self.changes += 1
        self._of(sequence).pop(sequence)
        self._count(sequence, -1)

    def pass_over(self, sequence: Sequence) -> None:
        """The head is for another replica: while one looks on, until put_back()."""
        self._of(sequence).drop(sequence)  # not popped: what is taken counts, for fairness

    def put_back(self, passed: list[Sequence], now_ns: int) -> None:
        """They stand where they stood."""
        for sequence in passed:
            self._of(sequence).push(sequence, now_ns)

    def aside(self, sequence: Sequence) -> None:
        """One that was popped, or has left its slot, waits outside the queue, until back()."""
        self._aside[sequence.number] = sequence
        self._count(sequence, 1)

    def back(self, sequence: Sequence, now_ns: int) -> None:
        """One that was set aside stands in the queue again; nothing happens if it has ended or was parked meanwhile."""
        if self._aside.pop(sequence.number, None) is not None:
            self._count(sequence, -1)
            self.push(sequence, now_ns)

    def drop(self, sequence: Sequence) -> None:
        """A waiting sequence has ended or is parked (its state says so already)."""
        self.changes += 1
        self._count(sequence, -1)
        if self._aside.pop(sequence.number, None) is None:
            self._of(sequence).drop(sequence)

    def grew(self, sequence: Sequence) -> None:
        """A waiting sequence got a token of a step that was sent before it was preempted."""
        self.class_tokens[sequence.priority] += 1

    def unswapped(self, sequence: Sequence, now_ns: int) -> None:
        """A waiting sequence loses its KV in the host tier."""
        apart = self._swapped is not None and sequence.number not in self._aside
        if apart:
            self._of(sequence).drop(sequence)
        self._count(sequence, -1)
        sequence.host, sequence.computed, sequence.offered = EMPTY, 0, -1
        self._count(sequence, 1)
        if apart:
            self._queue.push(sequence, now_ns)

    def split(self, apart: bool) -> None:
        """From now on the swapped stand in a queue of their own, or not."""
        if apart == (self._swapped is not None):
            return
        moved = [s for s in self._queue if s.swapped] if self._swapped is None else list(self._swapped)
        for sequence in moved:
            self._of(sequence).drop(sequence)
        self._swapped = self._begun() if apart else None
        for sequence in sorted(moved, key=lambda s: s.number):
            self._of(sequence).push(sequence, 0)  # who is late is found when the head is asked for

    def _begun(self) -> Queue:
        """An empty queue for those who had a slot before."""
        return ByClass([by_arrival() for _ in CLASSES], self._order.age_ns) if self._order.by_class else by_arrival()

    def rebuild(self, order: Order, now_ns: int) -> None:
        """The waiting stand in another policy's order from now on."""
        waiting, self._order = list(self), order
        self._queue, self._swapped = order.queue(), self._begun() if self._swapped is not None else None
        self._aside.clear()
        for sequence in sorted(waiting, key=lambda s: s.number):
            self._of(sequence).push(sequence, now_ns)

    def check(self) -> None:
        """Raises RuntimeError when the counts are not those of the queue."""
        waiting = list(self)
        counts = [sum(s.priority == c for s in waiting) for c in range(len(CLASSES))]
        tokens = [sum(s.known - s.computed for s in waiting if s.priority == c) for c in range(len(CLASSES))]
        if counts != self.counts or tokens != self.class_tokens:
            raise RuntimeError(f"{counts} sequences wait, {self.counts} are counted; {tokens}, {self.class_tokens}")
        swapped = [sum(s.swapped for s in waiting if s.priority == c) for c in range(len(CLASSES))]
        apart = len({s.number for s in waiting}) == len(waiting)
        if swapped != self.swapped_counts or sum(swapped) != self.swapped or not apart:
            raise RuntimeError("the swapped are counted wrongly, or a sequence waits twice")

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.counts[sequence.priority] += sign
        self._waiting += sign
        self.class_tokens[sequence.priority] += sign * (sequence.known - sequence.computed)
        self.swapped += sign * sequence.swapped
        self.swapped_counts[sequence.priority] += sign * sequence.swapped

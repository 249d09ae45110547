"""Owner of every sequence that waits for a slot: new, preempted, or of a lost replica.

Four heaps, one per class, each in the policy's order; the passes look at the head and take it or leave it, so a
sequence that does not fit holds back those behind it and nobody starves by being overtaken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.scheduler.core.policy import Order
from services.scheduler.core.sequence import Sequence, State

CLASSES = ("realtime", "high", "normal", "low")
Entry = tuple[tuple[float, ...], int, Sequence]


class Placer:
    """The waiting, by class. `counts` and `tokens` (known tokens of the waiting) are exact at any moment."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heaps: list[list[Entry]] = [[] for _ in CLASSES]
        self.counts = [0] * len(CLASSES)
        self.tokens = 0

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._heaps:
            yield from (entry[2] for entry in heap if entry[2].state is State.WAITING)

    def push(self, sequence: Sequence) -> None:
        """`sequence` waits from now on. A preempted one keeps its arrival, so it stands where it stood."""
        sequence.state = State.WAITING
        heapq.heappush(self._heaps[sequence.priority], (self._order.place(sequence), sequence.number, sequence))
        self.counts[sequence.priority] += 1
        self.tokens += sequence.known

    def head(self, now_ns: int) -> Sequence | None:
        """Who is next, of all classes."""
        best: Sequence | None = None
        rank: tuple[float, ...] = ()
        for priority, heap in enumerate(self._heaps):
            while heap and heap[0][2].state is not State.WAITING:
                heapq.heappop(heap)
            if not self.counts[priority]:
                continue
            sequence = heap[0][2]
            its = self._order.rank(sequence, now_ns)
            if best is None or its < rank:
                best, rank = sequence, its
        return best

    def pop(self, sequence: Sequence) -> None:
        """Takes the head of its class out: it enters a slot."""
        heapq.heappop(self._heaps[sequence.priority])
        self._forget(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A waiting sequence has ended (its state says so already); its entry is removed when it surfaces."""
        self._forget(sequence)
        heap = self._heaps[sequence.priority]
        if len(heap) > 2 * self.counts[sequence.priority] + 64:
            heap[:] = [entry for entry in heap if entry[2].state is State.WAITING]
            heapq.heapify(heap)

    def grew(self, tokens: int) -> None:
        """A waiting sequence got tokens of steps that were sent before it was preempted."""
        self.tokens += tokens

    def check(self) -> None:
        """Raises RuntimeError when the counts are not those of the heaps."""
        waiting = list(self)
        counts = [sum(s.priority == c for s in waiting) for c in range(len(CLASSES))]
        if counts != self.counts or sum(s.known for s in waiting) != self.tokens:
            raise RuntimeError(f"{counts} sequences wait, {self.counts} are counted")

    def _forget(self, sequence: Sequence) -> None:
        self.counts[sequence.priority] -= 1
        self.tokens -= sequence.known

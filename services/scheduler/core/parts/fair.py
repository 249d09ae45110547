"""Fairness between tenants by virtual token counters: the order `fair`.

Whoever was served least is next.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from services.scheduler.core.parts.counters import Counters
from services.scheduler.core.policy import Queue
from services.scheduler.core.queues import Heap, arrival
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import SlotTable
from services.scheduler.core.types import Int32

Rank = tuple[int, int, int]  # tokens served, arrival and number of the first who waits


class Fair:
    """By the counters of the tenants, whatever the class; inside a tenant by arrival."""

    swapped_first = False
    counts = True
    by_class = False
    age_ns = 0
    prefixes = False

    def __init__(self) -> None:
        self.counters = Counters(lambda: self._queue.waiting())
        self._queue = FairQueue(self.counters)

    def queue(self) -> Queue:
        self._queue = FairQueue(self.counters)
        return self._queue

    def sort(self, table: SlotTable, slots: Int32, now_ns: int) -> Int32:
        tenants = table.tenant[slots]
        if slots.size:
            self.counters.reach(int(tenants.max()))
        return slots[np.lexsort((table.number[slots], table.arrived[slots], self.counters.counter[tenants]))]

    def served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
        self.counters.served(tenants, tokens)
        self._queue.settle()

    def spare(self, table: SlotTable, most: int, waiting: int) -> None:
        pass


class FairQueue:
    """The waiting: FIFO inside a tenant, of the tenants the one with the least counter.

    What is taken out within a step counts at once with its known tokens, until served() tells what it really got: else
    one tenant would have a whole step to itself.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._tenants: dict[int, Heap] = {}  # none of them empty
        self._ranks: list[tuple[Rank, int]] = []  # a heap; an entry counts if it is its tenant's rank
        self._taken: dict[Sequence, int] = {}  # since the last step
        self._charged: dict[int, int] = {}

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._tenants.values():
            yield from heap

    def waiting(self) -> list[int]:
        """Tenants of whom something waits."""
        return list(self._tenants)

    def push(self, sequence: Sequence, now_ns: int) -> None:
        tenant = sequence.record.tenant
        if sequence in self._taken:
            self._charged[tenant] -= self._taken.pop(sequence)
        if tenant not in self._tenants:
            self._counters.comes(tenant)
            self._tenants[tenant] = Heap()
        self._tenants[tenant].push(sequence, arrival(sequence))
        self._note(tenant)

    def head(self, now_ns: int) -> Sequence | None:
        while self._ranks:
            rank, tenant = self._ranks[0]
            if (now := self._rank(tenant)) == rank:
                return self._tenants[tenant].first()
            if now is not None and now > rank:
                heapq.heapreplace(self._ranks, (now, tenant))
            else:  # smaller ones were noted when they arose
                heapq.heappop(self._ranks)
        return None

    def pop(self, sequence: Sequence) -> None:
        tenant = sequence.record.tenant
        self._taken[sequence] = sequence.known
        self._charged[tenant] = self._charged.get(tenant, 0) + sequence.known
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        tenant = sequence.record.tenant
        heap = self._tenants.get(tenant)
        if heap is not None and heap.remove(sequence):
            self._counters.goes(tenant)
            if not len(heap):
                del self._tenants[tenant]

    def settle(self) -> None:
        """A step is complete: its real tokens are in the counters."""
        charged, self._charged = list(self._charged), {}
        self._taken.clear()
        for tenant in charged:
            if tenant in self._tenants:
                self._note(tenant)

    def _rank(self, tenant: int) -> Rank | None:
        heap = self._tenants.get(tenant)
        if heap is None or (first := heap.first()) is None:
            self._tenants.pop(tenant, None)
            return None
        return int(self._counters.counter[tenant]) + self._charged.get(tenant, 0), arrival(first), first.number

    def _note(self, tenant: int) -> None:
        """Its rank may have become smaller. One that has grown is noticed when it comes up."""
        if (rank := self._rank(tenant)) is not None:
            heapq.heappush(self._ranks, (rank, tenant))
        if len(self._ranks) > 4 * len(self._tenants) + 64:
            self._ranks = [(r, t) for t in list(self._tenants) if (r := self._rank(t)) is not None]
            heapq.heapify(self._ranks)

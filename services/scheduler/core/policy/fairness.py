"""Fairness between tenants by virtual token counters (VTC, OSDI '24, algorithm 2).

`Counters` says how much each tenant was served. Two queues use it: `FairQueue` serves the tenant with the least counter
(the order `fair`), `ByShare` lets a tenant that is ahead of the waiting ones stand back (`class-slack`, per class).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from services.scheduler.core.policy.base import Order, Queue
from services.scheduler.core.policy.queues import MOVED, BySlack, Heap, arrival
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.table import Int64, SlotTable
from services.scheduler.core.types import Int32, Rows

ABSENT = 16  # steps without anything waiting or served after which somebody has been away


class Counters:
    """By small integers, `waiting()` being those of whom something waits. One that was away is lifted (or lowered) to
    the least counter of those who were not; what was counted for the absent is forgotten by that."""

    def __init__(self, waiting: Callable[[], list[int]]) -> None:
        self.counter: Int64 = np.zeros(16, np.int64)
        self._seen: Int64 = np.full(16, -ABSENT - 1, np.int64)  # step of the last service
        self._step = 0
        self._waiting = waiting

    def served(self, who: Int32 | Int64, tokens: Int32) -> None:
        """A step gave so many tokens [n] to these [n], each of whom may appear several times."""
        self._step += 1
        if who.size:
            self.reach(int(who.max()))
            np.add.at(self.counter, who, tokens)
            self._seen[who] = self._step

    def comes(self, who: int) -> None:
        """Something of `who` waits, and nothing did before."""
        self.reach(who)
        if self._step - self._seen[who] > ABSENT:
            here = self._step - self._seen <= ABSENT
            here[self._waiting()] = True
            here[who] = False
            self.counter[who] = self.counter[here].min() if here.any() else 0
        self._seen[who] = self._step

    def goes(self, who: int) -> None:
        """Something of `who` waits no more."""
        self._seen[who] = self._step

    def reach(self, who: int) -> None:
        """Has a counter for `who`."""
        while who >= self.counter.size:
            self._seen = np.append(self._seen, np.full(self._seen.size, -ABSENT - 1))
            self.counter = np.append(self.counter, np.zeros_like(self.counter))


Rank = tuple[int, int, int]  # tokens served, arrival and number of the first who waits


class Fair(Order):
    """By the counters of the tenants, whatever the class; inside a tenant by arrival."""

    counts = True

    def __init__(self) -> None:
        self.counters = Counters(lambda: self._queue.waiting())
        self._queue = FairQueue(self.counters)

    def queue(self) -> Queue:
        self._queue = FairQueue(self.counters)
        return self._queue

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        tenants = table.tenant[rows]
        if rows.size:
            self.counters.reach(int(tenants.max()))
        return rows[np.lexsort((table.number[rows], table.arrived[rows], self.counters.counter[tenants]))]

    def served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
        self.counters.served(tenants, tokens)
        self._queue.settle()


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


ALLOWANCE = 4_096  # tokens by which a tenant may be ahead of the least served who wait
FLOOD = 4  # one of so many that wait is a tenant's: a flood
SPARE = 32  # one of so many slots is left free by who holds an even share of them already
SEVERAL = 256  # steps for which tokens go on being counted when nobody but one tenant waits
NOBODY = -1


class Spare:
    """Slots that a tenant leaves free for the others while it holds an even share of them already: else who comes
    next to a flood waits until somebody's output ends. One for the queues of several classes."""

    def __init__(self) -> None:
        self._held: Int64 = np.zeros(0, np.int64)  # slots, by tenant; of those taken in this step, too
        self._even = 0.0  # slots of an even share
        self._left = 0  # free ones beyond those to be left

    def open(self) -> None:
        """Nobody has to leave any."""
        self._held = self._held[:0]

    def count(self, held: Int64, tenants: int, most: int, left: int) -> None:
        """Before a step: slots held by each tenant [n], of `most`; so many tenants run or wait; so many slots are free
        beyond those to be left."""
        self._held, self._even, self._left = held, most / tenants, left

    def barred(self, tenant: int) -> bool:
        """May no more of it enter in this step?"""
        return self._left <= 0 and tenant < self._held.size and bool(self._held[tenant] >= self._even)

    def taken(self, tenant: int, sequences: int) -> None:
        """So many of it are about to enter; fewer than 0: they came back."""
        if tenant < self._held.size:
            self._held[tenant] += sequences
            self._left -= sequences


class ByShare:
    """The waiting of one class. In `common` stand those who are not ahead; who is found ahead at its head moves to a
    queue of its tenant, and comes back when its tenant's counter lets it. If only tenants that are ahead wait, the one
    with the least counter is next: no slot stays empty for fairness.

    What is taken out within a step counts at once with its known tokens, until served() tells what it really got. Those
    that ran before (preempted ones) are never held.
    """

    def __init__(self, inner: Callable[[], BySlack], spare: Spare) -> None:
        self._spare = spare
        self.counters = Counters(lambda: np.flatnonzero(self.here).tolist())
        self._inner, self._common = inner, inner()
        self._held: dict[int, BySlack] = {}  # by tenant, none of them empty
        self._known: dict[Sequence, int] = {}  # of those in `common`: known tokens when they came
        self._offered: dict[int, int] = {}  # by tenant, sum of these
        self._count: dict[int, int] = {}  # sequences that wait, by tenant
        self.here: npt.NDArray[np.bool_] = np.zeros(16, np.bool_)  # by tenant: in _count
        self._taken: dict[Sequence, int] = {}  # since the last step
        self._charged: dict[int, int] = {}  # by tenant, sum of these
        self._rest, self._last = 0, NOBODY  # steps for which tokens still count; the tenant that came last
        self._now_ns, self._limit, self._may_move = -1, 0, MOVED

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._common
        for held in self._held.values():
            yield from held

    def __bool__(self) -> bool:
        return bool(self._count)

    @property
    def several(self) -> bool:
        """Do tokens count? Not while there is one tenant only."""
        return self._rest > 0 or len(self._count) > 1

    def served(self, tenants: Int32 | Int64, tokens: Int32) -> None:
        """A step gave so many tokens [n] to these tenants [n]; to be called while there are several."""
        self._rest -= 1
        self.counters.served(tenants, tokens)
        self._taken.clear()
        self._charged.clear()

    def push(self, sequence: Sequence, now_ns: int) -> None:
        tenant = sequence.record.tenant
        if sequence in self._taken:
            self._charged[tenant] -= self._taken.pop(sequence)
            self._spare.taken(tenant, -1)
        if tenant not in self._count:
            self._comes(tenant)
        self._count[tenant] += 1
        if tenant in self._held and not sequence.outputs.size:
            self._held[tenant].push(sequence, now_ns)
        else:
            self._offer(sequence, now_ns)

    def head(self, now_ns: int) -> Sequence | None:
        self._look(now_ns)
        while (head := self._common.head(now_ns)) is not None:
            if not self._stands_back(head, now_ns):
                return head
        return self._first_held(now_ns)

    def held_back(self, now_ns: int) -> Sequence | None:
        """The first of the late whose tenant is not ahead."""
        self._look(now_ns)
        while (late := self._common.held_back(now_ns)) is not None:
            if not self._stands_back(late, now_ns):
                return late
        if (head := self.head(now_ns)) is None or head in self._known:
            return None
        return self._held[head.record.tenant].held_back(now_ns)  # all who wait are ahead

    def pop(self, sequence: Sequence) -> None:
        if self.several:
            tenant = sequence.record.tenant
            self._taken[sequence] = sequence.known
            self._spare.taken(tenant, 1)
            self._charged[tenant] = self._charged.get(tenant, 0) + sequence.known
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        tenant = sequence.record.tenant
        if sequence in self._known:
            self._withdraw(sequence)
        elif tenant in self._held:
            self._unhold(tenant, sequence)
        else:
            return
        self._count[tenant] -= 1
        if not self._count[tenant]:
            del self._count[tenant]
            self.here[tenant] = False
            self.counters.goes(tenant)
            self._now_ns = -1

    def _comes(self, tenant: int) -> None:
        """Its first sequence waits."""
        while tenant >= self.here.size:
            self.here = np.append(self.here, np.zeros_like(self.here))
        self.counters.comes(tenant)
        if self._count or self._last not in (NOBODY, tenant):
            self._rest = SEVERAL
        self._count[tenant], self.here[tenant], self._last = 0, True, tenant
        self._now_ns = -1

    def _look(self, now_ns: int) -> None:
        """Once a moment: how far anybody may be ahead, and who is not ahead any more."""
        if now_ns == self._now_ns:
            return
        self._now_ns, self._may_move = now_ns, MOVED
        if len(self._count) > 1:
            self._limit = int(self.counters.counter[: self.here.size][self.here].min()) + ALLOWANCE
        for tenant in list(self._held):
            while self._may_move and tenant in self._held and self._may_offer(tenant):
                self._may_move -= 1
                sequence = self._held[tenant].head(now_ns)
                if sequence is not None:
                    self._unhold(tenant, sequence)
                    self._offer(sequence, now_ns)

    def _used(self, tenant: int) -> int:
        return int(self.counters.counter[tenant]) + self._charged.get(tenant, 0)

    def _may_offer(self, tenant: int) -> bool:
        return not self._spare.barred(tenant) and self._used(tenant) + self._offered.get(tenant, 0) <= self._limit

    def _stands_back(self, head: Sequence, now_ns: int) -> bool:
        """Moves the head of `common` to its tenant's own queue if that tenant is ahead of others, or may not enter."""
        tenant = head.record.tenant
        barred = self._spare.barred(tenant)
        others = len(self._count) > 1 or tenant in self._held  # else the rest of it would go before what is held
        ahead = others and self._used(tenant) > self._limit
        if head.outputs.size or not (barred or ahead):
            return False
        if tenant not in self._held and self._count[tenant] > max(MOVED, len(self._known) // FLOOD):
            self._hold_all(tenant, now_ns)
            return True
        if not barred:
            if not self._may_move:
                return False
            self._may_move -= 1
        self._withdraw(head)
        if tenant not in self._held:
            self._held[tenant] = self._inner()
        self._held[tenant].push(head, now_ns)
        return True

    def _hold_all(self, tenant: int, now_ns: int) -> None:
        """A flood moves at once: by MOVED in a moment, who came behind it would wait until all of it has moved."""
        flood, self._common = self._common, self._inner()
        self._held[tenant] = flood
        for sequence in list(flood):
            if sequence.record.tenant == tenant and not sequence.outputs.size:
                self._offered[tenant] -= self._known.pop(sequence)
            else:
                flood.drop(sequence)
                self._common.push(sequence, now_ns)
        if not self._offered[tenant]:
            del self._offered[tenant]

    def _first_held(self, now_ns: int) -> Sequence | None:
        for tenant in sorted(self._held, key=self._used):
            if not self._spare.barred(tenant) and (head := self._held[tenant].head(now_ns)) is not None:
                return head
        return None

    def _offer(self, sequence: Sequence, now_ns: int) -> None:
        tenant = sequence.record.tenant
        self._common.push(sequence, now_ns)
        self._known[sequence] = sequence.known
        self._offered[tenant] = self._offered.get(tenant, 0) + sequence.known

    def _withdraw(self, sequence: Sequence) -> None:
        tenant = sequence.record.tenant
        self._common.drop(sequence)
        self._offered[tenant] -= self._known.pop(sequence)
        if not self._offered[tenant]:
            del self._offered[tenant]

    def _unhold(self, tenant: int, sequence: Sequence) -> None:
        self._held[tenant].drop(sequence)
        if not self._held[tenant]:
            del self._held[tenant]

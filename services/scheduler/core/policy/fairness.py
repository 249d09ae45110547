"""Fairness between tenants by virtual token counters (VTC, OSDI '24, algorithm 2).

`Counters` counts the tokens that each tenant was served. Two queues use it. `FairQueue` serves the tenant with the
least counter (the order `fair`). `ByShare` skips a tenant that is ahead of the other waiting tenants (`class-slack`,
one queue a class). A tenant is an interned number that indexes the columns.
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

ABSENT = 16  # a tenant that was neither waiting nor served for more steps than this is absent


class Counters:
    """One counter of served tokens for each tenant (VTC, algorithm 2).

    An absent tenant that comes back starts at the least counter of the tenants that are present, which lifts or lowers
    its counter. Tokens that were counted before its absence are thereby forgotten.

    A popped sequence is charged its known tokens at once, until the step is planned and the tokens that it really
    computes are counted. Without the charge one tenant could fill a whole step.
    """

    def __init__(self, waiting: Callable[[], list[int]]) -> None:
        """waiting: return the tenants that have a waiting sequence."""
        self.counter: Int64 = np.zeros(16, np.int64)  # by tenant, tokens
        self._last_steps: Int64 = np.full(
            16, -ABSENT - 1, np.int64
        )  # by tenant, last step at which it was served or waited
        self._step = 0
        self._waiting = waiting
        self._popped_tokens: dict[Sequence, int] = {}  # popped since the last step -> tokens charged
        self._charged_tokens: dict[int, int] = {}  # tenant -> sum of these tokens

    def used_tokens(self, tenant: int) -> int:
        """Return the tokens that a tenant was served and is charged."""
        return int(self.counter[tenant]) + self._charged_tokens.get(tenant, 0)

    def charge(self, sequence: Sequence) -> None:
        """Charge a popped sequence its known tokens."""
        tenant = sequence.record.tenant
        self._popped_tokens[sequence] = sequence.known_tokens
        self._charged_tokens[tenant] = self._charged_tokens.get(tenant, 0) + sequence.known_tokens

    def refund(self, sequence: Sequence) -> bool:
        """Take back the charge of a sequence that waits again. Return whether it had one."""
        if sequence not in self._popped_tokens:
            return False
        self._charged_tokens[sequence.record.tenant] -= self._popped_tokens.pop(sequence)
        return True

    def settle(self) -> list[int]:
        """Drop the charges, once the tokens of the planned step are counted. Return the tenants that had one."""
        charged = list(self._charged_tokens)
        self._charged_tokens.clear()
        self._popped_tokens.clear()
        return charged

    def count_served(self, tenants: Int32 | Int64, tokens: Int32) -> None:
        """Count the tokens [n] that a step gives to tenants [n]; a tenant may appear several times."""
        self._step += 1
        if tenants.size:
            self.grow_to(int(tenants.max()))
            np.add.at(self.counter, tenants, tokens)
            self._last_steps[tenants] = self._step

    def on_arrival(self, tenant: int) -> None:
        """Note that a tenant has its first waiting sequence."""
        self.grow_to(tenant)
        if self._step - self._last_steps[tenant] > ABSENT:
            here = self._step - self._last_steps <= ABSENT
            here[self._waiting()] = True
            here[tenant] = False
            self.counter[tenant] = self.counter[here].min() if here.any() else 0
        self._last_steps[tenant] = self._step

    def on_leave(self, tenant: int) -> None:
        """Note that a sequence of a tenant does not wait any more."""
        self._last_steps[tenant] = self._step

    def grow_to(self, tenant: int) -> None:
        """Grow the columns until they have an entry for this tenant."""
        while tenant >= self.counter.size:
            self._last_steps = np.append(self._last_steps, np.full(self._last_steps.size, -ABSENT - 1))
            self.counter = np.append(self.counter, np.zeros_like(self.counter))


Rank = tuple[int, int, int]  # of a tenant: tokens served; arrival (ns) and number of its first waiting sequence


class Fair(Order):
    """Serve the tenant with the least counter, whatever the class; inside a tenant by arrival."""

    def __init__(self) -> None:
        self.counters = Counters(lambda: self._queue.waiting_tenants())
        self._queue = FairQueue(self.counters)

    @property
    def counts_tokens(self) -> bool:
        return True

    def queue(self) -> Queue:
        self.counters.settle()
        self._queue = FairQueue(self.counters)
        return self._queue

    def sort(self, table: SlotTable, rows: Rows, now_ns: int) -> Rows:
        tenants = table.tenant[rows]
        if rows.size:
            self.counters.grow_to(int(tenants.max()))
        return rows[np.lexsort((table.number[rows], table.arrival_ns[rows], self.counters.counter[tenants]))]

    def count_served(self, tenants: Int32, classes: Int32, tokens: Int32) -> None:
        self.counters.count_served(tenants, tokens)
        self._queue.settle()


class FairQueue:
    """Waiting sequences, FIFO inside a tenant; the tenant with the least counter is next."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._tenants: dict[int, Heap] = {}  # tenant -> its waiting sequences, at least one
        self._ranks: list[tuple[Rank, int]] = []  # a heap; an entry is valid while it equals its tenant's rank

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._tenants.values():
            yield from heap

    def waiting_tenants(self) -> list[int]:
        """Return the tenants that have a waiting sequence."""
        return list(self._tenants)

    def push(self, sequence: Sequence, now_ns: int) -> None:
        tenant = sequence.record.tenant
        self._counters.refund(sequence)
        if tenant not in self._tenants:
            self._counters.on_arrival(tenant)
            self._tenants[tenant] = Heap()
        self._tenants[tenant].push(sequence, arrival(sequence))
        self._note(tenant)

    def head(self, now_ns: int) -> Sequence | None:
        while self._ranks:
            rank, tenant = self._ranks[0]
            if (now := self._rank(tenant)) == rank:
                return self._tenants[tenant].peek()
            if now is not None and now > rank:
                heapq.heapreplace(self._ranks, (now, tenant))
            else:  # the tenant has left, or its rank fell; a smaller rank was pushed when it arose (_note)
                heapq.heappop(self._ranks)
        return None

    def pop(self, sequence: Sequence) -> None:
        self._counters.charge(sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        tenant = sequence.record.tenant
        heap = self._tenants.get(tenant)
        if heap is not None and heap.remove(sequence):
            self._counters.on_leave(tenant)
            if not len(heap):
                del self._tenants[tenant]

    def settle(self) -> None:
        """Rank anew by the tokens of the planned step, which the counters hold now."""
        for tenant in self._counters.settle():
            if tenant in self._tenants:
                self._note(tenant)

    def _rank(self, tenant: int) -> Rank | None:
        heap = self._tenants.get(tenant)
        if heap is None or (first := heap.peek()) is None:
            self._tenants.pop(tenant, None)
            return None
        return self._counters.used_tokens(tenant), arrival(first), first.number

    def _note(self, tenant: int) -> None:
        """Push the rank of a tenant, which may be smaller than before. head() corrects a rank that has grown."""
        if (rank := self._rank(tenant)) is not None:
            heapq.heappush(self._ranks, (rank, tenant))
        if len(self._ranks) > 4 * len(self._tenants) + 64:
            self._ranks = [(r, t) for t in list(self._tenants) if (r := self._rank(t)) is not None]
            heapq.heapify(self._ranks)


ALLOWANCE = 4_096  # tokens by which a tenant may be ahead of the least served waiting tenant
FLOOD = 4  # a tenant floods a class if more than MOVED of it wait, and more than 1 / FLOOD of the common queue
SPARE = 32  # a tenant with an even share of the slots leaves 1 / SPARE of all slots free
SEVERAL = 256  # steps for which tokens are counted after a different tenant has come, even if only one waits
NO_TENANT = -1  # no tenant has come yet


class Spare:
    """Spare slots, which a tenant leaves free once it holds an even share of all slots.

    Without them a tenant that comes during another tenant's flood would wait until an output of the flood ends. The
    queues of several classes share one object.
    """

    def __init__(self) -> None:
        self._held_slots: Int64 = np.zeros(0, np.int64)  # by tenant, slots held, including those taken in this step
        self._even_share = 0.0  # slots of an even share
        self._slots_left = 0  # free slots beyond the spare ones

    def open(self) -> None:
        """Let every tenant use all slots."""
        self._held_slots = self._held_slots[:0]

    def count(self, held: Int64, tenants: int, slots: int, left: int) -> None:
        """Set the slots for the next step.

        held: [n] slots that each tenant holds. tenants: how many run or wait. slots: those that may be in use. left:
        free slots beyond the spare ones.
        """
        self._held_slots, self._even_share, self._slots_left = held, slots / tenants, left

    def is_barred(self, tenant: int) -> bool:
        """Return whether no further sequence of `tenant` may enter in this step."""
        return (
            self._slots_left <= 0
            and tenant < self._held_slots.size
            and bool(self._held_slots[tenant] >= self._even_share)
        )

    def count_taken(self, tenant: int, sequences: int) -> None:
        """Count sequences of `tenant` that are about to enter; a negative count takes back sequences that returned."""
        if tenant < self._held_slots.size:
            self._held_slots[tenant] += sequences
            self._slots_left -= sequences


class ByShare:
    """Waiting sequences of one class. A tenant that was served too much is skipped until the other tenants catch up.

    A tenant is ahead when its counter is more than ALLOWANCE above the least counter of the waiting tenants. Sequences
    stand in the common queue. When the head of it belongs to a tenant that is ahead, or that must leave spare slots
    free (Spare), it moves to a queue of its tenant. It moves back when the tenant may be served again. If all waiting
    tenants are ahead, the one with the least counter is next, so fairness leaves no slot empty; only Spare does.

    A sequence with outputs (a preempted one) is never held.
    """

    def __init__(self, inner: Callable[[], BySlack], spare: Spare) -> None:
        """inner: return an empty queue, for the common queue and for each held tenant."""
        self._spare = spare
        self.counters = Counters(lambda: np.flatnonzero(self.waits).tolist())
        self._inner, self._common = inner, inner()
        self._held_queues: dict[int, BySlack] = {}  # tenant -> its held sequences, at least one
        self._pushed_tokens: dict[Sequence, int] = {}  # sequences of the common queue -> known tokens when pushed
        self._offered_tokens: dict[int, int] = {}  # tenant -> sum of these tokens
        self._count: dict[int, int] = {}  # tenant -> its waiting sequences, at least one
        self.waits: npt.NDArray[np.bool_] = np.zeros(16, np.bool_)  # by tenant: whether it is in _count
        self._rest = 0  # steps for which tokens are still counted
        self._last_tenant = NO_TENANT  # that came last
        self._now_ns, self._limit, self._may_move = -1, 0, MOVED  # _look(): its time, largest counter, moves left

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._common
        for held in self._held_queues.values():
            yield from held

    def __bool__(self) -> bool:
        return bool(self._count)

    @property
    def several(self) -> bool:
        """Whether tokens are counted: several tenants wait, or a different one came less than SEVERAL steps ago."""
        return self._rest > 0 or len(self._count) > 1

    def count_served(self, tenants: Int32 | Int64, tokens: Int32) -> None:
        """Count the tokens [n] that a step gives to tenants [n]. Call it while `several` is true."""
        self._rest -= 1
        self.counters.count_served(tenants, tokens)
        self.counters.settle()

    def push(self, sequence: Sequence, now_ns: int) -> None:
        tenant = sequence.record.tenant
        if self.counters.refund(sequence):
            self._spare.count_taken(tenant, -1)
        if tenant not in self._count:
            self._first_waits(tenant)
        self._count[tenant] += 1
        if tenant in self._held_queues and not sequence.outputs.size:
            self._held_queues[tenant].push(sequence, now_ns)
        else:
            self._offer(sequence, now_ns)

    def head(self, now_ns: int) -> Sequence | None:
        self._look(now_ns)
        while (head := self._common.head(now_ns)) is not None:
            if not self._stands_back(head, now_ns):
                return head
        return self._first_held(now_ns)

    def held_back(self, now_ns: int) -> Sequence | None:
        """Return the first late sequence of a tenant that is not ahead; of the next tenant where all are ahead."""
        self._look(now_ns)
        while (late := self._common.held_back(now_ns)) is not None:
            if not self._stands_back(late, now_ns):
                return late
        if (head := self.head(now_ns)) is None or head in self._pushed_tokens:
            return None
        return self._held_queues[head.record.tenant].held_back(now_ns)  # all waiting tenants are ahead

    def is_late(self, sequence: Sequence) -> bool:
        """Return whether `sequence` was late when head() was last called."""
        queue = self._common if sequence in self._pushed_tokens else self._held_queues[sequence.record.tenant]
        return queue.is_late(sequence)

    def pop(self, sequence: Sequence) -> None:
        if self.several:
            self.counters.charge(sequence)
            self._spare.count_taken(sequence.record.tenant, 1)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        tenant = sequence.record.tenant
        if sequence in self._pushed_tokens:
            self._withdraw(sequence)
        elif tenant in self._held_queues:
            self._unhold(tenant, sequence)
        else:
            return
        self._count[tenant] -= 1
        if not self._count[tenant]:
            del self._count[tenant]
            self.waits[tenant] = False
            self.counters.on_leave(tenant)
            self._now_ns = -1

    def _first_waits(self, tenant: int) -> None:
        """Note the first waiting sequence of a tenant."""
        while tenant >= self.waits.size:
            self.waits = np.append(self.waits, np.zeros_like(self.waits))
        self.counters.on_arrival(tenant)
        if self._count or self._last_tenant not in (NO_TENANT, tenant):
            self._rest = SEVERAL
        self._count[tenant], self.waits[tenant], self._last_tenant = 0, True, tenant
        self._now_ns = -1

    def _look(self, now_ns: int) -> None:
        """Update the largest allowed counter and move sequences of tenants that are not ahead any more back.

        Done once for each value of `now_ns`, with at most MOVED moves, so that a step takes bounded time.
        """
        if now_ns == self._now_ns:
            return
        self._now_ns, self._may_move = now_ns, MOVED
        if len(self._count) > 1:
            self._limit = int(self.counters.counter[: self.waits.size][self.waits].min()) + ALLOWANCE
        for tenant in list(self._held_queues):
            while self._may_move and tenant in self._held_queues and self._may_offer(tenant):
                self._may_move -= 1
                sequence = self._held_queues[tenant].head(now_ns)
                if sequence is not None:
                    self._unhold(tenant, sequence)
                    self._offer(sequence, now_ns)

    def _may_offer(self, tenant: int) -> bool:
        return (
            not self._spare.is_barred(tenant)
            and self.counters.used_tokens(tenant) + self._offered_tokens.get(tenant, 0) <= self._limit
        )

    def _stands_back(self, head: Sequence, now_ns: int) -> bool:
        """Move the head of the common queue to the queue of its tenant if the tenant is ahead or barred.

        Return whether it was moved.
        """
        tenant = head.record.tenant
        barred = self._spare.is_barred(tenant)
        # A tenant that waits alone is held on while it has held sequences: else its later ones would overtake them.
        others = len(self._count) > 1 or tenant in self._held_queues
        ahead = others and self.counters.used_tokens(tenant) > self._limit
        if head.outputs.size or not (barred or ahead):
            return False
        if tenant not in self._held_queues and self._count[tenant] > max(MOVED, len(self._pushed_tokens) // FLOOD):
            self._hold_all(tenant, now_ns)
            return True
        if not barred:
            if not self._may_move:
                return False
            self._may_move -= 1
        self._withdraw(head)
        if tenant not in self._held_queues:
            self._held_queues[tenant] = self._inner()
        self._held_queues[tenant].push(head, now_ns)
        return True

    def _hold_all(self, tenant: int, now_ns: int) -> None:
        """Move all sequences of a flooding tenant at once.

        With MOVED moves at a time, tenants behind the flood would wait until all of it has moved.
        """
        flood, self._common = self._common, self._inner()
        self._held_queues[tenant] = flood
        for sequence in list(flood):
            if sequence.record.tenant == tenant and not sequence.outputs.size:
                self._offered_tokens[tenant] -= self._pushed_tokens.pop(sequence)
            else:
                flood.drop(sequence)
                self._common.push(sequence, now_ns)
        if not self._offered_tokens[tenant]:
            del self._offered_tokens[tenant]

    def _first_held(self, now_ns: int) -> Sequence | None:
        for tenant in sorted(self._held_queues, key=self.counters.used_tokens):
            if not self._spare.is_barred(tenant) and (head := self._held_queues[tenant].head(now_ns)) is not None:
                return head
        return None

    def _offer(self, sequence: Sequence, now_ns: int) -> None:
        tenant = sequence.record.tenant
        self._common.push(sequence, now_ns)
        self._pushed_tokens[sequence] = sequence.known_tokens
        self._offered_tokens[tenant] = self._offered_tokens.get(tenant, 0) + sequence.known_tokens

    def _withdraw(self, sequence: Sequence) -> None:
        tenant = sequence.record.tenant
        self._common.drop(sequence)
        self._offered_tokens[tenant] -= self._pushed_tokens.pop(sequence)
        if not self._offered_tokens[tenant]:
            del self._offered_tokens[tenant]

    def _unhold(self, tenant: int, sequence: Sequence) -> None:
        self._held_queues[tenant].drop(sequence)
        if not self._held_queues[tenant]:
            del self._held_queues[tenant]

"""PendingPrefix of every sequence that waits for a slot: new, preempted, of a lost replica, or set aside for a while.

The policy's queue holds them in order; here they are counted. While replicas have roles, sequences whose KV lies in a
host tier stand in queues of their own, one for each set of replicas that may take them (Apart), so that those that wait
for one replica do not hide those that are for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.policy.base import Order, Queue
from services.scheduler.core.policy.queues import ByClass, by_arrival
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.types import CLASSES

Takers = frozenset[int]  # numbers of replicas


class Apart:
    """Owned by WaitingQueue. Made anew whenever the answers of `takers` may have changed."""

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


ONE_QUEUE = (None,)


class WaitingQueue:
    """The waiting. `counts`, `swapped_counts` and `class_tokens` (known tokens whose KV lies nowhere) by class and
    `swapped` are exact at any moment."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._queue = order.queue()  # once: the order remembers in it who was served, and who was taken out just now
        self._apart: Apart | None = None  # of the swapped, while there are roles
        self._aside: dict[int, Sequence] = {}  # by number: counted here, and not in the queue
        self.counts = [0] * CLASSES
        self.swapped_counts = [0] * CLASSES
        self._waiting = 0
        self.class_tokens = [0] * CLASSES
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
        if self._apart is not None:
            yield from self._apart
        yield from self._aside.values()

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """`sequence` waits from now on. A preempted one keeps its arrival, so it stands where it stood."""
        sequence.state = State.WAITING
        self.changes += 1
        self._of(sequence).push(sequence, now_ns)
        self._count(sequence, 1)

    def requeue(self, sequence: Sequence, now_ns: int, out: OutcomeBuilder, aside: bool = False) -> None:
        """Let a sequence that has left its row wait again, in its old place, or outside the queue until back()."""
        out.checkpoint(sequence)
        if aside:
            sequence.state = State.WAITING
            self.aside(sequence)
        else:
            self.push(sequence, now_ns)

    def turns(self, replica: int) -> tuple[Takers | None, ...]:
        """The queues that a replica looks at: of the swapped those that are for it, and of all others."""
        return ONE_QUEUE if self._apart is None else (*self._apart.turns(replica), None)

    def turn(self, sequence: Sequence) -> Takers | None:
        """The queue in which it stands or stood."""
        return self._apart.takers(sequence) if self._apart is not None and sequence.swapped else None

    def head(self, now_ns: int, turn: Takers | None = None) -> Sequence | None:
        """Who is next, of all classes; with roles of one queue."""
        return self._queue.head(now_ns) if self._apart is None or turn is None else self._apart.head(turn, now_ns)

    def rank(self, sequence: Sequence, now_ns: int) -> tuple[int, bool, int, int]:
        """The heads of several queues go by class, those before who had a slot once, then by arrival."""
        arrived_ns, lifted = sequence.record.arrived_ns, 0
        if self._order.by_class:
            waited = max(now_ns - arrived_ns, 0) // self._order.age_ns if self._order.age_ns else 0
            lifted = max(sequence.priority - waited, 0)
        return lifted, not sequence.swapped, arrived_ns, sequence.number

    def _of(self, sequence: Sequence) -> Apart | Queue:
        return self._apart if self._apart is not None and sequence.swapped else self._queue

    def pop(self, sequence: Sequence) -> None:
        """Takes the head out: it enters a slot, or comes back by push() or aside()."""
        self.changes += 1
        self._of(sequence).pop(sequence)
        self._count(sequence, -1)

    def pass_over(self, sequence: Sequence) -> None:
        """The head is for another replica: while one looks on, until put_back()."""
        if self._apart is not None and sequence.swapped:
            self._apart.pass_over(sequence)
        else:
            self._queue.drop(sequence)  # not popped: what is taken counts, for fairness

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
        apart = self._apart is not None and sequence.swapped and sequence.number not in self._aside
        if apart:
            self._of(sequence).drop(sequence)
        self._count(sequence, -1)
        sequence.saved, sequence.route.generation = None, -1
        self._count(sequence, 1)
        if apart:
            self._queue.push(sequence, now_ns)

    def split(self, takers: Callable[[Sequence], Takers] | None) -> None:
        """From now on the swapped stand in queues of their own by who may take them, or not. To be called whenever that
        may have changed."""
        if takers is None and self._apart is None:
            return
        moved = [s for s in self._queue if s.swapped] if self._apart is None else list(self._apart)
        for sequence in moved:
            self._of(sequence).drop(sequence)
        self._apart = Apart(self._order, takers) if takers is not None else None
        for sequence in sorted(moved, key=lambda s: s.number):
            self._of(sequence).push(sequence, 0)  # who is late is found when the head is asked for

    def rebuild(self, order: Order, now_ns: int) -> None:
        """The waiting stand in another policy's order from now on."""
        waiting, self._order = list(self), order
        self._queue = order.queue()
        if self._apart is not None:
            self._apart = self._apart.another(order)
        self._aside.clear()
        for sequence in sorted(waiting, key=lambda s: s.number):
            self._of(sequence).push(sequence, now_ns)

    def check(self) -> None:
        """Raises RuntimeError when the counts are not those of the queue."""
        waiting = list(self)
        if self._apart is not None:
            self._apart.check()
        if any(s.swapped for s in self._queue) and self._apart is not None:
            raise RuntimeError("a swapped sequence stands among those to compute")
        counts = [sum(s.priority == c for s in waiting) for c in range(CLASSES)]
        tokens = [sum(s.known - s.computed for s in waiting if s.priority == c) for c in range(CLASSES)]
        if counts != self.counts or tokens != self.class_tokens:
            raise RuntimeError(f"{counts} sequences wait, {self.counts} are counted; {tokens}, {self.class_tokens}")
        swapped = [sum(s.swapped for s in waiting if s.priority == c) for c in range(CLASSES)]
        apart = len({s.number for s in waiting}) == len(waiting)
        if swapped != self.swapped_counts or sum(swapped) != self.swapped or not apart:
            raise RuntimeError("the swapped are counted wrongly, or a sequence waits twice")

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.counts[sequence.priority] += sign
        self._waiting += sign
        self.class_tokens[sequence.priority] += sign * (sequence.known - sequence.computed)
        self.swapped += sign * sequence.swapped
        self.swapped_counts[sequence.priority] += sign * sequence.swapped

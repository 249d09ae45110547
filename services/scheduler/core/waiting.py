"""All sequences that wait for a slot: new, preempted, of a lost replica, or set aside for a while.

WaitingQueue counts them and `scan` offers them to a replica; the policy's queue holds them in order. While replicas
have roles, swapped sequences stand in separate queues (SwappedQueues), so that a sequence that waits for one replica
does not hide one that another replica may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Self

from services.scheduler.core.outcome import OutcomeBuilder
from services.scheduler.core.placement.base import MAX_PASSED
from services.scheduler.core.policy.base import Order, Queue
from services.scheduler.core.policy.queues import ByClass, by_arrival
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.types import CLASS_COUNT, Priority

Takers = frozenset[int]  # numbers of the replicas that may take a sequence
Key = Takers | None  # names a queue; None is the policy's queue


class SwappedQueues:
    """Swapped sequences, in one queue for each set of replicas that may take them.

    Built again whenever the answers of `takers` may have changed.
    """

    def __init__(self, order: Order, takers: Callable[[Sequence], Takers]) -> None:
        """takers: return the replicas that may take a sequence, now or when its KV can be read."""
        self._order = order
        self._takers = takers
        self._queues: dict[Takers, Queue] = {}
        self._keys_of: dict[int, tuple[Takers, ...]] = {}  # replica -> the queues of sequences that it may take
        self._key: dict[Sequence, Takers] = {}  # sequence -> its queue

    def empty_copy(self, order: Order) -> SwappedQueues:
        """Return empty queues in the order of another policy."""
        return SwappedQueues(order, self._takers)

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def keys(self, replica: int) -> tuple[Takers, ...]:
        """Return the keys of the queues of sequences that a replica may take."""
        return self._keys_of.get(replica, ())

    def key(self, sequence: Sequence) -> Takers:
        """Return the key of the queue in which a sequence stands, or stood when it was skipped."""
        return self._key[sequence]

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """Add `sequence`, or add it again after skip()."""
        key = self._key.get(sequence)
        if key is None:
            key = self._key[sequence] = self._takers(sequence)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = resumed_queue(self._order)
            for replica in key:
                self._keys_of[replica] = (*self.keys(replica), key)
        queue.push(sequence, now_ns)

    def head(self, key: Takers, now_ns: int) -> Sequence | None:
        """Return the next sequence of one queue."""
        return self._queues[key].head(now_ns)

    def pop(self, sequence: Sequence) -> None:
        """Remove the head of a queue."""
        self._queues[self._key.pop(sequence)].pop(sequence)

    def skip(self, sequence: Sequence) -> None:
        """Remove a sequence until it is pushed again in the same step."""
        self._queues[self._key[sequence]].drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that does not wait here any more."""
        self._queues[self._key.pop(sequence)].drop(sequence)

    def check(self) -> None:
        """Raise RuntimeError when a sequence is in a queue other than that of the replicas that may take it."""
        if set(self._key) != set(self):
            raise RuntimeError("the swapped sequences in the queues are not those that have a key")
        for key, queue in self._queues.items():
            for sequence in queue:
                if self._key[sequence] != key or self._takers(sequence) != key:
                    raise RuntimeError(f"{key} look at {sequence.number}, {self._takers(sequence)} may take it")


def resumed_queue(order: Order) -> Queue:
    """Return an empty queue for sequences that had a slot before."""
    return ByClass([by_arrival() for _ in range(CLASS_COUNT)], order.age_ns) if order.by_class else by_arrival()


POLICY_QUEUE = (None,)


class WaitingQueue:
    """All waiting sequences, in order and counted.

    These counts are exact at any moment. By class: `counts` and `swapped_counts` (sequences), `class_tokens` (known
    tokens without KV in a host tier). In all: `swapped_count` (sequences). Held sequences are in `held_sequences`
    alone: no count, no iteration and no length has them.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._queue = order.queue()  # one object: it keeps what was served and what was just removed
        self._swapped_queues: SwappedQueues | None = None  # only while replicas have roles
        self._aside: dict[int, Sequence] = {}  # by number, set aside: counted, but not in a queue
        self.held_sequences: dict[int, Sequence] = {}  # by number, until release(); not to be changed from outside
        self.counts = [0] * CLASS_COUNT
        self.swapped_counts = [0] * CLASS_COUNT
        self._length = 0
        self.class_tokens = [0] * CLASS_COUNT
        self.swapped_count = 0
        self.changes = 0  # grows whenever another sequence may be at the head

    def __len__(self) -> int:
        return self._length

    @property
    def urgent(self) -> bool:
        """Whether a sequence of class <= high waits."""
        return bool(self.counts[0] or self.counts[1])

    @property
    def tokens(self) -> int:
        """Known tokens without KV in a host tier, of all waiting sequences."""
        return sum(self.class_tokens)

    def totals(self, low_yields: bool) -> tuple[int, int]:
        """Return how many sequences wait, and their tokens without KV in a host tier; without class low if it
        yields."""
        low = Priority.LOW
        if low_yields:
            return len(self) - self.counts[low], self.tokens - self.class_tokens[low]
        return len(self), self.tokens

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queue
        if self._swapped_queues is not None:
            yield from self._swapped_queues
        yield from self._aside.values()

    def push(self, sequence: Sequence, now_ns: int) -> None:
        """Add `sequence`. A preempted one keeps its arrival, and so its place."""
        sequence.state = State.WAITING
        self.changes += 1
        self._queue_of(sequence).push(sequence, now_ns)
        self._count(sequence, 1)

    def requeue(self, sequence: Sequence, now_ns: int, out: OutcomeBuilder, aside: bool = False) -> None:
        """Add a sequence that has left its row: in its old place, or set aside until put_back()."""
        out.checkpoint(sequence)
        if aside:
            sequence.state = State.WAITING
            self.set_aside(sequence)
        else:
            self.push(sequence, now_ns)

    def scan(self, replica: int, now_ns: int, look_past: int, passed_over: list[Sequence]) -> Scan:
        """Return the scan of the waiting sequences for one replica, which skips at most `look_past` of each queue.

        passed_over: receives the deferred sequences.
        """
        return Scan(self, replica, now_ns, look_past, passed_over)

    def heads(self, replica: int, now_ns: int) -> list[Sequence]:
        """Return the heads of the queues that a replica reads, sorted: by class, swapped first, then by arrival."""
        heads = [head for key in self.keys(replica) if (head := self.head(key, now_ns)) is not None]
        if len(heads) > 1:
            heads.sort(key=lambda head: self.rank(head, now_ns))
        return heads

    def keys(self, replica: int) -> tuple[Key, ...]:
        """Return the keys of the queues that a replica reads: those of swapped sequences that it may take, and None."""
        queues = self._swapped_queues
        return POLICY_QUEUE if queues is None else (*queues.keys(replica), None)

    def key(self, sequence: Sequence) -> Key:
        """Return the key of the queue in which a sequence stands or stood."""
        queues = self._swapped_queues
        return queues.key(sequence) if queues is not None and sequence.is_swapped else None

    def head(self, key: Key, now_ns: int) -> Sequence | None:
        """Return the next sequence of one queue."""
        queues = self._swapped_queues
        return self._queue.head(now_ns) if queues is None or key is None else queues.head(key, now_ns)

    def rank(self, sequence: Sequence, now_ns: int) -> tuple[int, bool, int, int]:
        """Return the sort key of a head among the heads of several queues; the least is first."""
        arrived_ns, lifted = sequence.record.arrived_ns, 0
        if self._order.by_class:
            waited = max(now_ns - arrived_ns, 0) // self._order.age_ns if self._order.age_ns else 0
            lifted = max(sequence.priority - waited, 0)
        return lifted, not sequence.is_swapped, arrived_ns, sequence.number

    def pop(self, sequence: Sequence) -> None:
        """Remove a sequence that is about to enter a slot. If it does not, push() or set_aside() returns it.

        One that was set aside enters where sequences were preempted for it.
        """
        self.changes += 1
        if self._aside.pop(sequence.number, None) is None:
            self._queue_of(sequence).pop(sequence)
        self._count(sequence, -1)

    def skip(self, sequence: Sequence) -> None:
        """Remove a head until unskip(), while a replica looks at the sequences behind it."""
        if self._swapped_queues is not None and sequence.is_swapped:
            self._swapped_queues.skip(sequence)
        else:
            self._queue.drop(sequence)  # pop() would count it as served, for fairness

    def unskip(self, sequence: Sequence, now_ns: int) -> None:
        """Return a skipped sequence to its old place."""
        self._queue_of(sequence).push(sequence, now_ns)

    def set_aside(self, sequence: Sequence) -> None:
        """Keep a sequence that was popped, or has left its slot, outside the queue until put_back()."""
        self._aside[sequence.number] = sequence
        self._count(sequence, 1)

    def hold(self, sequence: Sequence) -> None:
        """Take a waiting sequence out of the queue and the counts until release(): no replica may run it."""
        self.drop(sequence)
        self.held_sequences[sequence.number] = sequence

    def release(self, sequence: Sequence, now_ns: int) -> None:
        """Return a held sequence to the queue."""
        del self.held_sequences[sequence.number]
        self.push(sequence, now_ns)

    def put_back(self, sequence: Sequence, now_ns: int) -> None:
        """Return a sequence that was set aside to the queue; do nothing if it has ended or was parked meanwhile."""
        if self._aside.pop(sequence.number, None) is not None:
            self._count(sequence, -1)
            self.push(sequence, now_ns)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended or is parked. Its state must be set already."""
        self.changes += 1
        if self.held_sequences.pop(sequence.number, None) is not None:
            return
        self._count(sequence, -1)
        if self._aside.pop(sequence.number, None) is None:
            self._queue_of(sequence).drop(sequence)

    def grew(self, sequence: Sequence, tokens: int = 1) -> None:
        """Count tokens that a waiting sequence has to compute after a step that was sent before its preemption."""
        if sequence.number not in self.held_sequences:
            self.class_tokens[sequence.priority] += tokens

    def lose_saved(self, sequence: Sequence, now_ns: int) -> None:
        """Drop the KV that a waiting sequence has in a host tier."""
        if sequence.number in self.held_sequences:
            sequence.saved_kv, sequence.route.generation = None, -1
            return
        moves = self._swapped_queues is not None and sequence.is_swapped and sequence.number not in self._aside
        if moves:
            self._queue_of(sequence).drop(sequence)
        self._count(sequence, -1)
        sequence.saved_kv, sequence.route.generation = None, -1
        self._count(sequence, 1)
        if moves:
            self._queue.push(sequence, now_ns)

    def split(self, takers: Callable[[Sequence], Takers] | None) -> None:
        """Move swapped sequences to queues by the replicas that may take them, or to the policy's queue (None).

        Call it whenever the answers of `takers` may have changed.
        """
        if takers is None and self._swapped_queues is None:
            return
        moved = list(self._swapped_queues or (s for s in self._queue if s.is_swapped))
        for sequence in moved:
            self._queue_of(sequence).drop(sequence)
        self._swapped_queues = SwappedQueues(self._order, takers) if takers is not None else None
        for sequence in sorted(moved, key=lambda s: s.number):
            self._queue_of(sequence).push(sequence, 0)  # now_ns 0: head() finds out which ones are late

    def rebuild(self, order: Order, now_ns: int) -> None:
        """Put all waiting sequences into the order of another policy."""
        waiting, self._order = list(self), order
        self._queue = order.queue()
        if self._swapped_queues is not None:
            self._swapped_queues = self._swapped_queues.empty_copy(order)
        self._aside.clear()
        for sequence in sorted(waiting, key=lambda s: s.number):
            self._queue_of(sequence).push(sequence, now_ns)

    def check(self) -> None:
        """Raise RuntimeError when the counts differ from the queues, or a sequence is in a wrong queue."""
        waiting = list(self)
        if self._swapped_queues is not None:
            self._swapped_queues.check()
            if any(s.is_swapped for s in self._queue):
                raise RuntimeError("a swapped sequence stands among those to compute")
        counts = [sum(s.priority == c for s in waiting) for c in range(CLASS_COUNT)]
        tokens = [
            sum(s.known_tokens - s.computed_tokens for s in waiting if s.priority == c) for c in range(CLASS_COUNT)
        ]
        if counts != self.counts or tokens != self.class_tokens:
            raise RuntimeError(f"{counts} sequences wait, {self.counts} are counted; {tokens}, {self.class_tokens}")
        swapped = [sum(s.is_swapped for s in waiting if s.priority == c) for c in range(CLASS_COUNT)]
        if swapped != self.swapped_counts or sum(swapped) != self.swapped_count:
            raise RuntimeError(f"{swapped} swapped sequences wait, {self.swapped_counts} are counted")
        if len({s.number for s in waiting} - self.held_sequences.keys()) != len(waiting):
            raise RuntimeError("a sequence waits twice")

    def _queue_of(self, sequence: Sequence) -> SwappedQueues | Queue:
        queues = self._swapped_queues
        return queues if queues is not None and sequence.is_swapped else self._queue

    def _count(self, sequence: Sequence, sign: int) -> None:
        priority = sequence.priority
        self._length += sign
        self.counts[priority] += sign
        self.class_tokens[priority] += sign * (sequence.known_tokens - sequence.computed_tokens)
        if sequence.is_swapped:
            self.swapped_count += sign
            self.swapped_counts[priority] += sign


class Scan:
    """One scan of the waiting sequences by a replica, in the order of the policy. A context manager and an iterator.

    A sequence that is neither taken nor deferred before the next one is read is skipped. Skipped sequences return to
    their old places when the context exits. After a `break` a new loop goes on with the same sequence. A deferred
    sequence is yielded once more: after all other ones, or before them when MAX_PASSED later ones have entered before
    it.
    """

    def __init__(
        self, waiting: WaitingQueue, replica: int, now_ns: int, look_past: int, passed_over: list[Sequence]
    ) -> None:
        """passed_over: receives the deferred sequences. look_past: sequences of each queue to skip, at most."""
        self.skipped_sequences: list[Sequence] = []
        self._waiting = waiting
        self._replica = replica
        self._now_ns = now_ns
        self._look_past = look_past
        self._passed_over = passed_over
        self._deferred_sequences: list[Sequence] = []  # those of `skipped_sequences` that are yielded again
        self._counts: dict[Key, int] = {}  # skipped sequences by queue
        self._closed_queues: set[Key] = set()  # queues with `look_past` skipped sequences: no further one is read
        self._current: Sequence | None = None  # yielded, and not yet taken, deferred or skipped
        self._at_end = False  # only deferred ones are left: one enters per step, so that other replicas get some

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self.skipped_sequences:
            self._waiting.unskip(sequence, self._now_ns)

    def __iter__(self) -> Iterator[Sequence]:
        while (sequence := self._next_sequence()) is not None:
            self._current = sequence
            yield sequence
            if self._current is sequence:
                self._skip(sequence)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue because it is about to enter."""
        if self.skipped_sequences and sequence in self.skipped_sequences:
            self.skipped_sequences.remove(sequence)
            self._deferred_sequences.remove(sequence)
            self._passed_over.remove(sequence)
            key = self._waiting.key(sequence)
            self._counts[key] -= 1
            self._closed_queues.discard(key)
            self._waiting.unskip(sequence, self._now_ns)
        self._waiting.pop(sequence)
        self._current = None
        self._at_end = bool(self._deferred_sequences) and not self._waiting.heads(self._replica, self._now_ns)

    def defer(self, sequence: Sequence) -> bool:
        """Skip a sequence that may enter but should not enter first, and yield it again later.

        Return False, and do nothing, if it was deferred before.
        """
        if sequence in self.skipped_sequences:
            return False
        if self._skip(sequence):
            self._deferred_sequences.append(sequence)
            self._passed_over.append(sequence)
        self._current = None
        return True

    def look_further(self) -> None:
        """Let one more sequence of each queue be skipped."""
        self._look_past += 1

    def _next_sequence(self) -> Sequence | None:
        deferred, waiting, now_ns = self._deferred_sequences, self._waiting, self._now_ns
        if self._at_end:
            return None
        for sequence in deferred:
            if sequence.route.passes >= MAX_PASSED:
                return sequence
        keys = [key for key in waiting.keys(self._replica) if key not in self._closed_queues]
        heads = [head for key in keys if (head := waiting.head(key, now_ns)) is not None]
        if len(heads) > 1:
            return min(heads, key=lambda head: waiting.rank(head, now_ns))
        return heads[0] if heads else deferred[0] if deferred else None

    def _skip(self, sequence: Sequence) -> bool:
        """Skip a sequence; return False, and close its queue, if `look_past` of the queue are skipped already."""
        if sequence in self._deferred_sequences:
            self._deferred_sequences.remove(sequence)
            return True
        key = self._waiting.key(sequence)
        if self._counts.get(key, 0) >= self._look_past:
            self._closed_queues.add(key)
            return False
        self._counts[key] = self._counts.get(key, 0) + 1
        self._waiting.skip(sequence)
        self.skipped_sequences.append(sequence)
        return True

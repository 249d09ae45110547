"""Queues of waiting sequences, from which the orders of order.py are built.

Each queue implements base.Queue: push, head, pop and drop. Removal is lazy: an entry of a heap is live only while its
sequence still refers to it and is WAITING. A heap is rebuilt when more than about half of its entries are dead. So an
operation takes O(log n) amortised time, and memory is proportional to the sequences that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.scheduler.core.policy.base import Queue
from services.scheduler.core.sequence import Sequence, State
from services.scheduler.core.table import Int64

LOOKED_AT = 128  # prefixes are not looked up while more sequences than this wait (SGLang)
LATE_EVERY = 8  # one of so many admissions is of a late sequence
MOVED = 32  # sequences that one queue moves (to the late ones, or between tenants) for one value of now_ns, at most
EMPTY = 1 << 62  # ns, later than any arrival
Float64 = npt.NDArray[np.float64]
Entry = tuple[int, int, int, Sequence]


class Heap:
    """Sequences by a key that is fixed when they are pushed, least first; equal keys by number."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._live: dict[Sequence, Entry] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._live

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._live if sequence.state is State.WAITING)

    def push(self, sequence: Sequence, key: int) -> None:
        self._serial += 1  # no two entries are equal, so sequences are never compared
        entry = (key, sequence.number, self._serial, sequence)
        self._live[sequence] = entry
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * len(self._live) + 64:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)

    def peek(self) -> Sequence | None:
        """Return the sequence with the least key, or None. Remove the dead entries before it."""
        while self._entries:
            entry = self._entries[0]
            sequence = entry[3]
            if self._live.get(sequence) is entry:
                if sequence.state is State.WAITING:
                    return sequence
                del self._live[sequence]
            heapq.heappop(self._entries)
        return None

    def key(self) -> int:
        """Return the key of first(). Call it only after first() has returned a sequence."""
        return self._entries[0][0]

    def remove(self, sequence: Sequence) -> bool:
        """Make the entry of `sequence` dead; return whether it had one."""
        if self._live.pop(sequence, None) is None:
            return False
        if len(self._entries) > 2 * len(self._live) + 64:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)
        return True


class Keyed:
    """Order by one key of the sequence, least first; equal keys by number."""

    def __init__(self, key: Callable[[Sequence], int]) -> None:
        self._heap = Heap()
        self._key = key

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heap)

    def __bool__(self) -> bool:
        return len(self._heap) > 0

    def push(self, sequence: Sequence, now_ns: int) -> None:
        self._heap.push(sequence, self._key(sequence))

    def head(self, now_ns: int) -> Sequence | None:
        return self._heap.peek()

    def held_back(self, now_ns: int) -> Sequence | None:
        """Return None: this queue does not serve later sequences before earlier ones."""
        return None

    def is_late(self, sequence: Sequence) -> bool:
        """Return False: this queue knows no limits."""
        return False

    def pop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)


def by_arrival() -> Keyed:
    """Return an empty queue in order of arrival; equal arrivals by number."""
    return Keyed(arrival)


def arrival(sequence: Sequence) -> int:
    """Return the arrival of the sequence's request, in ns."""
    return sequence.record.arrived_ns


class BySlack:
    """Order by latency limit. A sequence is late when it can no longer meet its limit.

    The order is: first sequences with outputs (preempted ones), by arrival; then sequences in time, by key; then late
    ones, by arrival. With `late_first` late sequences go before those in time.
    """

    def __init__(
        self,
        start_by: Callable[[Sequence], int],
        key: Callable[[Sequence], int],
        late_first: bool = False,
        became_late: Callable[[Sequence, int], None] | None = None,
    ) -> None:
        """start_by: return the last moment (ns) at which a prefill may begin. key: order of sequences in time.

        Neither may change while a sequence waits. became_late: called with each that was in time when it came, and the
        time.
        """
        self._became_late = became_late
        self._start_by, self._key = start_by, key
        self._late_first = late_first
        self._begun, self._timely, self._late = Heap(), Heap(), Heap()
        self._heaps = (self._begun, self._timely, self._late)
        self._moved_ns, self._may_move = -1, MOVED

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._heaps:
            yield from heap

    def push(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.outputs.size:
            self._begun.push(sequence, arrival(sequence))
        elif self._start_by(sequence) < now_ns:
            self._late.push(sequence, arrival(sequence))
        else:
            self._timely.push(sequence, self._key(sequence))

    def __bool__(self) -> bool:
        return bool(self._timely or self._late or self._begun)

    def head(self, now_ns: int) -> Sequence | None:
        begun, timely = self._begun.peek(), self._move(now_ns)
        late = self._late.peek()
        if late is not None and (timely is None or self._late_first):
            return begun or late
        return begun or timely

    def held_back(self, now_ns: int) -> Sequence | None:
        """Return the first late sequence, which may have waited longer than the head, or None."""
        self._move(now_ns)
        return self._late.peek()

    def is_late(self, sequence: Sequence) -> bool:
        """Return whether `sequence` waits here and was late when head() was last called."""
        return sequence in self._late

    def pop(self, sequence: Sequence) -> None:
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        for heap in self._heaps:
            if heap.remove(sequence):
                return

    def _move(self, now_ns: int) -> Sequence | None:
        """Move sequences that have become late, at most MOVED for one `now_ns`; return the first one in time, or None.

        When no move is left the first one may be late; it is returned only if no late sequence waits.
        """
        if now_ns != self._moved_ns:
            self._moved_ns, self._may_move = now_ns, MOVED
        while True:
            timely = self._timely.peek()
            if timely is None or self._start_by(timely) >= now_ns:
                return timely
            if not self._may_move:
                return None if self._late else timely
            self._may_move -= 1
            self._timely.remove(timely)
            self._late.push(timely, arrival(timely))
            if self._became_late is not None:
                self._became_late(timely, now_ns)


class Inner(Protocol):
    """A queue of one class; true while a sequence waits in it."""

    def __bool__(self) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence, now_ns: int) -> None: ...

    def head(self, now_ns: int) -> Sequence | None: ...

    def held_back(self, now_ns: int) -> Sequence | None:
        """Return the first sequence that later ones may overtake, or None."""

    def is_late(self, sequence: Sequence) -> bool:
        """Return whether `sequence` waits here and can no longer meet its limit."""

    def pop(self, sequence: Sequence) -> None: ...

    def drop(self, sequence: Sequence) -> None: ...


class ByClass:
    """One queue for each class, best class first.

    Each `age_ns` waited lifts a sequence by one class, up to realtime; 0 means never. Heads of equal class go by
    arrival, late ones after those in time. Only the heads of the four queues are compared.

    Late sequences wait for those in time of their class, however long that takes: else an overload would make all of
    them late. To prevent starvation one of LATE_EVERY admissions takes the late sequence with the earliest arrival, of
    any class. While realtime or high sequences wait this is one of 4 * LATE_EVERY admissions.
    """

    def __init__(self, inner: Collection[Inner], age_ns: int) -> None:
        """inner: the queue of each class, best class first. age_ns: ns of waiting that lift a sequence by one class."""
        self._queues = list(inner)
        self._age_ns = age_ns
        self._admissions = 0
        # Numbers of sequences popped at _now_ns; one that comes back was not admitted.
        self._popped_numbers: set[int] = set()
        self._now_ns = 0

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues:
            yield from queue

    def push(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.number in self._popped_numbers:
            self._popped_numbers.remove(sequence.number)
            self._admissions -= 1
        self._queues[sequence.priority].push(sequence, now_ns)

    def head(self, now_ns: int) -> Sequence | None:
        if now_ns != self._now_ns:
            self._now_ns = now_ns
            self._popped_numbers.clear()
        queues = [queue for queue in self._queues if queue]
        if self._admissions % LATE_EVERY == LATE_EVERY - 1:
            urgent = self._queues[0] or self._queues[1]
            if not urgent or self._admissions // LATE_EVERY % 4 == 3:
                held = [late for queue in queues if (late := queue.held_back(now_ns)) is not None]
                if held:
                    return min(held, key=arrival)
        heads = [(head, queue) for queue in queues if (head := queue.head(now_ns)) is not None]
        if len(heads) > 1:
            return min(heads, key=lambda pair: self._rank(pair[0], pair[1].is_late(pair[0]), now_ns))[0]
        return heads[0][0] if heads else None

    def pop(self, sequence: Sequence) -> None:
        self._queues[sequence.priority].pop(sequence)
        self._admissions += 1
        self._popped_numbers.add(sequence.number)

    def drop(self, sequence: Sequence) -> None:
        self._queues[sequence.priority].drop(sequence)

    def _rank(self, sequence: Sequence, late: bool, now_ns: int) -> tuple[int, bool, int, int]:
        arrived, priority = sequence.record.arrived_ns, sequence.priority
        if self._age_ns:
            priority = max(priority - max(now_ns - arrived, 0) // self._age_ns, 0)
        return priority, late, arrived, sequence.number


class SwappedFirst:
    """Swapped sequences (with KV in a host tier) by arrival, then the queue of all other sequences."""

    def __init__(self, others: Queue) -> None:
        self._swapped_queue, self._other_queue = by_arrival(), others

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._swapped_queue
        yield from self._other_queue

    def push(self, sequence: Sequence, now_ns: int) -> None:
        (self._swapped_queue if sequence.is_swapped else self._other_queue).push(sequence, now_ns)

    def head(self, now_ns: int) -> Sequence | None:
        while (first := self._swapped_queue.head(now_ns)) is not None:
            if first.is_swapped:
                return first
            self._swapped_queue.drop(first)  # its KV was evicted, or lost with its replica
            self._other_queue.push(first, now_ns)
        return self._other_queue.head(now_ns)

    def pop(self, sequence: Sequence) -> None:
        if sequence.is_swapped:
            self._swapped_queue.pop(sequence)
        else:
            self._other_queue.pop(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._swapped_queue.drop(sequence)
        self._other_queue.drop(sequence)


class ByRatio:
    """Highest response ratio first: (waited + work) / work, where work is `token_ns` for each known token (HRRN).

    Of two sequences of equal size the earlier one always has the higher ratio. So sequences stand in FIFO buckets, four
    for each doubling of the size, and only the first ones of the buckets are compared, as columns.
    """

    def __init__(self, token_ns: int) -> None:
        self._token_ns = token_ns
        self._buckets: list[Heap] = []
        self._bucket_of: dict[Sequence, int] = {}  # sequence -> its bucket
        self._arrival_ns: Int64 = np.zeros(0, np.int64)  # by bucket, arrival of its first sequence (ns); EMPTY if empty
        self._work: Float64 = np.zeros(0)  # by bucket, predicted prefill of its first sequence, ns

    def __iter__(self) -> Iterator[Sequence]:
        for bucket in self._buckets:
            yield from bucket

    def push(self, sequence: Sequence, now_ns: int) -> None:
        at = quarter_octave(sequence.known_tokens)
        while len(self._buckets) <= at:
            self._buckets.append(Heap())
            self._arrival_ns, self._work = np.append(self._arrival_ns, EMPTY), np.append(self._work, 1.0)
        self._buckets[at].push(sequence, arrival(sequence))
        self._bucket_of[sequence] = at
        self._look(at)

    def head(self, now_ns: int) -> Sequence | None:
        while self._buckets:
            at = int(np.argmax((now_ns - self._arrival_ns) / self._work))
            before = self._arrival_ns[at], self._work[at]
            first = self._look(at)
            if (self._arrival_ns[at], self._work[at]) == before:
                return first
        return None

    def pop(self, sequence: Sequence) -> None:
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        if (at := self._bucket_of.pop(sequence, None)) is not None:
            self._buckets[at].remove(sequence)
            self._look(at)

    def _look(self, at: int) -> Sequence | None:
        """Update the columns for one bucket; return its first sequence, or None."""
        first = self._buckets[at].peek()
        if first is None:
            self._arrival_ns[at] = EMPTY
        else:
            self._arrival_ns[at], self._work[at] = arrival(first), max(first.known_tokens, 1) * self._token_ns
        return first


class ByPrefix:
    """Most cached tokens first, equal ones by arrival; by arrival alone while more than LOOKED_AT wait (SGLang)."""

    def __init__(self) -> None:
        self._heap = Heap()
        self._ranking: list[Sequence] = []  # sorted, best last
        self._made_of = (-1, -1)  # now_ns and sum of hits when it was sorted; (-1, -1) if it has to be sorted again

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heap)

    def push(self, sequence: Sequence, now_ns: int) -> None:
        self._heap.push(sequence, arrival(sequence))
        self._made_of = (-1, -1)

    def head(self, now_ns: int) -> Sequence | None:
        if len(self._heap) > LOOKED_AT:
            return self._heap.peek()
        made_of = now_ns, sum([sequence.prefix.hits for sequence in self._ranking])
        if made_of != self._made_of:
            self._ranking = sorted(self._heap, key=lambda s: (s.prefix.hits, -arrival(s), -s.number))
            self._made_of = now_ns, sum([sequence.prefix.hits for sequence in self._ranking])
        while self._ranking and not (self._ranking[-1] in self._heap and self._ranking[-1].state is State.WAITING):
            gone = self._ranking.pop()
            self._made_of = now_ns, self._made_of[1] - gone.prefix.hits
        return self._ranking[-1] if self._ranking else None

    def pop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)


def quarter_octave(tokens: int) -> int:
    """Return the bucket of a size: four for each doubling. Sizes in a bucket differ by less than 25 %."""
    tokens = max(tokens, 1)
    octave = tokens.bit_length() - 1
    return 4 * octave + ((tokens << 2 >> octave) & 3)

"""The waiting in order: the queues that the orders of order.py are made of.

A sequence is pushed, looked at as the head, popped and dropped. Removal is lazy everywhere: an entry counts only while
its sequence is still listed under it and WAITING, and heaps are rebuilt before more than half of them is dead, so every
operation takes O(log n) and nothing grows beyond what waits.
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
from services.scheduler.core.types import CLASSES

LOOKED_AT = 128  # above so many waiting, prefixes are not looked at (SGLang)
LATE_EVERY = 8  # admissions of which one is of the late
MOVED = 32  # sequences that are moved to the late in one moment at most
EMPTY = 1 << 62  # ns, later than anything
Float64 = npt.NDArray[np.float64]
Entry = tuple[int, int, int, Sequence]


class Heap:
    """Sequences by a key that is fixed when they are pushed; equal keys by number."""

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

    def first(self) -> Sequence | None:
        """The least; dead entries above it are removed."""
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
        """Of first(), which was not None."""
        return self._entries[0][0]

    def remove(self, sequence: Sequence) -> bool:
        """Its entry is dead from now on; False if it had none."""
        if self._live.pop(sequence, None) is None:
            return False
        if len(self._entries) > 2 * len(self._live) + 64:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)
        return True


class Keyed:
    """By one key of the sequence, smallest first; equal ones by number."""

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
        return self._heap.first()

    def held_back(self, now_ns: int) -> Sequence | None:
        """Nobody waits behind later ones."""
        return None

    def pop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)


def by_arrival() -> Keyed:
    """First come, first served; equal arrivals by number."""
    return Keyed(arrival)


def arrival(sequence: Sequence) -> int:
    return sequence.record.arrived_ns


class BySlack:
    """By key(sequence), which is fixed; start_by(sequence) is the last moment at which its prefill may begin.

    Those who can no more make it are late: with `late_first` they go before all others; else they are served when
    nobody in time waits. The late stand by arrival, and so do those who have outputs already (preempted ones), before
    everybody: their first token is out.
    """

    def __init__(
        self, start_by: Callable[[Sequence], int], key: Callable[[Sequence], int], late_first: bool = False
    ) -> None:
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
        begun, timely = self._begun.first(), self._move(now_ns)
        late = self._late.first()
        if late is not None and (timely is None or self._late_first):
            return begun or late
        return begun or timely

    def held_back(self, now_ns: int) -> Sequence | None:
        """The first of the late, who may have waited longer than the head."""
        self._move(now_ns)
        return self._late.first()

    def pop(self, sequence: Sequence) -> None:
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        for heap in self._heaps:
            if heap.remove(sequence):
                return

    def _move(self, now_ns: int) -> Sequence | None:
        """The first who is in time, after some who are not have been moved to the late, at most so many a moment."""
        if now_ns != self._moved_ns:
            self._moved_ns, self._may_move = now_ns, MOVED
        while True:
            timely = self._timely.first()
            if timely is None or self._start_by(timely) >= now_ns:
                return timely
            if not self._may_move:
                return None if self._late else timely
            self._may_move -= 1
            self._timely.remove(timely)
            self._late.push(timely, arrival(timely))


class Inner(Protocol):
    """A queue of one class; true while something waits in it."""

    def __bool__(self) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence, now_ns: int) -> None: ...

    def head(self, now_ns: int) -> Sequence | None: ...

    def held_back(self, now_ns: int) -> Sequence | None:
        """The first who waits behind later ones."""

    def pop(self, sequence: Sequence) -> None: ...

    def drop(self, sequence: Sequence) -> None: ...


class ByClass:
    """One queue a class, best class first; each `age_ns` waited (0: never) lifts a sequence by one class, no higher
    than realtime. Of equal classes the first come. Only the heads of the four are compared.

    Whom his class holds back as late waits for those in time however long that lasts, or an overload would make all
    of them late; so that he does not starve every eighth admission is of the longest waiting of them, of any class;
    every 32nd while realtime or high ones wait.
    """

    def __init__(self, inner: Collection[Inner], age_ns: int) -> None:
        """inner: the queue of each class, best class first."""
        self._queues = list(inner)
        self._age_ns = age_ns
        self._admitted = 0
        self._out: set[int] = set()  # numbers of those popped since time passed: they may come back
        self._now_ns = 0

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues:
            yield from queue

    def push(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.number in self._out:
            self._out.remove(sequence.number)
            self._admitted -= 1
        self._queues[sequence.priority].push(sequence, now_ns)

    def head(self, now_ns: int) -> Sequence | None:
        if now_ns != self._now_ns:
            self._now_ns = now_ns
            self._out.clear()
        urgent = self._queues[0] or self._queues[1]
        if self._admitted % LATE_EVERY == LATE_EVERY - 1 and (not urgent or self._admitted // LATE_EVERY % 4 == 3):
            held = [late for queue in self._queues if queue and (late := queue.held_back(now_ns)) is not None]
            if held:
                return min(held, key=arrival)
        best, rank = None, (CLASSES, 0, 0)
        for queue in self._queues:
            if not queue or (head := queue.head(now_ns)) is None:
                continue
            its = self._rank(head, now_ns)
            if its < rank:
                best, rank = head, its
        return best

    def pop(self, sequence: Sequence) -> None:
        self._queues[sequence.priority].pop(sequence)
        self._admitted += 1
        self._out.add(sequence.number)

    def drop(self, sequence: Sequence) -> None:
        self._queues[sequence.priority].drop(sequence)

    def _rank(self, sequence: Sequence, now_ns: int) -> tuple[int, int, int]:
        arrived, priority = sequence.record.arrived_ns, sequence.priority
        if self._age_ns:
            priority = max(priority - max(now_ns - arrived, 0) // self._age_ns, 0)
        return priority, arrived, sequence.number


class SwappedFirst:
    """Those whose KV lies in the host tier by arrival, before all others."""

    def __init__(self, others: Queue) -> None:
        self._swapped, self._others = by_arrival(), others

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._swapped
        yield from self._others

    def push(self, sequence: Sequence, now_ns: int) -> None:
        (self._swapped if sequence.swapped else self._others).push(sequence, now_ns)

    def head(self, now_ns: int) -> Sequence | None:
        while (first := self._swapped.head(now_ns)) is not None:
            if first.swapped:
                return first
            self._swapped.drop(first)  # its KV was lost with its replica, or evicted
            self._others.push(first, now_ns)
        return self._others.head(now_ns)

    def pop(self, sequence: Sequence) -> None:
        if sequence.swapped:
            self._swapped.pop(sequence)
        else:
            self._others.pop(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._swapped.drop(sequence)
        self._others.drop(sequence)


class ByRatio:
    """Highest response ratio first: (waited + work) / work, where work is `token_ns` for each known token (HRRN).

    The ratio of two sequences of equal size never changes sides, so they stand in FIFO buckets of a quarter octave, and
    only the first ones are compared, as columns.
    """

    def __init__(self, token_ns: int) -> None:
        self._token_ns = token_ns
        self._buckets: list[Heap] = []
        self._where: dict[Sequence, int] = {}
        self._arrived: Int64 = np.zeros(0, np.int64)  # of the first of each bucket; EMPTY without one
        self._work: Float64 = np.zeros(0)

    def __iter__(self) -> Iterator[Sequence]:
        for bucket in self._buckets:
            yield from bucket

    def push(self, sequence: Sequence, now_ns: int) -> None:
        at = quarter_octave(sequence.known)
        while len(self._buckets) <= at:
            self._buckets.append(Heap())
            self._arrived, self._work = np.append(self._arrived, EMPTY), np.append(self._work, 1.0)
        self._buckets[at].push(sequence, arrival(sequence))
        self._where[sequence] = at
        self._look(at)

    def head(self, now_ns: int) -> Sequence | None:
        while self._buckets:
            at = int(np.argmax((now_ns - self._arrived) / self._work))
            before = self._arrived[at], self._work[at]
            first = self._look(at)
            if (self._arrived[at], self._work[at]) == before:
                return first
        return None

    def pop(self, sequence: Sequence) -> None:
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        if (at := self._where.pop(sequence, None)) is not None:
            self._buckets[at].remove(sequence)
            self._look(at)

    def _look(self, at: int) -> Sequence | None:
        """Notes the first of a bucket in the columns."""
        first = self._buckets[at].first()
        if first is None:
            self._arrived[at] = EMPTY
        else:
            self._arrived[at], self._work[at] = arrival(first), max(first.known, 1) * self._token_ns
        return first


class ByPrefix:
    """Most cached tokens first, equal ones by arrival; by arrival alone while more than 128 wait (SGLang)."""

    def __init__(self) -> None:
        self._heap = Heap()
        self._ranked: list[Sequence] = []  # best last
        self._made_of = (-1, -1)  # time and sum of hits of that; no such: it is out of date

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heap)

    def push(self, sequence: Sequence, now_ns: int) -> None:
        self._heap.push(sequence, arrival(sequence))
        self._made_of = (-1, -1)

    def head(self, now_ns: int) -> Sequence | None:
        if len(self._heap) > LOOKED_AT:
            return self._heap.first()
        made_of = now_ns, sum([sequence.prefix.hits for sequence in self._ranked])
        if made_of != self._made_of:
            self._ranked = sorted(self._heap, key=lambda s: (s.prefix.hits, -arrival(s), -s.number))
            self._made_of = now_ns, sum([sequence.prefix.hits for sequence in self._ranked])
        while self._ranked and not (self._ranked[-1] in self._heap and self._ranked[-1].state is State.WAITING):
            gone = self._ranked.pop()
            self._made_of = now_ns, self._made_of[1] - gone.prefix.hits
        return self._ranked[-1] if self._ranked else None

    def pop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)

    def drop(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)


def quarter_octave(tokens: int) -> int:
    """Bucket of a size: four for each doubling. Sizes of a bucket differ by less than 25 %."""
    tokens = max(tokens, 1)
    octave = tokens.bit_length() - 1
    return 4 * octave + ((tokens << 2 >> octave) & 3)

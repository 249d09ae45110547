"""The order of waiting sequences: queues of the policies, and fair shares of tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.policy.base import Queue
from services.scheduler.core.policy.fairness import ABSENT, Fair
from services.scheduler.core.policy.order import (
    ClassThenArrival,
    ClassThenSlack,
    FirstCome,
    LeastSlack,
    LongestPrefix,
    ResponseRatio,
    ShortestPrompt,
    start_by,
)
from services.scheduler.core.policy.queues import LATE_EVERY, arrival, quarter_octave
from services.scheduler.core.sequence import SavedKV, Sequence, State
from tests.unit.scheduler.core.policy.rows import drained, waiting

MS, S = 1_000_000, 1_000_000_000
TOKEN_NS = 50_000


class Model:
    """The waiting in a list, and what a brute-force order remembers: which were late, how many were admitted."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.late: set[Sequence] = set()
        self.admitted = 0

    def pushed(self, s: Sequence, now: int) -> None:
        self.waiting.append(s)
        self.late.discard(s)
        if start_by(s, 2 * S, TOKEN_NS) < now:
            self.late.add(s)

    def arrivals(self, now: int) -> Sequence:
        return min(self.waiting, key=lambda s: (arrival(s), s.number))

    def swapped(self, now: int) -> Sequence:
        return min(self.waiting, key=lambda s: (not s.is_swapped, arrival(s), s.number))

    def shortest(self, now: int) -> Sequence:
        return min(self.waiting, key=lambda s: (s.known_tokens, s.number))

    def prefix(self, now: int) -> Sequence:
        return min(self.waiting, key=lambda s: (-s.prefix.hits, arrival(s), s.number))

    def classes(self, now: int) -> Sequence:
        return min(self.waiting, key=lambda s: self.rank(s, now))

    def ratio(self, now: int) -> Sequence:
        """Of the oldest of each quarter octave the one with the highest (waited + work) / work."""
        heads: dict[int, Sequence] = {}
        for s in sorted(self.waiting, key=lambda s: (arrival(s), s.number)):
            heads.setdefault(octave(s.known_tokens), s)
        ratios = {s: (now - arrival(s)) / (s.known_tokens * TOKEN_NS) for s in heads.values()}  # less one
        return max((heads[size] for size in sorted(heads)), key=lambda s: ratios[s])

    def slack(self, among: list[Sequence], now: int, weight: int, late_first: bool) -> Sequence:
        """Late is the one that stands first of those in time and cannot be in time any more."""
        fresh = sorted(
            (s for s in among if not s.outputs.size and s not in self.late),
            key=lambda s: (start_by(s, 2 * S, -weight * TOKEN_NS), s.number),
        )
        while fresh and start_by(fresh[0], 2 * S, TOKEN_NS) < now:
            self.late.add(fresh.pop(0))
        begun = [s for s in among if s.outputs.size]
        late = [s for s in among if not s.outputs.size and s in self.late]
        oldest = {"key": lambda s: (arrival(s), s.number)}
        if begun:
            return min(begun, **oldest)
        return min(late, **oldest) if late and (not fresh or late_first) else fresh[0]

    def least_slack(self, now: int) -> Sequence:
        return self.slack(self.waiting, now, -1, True)

    def class_slack(self, now: int) -> Sequence:
        classes = [[s for s in self.waiting if s.priority == priority] for priority in range(4)]
        heads = [self.slack(among, now, 4, False) for among in classes if among]
        held = [s for s in self.waiting if not s.outputs.size and s in self.late]
        urgent = any(s.priority <= 1 for s in self.waiting)
        if held and self.admitted % (4 * LATE_EVERY if urgent else LATE_EVERY) == (4 if urgent else 1) * LATE_EVERY - 1:
            # of one class by number, of the classes the first that has one of that age
            return min(held, key=lambda s: (arrival(s), s.priority, s.number))
        return min(heads, key=lambda s: self.rank(s, now, s in held))

    @staticmethod
    def rank(s: Sequence, now: int, late: bool = False) -> tuple[int, bool, int, int]:
        return max(s.priority - max(now - arrival(s), 0) // (10 * S), 0), late, arrival(s), s.number


def octave(tokens: int) -> int:
    return int(np.floor(np.log2(tokens))) * 4 + int((tokens / 2 ** np.floor(np.log2(tokens)) - 1) * 4)


ORDERS: dict[str, tuple[Callable[[], Queue], Callable[[Model, int], Sequence]]] = {
    "fcfs": (lambda: FirstCome().queue(), Model.arrivals),
    "swapped": (lambda: FirstCome(True).queue(), Model.swapped),
    "class": (lambda: ClassThenArrival().queue(), Model.classes),
    "class-slack": (lambda: ClassThenSlack().queue(), Model.class_slack),
    "least-slack": (lambda: LeastSlack().queue(), Model.least_slack),
    "shortest": (lambda: ShortestPrompt().queue(), Model.shortest),
    "ratio": (lambda: ResponseRatio().queue(), Model.ratio),
    "prefix": (lambda: LongestPrefix().queue(), Model.prefix),
}
PUSH = st.tuples(
    st.just("push"), st.integers(0, 3), st.integers(1, 40_000), st.sampled_from([0, 300 * MS, 9 * S]), st.integers(0, 5)
)
OTHERS = st.tuples(
    st.sampled_from(["pop", "pop", "drop", "park", "resume", "tick", "preempt", "back"]), st.integers(0, 1000)
)


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=60, deadline=None)
@given(events=st.lists(st.one_of(PUSH, OTHERS), max_size=60))
def test_head_is_one_that_search_of_all_the_waiting_finds(order: str, events: list[tuple[Any, ...]]) -> None:
    make, best = ORDERS[order]
    queue, model, now = make(), Model(), 100 * S
    parked: list[Sequence] = []
    running: list[Sequence] = []

    def push(sequence: Sequence) -> None:
        sequence.state = State.WAITING
        queue.push(sequence, now)
        model.pushed(sequence, now)

    for number, (kind, *values) in enumerate(events):
        at = int(values[0])
        if kind == "push":
            priority, tokens, ttft, hits = values
            sequence = waiting(number, now - number % 3 * S, tokens, priority, ttft)
            sequence.prefix.hits = int(hits) * 16
            if hits == 5:
                sequence.saved_kv = SavedKV(0, np.zeros(1, np.int32), 1, 0, True)
            push(sequence)
        elif kind == "tick":
            now += at * 40 * MS
        elif kind in ("drop", "park") and model.waiting:
            sequence = model.waiting.pop(at % len(model.waiting))
            sequence.state = State.PARKED if kind == "park" else State.ENDED
            queue.drop(sequence)
            if kind == "park":
                parked.append(sequence)
        elif kind == "resume" and parked:
            push(parked.pop(at % len(parked)))
        elif kind == "preempt" and running:
            sequence = running.pop(at % len(running))
            sequence.outputs = np.zeros(at % 3, np.int32)
            push(sequence)
        elif kind in ("pop", "back") and model.waiting:
            sequence = queue.head(now)
            assert sequence is not None
            queue.pop(sequence)
            model.waiting.remove(sequence)
            if kind == "back":
                queue.push(sequence, now)
                model.pushed(sequence, now)
            else:
                model.admitted += 1
                sequence.state = State.RUNNING
                running.append(sequence)
        assert queue.head(now) is (best(model, now) if model.waiting else None)
        assert sorted(s.number for s in queue) == sorted(s.number for s in model.waiting)


def test_every_32nd_admission_is_the_longest_late_one_beside_urgent() -> None:
    queue = ClassThenSlack().queue()
    queue.push(waiting(0, 0, priority=3), 0)
    served = []
    for second in range(64):
        now = second * S
        queue.push(waiting(100 + second, now, priority=3), now)
        queue.push(waiting(200 + second, now, priority=1), now)
        served.append(queue.head(now))
        queue.pop(served[-1])
    assert [i for i, sequence in enumerate(served) if sequence.priority == 3] == [31, 63]
    assert [served[31].number, served[63].number] == [0, 100]


def test_late_one_that_age_has_lifted_waits_for_those_in_time_of_its_new_class() -> None:
    queue, now = ClassThenSlack().queue(), 60 * S
    for number in range(3):
        queue.push(waiting(number, number, priority=3), number)
    queue.push(waiting(3, now - 2 * S, priority=0), now)
    queue.push(waiting(4, now - S, priority=0), now)
    assert [s.number for s in drained(queue, now)] == [4, 0, 1, 2, 3]


def test_above_128_waiting_prefixes_are_not_looked_at() -> None:
    queue = LongestPrefix().queue()
    sequences = [waiting(i, i) for i in range(129)]
    sequences[77].prefix.hits = 64
    for sequence in sequences:
        queue.push(sequence, 0)
    assert queue.head(1).number == 0
    queue.pop(sequences[0])
    assert queue.head(1).number == 77
    sequences[99].prefix.hits = 128
    assert queue.head(1).number == 99, "it was looked up since"


def test_swapped_one_that_lost_its_copy_stands_with_the_others() -> None:
    queue = FirstCome(True).queue()
    swapped = waiting(5, 5)
    swapped.saved_kv = SavedKV(0, np.zeros(2, np.int32), 2, 0, True)
    for sequence in (waiting(1, 1), swapped, waiting(9, 9)):
        queue.push(sequence, 10)
    assert queue.head(10).number == 5
    swapped.saved_kv = None
    assert [s.number for s in drained(queue, 10)] == [1, 5, 9]


@pytest.mark.parametrize("order", [*ORDERS, "fair"])
def test_what_was_dropped_takes_no_room(order: str) -> None:
    """5,000 come and are dropped, never seen at the head, while one waits."""
    queue = Fair().queue() if order == "fair" else ORDERS[order][0]()
    queue.push(waiting(0), 0)
    for number in range(1, 5_001):
        sequence = waiting(number, number, tokens=1 + number % 50, priority=number % 4, tenant=number % 50)
        queue.push(sequence, 0)
        sequence.state = State.ENDED
        queue.drop(sequence)
    assert [s.number for s in queue] == [0]
    assert _entries(queue, set()) < 1000


def test_sequence_that_is_not_waiting_is_passed_over() -> None:
    for make, _ in ORDERS.values():
        queue = make()
        sequences = [waiting(i, i) for i in range(3)]
        for sequence in sequences:
            queue.push(sequence, 10)
        first = queue.head(10)
        first.state = State.ENDED
        assert queue.head(10) not in (None, first)


def test_quarter_octaves_are_four_for_each_doubling() -> None:
    assert [quarter_octave(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 16, 19, 20)] == [0, 4, 6, 8, 9, 10, 11, 12, 16, 16, 17]
    assert all(quarter_octave(n) == octave(n) for n in range(1, 5000))


def _entries(thing: object, seen: set[int]) -> int:
    """Elements of all containers that hang on a queue, its sequences not looked into."""
    if id(thing) in seen or isinstance(thing, (Sequence, str, int, np.ndarray)):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(_entries(v, seen) for v in thing.values())
    if isinstance(thing, (list, tuple)):
        return len(thing) + sum(_entries(v, seen) for v in thing)
    return sum(_entries(v, seen) for v in vars(thing).values()) if hasattr(thing, "__dict__") else 0


def _serve(order: Fair, tenants: list[int], tokens: list[int]) -> None:
    """A step gave so many tokens to these, all of class normal."""
    order.count_served(np.array(tenants, np.int32), np.full(len(tenants), 2, np.int32), np.array(tokens, np.int32))


def test_returning_tenant_is_lifted_to_the_least_present_counter() -> None:
    """Tenants 0 and 1 have had 1000 and 1200 tokens while 2 was away: 2 starts at 1000, not at 0."""
    order = Fair()
    queue = order.queue()
    for number, tenant in enumerate([0, 1]):
        queue.push(waiting(number, number, tenant=tenant), 0)
    for tokens in range(ABSENT + 2):
        _serve(order, [0, 1], [1000 if not tokens else 0, 1200 if not tokens else 0])
    queue.push(waiting(9, 9, tenant=2), 0)
    assert order.counters.counter[:3].tolist() == [1000, 1200, 1000]
    assert [s.record.tenant for s in drained(queue, 0)] == [0, 2, 1]


def test_a_tenant_between_two_requests_keeps_its_counter() -> None:
    order = Fair()
    queue = order.queue()
    queue.push(waiting(0, 0, tenant=0), 0)
    queue.push(waiting(1, 1, tenant=1), 0)
    _serve(order, [0, 1], [50, 900])
    queue.pop(queue.head(0))  # of tenant 0, which has nothing waiting now
    _serve(order, [0], [10])
    queue.push(waiting(2, 2, tenant=0), 0)
    assert order.counters.counter[:2].tolist() == [60, 900]


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "pop", "back", "drop", "served"]), st.integers(0, 5), st.integers(1, 90)
        ),
        max_size=80,
    )
)
def test_fair_heads_are_those_of_a_search(events: list[tuple[str, int, int]]) -> None:
    order = Fair()
    queue = order.queue()
    all_of: list[Sequence] = []
    taken: Counter[int] = Counter()
    for number, (kind, tenant, tokens) in enumerate(events):
        if kind == "push":
            sequence = waiting(number, number, tokens, tenant=tenant)
            queue.push(sequence, 0)
            all_of.append(sequence)
        elif kind == "served":
            _serve(order, [tenant], [tokens])
            taken.clear()
        elif kind == "drop" and all_of:
            sequence = all_of.pop(tokens % len(all_of))
            sequence.state = State.ENDED
            queue.drop(sequence)
        elif all_of and kind in ("pop", "back"):
            sequence = queue.head(0)
            queue.pop(sequence)
            if kind == "back":
                queue.push(sequence, 0)
            else:
                all_of.remove(sequence)
                taken[sequence.record.tenant] += sequence.known_tokens
        least = min(
            all_of,
            key=lambda s: (int(order.counters.counter[s.record.tenant]) + taken[s.record.tenant], arrival(s), s.number),
            default=None,
        )
        assert queue.head(0) is least
        assert sorted(s.number for s in queue) == [s.number for s in all_of]

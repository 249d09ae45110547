"""Fairness between tenants: the virtual token counters and their queue."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.policy.fairness import ABSENT, Fair
from services.scheduler.core.policy.queues import arrival
from services.scheduler.core.sequence import Sequence, State
from tests.unit.scheduler.core.policy.rows import drained, waiting


def _serve(order: Fair, tenants: list[int], tokens: list[int]) -> None:
    """A step gave so many tokens to these, all of class normal."""
    order.served(np.array(tenants, np.int32), np.full(len(tenants), 2, np.int32), np.array(tokens, np.int32))


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
                taken[sequence.record.tenant] += sequence.known
        least = min(
            all_of,
            key=lambda s: (int(order.counters.counter[s.record.tenant]) + taken[s.record.tenant], arrival(s), s.number),
            default=None,
        )
        assert queue.head(0) is least
        assert sorted(s.number for s in queue) == [s.number for s in all_of]

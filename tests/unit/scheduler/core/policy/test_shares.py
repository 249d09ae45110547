"""Fairness between the tenants of one class: a tenant that is ahead stands back, and no other notices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.policy.base import Queue
from services.scheduler.core.policy.fairness import ALLOWANCE, ByShare, Spare
from services.scheduler.core.policy.order import ClassThenSlack
from services.scheduler.core.policy.queues import BySlack, arrival
from services.scheduler.core.sequence import Sequence, State
from tests.unit.scheduler.core.policy.rows import Rows, drained, waiting

NORMAL, LOW = 2, 3


def push(queue: Queue, tenants: list[int], **more: int) -> None:
    """One sequence for each, numbered and arrived in this order."""
    for number, tenant in enumerate(tenants):
        queue.push(waiting(number, number, tenant=tenant, **more), 1)


def _share(spare: Spare | None = None) -> ByShare:
    """Make a share in which no sequence is ever late; inside it the first come is first."""
    return ByShare(lambda: BySlack(lambda sequence: 1 << 60, arrival), spare or Spare())


@pytest.mark.parametrize(
    ("tenants", "tokens", "order"),
    [
        ([0, 0, 0, 1, 2], ALLOWANCE + 1, [3, 4, 0, 1, 2]),
        ([0] * 1_000 + [1], ALLOWANCE + 1, [1_000, *range(1_000)]),
        ([0, 1, 0, 1], ALLOWANCE - 30, [0, 1, 2, 3]),
        ([0, 0, 1], 100 * ALLOWANCE, [2, 0, 1]),
    ],
    ids=["one beyond the allowance", "a flood", "one within the allowance", "one that is alone at last"],
)
def test_tenant_that_was_given_more_stands_back(tenants: list[int], tokens: int, order: list[int]) -> None:
    share = _share()
    push(share, tenants)
    share.count_served(np.array([0]), np.array([tokens]))
    assert [s.number for s in drained(share, 2)] == order


def test_tenant_that_stood_back_comes_again_when_others_have_caught_up() -> None:
    share = _share()
    push(share, [0, 1, 0, 1])
    share.count_served(np.array([0, 1]), np.array([ALLOWANCE + 1, 0]))
    assert share.head(2).number == 1
    share.count_served(np.array([0, 1]), np.array([0, ALLOWANCE]))
    assert share.head(3).number == 0


def test_one_that_ran_before_is_never_held() -> None:
    share = _share()
    share.push(waiting(0, 0, tenant=0, outputs=3), 1)
    share.push(waiting(1, 1, tenant=1), 1)
    share.count_served(np.array([0]), np.array([100 * ALLOWANCE]))
    assert share.head(2).number == 0


def test_what_is_taken_within_a_step_counts_at_once_and_until_its_end() -> None:
    share = _share()
    push(share, [0] * 5 + [1], tokens=ALLOWANCE)
    taken = []
    for _ in range(3):
        share.pop(head := share.head(1))
        taken.append(head.record.tenant)
    assert taken == [0, 0, 1]
    share.push(waiting(6, 6, tenant=1), 1)
    assert share.head(1).record.tenant == 1
    share.count_served(np.array([0, 1]), np.array([0, 0]))  # the step computed nothing of them
    assert share.head(2).record.tenant == 0


def test_one_that_is_taken_and_put_back_changes_nothing() -> None:
    share = _share()
    share.push(waiting(0, 0, 10 * ALLOWANCE, tenant=0), 1)
    share.push(waiting(1, 1, tenant=1), 1)
    for now in range(1, 5):
        head = share.head(now)
        assert head.number == 0
        share.pop(head)
        share.push(head, now)


def test_each_class_has_counters_of_its_own() -> None:
    """Tenant 0 was given much in class low; that costs it nothing in class normal."""
    order = ClassThenSlack()
    queue = order.queue()
    for number, (tenant, priority) in enumerate([(0, LOW), (1, LOW), (0, NORMAL), (1, NORMAL), (0, LOW)]):
        queue.push(waiting(number, number, tenant=tenant, priority=priority), 1)
    order.count_served(np.array([0, 1]), np.array([LOW, LOW]), np.array([ALLOWANCE + 1, 0]))
    assert [s.number for s in drained(queue, 2)] == [2, 3, 1, 0, 4]


def test_several_tenants_wait_only_once_a_second_one_comes() -> None:
    """The order counts no tokens before: what is not counted costs no time."""
    share = _share()
    push(share, [7] * 3)
    before = share.counters.counter[7]
    share.pop(share.head(2))
    assert not share.several and share.counters.counter[7] == before
    share.push(waiting(3, 3, tenant=8), 2)
    assert share.several


def _full(order: ClassThenSlack, tenants: list[int], running: list[int], most: int) -> Queue:
    """Sequences of these tenants wait in that order, of class normal; so many of each tenant run."""
    queue = order.queue()
    push(queue, tenants)
    rows = Rows(slots=most, blocks=most)
    for tenant, count in enumerate(running):
        for _ in range(count):
            rows.add(known_tokens=1, limit=9, tenant=tenant)
    order.keep_slots(rows.table, most, len(tenants))
    return queue


def test_tenant_above_its_even_share_leaves_the_last_slots() -> None:
    queue = _full(ClassThenSlack(), [0, 0, 0, 0, 1, 1, 1], [40, 21], 64)  # three are free, two are to be left
    queue.pop(first := queue.head(2))
    assert first.number == 0
    assert queue.head(2).number == 4
    queue.push(first, 2)  # it did not get it after all, and the others are before it
    assert [s.number for s in drained(queue, 2)] == [4, 5, 6]
    assert sorted(s.number for s in queue) == [0, 1, 2, 3]


def test_what_is_taken_within_step_counts_for_share_of_slots() -> None:
    """Nothing runs: 32 of 64 slots are an even share, and two of the others are left."""
    queue = _full(ClassThenSlack(), [0] * 80 + [1], [], 64)
    taken = drained(queue, 2)
    assert [s.record.tenant for s in taken] == [0] * 62 + [1]


def test_tenant_that_left_slots_enters_when_more_are_free() -> None:
    order = ClassThenSlack()
    queue = _full(order, [0, 0, 1], [40, 22], 64)
    assert [s.number for s in drained(queue, 2)] == [2]
    rows = Rows(slots=64, blocks=64)
    for tenant in [0] * 31 + [1] * 31:
        rows.add(known_tokens=1, limit=9, tenant=tenant)
    order.keep_slots(rows.table, 64, 2)
    assert queue.head(3).number == 0, "31 of 64 are less than an even share of two"
    order.keep_slots(Rows(slots=64).table, 64, 2)
    assert [s.number for s in drained(queue, 4)] == [0, 1]


def test_a_tenant_alone_leaves_no_slot() -> None:
    assert len(drained(_full(ClassThenSlack(), [0, 0, 0], [62], 64), 2)) == 3


def test_urgent_tenants_leave_no_slot_while_lower_classes_can_yield() -> None:
    order = ClassThenSlack()
    queue = order.queue()
    push(queue, [0, 0, 1], priority=1)
    rows = Rows(slots=64, blocks=64)
    for _ in range(63):
        rows.add(known_tokens=1, limit=9, tenant=0, priority=1)
    order.keep_slots(rows.table, 64, 3)
    assert queue.head(2).number == 2
    rows.table.priority[5] = LOW
    order.keep_slots(rows.table, 64, 3)
    assert queue.head(3).number == 0


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "pop", "back", "drop", "served", "spare"]),
            st.integers(0, 4),
            st.integers(1, 9000),
        ),
        max_size=70,
    )
)
def test_head_is_not_ahead_unless_all_are(events: list[tuple[str, int, int]]) -> None:
    """Nothing is lost or invented, whatever happens; and the head's tenant is within the allowance of the least served
    of those that wait, at the moment's beginning, or has the least of all that may enter."""
    spare = Spare()
    share = _share(spare)
    all_of: list[Sequence] = []
    charged: dict[int, int] = {}
    for now, (kind, tenant, tokens) in enumerate(events, 1):
        if kind == "push":
            sequence = waiting(now, now, tokens, tenant=tenant)
            share.push(sequence, now)
            all_of.append(sequence)
        elif kind == "served" and share.several:
            share.count_served(np.array([tenant]), np.array([tokens]))
            charged.clear()
        elif kind == "spare":
            spare.count(np.array([tenant, 2, 1, 4 - tenant, 0]), 5, 8, tokens % 4 - 1)
        elif kind == "drop" and all_of:
            sequence = all_of.pop(tokens % len(all_of))
            sequence.state = State.ENDED
            share.drop(sequence)
        elif all_of and kind in ("pop", "back"):
            several = share.several
            sequence = share.head(now)
            if sequence is None:
                continue
            share.pop(sequence)
            if kind == "back":
                share.push(sequence, now)
            else:
                all_of.remove(sequence)
                if several:
                    tenant = sequence.record.tenant
                    charged[tenant] = charged.get(tenant, 0) + sequence.known_tokens
        assert sorted(s.number for s in share) == sorted(s.number for s in all_of)
        assert bool(share) == bool(all_of)
        later = len(events) + now  # a moment of its own
        head = share.head(later)
        may = {s.record.tenant for s in all_of if not spare.is_barred(s.record.tenant)}
        assert (head is None) == (not may)
        if head is not None:
            used = {t: int(share.counters.counter[t]) + charged.get(t, 0) for t in {s.record.tenant for s in all_of}}
            least = min(int(share.counters.counter[t]) for t in used)
            mine = used[head.record.tenant]
            assert mine <= least + ALLOWANCE or mine == min(used[t] for t in may)
            assert head.record.tenant in may

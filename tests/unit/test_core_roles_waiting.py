"""Roles and the waiting: who has to be computed and who is swapped out stand apart, and neither keeps the other, or
those of another replica, from going on.
"""

from __future__ import annotations

import gc

import pytest

from services.scheduler.core.policy import Queue
from services.scheduler.core.sequence import Sequence
from tests.unit.core_twin import House, request
from tests.unit.test_core_roles import BOTH, D, P, house


def two_tenants(h: House, steps: int, least: int = 6) -> None:
    """So many steps in which requests of two tenants wait at any time."""
    for step in range(steps):
        while h.core.waiting_count < least:
            for tenant in ("x", "y"):
                h.add(request(f"{tenant}{len(h.requests)}", 20, 6, seed=step, tenant=tenant))
        h.step_once()


@pytest.mark.parametrize("policy", ["orcinus", "fair"])
@pytest.mark.parametrize("roles", [False, True])
def test_who_has_ended_is_forgotten_by_the_order(policy: str, roles: bool) -> None:
    h = house(*((P, D) if roles else (BOTH, BOTH)), policy="orcinus:order=fair" if policy == "fair" else policy)
    two_tenants(h, 100)
    gc.collect()
    held = {s for record in h.core._records.values() for s in record.sequences}
    mine = [s for s in gc.get_objects() if isinstance(s, Sequence) and s.record.request.id in h.requests]
    assert len(h.ended) > 50 and len([s for s in mine if s not in held]) <= 16, "nobody but those of the last steps"


@pytest.mark.parametrize("policy", ["orcinus", "orcinus:order=fair"])
def test_what_tenants_had_is_remembered_when_the_last_role_goes_and_one_comes(policy: str) -> None:
    h = house(BOTH, BOTH, policy=policy)
    order, made = h.core.policy.order, list[Queue]()
    new = order.queue
    order.queue = lambda: made.append(queue := new()) or queue  # type: ignore[method-assign, func-returns-value]
    two_tenants(h, 10)
    for role in (D, P):
        h.lose(1)
        two_tenants(h, 3)
        h.join(role)
        two_tenants(h, 10)
    h.lose(1)
    h.finish()
    assert not made, "one queue, with what it knows of the tenants"

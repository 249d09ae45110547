"""Roles and the waiting: sequences to be computed and those swapped out stand apart, and neither keeps the other, or
those of another replica, from going on.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from services.scheduler.core.policy.base import Queue
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.types import DECODE, PREFILL, Limits
from tests.unit.scheduler.core.placement.test_roles import BOTH, D, P, house, until
from tests.unit.scheduler.core.twin import House, request


def two_tenants(h: House, steps: int, least: int = 6) -> None:
    """So many steps in which requests of two tenants wait at any time."""
    for step in range(steps):
        while h.core.waiting_count < least:
            for tenant in ("x", "y"):
                h.add(request(f"{tenant}{len(h.requests)}", 20, 6, seed=step, tenant=tenant))
        h.step_once()


@pytest.mark.parametrize(("policy", "roles"), [("orcinus", True), ("fair", False)])
def test_ended_sequence_is_forgotten_by_the_order(policy: str, roles: bool) -> None:
    h = house(*((P, D) if roles else (BOTH, BOTH)), policy="orcinus:order=fair" if policy == "fair" else policy)
    two_tenants(h, 60)
    gc.collect()
    held = {s for record in h.core.records.values() for s in record.sequences}
    mine = [s for s in gc.get_objects() if isinstance(s, Sequence) and s.record.request.id in h.requests]
    assert len(h.ended) > 30 and len([s for s in mine if s not in held]) <= 16, "none but those of the last steps"


@pytest.mark.parametrize("policy", ["orcinus", "orcinus:order=fair"])
def test_tenant_counters_survive_when_roles_leave_and_join(policy: str) -> None:
    h = house(BOTH, BOTH, policy=policy)
    order, made = h.core.policy.order, list[Queue]()
    new = order.queue
    order.queue = lambda: made.append(queue := new()) or queue
    two_tenants(h, 10)
    for role in (D, P):
        h.lose(1)
        two_tenants(h, 3)
        h.join(role)
        two_tenants(h, 10)
    h.lose(1)
    h.finish()
    assert not made, "one queue, with what it knows of the tenants"


def test_swapped_sequence_bound_to_one_replica_passes_prompts() -> None:
    """The decode replica's context is too short for every third request: these are decoded, preempted and taken again
    where prompts wait at any time."""
    prefill, decode = replace(P, blocks=36, slots=6), replace(D, blocks=200, slots=16, max_model_len=40)
    h = house(prefill, decode, lookahead=0, policy="orcinus:memory=fits,relief=newest-swap")
    waits: dict[Sequence, int] = {}
    longest = 0
    for _ in range(250):
        while sum(not record.has_started for record in h.core.records.values()) < 4:
            number = len(h.requests)
            h.add(request(f"r{number}", 20, 10 if number % 3 else 50, seed=number))
        h.step_once()
        swapped = [s for s in h.core.waiting if s.saved_at(0)]
        waits = {s: waits.get(s, 0) + 1 for s in swapped}
        longest = max(longest, *waits.values(), 0)
    assert h.core.stats()["preemptions"] > 10 and longest < 80


@pytest.mark.parametrize("role", ["", DECODE])
def test_prompt_of_better_class_goes_before_one_swapped_out(role: str) -> None:
    h = house(*[replace(BOTH, role=role, blocks=24)] * 2, lookahead=0, policy="orcinus:memory=fits,relief=newest-swap")
    h.add_many(8, 12, 60, name="low", priority=3)
    until(h, lambda: h.core.stats()["swapped"] >= 3, h.step_once)
    h.add(request("realtime", 8, 4, seed=9, priority=0))
    h.step_once()
    assert "realtime" in h.started and h.core.stats()["swapped"] >= 3
    h.finish()


@pytest.mark.parametrize("role", ["", DECODE, PREFILL])
def test_lower_ones_yield_to_prompt_wherever_it_may_be_computed(role: str) -> None:
    h = house(*[replace(BOTH, role=role, slots=2)] * 2, lookahead=0)
    h.add_many(4, 8, 60, name="low", priority=3)
    h.steps(6)
    h.add(request("realtime", 8, 4, seed=9, priority=0))
    h.steps(8)
    assert "realtime" in h.ended and h.core.stats()["preemptions"] > 0


LARGE = replace(P, host_blocks=400, blocks=200)


@pytest.mark.parametrize(
    ("joining", "max_tokens"),
    [([replace(LARGE, host_tier="other/"), replace(D, host_tier="other/")], 60), ([replace(D, max_model_len=40)], 20)],
    ids=["of another folder", "that need less context"],
)
def test_handed_over_sequences_hide_no_others(joining: list[Limits], max_tokens: int) -> None:
    h = house(LARGE, replace(D, slots=1), lookahead=0)
    h.add_many(40, 8, 60, name="first")
    h.steps(20)
    for limits in joining:
        h.join(limits)
    h.add_many(6, 8, max_tokens, name="later", seed=100)
    h.steps(10)
    assert h.core.stats()["swapped"] > 30 and h.core.replicas[-1].table.count > 1

"""Blocks that sequences and tiers share, and their transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from services.scheduler.core.policy.base import Slo
from services.scheduler.core.policy.preemption import LeastLost, recompute
from services.scheduler.core.policy.presets import parse
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits
from tests.unit.scheduler.core.placement.test_roles import D, P
from tests.unit.scheduler.core.placement.test_roles import house as house_of_roles
from tests.unit.scheduler.core.twin import MS, House, house, request


def run_out(h: House) -> None:
    while not h.core.idle:
        h.step()


def test_the_longest_cached_prefix_goes_first_in_sglang() -> None:
    h = house("sglang", slots=1, block_size=4)
    h.add(request("p", 40, 1, seed=5))
    run_out(h)
    h.add_all(("x", 40, 1, 6), ("y", 40, 1, 5))
    assert h.step() == {"y": (36, 4)}, "nine blocks of p are there; at least one token is computed"
    assert h.step() == {"x": (0, 40)}
    assert h.core.stats()["prefix_hit_tokens"] == 36


def test_prompt_like_a_running_one_waits_and_computes_its_tail() -> None:
    h = house("orcinus", block_size=4, step_tokens=16)
    h.add_all(("a", 30, 3), ("b", 30, 3), seed=1)
    assert h.step() == {"a": (0, 16)}
    h.add(request("c", 9, 3, seed=2))
    assert h.step() == {"a": (16, 14), "c": (0, 2)}
    assert h.step() == {"a": (30, 1), "b": (28, 2), "c": (2, 7)}
    h.finish()
    assert h.core.stats()["prefix_hit_tokens"] == 28


def test_salt_of_its_own_keeps_a_tenants_prefixes_to_itself() -> None:
    h = house("orcinus", block_size=4)
    h.add(request("a", 40, 1, seed=5, salt=b"one"))
    run_out(h)
    h.add(request("b", 40, 1, seed=5, salt=b"two"))
    assert h.step() == {"b": (0, 40)}
    h.add(request("c", 40, 1, seed=5, salt=b"one"))
    assert h.step() == {"c": (36, 4)}


def test_cold_useful_prefixes_move_to_the_host_and_back() -> None:
    core = Scheduler("orcinus", lookahead=0, step_tokens=400)
    h = House(core, Limits(4, 64, 4, 200, 400, host_blocks=200))
    for name in ("a", "b"):  # b shares the prefix of a, so it is of use
        h.add(request(name, 80, 1, seed=1))
        run_out(h)
    for i in range(16):  # more than the pool holds, one after another
        h.add(request(f"o{i}", 40, 1, seed=10 + i))
        run_out(h)
    moved = core.stats()["swapped_blocks"]
    assert moved >= 19
    h.add(request("c", 80, 1, seed=1))
    assert h.plan() is not None  # the blocks come from the host first
    h.answer()
    assert core.stats()["swapped_blocks"] >= moved + 19
    assert h.step() == {"c": (76, 4)}
    h.finish()


def test_tbt_limit_at_risk_preempts_lower_classes_if_it_helps() -> None:
    """The twin's step takes 5 ms and 0.05 ms a token. Ten low ones decode beside one with a limit."""
    for limit_ms, expected in ((6, True), (4, False)):
        guarded = LeastLost(recompute, slo=Slo(risk_ns=500_000, safe_ns=600_000))
        core = Scheduler(dataclasses.replace(parse("sarathi:order=class"), relief=guarded), lookahead=0)
        h = House(core, Limits(64, 1000, 4, 400, 2048))
        h.add_many(30, 8, 60, name="low", priority=3)
        h.steps(20)
        h.add(request("tight", 8, 30, seed=99, priority=1, tbt_slo_ns=limit_ms * MS))
        for _ in range(12):
            h.plan()
            h.now += 5 * MS
            h.answer()
            h.core.check()
        assert bool(core.stats()["preemptions"]) == expected
        h.finish()


def test_a_prefix_is_waited_for_once_and_then_computed_again() -> None:
    h = house("orcinus", block_size=4, step_tokens=16, microbatches=2)
    h.add_all(("a", 60, 3), ("b", 60, 3), seed=1)
    assert h.plan_named() == {"a": (0, 16)}
    assert h.plan() is None, "b waits for a"
    h.now += 10_000 * MS
    assert h.plan_named() == {"b": (0, 16)}
    while h.answer():
        pass
    h.finish()


def test_many_waiting_for_one_prefix_lose_no_sequence_among_them() -> None:
    """More than are set aside for one owner, and a stranger behind every fortieth."""
    h = House(Scheduler("orcinus:order=fcfs,tokens=fixed-60000", lookahead=0), Limits(700, 40_000, 4, 120, 60_000))
    for i in range(600):
        h.add(request(f"same{i}", 80, 2, seed=1))
        if i % 40 == 39:
            h.add(request(f"other{i}", 12, 2, seed=100 + i))
    for _ in range(4):
        h.step_once()  # checks the invariants: none that waits is lost
    h.finish()
    assert all(finish == [Finish.LENGTH] for finish in h.ended.values())


ENDS: dict[str, Callable[[House], None]] = {
    "cancel": lambda h: h.take(h.core.cancel("low", h.now)),
    "stop": lambda h: h.stop("low", 0, 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_blocks_that_a_copy_writes_are_free_when_it_is_complete(end: str) -> None:
    """The sequence ends while its KV is copied in; the next request needs those blocks."""
    h = House(Scheduler("orcinus:relief=least-lost-swap+takes", lookahead=0), Limits(1, 12, 4, 60, 64, host_blocks=30))
    h.add(request("low", 20, 20, priority=3))
    h.steps(2)
    h.add(request("urgent", 4, 1, seed=2, priority=0))
    h.steps(2)
    step = h.plan()
    assert step is not None and "urgent" in h.ended and step.swap_in_gpu.size == 6
    ENDS[end](h)
    h.add(request("next", 40, 2, seed=4))
    assert h.plan() is None
    h.answer()
    assert h.step() == {"next": (0, 40)}
    h.finish()


def test_kv_is_read_by_another_replica_when_its_copy_is_complete() -> None:
    """The second step carries the copies; the only step of the sequence is answered before it."""
    h = house_of_roles(P, D, lookahead=0, microbatches=2)
    h.add(request("first", 8, 6, seed=1))
    h.plan(0)
    h.add(request("second", 8, 6, seed=2))
    step = h.plan(0)
    assert step is not None and step.swap_out_gpu.size == 2
    h.answer(0)
    assert h.plan(1) is None
    h.answer(0)
    step = h.plan(1)
    assert step is not None and step.swap_in_peers.tolist() == [0, 0]
    h.finish()

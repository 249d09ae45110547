"""Prefix sharing and swaps as a user of the core sees them: schedules computed by hand, on twin workers."""

from __future__ import annotations

import dataclasses

from services.scheduler.core.policy.base import Slo
from services.scheduler.core.policy.preemption import LeastLost, recompute
from services.scheduler.core.policy.presets import parse
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits
from tests.unit.scheduler.core.named import Named, house
from tests.unit.scheduler.core.twin import MS, House, request


def run_out(h: Named) -> None:
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


def test_waiting_for_a_prefix_ends_when_its_owner_is_gone() -> None:
    for cancel in (True, False):
        h = house("orcinus", block_size=4, step_tokens=16)
        h.add_all(("a", 60, 3), ("b", 60, 3), seed=1)
        assert h.step() == {"a": (0, 16)}
        if cancel:
            h.take(h.core.cancel("a", h.now))
            assert h.step() == {"b": (16, 16)}, "what a had computed stays known"
        else:
            h.now += 10_000 * MS
            assert set(h.step()) == {"a"}, "b has waited long enough, but running prompts come first"
            h.finish()
        h.finish()
        assert set(h.ended["b"]) == {Finish.LENGTH}


def test_salt_of_its_own_keeps_a_tenants_prefixes_to_itself() -> None:
    h = house("orcinus", block_size=4)
    h.add(request("a", 40, 1, seed=5, salt=b"one"))
    run_out(h)
    h.add(request("b", 40, 1, seed=5, salt=b"two"))
    assert h.step() == {"b": (0, 40)}
    h.add(request("c", 40, 1, seed=5, salt=b"one"))
    assert h.step() == {"c": (36, 4)}


def test_choices_of_a_request_share_the_blocks_of_its_prompt() -> None:
    h = house("orcinus", slots=8, blocks=30, block_size=4)
    h.add(request("a", 40, 6, seed=3, n=6))
    assert h.step() == {"a": (0, 40)}
    assert len(h.step()) == 1  # by name: all of them
    table = h.core.replicas[0].table
    firsts = {tuple(table.blocks[s, :9].tolist()) for s in range(6)}
    assert len(firsts) == 1 and table.count == 6, "ten blocks each would be 60 of 30"
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


def test_cold_useful_prefixes_move_to_the_host_and_back() -> None:
    core = Scheduler("orcinus", lookahead=0, step_tokens=400)
    h = Named(core, Limits(4, 64, 4, 200, 400, host_blocks=200))
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


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    """8 blocks of 2, two sequences of 4 tokens: at position 8 the newer one yields, by swap, and computes nothing
    twice."""
    policy = "sarathi:relief=newest-swap"
    h = Named(Scheduler(policy, lookahead=0), Limits(8, 8, 2, 32, 64, host_blocks=8))
    h.add_all(("a", 4, 8, 1), ("b", 4, 8, 2))
    for at in (0, 4, 5, 6, 7):
        assert h.step() == {"a": (at, max(4 - at, 1)), "b": (at, max(4 - at, 1))}
    ran: dict[str, list[int]] = {"a": [], "b": []}
    while not h.core.idle:
        for name, (start, length) in h.step().items():
            ran[name] += range(start, start + length)
        assert h.core.stats()["blocks_draining"] == 0
    assert ran["b"] == ran["a"] == [8, 9, 10], "none computed again, none past prompt + max_tokens - 1"
    stats = h.core.stats()
    assert (stats["preemptions"], stats["recomputed_tokens"], stats["swapped_blocks"]) == (1, 0, 8)


def test_urgent_request_preempts_the_lowest_class_with_least_loss() -> None:
    h = house("orcinus", slots=2, blocks=64, block_size=4)
    h.add(request("old", 20, 30, seed=1, priority=3))
    for _ in range(4):
        h.step()
    h.add(request("new", 8, 30, seed=2, priority=2))
    for _ in range(2):
        h.step()
    h.add(request("urgent", 8, 4, seed=3, priority=0))
    seen = [set(h.step()) for _ in range(3)]
    assert seen[-1] == {"new", "urgent"}, "of the lowest class first, whatever it loses"
    h.finish()
    assert h.core.stats()["preemptions"] == 1


def test_a_waiting_normal_one_takes_nothing() -> None:
    h = house("orcinus", slots=1, blocks=64, block_size=4)
    h.add(request("low", 8, 12, seed=1, priority=3))
    h.step()
    h.add(request("normal", 8, 4, seed=2, priority=2))
    for _ in range(8):
        h.step()
    assert h.core.stats()["preemptions"] == 0
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

"""Roles where they do not fit together: which replica computes and decodes what is not, or may not be, handed over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.core.placement.constraints import Fits
from services.scheduler.core.replica import Replica
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.types import CLASS_NAMES, Limits
from services.scheduler.workers.fleet import UnreadableWarnings
from tests.unit.scheduler.core.placement.test_roles import D, P, handed, house, not_handed, until
from tests.unit.scheduler.core.twin import House, request


def entered(h: House) -> list[int]:
    """Runs to the end; how many sequences had a slot on each replica."""
    found = [0] * len(h.workers)
    for replica, step in h.run_out():
        found[replica] += len(step.enters)
    return found


def test_decode_replica_computes_and_warns_when_it_cannot_map(caplog: pytest.LogCaptureFixture) -> None:
    h, unread = House(Scheduler("orcinus"), P), UnreadableWarnings()
    h.join(D)
    h.workers[1].unmappable = set(h.tiers)
    unread.look(h.core, {0: "p", 1: "d"})
    assert not caplog.records, "it has not tried yet"
    h.add_many(40, 10, 8)
    found = entered(h)
    assert min(found) >= 10 and sum(found) == 40 and handed(h) == 0
    for _ in range(2):
        unread.look(h.core, {0: "p", 1: "d"})
    (said,) = caplog.messages
    assert "decode worker d" in said and "prefill worker p" in said and "could not map" in said


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(D, host_tier="elsewhere/"), "another folder"),
        (replace(D, kv_format="g"), "kv_format: g and f"),
        (replace(D, host_tier=""), "no folder"),
        (replace(D, block_size=8), "8 and 4 tokens"),
    ],
)
def test_decode_replica_computes_and_warns_when_it_is_no_peer(
    other: Limits, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    h = house(P, other)
    UnreadableWarnings().look(h.core, {0: "p", 1: "d"})
    assert len(caplog.messages) == 1 and why in caplog.messages[0]
    h.add_many(40, 10, 8)
    assert min(entered(h)) >= 10


def test_decode_replica_waits_until_it_told_its_readable_peers() -> None:
    h = House(Scheduler("orcinus"), P)
    h.join(D)
    h.add(request("r", 10, 8))
    step = h.plan(1)
    assert step is not None and step.peers and not step.enters
    h.finish()


@pytest.mark.parametrize("lag", [0, 2])
def test_kv_from_a_host_tier_of_another_run_is_computed_again(lag: int) -> None:
    """The worker of the prefill replica was taken over, which the scheduler learns after the copy."""
    h = house(P, D, lookahead=0, lag=lag)
    h.add_many(3, 10, 8)
    until(h, lambda: handed(h) == 3 and h.core.stats()["swapped"] == 3, h.step_once)
    h.take_over(0)
    step = h.plan(1)
    assert step is not None and step.swap_in_peers.size
    until(h, lambda: not h.core.replicas[1].peers.readable, h.step_once)
    assert not h.core.replicas[1].transfers.slots()
    h.lose(0)
    h.finish()
    assert len(h.ended) == 3


@pytest.mark.parametrize("by_class", [True, False])
def test_sequence_to_be_decoded_elsewhere_is_not_before_prompt(by_class: bool) -> None:
    """One decode slot and a prefill replica that stands idle: a prompt that comes now starts at once."""
    policy = "orcinus" if by_class else "sarathi"
    h = house(replace(P, host_blocks=400, blocks=200), replace(D, slots=1), lookahead=0, policy=policy)
    for i in range(30):
        h.add(request(f"r{i}", 8, 8, seed=i, priority=3 * (i % 2)))
    until(h, lambda: handed(h) == 30, h.step_once)
    h.step_once()
    assert h.core.stats()["swapped"] >= 20
    assert [h.core.stats()[f"behind_{name}"] for name in CLASS_NAMES] == [0, 0, 0, 0]
    for i in range(3):
        h.add(request(f"new{i}", 8, 5, seed=i, priority=i + 1))
    assert [h.core.stats()[f"behind_{name}"] for name in CLASS_NAMES] == ([0, 1, 2, 3] if by_class else [3, 3, 3, 3])
    h.finish()


def test_slots_on_decode_replica_are_not_free_for_urgent_prompt() -> None:
    h = house(replace(P, slots=2), replace(D, blocks=120))
    h.add_many(8, 8, 40, priority=3)
    until(h, lambda: h.core.replicas[1].table.count == 8, h.step_once)
    h.add_many(3, 8, 5, name="new", priority=0)
    assert h.core.stats()["behind_realtime"] == 3
    h.lose(0)
    assert h.core.stats()["behind_realtime"] == 0, "it computes itself now, and lower ones would yield"
    h.finish()


def asked(h: House, monkeypatch: pytest.MonkeyPatch, steps: int) -> int:
    """Mode often in so many steps of the prefill replica a replica is asked whether it could run a sequence."""
    calls = 0
    holds = Fits.holds

    def counted(self: Fits, replica: Replica, sequence: Sequence) -> bool:
        nonlocal calls
        calls += 1
        return holds(self, replica, sequence)

    monkeypatch.setattr(Fits, "holds", counted)
    for _ in range(steps):
        assert h.plan(0) is not None
        h.answer(0)
    return calls


def test_full_host_tier_costs_no_look_at_decoding_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    h = house(replace(P, host_blocks=1, blocks=200), D, lookahead=0)
    h.add_many(8, 7, 30)
    until(h, lambda: not_handed(h), lambda: (h.plan(0), h.answer(0)))
    assert not_handed(h) == 8, "each is counted once"
    assert asked(h, monkeypatch, 10) == 0
    assert not_handed(h) == 8
    h.finish()


def test_sequence_that_fits_no_other_replica_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    h = house(replace(P, blocks=200, host_blocks=200), replace(D, max_model_len=20), replace(D, blocks=5), lookahead=0)
    h.add_many(8, 7, 40)
    assert asked(h, monkeypatch, 1) > 0
    assert asked(h, monkeypatch, 1) == 2 * 8
    assert asked(h, monkeypatch, 10) == 0
    assert handed(h) == not_handed(h) == 0
    h.finish()


def handed_at_switch(lookahead: int, lag: int = 0) -> House:
    """Three run on the decode replica for long, "x" and "y" have just been handed over when another policy is asked
    for, and "new" waits."""
    h = house(P, replace(D, blocks=150), lookahead=lookahead, lag=lag)
    h.add_many(3, 8, 70, name="long")
    until(h, lambda: h.core.replicas[1].table.count == 3, h.step_once)
    for name in "xy":
        h.add(request(name, 8, 10, seed=9))
    until(h, lambda: handed(h) == 5, lambda: (h.plan(0), handed(h) == 5 or h.answer(0)))
    h.core.switch("vllm")
    h.add(request("new", 8, 5, seed=10))
    return h


@pytest.mark.parametrize(("lookahead", "lag"), [(0, 2), (1, 0)])
def test_handed_over_sequence_continues_while_a_policy_change_waits(lookahead: int, lag: int) -> None:
    h = handed_at_switch(lookahead, lag)
    until(h, lambda: {"x", "y"} <= set(h.ended), h.step_once)
    assert set(h.ended) == {"x", "y"} and h.core.policy.name == "orcinus"
    assert "new" not in h.started, "no other enters"
    until(h, lambda: h.core.policy.name == "vllm", h.step_once)
    assert {"long0", "long1", "long2"} <= set(h.ended) and "new" not in h.ended
    h.finish()


def test_withdrawn_policy_change_lets_all_enter_again() -> None:
    h = handed_at_switch(1)
    h.steps(5)
    h.core.switch("orcinus")
    until(h, lambda: "new" in h.ended, h.step_once)
    assert "long0" not in h.ended
    h.finish()


def swapped_in_its_prompt(*others: Limits) -> tuple[House, list[int]]:
    """The prefill replica has preempted "a" by swap after 32 of its 60 tokens of prompt, for a prompt of one token; it
    runs to its end. Also the prompt tokens that each replica computed after that; `others` join before."""
    one = replace(P, max_step_tokens=16, slots=1)
    h = house(one, D, lookahead=0, policy="orcinus:relief=least-lost-swap+takes")
    h.add(request("a", 60, 6, seed=1, priority=3))
    h.plan(0)
    h.answer(0)
    h.add(request("urgent", 1, 1, seed=2, priority=0))
    until(h, lambda: "urgent" in h.ended, lambda: h.plan(0) or h.answer(0))
    assert h.core.stats()["swapped"] == 1
    for each in others:
        h.join(each)
    computed = [0] * len(h.workers)
    for replica, step in h.run_out():
        computed[replica] += int(step.chunk_lengths[step.chunk_lengths > 1].sum())
    return h, computed


def test_prompt_swapped_out_halfway_continues_on_a_prefill_replica() -> None:
    h, computed = swapped_in_its_prompt()
    assert computed == [28, 0] and handed(h) == 1
    h, computed = swapped_in_its_prompt(replace(P, max_step_tokens=16))
    assert sum(computed) == 28 and computed[1] == 0, "either prefill replica may load it"

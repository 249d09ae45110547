"""A request with tokens goes on only at a replica that would have given it the same ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits
from tests.unit.scheduler.core.twin import House, answer, request

PLAIN = Limits(slots=32, blocks=512, block_size=4, max_model_len=128, max_step_tokens=64, identity="plain")
INT8 = replace(PLAIN, identity="int8")


def begun(count: int = 40, policy: str = "orcinus") -> House:
    """Return a house without a replica, of which one in int8 has begun `count` requests; "late" has no token."""
    house = House(Scheduler(policy, lookahead=0), INT8)
    for number in range(count):
        house.add(request(f"r{number}", 4, 30, seed=number))
    house.steps(4)
    house.add(request("late", 4, 5, seed=99))
    house.lose(0)
    assert not house.core.stranded_requests(), "without a replica all wait"
    return house


@pytest.mark.parametrize("policy", ["orcinus", "vllm", "sarathi:order=fair"])
def test_requests_with_tokens_wait_for_equal_numerics_and_hide_no_others(policy: str) -> None:
    house = begun(policy=policy)
    has_tokens = {name for name, record in house.core.records.items() if any(s.outputs.size for s in record.sequences)}
    assert 16 < len(has_tokens) < 40, "more than a replica looks past"
    house.join(PLAIN)
    house.core.check()
    assert house.core.stranded_requests() == dict.fromkeys(has_tokens, "int8")
    house.steps(200)
    assert house.ended.keys() == {"late", *(f"r{number}" for number in range(40))} - has_tokens
    house.core.check()
    house.lose(0)
    house.join(INT8)
    assert not house.core.stranded_requests()
    house.finish()
    assert len(house.ended) == 41 and all(finish == [Finish.LENGTH] for finish in house.ended.values())


def test_stranded_requests_are_no_queue_before_new_ones() -> None:
    house = begun(20)
    house.join(PLAIN)
    house.steps(40)
    assert "late" in house.ended and len(house.core.stranded_requests()) == 20
    stats = house.core.stats()
    assert stats["waiting"] == stats["queued_tokens"] == stats["behind_low"] == 0
    assert house.core.waiting_count == 0 and len(house.core.records) == 20
    house.core.check()


@pytest.mark.parametrize("policy", ["orcinus", "vllm", "sarathi:order=fair"])
def test_stranded_request_leaves_by_every_way(policy: str) -> None:
    house = begun(8, policy)
    house.join(PLAIN)
    names = list(house.core.stranded_requests())
    for _ in range(3):
        house.core.park(names[0])
        house.core.check()
        assert names[0] not in house.core.stranded_requests()
        house.core.resume(names[0], house.now)
    for name in names[1:3]:
        house.take(house.core.cancel(name, house.now))
    assert house.core.release(names[3], begun=True)
    assert house.core.stranded_requests().keys() == {names[0], *names[4:]}
    assert len(house.core.waiting.held_sequences) == len(names) - 3
    house.core.check()
    house.lose(0)
    house.join(INT8)
    assert not house.core.waiting.held_sequences
    house.core.check()


def test_requests_with_tokens_are_stranded_without_a_replica_beside_other_shards() -> None:
    house = begun(4)
    for others in ({"int8", "plain"}, {"", "plain"}):
        house.core.served_elsewhere(frozenset(others))
        assert not house.core.stranded_requests()
    house.core.served_elsewhere(frozenset({"plain"}))
    assert house.core.stranded_requests() == dict.fromkeys((f"r{number}" for number in range(4)), "int8")
    assert house.core.stats()["waiting"] == 1, "late may run anywhere"
    house.core.check()
    house.core.served_elsewhere(frozenset())
    assert not house.core.stranded_requests() and house.core.stats()["waiting"] == 5
    house.core.check()


def test_requests_go_on_at_equal_unknown_or_allowed_numerics() -> None:
    for limits in (INT8, replace(PLAIN, identity="")):
        house = begun()
        house.join(limits)
        assert not house.core.stranded_requests()
        house.finish()
        assert len(house.ended) == 41


def test_replica_of_other_numerics_beside_takes_only_what_has_no_token() -> None:
    house = House(Scheduler(lookahead=0), INT8)
    house.join(PLAIN)
    house.add_many(12, 4, 30)
    house.steps(3)
    ran = {name: record.request.identity for name, record in house.core.records.items() if record.has_tokens}
    assert set(ran.values()) == {"int8", "plain"}
    for replica in (0, 1):
        house.lose(replica)
        house.join((INT8, PLAIN)[replica])
    house.core.check()
    house.steps(2)
    assert {name: house.core.records[name].request.identity for name in ran} == ran
    house.finish()


def test_restarted_request_keeps_the_numerics_of_its_record() -> None:
    new = request("a", 5, 40, seed=1)
    new.outputs, new.identity = [np.array(answer(new, 0, 64)[0][:3], np.int32)], "int8"
    other = request("b", 5, 4, seed=2, identity="int8", has_begun=True)
    house = House(Scheduler(lookahead=0), PLAIN)
    house.add(new)
    house.add(other)
    assert house.core.stranded_requests() == {"a": "int8"} and house.core.identity("a") == "int8"
    assert house.core.identity("b") == "", "it has no token"
    house.steps(20)
    assert house.ended.keys() == {"b"}
    house.core.park("a")
    house.core.resume("a", house.now)
    assert house.core.stranded_requests() == {"a": "int8"}
    house.take(house.core.cancel("a", house.now, Finish.ERROR, "why"))
    assert not house.core.stranded_requests() and house.core.idle


def test_stranded_request_on_trial_makes_no_other_replica_the_dock() -> None:
    house = begun(4)
    house.core.confine([f"r{number}" for number in range(4)])
    house.join(PLAIN)
    house.core.assign_dock(house.now)
    house.steps(10)
    assert house.ended.keys() == {"late"}

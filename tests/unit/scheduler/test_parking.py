"""Requests without their gateway: parked, adopted, heard again, given up; and beside those under suspicion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits, NewRequest, StepResult
from services.scheduler.quarantine import ABANDONED_S, GATEWAY_GONE_S, NEVER_SEEN_S, Quarantine
from tests.unit.scheduler.core.twin import House

SECOND = 1_000_000_000


class Shard:
    """A core with a worker that answers every step, and the quarantine in front of it."""

    def __init__(self) -> None:
        self.core = Scheduler("orcinus", lookahead=1)
        self.join()
        self.quarantine = Quarantine(self.core, self.give_up, self.abandon)
        self.given_up: list[str] = []
        self.abandoned: list[str] = []
        self.now_s = 1.0

    def join(self) -> None:
        self.core.join(Limits(slots=8, blocks=64, block_size=4, max_model_len=128, max_step_tokens=64))

    def give_up(self, name: str, text: str) -> None:
        self.given_up.append(name)

    def abandon(self, name: str, finish: Finish, text: str) -> None:
        self.abandoned.append(name)
        self.core.cancel(name, self.now_ns, finish, text)
        self.quarantine.remove(name, self.now_ns)

    @property
    def now_ns(self) -> int:
        return int(self.now_s * SECOND)

    def arrive(self, name: str, gateway: str, delivered: bool = True, background: bool = False) -> None:
        prompt = np.arange(6, dtype=np.int32)
        self.core.add(NewRequest(id=name, prompts=[prompt], max_tokens=100, gateway=gateway), self.now_ns)
        self.quarantine.add(name, gateway, self.now_ns, delivered, background)

    def look(self, *alive: str, after_s: float = 1.0) -> None:
        self.now_s += after_s
        self.quarantine.check_gateways(set(alive), self.now_ns)

    def lose_the_gateway(self) -> None:
        """Gateway g1 was heard and then not, for as long as makes it gone."""
        self.look("g1")
        self.look()
        self.look(after_s=GATEWAY_GONE_S)

    def steps(self, count: int) -> list[str]:
        """Runs so many steps, each answered after the next was planned. Return the requests that got tokens."""
        got: list[str] = []
        waiting: list[Any] = []
        for _ in range(count):
            plan, _ = self.core.plan(self.now_ns)
            if plan is not None:
                waiting.append(plan)
            if waiting and (plan is None or len(waiting) == 2):
                got += self.answer(waiting.pop(0))
        for plan in waiting:
            got += self.answer(plan)
        self.core.check()
        return got

    def answer(self, plan: Any) -> list[str]:
        slots = plan.chunk_slots[plan.samples]
        result = StepResult(id=plan.id, replica=0, slots=slots, tokens=np.full(slots.size, 3, np.int32))
        outcome = self.core.apply(result, self.now_ns)
        return [request.id for request, count in zip(outcome.requests, outcome.counts.tolist(), strict=True) if count]


@pytest.fixture
def shard() -> Shard:
    return Shard()


def test_requests_of_a_lost_gateway_are_parked_alone(shard: Shard) -> None:
    shard.arrive("a", "g1")
    shard.arrive("b", "g2")
    assert set(shard.steps(4)) == {"a", "b"}
    shard.look("g1", "g2")
    shard.look("g2")
    assert set(shard.steps(4)) == {"a", "b"}, "a heartbeat that is late once is no death"
    shard.look("g2", after_s=GATEWAY_GONE_S)
    assert set(shard.steps(6)) <= {"b"}
    assert shard.core.stats()["parked"] == 1


def test_adopting_gateway_gets_the_rest(shard: Shard) -> None:
    shard.arrive("a", "g1")
    shard.steps(4)
    shard.lose_the_gateway()
    assert shard.steps(4) == []
    shard.core.adopt("a", "g2")
    shard.quarantine.adopted("a", "g2", shard.now_ns)
    shard.look("g2", after_s=GATEWAY_GONE_S)
    assert set(shard.steps(4)) == {"a"}
    assert shard.core.stats()["parked"] == 0


def test_a_gateway_that_was_only_silent_has_its_requests_back(shard: Shard) -> None:
    shard.arrive("a", "g1")
    shard.lose_the_gateway()
    assert shard.steps(4) == []
    shard.look("g1")
    assert set(shard.steps(4)) == {"a"}


def test_a_gateway_that_never_was_heard_gets_more_time(shard: Shard) -> None:
    shard.arrive("a", "g1")
    shard.look()
    shard.look(after_s=NEVER_SEEN_S - 0.5)
    assert set(shard.steps(4)) == {"a"}
    shard.look(after_s=0.5)
    assert shard.steps(4) == []


def test_request_of_a_gateway_that_died_before_the_claim_never_runs(shard: Shard) -> None:
    shard.arrive("a", "g1", delivered=False)
    assert shard.steps(4) == []
    shard.look()
    assert shard.steps(4) == []
    shard.core.adopt("a", "g2")
    shard.quarantine.adopted("a", "g2", shard.now_ns)
    shard.look("g2")
    assert set(shard.steps(4)) == {"a"}


def test_request_of_a_silent_gateway_runs_at_the_next_look(shard: Shard) -> None:
    shard.arrive("a", "g1", delivered=False)
    shard.look("g1")
    assert set(shard.steps(4)) == {"a"}


def test_one_in_the_background_waits_for_a_gateway_however_long(shard: Shard) -> None:
    shard.arrive("a", "g1", background=True)
    shard.lose_the_gateway()
    shard.look(after_s=3 * ABANDONED_S)
    assert (shard.abandoned, shard.steps(4)) == ([], [])
    shard.quarantine.adopted("a", "g2", shard.now_ns)
    assert set(shard.steps(4)) == {"a"}


def test_request_is_cancelled_after_five_minutes_without_a_gateway(shard: Shard) -> None:
    shard.arrive("a", "g1")
    shard.lose_the_gateway()
    shard.look(after_s=ABANDONED_S - 1)
    assert shard.abandoned == []
    shard.look(after_s=2)
    assert shard.abandoned == ["a"]
    assert shard.core.idle
    assert shard.quarantine.gateways == set()


def on_trial(*names: str) -> Shard:
    """A shard that lost its worker with these, of gateway g1, and is there again."""
    shard = Shard()
    for name in names:
        shard.arrive(name, "g1")
    shard.look("g1")
    shard.steps(2)
    shard.core.lose(0, shard.now_ns)
    shard.quarantine.died(set(names), set(names), shard.now_ns)
    shard.join()
    return shard


def test_one_that_is_suspected_stays_parked_when_it_is_adopted() -> None:
    shard = on_trial("a", "b")
    shard.look()
    shard.look(after_s=GATEWAY_GONE_S)
    shard.quarantine.adopted("b", "g2", shard.now_ns)
    assert set(shard.steps(4)) == {"a"}, "b is not on trial"
    shard.quarantine.adopted("a", "g2", shard.now_ns)
    assert set(shard.steps(1)) == {"a"}
    shard.quarantine.progressed({"a"}, shard.now_ns)
    assert set(shard.steps(4)) == {"a", "b"}


def test_parked_suspect_of_a_lost_gateway_blocks_no_others() -> None:
    shard = on_trial("a", "b")
    shard.arrive("c", "g2")
    for _ in range(2):
        shard.look("g2", after_s=GATEWAY_GONE_S)
    for name in ("a", "b"):
        assert set(shard.steps(1)) == {name}
        shard.quarantine.progressed({name}, shard.now_ns)
        shard.look("g2")  # cleared, it is parked again
    assert set(shard.steps(6)) == {"c"}


def test_request_parked_for_its_lost_gateway_can_be_tried() -> None:
    shard = Shard()
    shard.arrive("a", "g1")
    shard.arrive("c", "g2")
    shard.look("g1", "g2")
    shard.steps(2)
    shard.look("g2")
    shard.look("g2", after_s=GATEWAY_GONE_S)
    shard.core.lose(0, shard.now_ns)
    shard.quarantine.died({"a"}, {"a", "c"}, shard.now_ns)  # a step of a was under way
    shard.join()
    assert set(shard.steps(1)) == {"a"}


def test_parked_swapped_sequence_gives_up_its_host_blocks() -> None:
    h = House(Scheduler("sarathi:relief=newest-swap", lookahead=0), Limits(8, 8, 2, 32, 64, host_blocks=8))
    h.add_all(("stays", 4, 8, 3), ("yields", 4, 8, 4))
    while not h.core.stats()["swapped"]:
        h.step_once()
    h.core.park("yields")
    h.core.check()
    stats = h.core.stats()
    assert (stats["parked"], stats["swapped"], stats["host_blocks_free"]) == (1, 0, 8)
    h.steps(4)
    h.core.resume("yields", h.now)
    h.finish()  # with the tokens that it gets alone


@pytest.mark.parametrize(("again", "suspected"), [("another", True), ("the same", False)])
def test_broken_connection_to_worker_that_lives_makes_no_suspect(again: str, suspected: bool) -> None:
    shard = Shard()
    shard.arrive("a", "g1")
    shard.steps(2)
    for _ in range(3):  # the second death of one that is alone would be its end
        shard.core.lose(0, shard.now_ns)
        shard.quarantine.link_lost("worker-0", "the same", {"a"}, {"a"})
        assert not shard.quarantine.has_suspects or suspected
        shard.join()
        shard.quarantine.linked("worker-0", again, shard.now_ns)
    assert bool(shard.given_up) == suspected


@pytest.mark.parametrize(
    ("later", "dead"), [(False, []), (True, ["a"])], ids=["noticed together", "one after the other"]
)
def test_deaths_noticed_together_count_once_for_a_request(later: bool, dead: list[str]) -> None:
    """Two choices of one request are alone on two workers, and both workers die."""
    shard = Shard()
    shard.join()
    shard.arrive("a", "g1")
    shard.steps(2)
    for number in (0, 1):
        shard.core.lose(number, shard.now_ns)
        shard.quarantine.link_lost(f"worker-{number}", "first", {"a"}, {"a"})
        if later or number == 1:
            shard.join()
            shard.quarantine.linked(f"worker-{number}", "another", shard.now_ns)
    shard.join()
    if not later:
        shard.quarantine.find_dead(lambda name: True, shard.now_ns)
    assert shard.given_up == dead

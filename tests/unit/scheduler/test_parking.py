"""Requests without their gateway: parked, adopted, heard again, given up; and beside those under suspicion."""

from __future__ import annotations

import pytest

from services.scheduler.quarantine import ABANDONED_S, GATEWAY_GONE_S, NEVER_SEEN_S
from tests.unit.scheduler.quarantined import LIMITS, SECOND, Shard


class Parking(Shard):
    """A shard, a worker that answers every step, and gateways that are heard or not."""

    def __init__(self) -> None:
        super().__init__(lookahead=1)

    def look(self, *alive: str, after_s: float = 1.0) -> None:
        self.house.now += int(after_s * SECOND)
        self.quarantine.check_gateways(set(alive), self.house.now)

    def lose_the_gateway(self) -> None:
        """Gateway g1 was heard and then not, for as long as makes it gone."""
        self.look("g1")
        self.look()
        self.look(after_s=GATEWAY_GONE_S)

    def steps(self, count: int) -> list[str]:
        """Run so many steps, each answered after the next was planned. Return the requests that got tokens."""
        before = {key: len(tokens) for key, tokens in self.house.published.items()}
        queue = self.house.workers[0].queue
        for _ in range(count):
            if self.house.plan() is None or len(queue) == 2:
                self.house.answer()
        while self.house.answer():
            pass
        self.core.check()
        return [key[0] for key, tokens in self.house.published.items() if len(tokens) > before[key]]


@pytest.fixture
def shard() -> Parking:
    return Parking()


def test_requests_of_a_lost_gateway_are_parked_alone(shard: Parking) -> None:
    shard.arrive("a", "g1")
    shard.arrive("b", "g2")
    assert set(shard.steps(4)) == {"a", "b"}
    shard.look("g1", "g2")
    shard.look("g2")
    assert set(shard.steps(4)) == {"a", "b"}, "a heartbeat that is late once is no death"
    shard.look("g2", after_s=GATEWAY_GONE_S)
    assert set(shard.steps(6)) <= {"b"}
    assert shard.core.stats()["parked"] == 1


def test_adopting_gateway_gets_the_rest(shard: Parking) -> None:
    shard.arrive("a", "g1")
    shard.steps(4)
    shard.lose_the_gateway()
    assert shard.steps(4) == []
    shard.core.adopt("a", "g2")
    shard.quarantine.on_adopt("a", "g2", shard.house.now)
    shard.look("g2", after_s=GATEWAY_GONE_S)
    assert set(shard.steps(4)) == {"a"}
    assert shard.core.stats()["parked"] == 0


def test_adopted_before_its_gateway_is_gone_is_not_parked(shard: Parking) -> None:
    shard.arrive("a", "g1")
    shard.look("g1", "g2")
    shard.core.adopt("a", "g2")
    shard.quarantine.on_adopt("a", "g2", shard.house.now)
    shard.look("g2")
    shard.look("g2", after_s=GATEWAY_GONE_S)
    assert set(shard.steps(4)) == {"a"}


def test_a_gateway_that_was_only_silent_has_its_requests_back(shard: Parking) -> None:
    shard.arrive("a", "g1")
    shard.lose_the_gateway()
    assert shard.steps(4) == []
    shard.look("g1")
    assert set(shard.steps(4)) == {"a"}


def test_a_gateway_that_never_was_heard_gets_more_time(shard: Parking) -> None:
    shard.arrive("a", "g1")
    shard.look()
    shard.look(after_s=NEVER_SEEN_S - 0.5)
    assert set(shard.steps(4)) == {"a"}
    shard.look(after_s=0.5)
    assert shard.steps(4) == []


def test_request_of_a_gateway_that_died_before_the_claim_never_runs(shard: Parking) -> None:
    shard.arrive("a", "g1", delivered=False)
    assert shard.steps(4) == []
    shard.look()
    assert shard.steps(4) == []
    shard.core.adopt("a", "g2")
    shard.quarantine.on_adopt("a", "g2", shard.house.now)
    shard.look("g2")
    assert set(shard.steps(4)) == {"a"}


def test_one_in_the_background_waits_for_a_gateway_however_long(shard: Parking) -> None:
    shard.arrive("a", "g1", background=True)
    shard.lose_the_gateway()
    shard.look(after_s=3 * ABANDONED_S)
    assert (shard.abandoned, shard.steps(4)) == ([], [])
    shard.quarantine.on_adopt("a", "g2", shard.house.now)
    assert set(shard.steps(4)) == {"a"}


def test_request_is_cancelled_after_five_minutes_without_a_gateway(shard: Parking) -> None:
    shard.arrive("a", "g1")
    shard.lose_the_gateway()
    shard.look(after_s=ABANDONED_S - 1)
    assert shard.abandoned == []
    shard.look(after_s=2)
    assert shard.abandoned == ["a"]
    assert shard.core.idle
    assert shard.quarantine.gateways == set()


def on_trial(*names: str) -> Parking:
    """A shard that lost its worker with these, of gateway g1, and is there again."""
    shard = Parking()
    for name in names:
        shard.arrive(name, "g1")
    shard.look("g1")
    shard.steps(2)
    shard.house.lose(0)
    shard.quarantine.on_death(set(names), set(names), shard.house.now)
    shard.house.join(LIMITS)
    return shard


def test_one_that_is_suspected_stays_parked_when_it_is_adopted() -> None:
    shard = on_trial("a", "b")
    shard.look()
    shard.look(after_s=GATEWAY_GONE_S)
    shard.quarantine.on_adopt("b", "g2", shard.house.now)
    assert set(shard.steps(4)) == {"a"}, "b is not on trial"
    shard.quarantine.on_adopt("a", "g2", shard.house.now)
    assert set(shard.steps(1)) == {"a"}
    shard.quarantine.on_progress({"a"}, shard.house.now)
    assert set(shard.steps(4)) == {"a", "b"}


def test_parked_suspect_of_a_lost_gateway_blocks_no_others() -> None:
    shard = on_trial("a", "b")
    shard.arrive("c", "g2")
    for _ in range(2):
        shard.look("g2", after_s=GATEWAY_GONE_S)
    for name in ("a", "b"):
        assert set(shard.steps(1)) == {name}
        shard.quarantine.on_progress({name}, shard.house.now)
        shard.look("g2")  # cleared, it is parked again
    assert set(shard.steps(6)) == {"c"}


def test_those_that_wait_for_a_worker_are_counted_apart_from_those_without_a_gateway() -> None:
    shard = Parking()
    for name in ("a", "b"):
        shard.arrive(name, "g1")
    shard.lose_the_gateway()
    assert shard.quarantine.suspects == 0
    shard.arrive("c", "g2")
    shard.quarantine.link_lost("w", "1", {"c", "ended"}, {"c"})
    assert shard.quarantine.suspects == 1
    shard.quarantine.on_link("w", "1", shard.house.now)
    assert shard.quarantine.suspects == 0
    trial = on_trial("a", "b")
    assert trial.quarantine.suspects == 1, "b, while a is tried"


def test_request_parked_for_its_lost_gateway_can_be_tried() -> None:
    shard = Parking()
    shard.arrive("a", "g1")
    shard.arrive("c", "g2")
    shard.look("g1", "g2")
    shard.steps(2)
    shard.look("g2")
    shard.look("g2", after_s=GATEWAY_GONE_S)
    shard.house.lose(0)
    shard.quarantine.on_death({"a"}, {"a", "c"}, shard.house.now)  # a step of a was under way
    shard.house.join(LIMITS)
    assert set(shard.steps(1)) == {"a"}


@pytest.mark.parametrize(("again", "suspected"), [("another", True), ("the same", False)])
def test_broken_connection_to_worker_that_lives_makes_no_suspect(again: str, suspected: bool) -> None:
    shard = Parking()
    shard.arrive("a", "g1")
    shard.steps(2)
    for _ in range(3):  # the second death of one that is alone would be its end
        shard.house.lose(0)
        shard.quarantine.link_lost("worker-0", "the same", {"a"}, {"a"})
        assert not shard.quarantine.has_suspects or suspected
        shard.house.join(LIMITS)
        shard.quarantine.on_link("worker-0", again, shard.house.now)
    assert bool(shard.given_up) == suspected


@pytest.mark.parametrize(
    ("later", "dead"), [(False, []), (True, ["a"])], ids=["noticed together", "one after the other"]
)
def test_deaths_noticed_together_count_once_for_a_request(later: bool, dead: list[str]) -> None:
    """Two choices of one request are alone on two workers, and both workers die."""
    shard = Parking()
    shard.house.join(LIMITS)
    shard.arrive("a", "g1")
    shard.steps(2)
    for number in (0, 1):
        shard.house.lose(number)
        shard.quarantine.link_lost(f"worker-{number}", "first", {"a"}, {"a"})
        if later or number == 1:
            shard.house.join(LIMITS)
            shard.quarantine.on_link(f"worker-{number}", "another", shard.house.now)
    shard.house.join(LIMITS)
    if not later:
        shard.quarantine.find_dead(lambda name: True, shard.house.now)
    assert shard.given_up == dead


def test_request_of_a_silent_gateway_runs_at_the_next_look(shard: Parking) -> None:
    shard.arrive("a", "g1", delivered=False)
    shard.look("g1")
    assert set(shard.steps(4)) == {"a"}

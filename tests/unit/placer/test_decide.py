"""Which models the placer lets be awake: by hand, and two that always have work, played over an hour."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.placer.decide import IDLE_MS, PATIENCE, UNKNOWN_GIVE_UP_MS, UNKNOWN_LOAD_MS, Demand, choose, wake_ms
from shared.keys import CLASSES
from shared.placement import MAX_FAILED

LOAD_MS = 5000
BUSY = Demand("busy", True, ready_ms=10**6, load_ms=LOAD_MS, waiting_ms={"normal": 300})
IDLE = Demand("idle", True, ready_ms=10**6, idle_ms=IDLE_MS, load_ms=LOAD_MS)
CALLER = Demand("caller", False, load_ms=LOAD_MS, waiting_ms={"normal": 1})


def waits(priority: str, age_ms: int) -> Demand:
    return replace(CALLER, waiting_ms={priority: age_ms})


def test_model_without_work_goes_at_once_but_not_between_two_requests() -> None:
    assert choose([IDLE, CALLER], 1) == {"caller"}
    assert choose([replace(IDLE, idle_ms=IDLE_MS - 1), CALLER], 1) == {"idle"}
    assert choose([IDLE, replace(CALLER, waiting_ms={})], 1) == {"idle"}, "a switch needs a request"
    assert choose([BUSY, CALLER], 2) == {"busy", "caller"}, "there is room for both"


@pytest.mark.parametrize("priority", CLASSES)
def test_model_with_work_goes_when_wait_and_turn_are_worth_a_load(priority: str) -> None:
    due_ms = PATIENCE[priority] * LOAD_MS
    assert choose([BUSY, waits(priority, due_ms)], 1) == {"caller"}
    assert choose([BUSY, waits(priority, due_ms - 1)], 1) == {"busy"}
    assert choose([replace(BUSY, ready_ms=due_ms - 1), waits(priority, due_ms)], 1) == {"busy"}
    unknown = replace(waits(priority, due_ms), load_ms=0)
    assert choose([BUSY, unknown], 1) == {"busy"}
    assert choose([BUSY, replace(unknown, waiting_ms={priority: PATIENCE[priority] * UNKNOWN_LOAD_MS})], 1) == {
        "caller"
    }


def test_model_that_loads_is_left_alone_until_it_is_given_up() -> None:
    late = waits("realtime", 10**7)
    loading = replace(BUSY, ready_ms=0, loading_ms=10 * LOAD_MS, load_ms=0)
    assert choose([loading, late], 1) == {"busy"}
    assert choose([replace(loading, loading_ms=UNKNOWN_GIVE_UP_MS), late], 1) == {"caller"}
    known = replace(loading, load_ms=2 * LOAD_MS)
    assert choose([replace(known, loading_ms=20 * LOAD_MS - 1), late], 1) == {"busy"}
    assert choose([replace(known, loading_ms=20 * LOAD_MS), late], 1) == {"caller"}


@pytest.mark.parametrize("priority", CLASSES)
def test_turn_begins_when_all_that_ran_before_goes_on(priority: str) -> None:
    turn_ms = PATIENCE[priority] * LOAD_MS
    late, give_up_ms = waits(priority, 10**9), 10 * LOAD_MS + 10_000
    for resuming_ms, begins_ms in ((0, 0), (7000, 7000), (10**8, give_up_ms)):
        busy = replace(BUSY, resuming_ms=resuming_ms)
        assert choose([replace(busy, ready_ms=begins_ms + turn_ms - 1), late], 1) == {"busy"}
        assert choose([replace(busy, ready_ms=begins_ms + turn_ms), late], 1) == {"caller"}
    assert choose([replace(IDLE, resuming_ms=IDLE.ready_ms), CALLER], 1) == {"caller"}, "it has nothing to resume"


@pytest.mark.parametrize("priority", CLASSES)
def test_requests_end_that_take_longer_than_a_turn_to_compute_again(priority: str) -> None:
    """Two models take turns, with one such request each. Recomputed, it needs ten more turns; a sleep loses its KV."""
    second_ms, again_ms = 1000, 45_000
    left_ms = {name: 10 * PATIENCE[priority] * LOAD_MS for name in ("a", "b")}
    awake, since_ms, resumed_ms = "a", 0, 0  # resumed_ms: of the turn, what was computed again
    for now_ms in range(second_ms, 40 * (again_ms + 9 * LOAD_MS), second_ms):
        passed_ms = now_ms - since_ms
        ready_ms = max(0, passed_ms - LOAD_MS)
        models = [
            Demand(
                name, name == awake,
                ready_ms=ready_ms * (name == awake), resuming_ms=resumed_ms * (name == awake),
                loading_ms=min(passed_ms, LOAD_MS) * (name == awake and not ready_ms), load_ms=LOAD_MS,
                waiting_ms={priority: passed_ms},
            )
            for name in ("a", "b")
        ]  # fmt: skip
        (chosen,) = choose(models, 1)
        if chosen != awake:
            awake, since_ms, resumed_ms = chosen, now_ms, 0
        elif ready_ms and resumed_ms < again_ms:
            resumed_ms += second_ms
        elif ready_ms:
            left_ms[awake] -= second_ms
    assert max(left_ms.values()) <= 0


@pytest.mark.parametrize("priority", CLASSES)
def test_model_whose_load_failed_waits_twice_as_long_each_time(priority: str) -> None:
    for failed in (1, 2, 6):
        due_ms = (PATIENCE[priority] << failed) * LOAD_MS
        for other in (replace(each, ready_ms=10**8) for each in (BUSY, IDLE)):
            early, due = (replace(waits(priority, age_ms), failed_loads=failed) for age_ms in (due_ms - 1, due_ms))
            assert choose([other, early], 1) == {other.name}
            assert choose([other, due], 1) == {"caller"}
            asking = replace(early, waiting_ms={})
            wait_ms = wake_ms(asking, [replace(other, ready_ms=1), asking], 1)[CLASSES.index(priority)]
            assert wait_ms == due_ms + LOAD_MS
        assert choose([IDLE, early], 2) == {"idle", "caller"}, "there is room for both"
    slow = Demand("slow", True, loading_ms=2 * UNKNOWN_GIVE_UP_MS - 1, failed_loads=1)
    assert choose([slow, CALLER], 1) == {"slow"}, "its next load has more time"
    assert choose([replace(slow, failed_loads=0), CALLER], 1) == {"caller"}


def test_most_urgent_comes_first_and_the_longest_idle_goes() -> None:
    longer = replace(IDLE, name="longer", idle_ms=9 * IDLE_MS, ready_ms=9 * IDLE_MS)
    urgent = replace(waits("realtime", 100), name="urgent")
    older = waits("low", 700)
    assert choose([IDLE, longer, older], 2) == {"idle", "caller"}
    assert choose([IDLE, longer, older, urgent], 2) == {"caller", "urgent"}
    assert choose([IDLE, replace(longer, idle_ms=5), older, urgent], 2) == {"longer", "urgent"}
    assert choose([BUSY, IDLE, longer, CALLER], 2) == {"busy", "caller"}, "one too many were awake"


def test_caller_that_has_waited_its_time_comes_before_a_better_class() -> None:
    """Else two models with work of class realtime in turn keep a third one asleep, as none serves for long enough."""
    busy = replace(BUSY, ready_ms=LOAD_MS)
    better = replace(waits("realtime", LOAD_MS), name="better")
    due_ms = PATIENCE["low"] * LOAD_MS
    assert choose([busy, better, waits("low", due_ms + 1)], 1) == {"caller"}
    assert choose([busy, better, waits("low", due_ms - 1)], 1) == {"better"}
    assert choose([busy, waits("low", due_ms + 1)], 1) == {"busy"}, "for it alone the turn is not over"


def test_wake_time_is_the_rest_of_the_turn_and_the_load() -> None:
    assert wake_ms(BUSY, [BUSY, CALLER], 1) == (0, 0, 0, 0)
    fresh = replace(BUSY, ready_ms=4000)
    turns = [PATIENCE[priority] * LOAD_MS for priority in CLASSES]
    asleep = replace(CALLER, waiting_ms={})
    assert wake_ms(asleep, [fresh, asleep], 1) == tuple(turn + LOAD_MS for turn in turns)
    assert wake_ms(asleep, [IDLE, asleep], 1) == (LOAD_MS,) * 4
    assert wake_ms(asleep, [fresh, asleep], 2) == (LOAD_MS,) * 4
    loading = replace(BUSY, ready_ms=0, loading_ms=2000)
    assert wake_ms(loading, [loading], 1) == (3000,) * 4
    waiting = waits("normal", 3000)  # for 3 s already, which a further request of that class or a lower one need not
    left = turns[2] - 3000 + LOAD_MS
    assert wake_ms(waiting, [fresh, waiting], 1) == (turns[0] + LOAD_MS, turns[1] + LOAD_MS, left, left)


@pytest.mark.parametrize("priority", CLASSES)
def test_two_that_always_have_work_spend_little_time_on_loads(priority: str) -> None:
    second_ms, hour_ms = 1000, 3_600_000
    awake, loaded_at, slept_at, loads = "a", 0, {"b": 0}, 0
    served = {"a": 0, "b": 0}
    for now_ms in range(0, hour_ms, second_ms):
        models = [
            Demand(
                name, name == awake,
                ready_ms=max(0, now_ms - loaded_at) if name == awake else 0,
                loading_ms=LOAD_MS - (loaded_at - now_ms) if name == awake and now_ms <= loaded_at else 0,
                load_ms=LOAD_MS,
                waiting_ms={priority: 1 if name == awake else now_ms - slept_at[name]},
            )
            for name in ("a", "b")
        ]  # fmt: skip
        (chosen,) = choose(models, 1)
        if chosen != awake:
            awake, loaded_at, slept_at, loads = chosen, now_ms + LOAD_MS, {awake: now_ms}, loads + 1
        elif now_ms > loaded_at:
            served[awake] += second_ms
    share = loads * LOAD_MS / hour_ms
    assert 0.5 / (1 + PATIENCE[priority]) < share <= 1 / (1 + PATIENCE[priority])
    assert 0.8 < served["a"] / served["b"] < 1.25


@pytest.mark.parametrize("is_busy", [True, False], ids=["beside one with work", "beside one that is idle now and then"])
def test_model_that_never_loads_takes_little_time_from_another(is_busy: bool) -> None:
    second_ms, day_ms = 1000, 86_400_000
    awake, since_ms, failed, lost_ms = "works", 0, 0, 0
    for now_ms in range(second_ms, day_ms, second_ms):
        passed_ms = now_ms - since_ms
        is_idle = not is_busy and awake == "works" and now_ms // second_ms % 60 >= 5  # a request every minute
        asleep_ms = passed_ms if awake == "broken" else 0
        works = Demand(
            "works", awake == "works",
            ready_ms=max(0, passed_ms - LOAD_MS) if awake == "works" else 0,
            loading_ms=min(passed_ms, LOAD_MS) if awake == "works" else 0,
            idle_ms=IDLE_MS if is_idle else 0, load_ms=LOAD_MS,
            waiting_ms={} if is_idle else {"normal": asleep_ms},
        )  # fmt: skip
        age_ms = passed_ms if awake == "works" else 1
        broken = Demand(
            "broken", awake == "broken", loading_ms=passed_ms if awake == "broken" else 0, failed_loads=failed,
            waiting_ms={"normal": age_ms},
        )  # fmt: skip
        (chosen,) = choose([works, broken], 1)
        if chosen != awake:
            failed = min(MAX_FAILED, failed + (awake == "broken"))
            awake, since_ms = chosen, now_ms
        lost_ms += second_ms if awake == "broken" else 0
    assert 0.05 < lost_ms / day_ms < 0.15

"""What a core says of itself by class: what is before a request that comes now, and when its first token comes."""

from __future__ import annotations

import pytest

from services.scheduler.core.types import CLASS_NAMES
from tests.unit.scheduler.core.twin import MS, House, house, request


def by_class(h: House, field: str) -> list[int]:
    stats = h.core.stats()
    return [int(stats[f"{field}_{name}"]) for name in CLASS_NAMES]


def full(policy: str, priorities: list[int]) -> House:
    """Two slots with those classes in them, prompts done; five wait: 10 tokens realtime, 20 high, 2 x 40 normal, 80
    low."""
    h = house(policy, slots=2)
    for index, priority in enumerate(priorities):
        h.add(request(f"runs-{index}", 3, 50, seed=index, priority=priority))
    for _ in range(3):
        h.step()
    h.plan()
    for index, (priority, tokens) in enumerate([(0, 10), (1, 20), (2, 40), (2, 40), (3, 80)]):
        h.add(request(f"waits-{index}", tokens, 3, seed=9 + index, priority=priority))
    return h


BY_CLASS, BY_ARRIVAL = ([1, 2, 4, 5], [10, 30, 110, 190]), ([5] * 4, [190] * 4)


@pytest.mark.parametrize(
    ("policy", "before"),
    [
        *((policy, BY_CLASS) for policy in ("orcinus", "iteration-level", "sarathi:order=class")),
        *((policy, BY_ARRIVAL) for policy in ("orcinus:order=fcfs", "sglang", "fastgen:order=fair", "tgi:order=ratio")),
    ],
)
def test_only_an_order_by_class_counts_less_before_better_ones(policy: str, before: tuple[list[int], ...]) -> None:
    h = full(policy, [0, 1])
    assert (by_class(h, "behind"), by_class(h, "queued_tokens")) == before
    assert h.core.stats()["queued_tokens"] == 190


def test_slots_of_lower_classes_count_as_free_for_takers() -> None:
    """Realtime and high take from normal and low ones; what waits before them needs such slots first."""
    assert by_class(full("orcinus", [2, 3]), "behind") == [0, 0, 4, 5]
    assert by_class(full("orcinus", [1, 3]), "behind") == [0, 1, 4, 5]
    assert by_class(full("orcinus:relief=newest", [2, 3]), "behind") == [1, 2, 4, 5]


@pytest.mark.parametrize(("policy", "tokens"), [("orcinus", [0, 0, 83, 83]), ("sarathi", [83, 83, 83, 83])])
def test_running_prompts_of_lower_classes_are_not_before_takers(policy: str, tokens: list[int]) -> None:
    h = house(policy, step_max=16)
    h.add(request("long", 100, 5, seed=1, priority=2))
    h.step()
    assert by_class(h, "queued_tokens") == tokens


def test_predicted_first_token_is_one_step_or_the_full_pace() -> None:
    """4 ms a step and 0.1 ms a token, steps of 512 tokens: what full steps would take plays no part for 30 tokens."""
    h = house("sarathi:order=class", slots=2, blocks=4000, context=8000)
    model = h.core.replicas[0].model
    assert h.core.predicted_ttft_ns(0) == 0
    model.observations, model.c0, model.c1, model.c2, model.c3 = 1, 4.0 * MS, MS / 10, 0.0, 0.0
    assert h.core.predicted_ttft_ns(0) == pytest.approx(4.1 * MS + 4.1 * MS)
    h.add(request("urgent", 30, 3, seed=1, priority=0))
    h.add(request("patient", 5090, 3, seed=2, priority=3))
    assert h.core.predicted_ttft_ns(0) == pytest.approx(7 * MS + 4.1 * MS)
    assert h.core.predicted_ttft_ns() == pytest.approx(10 * (4 * MS + 51.2 * MS) + 4.1 * MS)


def test_oldest_of_class_is_first_that_waits_and_never_ran() -> None:
    h = house("orcinus", slots=1)
    for index, (priority, arrived) in enumerate([(3, 5), (2, 7), (2, 9), (3, 8), (1, 11)]):
        h.add(request(f"{index}", 10, 3, seed=index, priority=priority, arrived_ns=arrived))
        if not index:
            h.step()
    assert by_class(h, "oldest_ns") == [0, 11, 7, 8]
    h.core.park("1")
    assert by_class(h, "oldest_ns") == [0, 11, 9, 8]
    h.step()
    h.step()
    assert by_class(h, "oldest_ns") == [0, 0, 9, 8], "the high one took the slot; the one that lost it has run"
    h.core.resume("1", h.now)
    h.finish()
    assert by_class(h, "oldest_ns") == [0, 0, 0, 0]

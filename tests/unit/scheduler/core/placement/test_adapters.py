"""Adapters of a replica: loaded when a sequence waits for one, kept while rows have it, the oldest makes room.

The twin's worker demands that each sequence enters with its own adapter, which no step has replaced.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.placement.adapters import MAX_REFUSALS, RETRY_NS, Adapters
from services.scheduler.core.placement.base import MAX_PASSED
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import EMPTY, Limits
from tests.unit.scheduler.core.twin import STEP_NS, House, request

LIMITS = Limits(slots=16, blocks=200, block_size=4, max_model_len=120, max_step_tokens=128, max_loras=2)
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def house(max_loras: int = 2, replicas: int = 1, policy: str = "orcinus", **settings: Any) -> House:
    limits = replace(LIMITS, max_loras=max_loras)
    made = House(Scheduler(policy, **settings), limits)
    for _ in range(replicas - 1):
        made.join(limits)
    return made


def failed(h: House) -> dict[str, str]:
    return {name: error for name, error in h.errors.items() if error}


def add(h: House, name: str, adapter: bytes, max_tokens: int = 6, **more: Any) -> None:
    h.add(request(name, 6, max_tokens, seed=len(h.requests), adapter=adapter, salt=adapter, **more))


def test_sequence_enters_behind_the_step_that_loads_its_adapter() -> None:
    h = house(lookahead=0)
    add(h, "a", A)
    step = h.plan()
    assert step is not None
    assert [(each.number, each.digest) for each in step.adapters] == [(1, A)]
    assert not step.enters and not step.chunk_slots.size
    h.answer()
    step = h.plan()
    assert step is not None
    assert [enter.adapter for enter in step.enters] == [1]
    h.answer()
    h.finish()


def test_least_recently_used_adapter_makes_room_and_one_with_rows_never() -> None:
    h = house(lookahead=0)
    add(h, "a", A, max_tokens=30)
    add(h, "b", B, max_tokens=2)
    add(h, "c", C, max_tokens=2)
    announced = []
    for _ in range(20):
        if (step := h.plan()) is not None:
            assert len(step.adapters) <= 1
            announced += [(each.number, each.digest) for each in step.adapters]
        h.answer()
    assert announced == [(1, A), (2, B), (2, C)], "c waits for b's number while a runs"
    h.finish()


@pytest.mark.parametrize("count", (1, 60))
def test_base_sequences_enter_while_others_wait_for_a_number(count: int) -> None:
    h = house(max_loras=1, lookahead=0)
    add(h, "long", A, max_tokens=60)
    h.steps(2)
    for number in range(count):
        add(h, f"further{number}", B)
    for number in range(40):
        add(h, f"base{number}", b"", max_tokens=2)
    h.steps(20)
    assert sum(name.startswith("base") for name in h.ended) == 40
    assert len(h.ended) == 40
    h.finish()


def test_later_sequences_with_adapters_let_numbers_drain_for_one_passed_over() -> None:
    h = house(max_loras=1, lookahead=0)
    add(h, "first", A, max_tokens=10)
    h.steps(2)
    add(h, "further", B)
    for number in range(60):
        add(h, f"a{number}", A, max_tokens=10)
    h.steps(30)
    assert "further" in h.ended
    assert sum(name.startswith("a") for name in h.ended) == MAX_PASSED
    h.finish()


def test_adapter_that_cannot_be_loaded_fails_its_sequences_alone_and_is_tried_again() -> None:
    h = house(lookahead=0)
    h.workers[0].unloadable = {A}
    add(h, "a", A)
    add(h, "b", B)
    h.steps(6)
    assert failed(h).keys() == {"a"}
    h.workers[0].unloadable = set()
    add(h, "soon", A)
    h.steps(2)
    assert failed(h).keys() == {"a", "soon"}
    h.now += RETRY_NS
    add(h, "again", A)
    h.finish()
    assert failed(h).keys() == {"a", "soon"}


def test_adapter_that_no_worker_can_load_is_read_once_by_each() -> None:
    h = house(replicas=2, lookahead=0)
    announced: list[tuple[int, bytes]] = []
    for worker in h.workers.values():
        worker.unloadable = {A}
    for number in range(40):
        add(h, f"a{number}", A)
        for replica in (0, 1):
            if (step := h.plan(replica)) is not None:
                announced += [(replica, each.digest) for each in step.adapters]
            h.answer(replica)
        h.now += STEP_NS
    h.finish()
    assert announced.count((0, A)) <= 1 and announced.count((1, A)) <= 1 and announced
    assert failed(h) == {f"a{number}": "nan_logits: the logits are not finite" for number in range(40)}


def test_further_adapters_do_not_make_a_worker_read_a_refused_one_again() -> None:
    h = house(max_loras=1, lookahead=0)
    h.workers[0].unloadable = {A}
    announced = []
    for number in range(20):
        add(h, f"a{number}", A)
        add(h, f"b{number}", B, max_tokens=2)
        for _ in range(6):
            if (step := h.plan()) is not None:
                announced += [each.digest for each in step.adapters]
            h.answer()
    h.finish()
    assert announced == [A, B]
    assert failed(h).keys() == {f"a{number}" for number in range(20)}


def test_sequences_go_to_the_worker_that_can_load_their_adapter() -> None:
    h = house(replicas=2)
    h.workers[1].unloadable = {A}
    add(h, "first", A)
    h.steps(3)
    for number in range(60):
        add(h, f"a{number}", A, max_tokens=20)
    h.steps(5)
    assert h.core.replicas[1].table.count == 0
    h.workers[1].unloadable = set()
    h.now += RETRY_NS
    h.steps(4)
    assert h.core.replicas[1].table.count == LIMITS.slots
    h.finish()
    assert not failed(h)


def test_sequence_goes_elsewhere_at_once_when_a_worker_refuses_its_adapter() -> None:
    h = house(lookahead=0)
    for number in range(15):
        add(h, f"base{number}", b"", max_tokens=60)
    h.steps(4)
    h.workers[h.join(LIMITS)].unloadable = {A}
    add(h, "a", A)
    h.steps(3)
    assert h.workers[1].adapters == {1: A}, "its first choice was the worker without work"
    assert [h.core.replicas[number].table.count for number in (0, 1)] == [16, 0]
    h.finish()
    assert not failed(h)


def test_sequences_that_wait_end_with_the_first_that_tells_why_none_can_run() -> None:
    h = house(lookahead=0)
    h.workers[0].unloadable = {A}
    for number in range(40):
        add(h, f"a{number}", A)
    entered = 0
    while not h.core.idle:
        if (step := h.plan()) is not None:
            entered += len(step.enters)
        h.answer()
    assert entered == LIMITS.slots and len(failed(h)) == 40


def test_worker_that_joins_may_load_what_the_others_refused() -> None:
    h = house(lookahead=0)
    h.workers[0].unloadable = {A}
    add(h, "a", A)
    h.steps(4)
    h.join(LIMITS)
    add(h, "later", A)
    h.finish()
    assert failed(h).keys() == {"a"}


def test_refusals_that_a_replica_remembers_are_bounded() -> None:
    adapters = Adapters(1)
    digests = [bytes([number]) * 32 for number in range(MAX_REFUSALS + 5)]
    for now_ns, digest in enumerate(digests):
        adapters.seek(digest)
        adapters.acknowledge(adapters.take_news(), EMPTY, now_ns)
        adapters.check()
    assert [adapters.refuses(digest) for digest in digests] == [False] * 5 + [True] * MAX_REFUSALS
    assert adapters.expire(RETRY_NS + 5)
    assert not adapters.refuses(digests[5]) and adapters.refuses(digests[6])


def test_request_with_an_adapter_ends_with_the_reason_where_no_worker_has_any() -> None:
    h = house(max_loras=0)
    add(h, "a", A)
    assert failed(h) == {"a": "the worker has no adapters; start it with --adapter-dir"}
    h.join(replace(LIMITS, max_loras=1))
    add(h, "later", A)
    h.finish()
    assert failed(h).keys() == {"a"}


@pytest.mark.parametrize("seed", range(6))
def test_all_end_with_their_adapters_under_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    h = house(
        rng.choice((1, 2, 3)), rng.choice((1, 1, 2)), rng.choice(("orcinus", "vllm", "sarathi")),
        lookahead=rng.choice((0, 1, 2)), microbatches=rng.choice((1, 2)), prefix_cache=rng.random() < 0.5,
    )  # fmt: skip
    if len(h.workers) > 1 and seed % 2:
        h.workers[1].unloadable = {A}
    for number in range(40):
        add(h, f"r{number}", rng.choice((b"", A, B, C)), max_tokens=rng.randint(1, 30), priority=rng.randint(0, 3))
        if rng.random() < 0.4:
            h.step_once()
    if seed % 3 == 0:
        h.lose(0)
        h.join(LIMITS)
    h.finish()
    assert not failed(h)


def test_acknowledgement_of_an_adapter_that_was_not_announced_is_refused() -> None:
    adapters = Adapters(2)
    adapters.seek(A)
    with pytest.raises(ValueError, match="adapter 2 was acknowledged"):
        adapters.acknowledge(adapters.take_news(), np.array([1, 2], np.int32), 0)


def test_sequence_goes_where_its_adapter_is_loaded() -> None:
    """Without the adapter it would go to the replica without work, which would load it at once."""
    h = house(lookahead=0)
    for number in range(6):
        add(h, f"a{number}", A, max_tokens=40)
    h.steps(4)
    other = h.join(LIMITS)
    add(h, "same", A, max_tokens=40)
    h.steps(3)
    assert [h.core.replicas[number].table.count for number in (0, other)] == [7, 0]
    assert not h.workers[other].adapters
    add(h, "base", b"", max_tokens=40)
    h.steps(3)
    assert [h.core.replicas[number].table.count for number in (0, other)] == [7, 1]
    h.finish()


def urgent_beside_low_ones(max_loras: int, *low: bytes, policy: str = "orcinus") -> tuple[House, int]:
    """The steps until an urgent sequence with adapter C has its first token, where `low` ones of 60 tokens run."""
    h = house(max_loras=max_loras, lookahead=1, policy=policy)
    for number, adapter in enumerate(low):
        add(h, f"low{number}", adapter, 60, priority=3)
    h.steps(6)
    add(h, "urgent", C, 20, priority=0)
    steps = 0
    while not h.published["urgent", 0]:
        h.step_once()
        steps += 1
    return h, steps


@pytest.mark.parametrize(("max_loras", "low", "preempted"), [(1, [A, A], 2), (2, [A, A, B], 1), (2, [A, b""], 0)])
def test_urgent_sequence_takes_the_number_of_an_adapter_of_low_ones(
    max_loras: int, low: list[bytes], preempted: int
) -> None:
    h, steps = urgent_beside_low_ones(max_loras, *low)
    assert steps <= 5 and h.core.stats()["preemptions"] == preempted
    h.finish()


def test_urgent_sequence_takes_the_number_of_the_lowest_class_whatever_its_work() -> None:
    h = house(max_loras=2, lookahead=1)
    add(h, "normal", A, 60, priority=2)
    for number in range(3):
        add(h, f"low{number}", B, 60, priority=3)
    h.steps(6)
    add(h, "urgent", C, 20, priority=0)
    h.steps(5)
    assert h.published["urgent", 0] and h.core.stats()["preemptions"] == 3
    h.finish()


@pytest.mark.parametrize("rows", [(4, 4), (4, 8), (1, 8), (8, 1)])
def test_one_replica_preempts_for_an_urgent_sequence_that_with_less_to_lose(rows: tuple[int, int]) -> None:
    limits = replace(LIMITS, max_loras=1, slots=16)
    h = House(Scheduler("orcinus", lookahead=1), limits)
    for adapter, count in zip((A, B), rows, strict=True):
        for number in range(count):
            add(h, f"{adapter!r}{number}", adapter, 60, priority=3)
        h.steps(4)
        if adapter == A:
            h.join(limits)
    h.steps(4)
    add(h, "urgent", C, 20, priority=0)
    h.steps(5)
    assert h.published["urgent", 0] and h.core.stats()["preemptions"] == min(rows)
    assert sum(replica.adapters.holds(C) for replica in h.core.replicas) == 1
    h.finish()


def test_urgent_sequence_waits_for_a_number_where_the_policy_takes_no_slots() -> None:
    h, steps = urgent_beside_low_ones(1, A, policy="sarathi")
    assert steps > 50 and h.core.stats()["preemptions"] == 0
    h.finish()


def test_urgent_sequence_takes_no_number_of_a_class_as_good() -> None:
    h = house(max_loras=1, lookahead=1)
    add(h, "high", A, 60, priority=1)
    add(h, "low", A, 60, priority=3)
    h.steps(6)
    add(h, "urgent", B, 2, priority=1)
    h.finish()
    assert h.core.stats()["preemptions"] == 0


@pytest.mark.parametrize("held", [C, b""])
def test_urgent_sequence_goes_to_another_replica_that_has_its_adapter_or_room(held: bytes) -> None:
    h = house(max_loras=1, lookahead=1)
    add(h, "low", A, 60, priority=3)
    h.steps(6)
    other = h.join(replace(LIMITS, max_loras=1))
    add(h, "before", held, 3)
    h.steps(6)
    assert "before" in h.ended or not held
    add(h, "urgent", C, 20, priority=0)
    h.steps(8)
    assert h.published["urgent", 0] and h.core.stats()["preemptions"] == 0
    assert h.core.replicas[other].adapters.holds(C)
    h.finish()

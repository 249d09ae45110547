"""Which replica takes a request: prefixes against load, how long one waits for a favourite, trials on one replica."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.placement import router as routing
from services.scheduler.core.placement.base import MAX_PASSED
from services.scheduler.core.placement.router import NEVER, TIMED, UNSEEN
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, NewRequest
from tests.unit.scheduler.core.twin import House, request

LIMITS = Limits(slots=8, blocks=64, block_size=4, max_model_len=128, max_step_tokens=64)


def house(replicas: int = 2, policy: str = "orcinus", **settings: object) -> House:
    made = House(Scheduler(policy, lookahead=0, prefix_cache=True, **settings), LIMITS)
    for _ in range(replicas - 1):
        made.join(LIMITS)
    return made


def with_prefix(name: str, group: int, own: int, max_tokens: int = 8) -> NewRequest:
    """40 tokens of the group, ten blocks, and 5 of its own."""
    head = np.random.default_rng(group).integers(0, 23, 40)
    tail = np.random.default_rng(1000 + own).integers(0, 23, 5)
    made = request(name, 45, max_tokens, seed=own)
    made.prompts = [np.concatenate([head, tail]).astype(np.int32)]
    return made


def where(h: House, name: str) -> int:
    """The replica on which it runs; -1: on none."""
    (sequence,) = h.core.records[name].sequences
    return sequence.replica if sequence.slot >= 0 else -1


def dock(h: House) -> int:
    """Return the number of the replica that is the dock; -1: none."""
    return next((number for number in sorted(h.workers) if h.core.replica_stats(number)["dock"]), -1)


def run_to_end(h: House) -> None:
    h.finish()
    h.core.check()


def warmed(h: House) -> None:
    """Each replica has run something, so that its speed is known; group k is cached on replica k."""
    numbers = sorted(h.workers)
    for number in numbers:
        h.add(with_prefix(f"warm{number}", number, number))
        assert h.plan(number) is not None
        assert where(h, f"warm{number}") == number
    run_to_end(h)


def test_replica_with_prefix_cached_takes_request_though_another_plans_first() -> None:
    h = house()
    warmed(h)
    h.add(with_prefix("a", 1, 50))
    assert h.plan(0) is None, "it is worth more to wait for replica 1"
    h.plan(1)
    assert where(h, "a") == 1
    assert h.core.stats()["prefix_hit_tokens"] == 40
    run_to_end(h)


def test_none_waits_for_a_favourite_longer_than_that_is_worth() -> None:
    h = house()
    warmed(h)
    h.add(with_prefix("a", 1, 50))
    assert h.plan(0) is None
    again = h.core.look_again_ns(0)
    model = h.core.replicas[0].model
    assert 0 < again - h.now <= 4 * model.predict(45, 0, 45 * 45), "of the order of what computing the prefix takes"
    h.now = again - 1
    assert h.plan(0) is None
    h.now = again
    assert h.plan(0) is not None
    assert where(h, "a") == 0
    run_to_end(h)


def timed(h: House, number: int, steps: int, base_ns: float, row_ns: float = 1e4) -> None:
    """So many decode steps of a replica were timed, that take base_ns and row_ns for each of their 1 to 8 rows."""
    for step in range(steps):
        rows = step % 8 + 1
        h.core.replicas[number].model.observe(rows, 20 * rows, 0.0, int(base_ns + row_ns * rows))
    h.core.replicas[number].model.fold()


def spread(h: House, count: int) -> list[int]:
    """How many of `count` short requests each replica takes that come at once."""
    h.add_many(count, 5, 20)
    for number in sorted(h.workers):
        h.plan(number)
    return [h.core.replicas[number].table.count for number in sorted(h.workers)]


@pytest.mark.parametrize(
    ("timings", "takes"),
    [
        ([(40, 1e6), (40, 1e6), (3, 5e6)], [2, 2, 2]),
        ([(40, 1e6), (40, 1e6), (40, 5e6)], [3, 3, 0]),
        ([(200, 20e6), (40, 1e6), (0, 0.0)], [0, 3, 3]),  # as slow as the first it would get nothing and stay unknown
        ([(40, 1e6, 2e5), (40, 1.1e6, 2e5)], [4, 4]),  # a tenth more is nothing against rows that slow all others
    ],
    ids=["slow at first", "slow", "new", "slower but less crowded"],
)
def test_replica_takes_its_part_by_its_speed(timings: list[tuple[Any, ...]], takes: list[int]) -> None:
    h = house(len(timings))
    for number, timing in enumerate(timings):
        timed(h, number, *timing)
    assert spread(h, sum(takes)) == takes
    run_to_end(h)


def test_request_set_aside_for_a_prefix_enters_where_others_were_preempted_for_it() -> None:
    """Replica 0 lets it wait for the prefix that another one computes there; replica 1 has made room for it."""
    h = house()
    warmed(h)
    h.add(with_prefix("first", 7, 50))
    h.add(with_prefix("second", 7, 51))
    assert h.plan(0) is not None
    assert (where(h, "first"), where(h, "second")) == (0, -1)
    (sequence,) = h.core.records["second"].sequences
    h.core.replicas[1].beneficiary = sequence
    assert h.plan(1) is not None
    assert where(h, "second") == 1
    h.core.check()
    h.answer(0)
    h.plan(0)
    assert where(h, "second") == 1, "it does not return to the queue"
    run_to_end(h)


def test_a_hot_prefix_does_not_keep_others_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ask for the prefix of replica 0, which is worth more than anything: the guard sends some to replica 1."""
    monkeypatch.setattr(routing, "WEIGHT", 10_000)
    h = house()
    warmed(h)
    for number in range(32):
        h.add(with_prefix(f"r{number}", 0, 100 + number, max_tokens=40))
    h.steps(8)
    counts = [replica.table.count for replica in h.core.replicas]
    assert min(counts) > 0 and max(counts) <= 1.3 * sum(counts) / 2 + 4
    run_to_end(h)


def test_at_most_sixteen_later_requests_pass_one_without_room() -> None:
    h = house()
    warmed(h)
    h.add(with_prefix("first", 1, 50, max_tokens=4))
    for number in range(3 * MAX_PASSED):
        h.add(with_prefix(f"r{number}", 0, 100 + number, max_tokens=4))
    for _ in range(4000):  # replica 1 plans nothing
        while h.plan(0) is not None:
            pass
        h.answer(0)
        h.now += 10_000_000
        if h.core.records.get("first") is None or where(h, "first") == 0:
            break
    assert sum(name.startswith("r") for name in h.ended) <= MAX_PASSED + LIMITS.slots
    run_to_end(h)


def test_request_too_long_for_blocks_runs_as_another_allows() -> None:
    h = house(replicas=1)
    h.join(replace(LIMITS, max_model_len=256, blocks=8))
    h.most = LIMITS.max_model_len
    h.add(request("a", 20, 200, seed=3))
    run_to_end(h)
    assert len(h.published["a", 0]) == LIMITS.max_model_len - 20


def test_microbatches_of_replica_are_its_stages_unless_they_are_set() -> None:
    for setting, found in ((0, [1, 2]), (3, [3, 3])):
        core = Scheduler("orcinus", microbatches=setting)
        numbers = [core.join(LIMITS), core.join(replace(LIMITS, stages=2))]
        assert [core.replicas[number].microbatches for number in numbers] == found


SMALL = replace(LIMITS, max_model_len=32)


def of_two_sizes() -> House:
    """Replicas 0 and 1 are large, and 2 is small; 0 is lost with a long and two short requests, under suspicion."""
    h = house(2)
    assert h.join(SMALL) == 2
    for number, (prompt, most) in enumerate(((40, 60), (5, 9), (5, 9))):
        h.add(request(f"r{number}", prompt, most, seed=number))
    h.plan(0)
    h.lose(0)
    h.core.confine({"r0"})
    return h


def test_the_dock_is_a_replica_that_those_on_trial_fit() -> None:
    h = of_two_sizes()
    h.add(request("bystander", 5, 20, seed=9))
    h.plan(1)
    assert where(h, "bystander") == 1, "the small one has least to do"
    h.core.assign_dock(h.now)
    h.steps(3)
    assert where(h, "r0") == 1 and dock(h) == 1
    h.core.confine(())
    run_to_end(h)
    assert len(h.published["r0", 0]) == 60


def test_joining_replica_is_the_dock_when_it_fits_most_suspects() -> None:
    h = of_two_sizes()
    assert h.join(SMALL) == 0
    assert dock(h) == -1
    h.core.confine({"r1", "r2"})
    assert h.join(SMALL) == 3
    assert dock(h) == 3
    h.core.confine(())
    run_to_end(h)


def test_dock_moves_on_for_suspects_that_do_not_fit() -> None:
    h = of_two_sizes()
    h.lose(1)
    h.core.confine({"r0", "r1", "r2"})
    h.core.assign_dock(h.now)
    assert dock(h) == 2
    assert h.join(LIMITS) == 0
    assert dock(h) == 2, "two of them fit it"
    h.step_once()
    assert where(h, "r0") == -1
    h.core.confine({"r0"})  # the others got a token each
    h.core.assign_dock(h.now)
    assert dock(h) == 0
    h.step_once()
    assert where(h, "r0") == 0
    h.core.confine(())
    run_to_end(h)


def test_no_replica_is_emptied_for_suspects_that_fit_none() -> None:
    h = of_two_sizes()
    h.lose(1)
    h.add(request("bystander", 5, 20, seed=9))
    h.plan(2)
    h.core.confine({"r0"})
    h.core.assign_dock(h.now)
    h.step_once()
    assert where(h, "bystander") == 2 and dock(h) == -1
    assert h.join(LIMITS) == 0 and dock(h) == 0
    h.core.confine(())
    run_to_end(h)


@pytest.mark.parametrize("seed", range(12))
def test_choice_is_the_best_of_all_assignments_of_one_request(seed: int) -> None:
    """Against brute force: the moment at which each replica would have the request's prompt computed and decoded, from
    what is in its table and cache, computed here from scratch. The least is the one that may take it at once."""
    rng = random.Random(seed)
    h = house(3)
    warmed(h)
    for number in range(rng.randint(0, 12)):
        h.add(with_prefix(f"r{number}", rng.randint(0, 3), number, max_tokens=60))
        h.plan(rng.randint(0, 2))
        h.answer(rng.randint(0, 2))
    for number in range(3):
        while h.workers[number].queue:
            h.answer(number)
    for name in [name for name in h.requests if name.startswith("r") and name in h.core.records]:
        if where(h, name) < 0:
            h.take(h.core.cancel(name, h.now))
    h.add(with_prefix("asked", rng.randint(0, 3), 77))
    (sequence,) = h.core.records["asked"].sequences
    since = [h.core.router.eligible_ns(replica, sequence, h.now) for replica in h.core.replicas]
    times = []
    timed_models = [replica.model for replica in h.core.replicas if replica.model.observations >= TIMED]
    fastest = min(timed_models, key=lambda model: model.predict(1), default=UNSEEN)
    for replica in h.core.replicas:
        table, model = replica.table, replica.model if replica.model.observations >= TIMED else fastest
        rows = [s for s in range(table.slots) if table.active[s]]
        context = sum(int(table.planned_tokens[s]) for s in rows)
        step = model.predict(len(rows), context)
        chunk = 64 - len(rows)
        token = model.predict(len(rows) + chunk, context) / chunk
        owed = sum(
            int(table.known_tokens[s] - table.planned_tokens[s])
            for s in rows
            if table.known_tokens[s] - table.planned_tokens[s] > 1
        )
        hit = 4 * replica.pool.match_length(sequence.prefix.keys)
        rest = 45 - min(hit, 44)
        time = owed * token + max(rest / chunk, 1) * step + 3 * rest * (token + model.c3 * (45 - rest + rest / 2))
        row = model.predict(len(rows) + 1, context + context // max(len(rows), 1)) - step
        times.append(time + 8 * step * (1 + len(rows) / 8 / 8) + 8 * len(rows) * row)
    if any(replica.table.count == 8 for replica in h.core.replicas):
        return
    best = min(range(3), key=times.__getitem__)
    assert since[best] - h.now <= 0.05 * times[best] and max(since) < NEVER
    run_to_end(h)

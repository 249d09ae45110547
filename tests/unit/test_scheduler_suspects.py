"""Finding the request that kills the worker, against a simulated worker that dies whenever a poison is in its step."""

from __future__ import annotations

import random

import pytest

from services.scheduler.suspects import Suspects


def trial(names: list[str], poison: set[str], seed: int) -> tuple[list[str], int]:
    """Runs requests to their ends: (given up, deaths). A step has every request that is not parked."""
    rng = random.Random(seed)
    suspects = Suspects()
    left = {name: rng.randint(1, 3) for name in names}  # tokens to go
    parked: set[str] = set()
    dead: list[str] = []
    deaths = 0
    for _ in range(10_000):
        if not left:
            assert not suspects
            return dead, deaths
        step = set(left) - parked
        assert step, "everything is parked"
        if step & poison:
            deaths += 1
            verdict = suspects.died(step)
            assert set(verdict.park) <= step
            parked |= set(verdict.park)
            for name in verdict.dead:
                dead.append(name)
                del left[name]
            parked -= set(verdict.resume)
            continue
        verdict = suspects.progressed(step)
        parked -= set(verdict.resume)
        for name in sorted(step):
            left[name] -= 1
            if not left[name]:
                del left[name]
                parked -= set(suspects.ended(name).resume)
    raise AssertionError(f"never ended: {left} parked {parked}")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("poisons", [0, 1, 2, 3])
def test_only_poison_is_given_up_and_everybody_else_ends(poisons: int, seed: int) -> None:
    names = [f"r{i:02d}" for i in range(random.Random(seed).randint(1, 20))]
    poison = set(random.Random(seed + 1000).sample(names, min(poisons, len(names))))
    dead, deaths = trial(names, poison, seed)
    assert sorted(dead) == sorted(poison)
    assert deaths <= 8 * (1 + len(poison)) + 2


def test_a_worker_that_died_for_another_reason_costs_nobody_his_request() -> None:
    suspects = Suspects()
    verdict = suspects.died(["a", "b", "c", "d"])
    assert (verdict.park, verdict.dead) == (["c", "d"], [])
    assert suspects.progressed({"a"}).resume == []
    assert suspects.progressed({"b"}).resume == ["c", "d"]
    suspects.progressed({"c", "d"})
    assert not suspects


def test_a_token_between_two_deaths_clears() -> None:
    suspects = Suspects()
    suspects.died(["a"])
    suspects.progressed({"a"})
    assert suspects.died(["a"]).dead == []
    assert suspects.died(["a"]).dead == ["a"]

"""A few golden plans of every policy. All of them: `python -m tests.unit.scheduler.golden_plans --all`."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.golden_plans import NAMES, QUICK_SEEDS, SEEDS, differences, recorded, run


@pytest.mark.parametrize(("number", "name"), enumerate(NAMES))
def test_plans_equal_the_recorded_ones(number: int, name: str) -> None:
    """One of the quick seeds each, in turn."""
    jobs = [(name, QUICK_SEEDS[number % 3])]
    assert not differences(jobs, map(run, jobs))


def test_every_policy_is_recorded_with_all_seeds() -> None:
    assert {name: len(hashes) for name, hashes in recorded().items()} == dict.fromkeys(NAMES, SEEDS)

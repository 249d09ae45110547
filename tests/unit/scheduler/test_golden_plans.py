"""A few golden plans of every policy. All of them: `python -m tests.unit.scheduler.golden_plans --all`."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.golden_plans import NAMES, QUICK_SEEDS, SEEDS, differences, recorded, run


@pytest.mark.parametrize("name", NAMES)
def test_plans_equal_the_recorded_ones(name: str) -> None:
    jobs = [(name, seed) for seed in QUICK_SEEDS]
    wrong, _ = differences(jobs, map(run, jobs))
    assert not wrong


def test_every_policy_is_recorded_with_all_seeds() -> None:
    assert {name: len(hashes) for name, hashes in recorded().items()} == dict.fromkeys(NAMES, SEEDS)

"""The checker of `orcinus chaos` on real runs of a stack with bugs: each must be found, and be called what it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from shared.settings import DEMO_MODEL
from tests.chaos.harness.run import Scenario, chaos
from tests.chaos.harness.target.planted import programs

pytestmark = pytest.mark.timeout(300)
SEED = 20261121
STOPS_FOR_LONG = 8
"""A seed with which scheduler_stop lasts longer than a lease."""


def violations(directory: Path, *bugs: str, seed: int = SEED, kinds: tuple[str, ...] = ()) -> set[tuple[str, str]]:
    """Kind and first word of the place of all that a short run finds. With bugs and without faults it waits for a rest
    only shortly: what leaks lets none come, and a scheduler that loses its lease meanwhile takes with it what
    it leaked.
    """
    scenario = Scenario(
        DEMO_MODEL, seed, seconds=30.0 if kinds else 6.0, faults=1, gap_s=0.5, clients=3, tokens=40, kinds=kinds,
        templates=2, record_s=2.0, settle_s=2.0 if bugs and not kinds else 60.0, programs=programs(*bugs),
    )  # fmt: skip
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(chaos(directory, scenario, print))
    print(*result.violations, sep="\n")
    return {(found.kind, found.where.split()[0]) for found in result.violations}


def test_run_without_a_bug_has_no_violations(tmp_path: Path) -> None:
    assert violations(tmp_path) == set()


def test_lost_ack_leaked_block_and_doubled_token_are_found(tmp_path: Path) -> None:
    found = violations(tmp_path, "lost_ack", "leaked_block", "doubled_token")
    assert {("leaked", "pending"), ("leaked", "blocks"), ("doubled", "request")} <= found


def test_an_ignored_epoch_is_found(tmp_path: Path) -> None:
    found = violations(tmp_path, "ignored_epoch", seed=STOPS_FOR_LONG, kinds=("scheduler_stop",))
    assert ("fenced", "stats") in found

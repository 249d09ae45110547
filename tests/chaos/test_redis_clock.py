"""The clock of a real Redis steps forward and back under load: nothing is lost, nothing comes twice, epochs rise.

Expiries, leases, heartbeats, ids of entries, times of blocked reads and the least next epoch go by that clock.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from shared.settings import DEMO_MODEL
from tests.chaos.harness.run import Scenario, chaos

SEED = 20261130
KINDS = ("redis_clock_forward", "redis_clock_back", "redis_clock_back_scheduler_kill")


@pytest.mark.timeout(300)
def test_clock_steps_of_redis_lose_and_repeat_nothing(tmp_path: Path) -> None:
    scenario = Scenario(
        DEMO_MODEL, SEED, seconds=120.0, faults=len(KINDS), gap_s=1.0, clients=6, kinds=KINDS, templates=4
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(chaos(tmp_path, scenario, print))
    figures = result.figures()
    print(figures)
    assert figures["faults"].keys() == set(KINDS)
    assert figures["finished"] > 2 * len(KINDS)
    assert result.violations == []

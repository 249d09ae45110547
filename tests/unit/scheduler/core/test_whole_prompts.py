"""Replicas that compute prompts whole (encoders): no policy cuts one, none waits for ever, and nothing is kept."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from services.scheduler.core.policy.presets import PRESETS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits
from tests.unit.scheduler.core.twin import House

STEP, SLOTS = 100, 6
LIMITS = Limits(
    slots=SLOTS, blocks=SLOTS, block_size=STEP + 1, max_model_len=STEP + 1, max_step_tokens=STEP, whole_prompts=True
)


@pytest.mark.parametrize(("policy", "step_tokens"), zip(PRESETS, cycle([0, 7]), strict=False))
def test_every_prompt_is_one_chunk_of_a_step_that_holds_it(policy: str, step_tokens: int) -> None:
    house = House(Scheduler(policy, lookahead=1, step_tokens=step_tokens, prefix_cache=True), LIMITS)
    sizes = {f"r{index}": int(size) for index, size in enumerate(np.random.default_rng(5).integers(1, STEP + 1, 40))}
    for seed, (name, size) in enumerate(sizes.items()):
        house.add_all((name, size, 1), seed=seed % 3, priority=seed % 4)  # some begin alike
    computed: dict[str, tuple[int, int]] = {}
    for _ in range(200):
        if len(computed) == len(sizes):
            break
        if (step := house.plan()) is None:
            house.now += 10_000_000
        else:
            chunks = house.chunks(step)
            assert sum(length for _, length in chunks.values()) <= STEP
            assert not computed.keys() & chunks.keys(), "each once"
            computed |= chunks
            house.answer()
        house.core.check()
    assert computed == {name: (0, size) for name, size in sizes.items()}
    assert house.core.stats()["prefix_hit_tokens"] == 0


def test_prompts_that_fit_share_a_step() -> None:
    house = House(Scheduler("orca", lookahead=0), LIMITS)
    house.add_all(("a", 60, 1), ("b", 50, 1), ("c", 30, 1))
    assert house.step() == {"a": (0, 60)}, "b does not fit beside it"
    assert house.step() == {"b": (0, 50), "c": (0, 30)}

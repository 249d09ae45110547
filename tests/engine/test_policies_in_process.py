"""Greedy tokens are the reference's under every policy: a small pool, shared prefixes, several choices, two tiers.

Scheduler and engine in a process, time by the work done. That preemption, swap and prefix sharing occurred is asserted:
equal tokens alone would also come from a policy that did nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from services.scheduler.core.policy.presets import NEEDS, OPTIONS, PARTS, PRESETS, WAYS
from services.worker.engine import Engine
from tests.engine.driver import make_engine
from tests.support import in_process
from tests.support.models import Reference
from tests.support.shared_prefixes import Load, policy_model, shared_prefixes

SMALL = {"max_seqs": 16, "kv_blocks": 26, "max_input_tokens": 48, "max_output_tokens": 16, "max_step_tokens": 512}
"""The longest request needs 16 blocks."""
# Occurs with certainty in this load, whatever else does. The others reserve, or estimate without an error.
RECOMPUTES = {"sarathi", "vllm", "fastgen", "trt-max-utilization", "lmdeploy"}
SWAPS = {"vllm", "ft-aimd"}
NUMBERS = {"fixed": 32, "capped": 8, "skip": 8, "shrinking": 64, "slots": 5}


def every_choice() -> list[str]:
    """As few policies as possible in which every choice of every part occurs, and every way and option of relief."""
    ways = itertools.cycle(["", *(f"-{way}" for way in WAYS)])
    options = itertools.cycle(["", *(f"+{option}" for option in OPTIONS)])
    choices = {
        part: itertools.cycle([name + (f"-{NUMBERS[name]}" if name in NEEDS else "") for name in table])
        for part, table in PARTS.items()
    }
    count = max(len(PARTS["order"]), len(PARTS["memory"]), len(PARTS["batch"]), len(WAYS) + 1, len(OPTIONS) + 1)
    made = []
    for _ in range(count):
        words = {part: next(names) for part, names in choices.items()}
        words["relief"] += next(ways) + next(options)
        made.append("orcinus:" + ",".join(f"{part}={word}" for part, word in words.items()))
    return made


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return policy_model(tmp_path_factory)


@pytest.fixture(scope="module")
def load(reference: Reference) -> Load:
    return shared_prefixes(reference)


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Engine:
    return make_engine(reference.path, host_blocks=32, **SMALL)


@pytest.mark.parametrize("policy", PRESETS)
def test_every_preset_gives_the_references_tokens(engine: Engine, load: Load, policy: str) -> None:
    recorded, core = in_process.run(engine, load.requests(), policy, lookahead=1)
    load.check(recorded)
    stats = core.stats()
    assert (stats["prefix_hit_tokens"] > 0) == core.policy.prefix_cache
    assert stats["preemptions"] > 0 or policy not in RECOMPUTES | SWAPS
    assert stats["recomputed_tokens"] > 0 or policy not in RECOMPUTES
    assert stats["swapped_blocks"] > 0 or policy not in SWAPS


@pytest.mark.parametrize("policy", every_choice())
def test_a_policy_made_of_parts_gives_the_references_tokens(engine: Engine, load: Load, policy: str) -> None:
    recorded, core = in_process.run(engine, load.requests(), policy, microbatches=2, lookahead=1, prefix_cache=True)
    load.check(recorded)
    assert core.policy.name == policy
    assert core.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"microbatches": 3, "lookahead": 2}])
def test_without_a_host_tier_the_default_recomputes(reference: Reference, load: Load, settings: dict[str, Any]) -> None:
    engine = make_engine(reference.path, **SMALL)
    recorded, core = in_process.run(engine, load.requests(), "orcinus:memory=watermark", **settings)
    load.check(recorded)
    stats = core.stats()
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] > 0
    assert stats["swapped_blocks"] == 0

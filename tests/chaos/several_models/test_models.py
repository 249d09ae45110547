"""Two models and three adapters at one address, and both models hurt: nothing lost, nothing twice, no other token.

The long run: `python -m tests.chaos.several_models.test_models FAULTS SEED`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import pytest
import uvloop
from transformers import AutoModelForCausalLM

from shared.settings import DEMO_MODEL
from tests.chaos.harness.faults import KINDS, OF_SECOND
from tests.chaos.harness.run import Result, Scenario, chaos
from tests.support.checkpoints.adapters import make_lora

SEED = 20261126
SHORT = ("worker_kill", "scheduler_kill", "gateway_kill", *OF_SECOND)
ADAPTERS = ("one", "two", "three")


def run(directory: Path, faults: int, seed: int, kinds: tuple[str, ...], templates: int | None = None) -> Result:
    folder = directory / "adapters"
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    for number, name in enumerate(ADAPTERS):
        make_lora(folder / name, model, seed + number)
    scenario = Scenario(
        DEMO_MODEL, seed, seconds=60.0 * faults, faults=faults, gap_s=1.0, clients=8, tokens=120, kinds=kinds,
        has_second=True, adapters=folder, templates=templates,
    )  # fmt: skip
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(chaos(directory / "stack", scenario, print))


@pytest.mark.timeout(600)
def test_faults_of_either_model_change_no_answer(tmp_path: Path) -> None:
    result = run(tmp_path, len(SHORT), SEED, SHORT, templates=6)
    assert result.violations == []
    figures = result.figures()
    assert figures["faults"].keys() == set(SHORT)
    done = {history.template.partition(" ")[0] for history in result.histories if history.end == "done"}
    assert done >= {"second", *ADAPTERS}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = run(Path(made), int(sys.argv[1]), int(sys.argv[2]), (*KINDS, *OF_SECOND))
        print(json.dumps(found.figures()), *found.violations, sep="\n")

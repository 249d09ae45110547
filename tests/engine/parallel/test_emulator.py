"""Ranks with the CUDA kernels, on emulated GPUs: each device's work is put off, and done when the ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driver import Driver
from tests.engine.ranks import Processes
from tests.support.checkpoints.models import make_llama, random_prompts
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

GAP = 0.25
"""Of the two best logits, which reach 30: a hundred times what float16 is off."""
SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float16"}
OUTPUTS = 4


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_of_emulated_gpus_give_transformers_tokens(
    processes: Processes, tmp_path: Path, tp: int, pp: int
) -> None:
    reference = make_llama(tmp_path / "tiny", seed=9, requests=1, output_tokens=1, **SHAPE)
    prompts = random_prompts(30, (3, 40), 3)
    outputs, gaps = reference.run(prompts, OUTPUTS)
    kept = [at for at, gap in enumerate(gaps) if gap > GAP][:3]
    assert len(kept) == 3
    settings = {"kernels": "emulator", "dtype": "auto", "max_seqs": 6, "max_step_tokens": 48, "block_size": 16}
    with processes.replica(tp, pp, reference.path, **settings, max_input_tokens=44, max_output_tokens=12) as replica:
        driver = Driver(replica)
        for slot, at in enumerate(kept):
            driver.enter(slot, prompts[at])
        while any(len(driver.outputs[slot]) < OUTPUTS for slot in range(3)):
            driver.step({slot: 15 for slot in range(3) if len(driver.outputs[slot]) < OUTPUTS})
        assert [driver.outputs[slot] for slot in range(3)] == [outputs[at] for at in kept]

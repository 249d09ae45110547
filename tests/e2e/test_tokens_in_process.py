"""Greedy tokens equal transformers' whatever is batched, chunked, paged, preempted or overlapped: the whole matrix.

Core and engine in one process. The prompts' smallest top-2 gap in the reference exceeds 1e-3 (asserted), so float32
leaves no room for a tie.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine import Engine
from shared.settings import WorkerSettings
from tests import in_process
from tests.models import Reference, make_llama

REQUESTS = 32
CHUNKS = (1, 7, 64, 0)  # tokens an iteration; 0: as many as the worker takes
BLOCKS = (4, 16)
OVERLAPS = tuple(itertools.product((1, 2, 3), (0, 1, 2)))  # microbatches, lookahead
SMALL_POOL_TOKENS = 160  # so small that running sequences lose their blocks


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("matrix") / "tiny"
    return make_llama(directory, requests=REQUESTS, hidden_size=32, num_hidden_layers=2, seed=20261120)


def engine(model: Path, block_size: int, pool_tokens: int) -> Engine:
    return Engine(
        WorkerSettings(
            model=model,
            device="cpu",
            dtype="float32",
            block_size=block_size,
            max_seqs=REQUESTS,
            kv_blocks=pool_tokens // block_size,
            max_step_tokens=4096,
            threads=1,
        )
    )


@pytest.mark.parametrize("policy", ["orcinus", "sarathi", "orca"])
@pytest.mark.parametrize("pool", ["ample", "small"])
@pytest.mark.parametrize("block_size", BLOCKS)
def test_greedy_tokens_are_the_references_in_the_whole_matrix(
    reference: Reference, block_size: int, pool: str, policy: str
) -> None:
    ample = 4096 if pool == "ample" else SMALL_POOL_TOKENS
    runner = engine(reference.path, block_size, ample)
    preemptions = 0
    for chunk, (microbatches, lookahead) in itertools.product(CHUNKS, OVERLAPS):
        requests = [
            in_process.request(f"r{index}", prompt, len(output))
            for index, (prompt, output) in enumerate(zip(reference.prompts, reference.outputs, strict=True))
        ]
        settings: dict[str, Any] = {"microbatches": microbatches, "lookahead": lookahead, "step_tokens": chunk}
        recorded, core = in_process.run(runner, requests, policy, **settings)
        assert not recorded.errors, (settings, recorded.errors)
        got = [recorded.tokens[f"r{index}", 0] for index in range(REQUESTS)]
        assert got == reference.outputs, settings
        preemptions += int(core.stats()["preemptions"])
    if pool == "small" and policy != "orca":  # orca reserves, so it never preempts
        assert preemptions > 0, "the pool was not small enough to show anything"
    if pool == "ample" or policy == "orca":
        assert preemptions == 0

"""Greedy tokens equal transformers' whatever is batched, chunked, paged, preempted or overlapped.

Scheduler and engine in a process. The prompts' smallest top-2 gap in the reference exceeds 1e-3 (asserted), so float32
leaves no room for a tie.
"""

from __future__ import annotations

import itertools

import pytest

from tests.engine.driver import make_engine, requests_of, tokens_of
from tests.support import in_process
from tests.support.checkpoints.models import Reference

REQUESTS = 24
MODEL = {"requests": REQUESTS, "prompt_tokens": (2, 40), "output_tokens": 10, "hidden_size": 32, "seed": 20261120}
CHUNKS = (1, 7, 64, 0)  # tokens an iteration; 0: as many as the worker takes
# Chunk, microbatches, lookahead: every pair of values of two settings occurs, every value in each second row.
PAIRS = tuple((chunk, m, lookahead) for (chunk, m), lookahead in zip(
    itertools.product(CHUNKS, (1, 2, 3)), (0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2), strict=True))  # fmt: skip
POOLS = {"ample": 4096, "small": 96}  # tokens; the small one holds the longest request and little more


# The C++ kernels have blocks of 16 tokens. The reference kernels (blocks of 4) are slow. The engine sees steps and no
# policy: every preset runs in test_policies_in_process.
@pytest.mark.parametrize(
    ("policy", "pool", "block_size", "pairs"),
    [
        ("orcinus", "ample", 16, PAIRS[::2]),
        ("sarathi", "small", 16, PAIRS),
        ("sarathi", "small", 4, PAIRS[::2]),
    ],
    ids=lambda value: None if isinstance(value, str | int) else f"{len(value)} pairs",
)
def test_greedy_tokens_equal_transformers_in_every_pair_of_settings(
    reference: Reference, policy: str, pool: str, block_size: int, pairs: tuple[tuple[int, int, int], ...]
) -> None:
    lengths = {"max_seqs": REQUESTS, "max_input_tokens": 64, "max_output_tokens": 32}
    blocks = POOLS[pool] // block_size
    runner = make_engine(reference.path, kernels="auto", block_size=block_size, kv_blocks=blocks, **lengths)
    for chunk, microbatches, lookahead in pairs:
        settings = {"microbatches": microbatches, "lookahead": lookahead, "step_tokens": chunk}
        recorded, core = in_process.run(runner, requests_of(reference.prompts, 10), policy, **settings)
        assert tokens_of(recorded) == reference.outputs, settings
        fills_pool = pool == "small" and chunk * microbatches not in (1, 2)  # so narrow steps run few sequences at once
        assert (int(core.stats()["preemptions"]) > 0) == fills_pool, settings

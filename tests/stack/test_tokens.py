"""Greedy tokens of the real stack equal transformers': HTTP, Redis, scheduler and worker as separate processes.

Two rows of the matrix of test_tokens_in_process. The one with a small pool runs `sarathi`, which admits without regard
to later growth, and must preempt.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.checkpoints.models import Reference, make_llama
from tests.support.stack import running_stack
from tests.support.waiting import until

REQUESTS = 32
# step_tokens (0: as many as the worker takes), block size, microbatches, lookahead, KV pool in tokens
AMPLE, SMALL = 4096, 96
ROWS = [
    (64, 16, 1, 1, SMALL),
    (7, 16, 3, 2, AMPLE),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("stack-matrix") / "tiny"
    return make_llama(directory, requests=REQUESTS, hidden_size=32, num_hidden_layers=2, seed=20261121)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_stack_gives_the_tokens_of_transformers(reference: Reference, tmp_path: Path, row: tuple[int, ...]) -> None:
    step_tokens, block_size, microbatches, lookahead, pool = row
    settings = {
        "dtype": "float32", "step_tokens": step_tokens, "block_size": block_size, "microbatches": microbatches,
        "lookahead": lookahead, "kv_blocks": pool // block_size, "max_seqs": REQUESTS,
        "max_input_tokens": 64, "max_output_tokens": 32,  # so that the longest sequence fits the small pool
        "policy": "sarathi" if pool == SMALL else "orcinus", "threads": 2,
    }  # fmt: skip
    with running_stack(tmp_path, reference.path, **settings) as stack, ThreadPoolExecutor(REQUESTS) as clients:
        lengths = map(len, reference.outputs)
        got = clients.map(lambda *each: stack.complete(*each, ignore_eos=True), reference.prompts, lengths)
        assert list(got) == reference.outputs
        stack.settled_empty()
        if pool == SMALL:
            until("the pool was too small for all", lambda: int(stack.stats()["preemptions"]) > 0)

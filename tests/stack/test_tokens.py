"""Greedy tokens of the real stack equal transformers': HTTP, Redis, scheduler and worker as separate processes.

One row of the matrix of test_tokens_in_process, with several steps in flight. Preemption is in test_policies.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.checkpoints.models import make_llama
from tests.support.stack import running_stack

REQUESTS = 32


def test_stack_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    reference = make_llama(tmp_path / "tiny", requests=REQUESTS, hidden_size=32, num_hidden_layers=2, seed=20261121)
    settings = {
        "dtype": "float32", "step_tokens": 7, "block_size": 16, "microbatches": 3, "lookahead": 2, "kv_blocks": 256,
        "max_seqs": REQUESTS, "max_input_tokens": 64, "max_output_tokens": 32, "threads": 2,
    }  # fmt: skip
    with running_stack(tmp_path, reference.path, **settings) as stack, ThreadPoolExecutor(REQUESTS) as clients:
        lengths = map(len, reference.outputs)
        got = clients.map(lambda *each: stack.complete(*each, ignore_eos=True), reference.prompts, lengths)
        assert list(got) == reference.outputs
        stack.settled_empty()

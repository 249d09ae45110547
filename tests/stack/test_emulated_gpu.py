"""The real stack over a worker that emulates a GPU: HTTP, Redis, scheduler and worker as separate processes.

Tokens are transformers'; the pool is so small that sequences are swapped out while steps are in flight.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.support.checkpoints.models import make_llama, random_prompts
from tests.support.compiler import needs_compiler
from tests.support.stack import running_stack
from tests.support.waiting import until

GAP = 0.25
"""Of the two best logits, which reach 30: a hundred times what float16 is off."""
TOKENS = 12


@needs_compiler
def test_emulated_gpu_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    reference = make_llama(tmp_path / "tiny", seed=9, requests=1, output_tokens=1, dtype="float16", **heads)
    prompts = random_prompts(60, (3, 40), 3)
    outputs, gaps = reference.run(prompts, TOKENS)
    kept = [at for at, gap in enumerate(gaps) if gap > GAP]
    assert len(kept) >= 16
    kernels, device = ("cuda", "cuda") if torch.cuda.is_available() else ("emulator", "cpu")
    settings = {"kernels": kernels, "dtype": "auto", "block_size": 16, "max_seqs": 8, "max_step_tokens": 64}
    limits = {"kv_blocks": 9, "host_blocks": 12, "max_input_tokens": 60, "max_output_tokens": 40}
    policy = {"policy": "sarathi:relief=newest-swap", "lookahead": 1}
    with running_stack(tmp_path, reference.path, device=device, **settings, **limits, **policy) as stack:
        with ThreadPoolExecutor(len(kept)) as pool:
            found = list(pool.map(lambda at: stack.complete(prompts[at], TOKENS, ignore_eos=True), kept))
        assert found == [outputs[at] for at in kept]
        settled = stack.settled()
        assert settled["blocks"] == settled["total"] == 9
        assert stack.stats()["backend"] == kernels
        # Stats are written once a second: those that settled() saw may be older than the load.
        until("the stats have swaps", lambda: int(stack.stats().get("swapped_blocks", "0")) > 0)

"""Continuous batching of transformers on the same device, with a model of the same shape: its decode step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.engine import config_of
from bench.kernels.shapes import LLAMA_8B, TINY

SEQUENCES, PROMPT = 64, 1024
TOKENS = (16, 80)
"""Generated in two runs: the difference holds no prefill."""


def continuous_batching(context: Context) -> Iterator[tuple[str, Any]]:
    """step_us at 64 sequences of 1,024 tokens; `skipped` where transformers is not installed."""
    try:
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, __version__
    except ImportError as error:
        yield "skipped", f"transformers cannot be imported: {error}"
        return
    yield "transformers", __version__
    if context.device != "cuda":
        yield "skipped", "it needs a GPU"
        return
    model = TINY if context.quick else LLAMA_8B
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = LlamaForCausalLM(LlamaConfig(**config_of(model))).eval()
    generator = torch.Generator().manual_seed(20261120)
    prompts = torch.randint(2, model.vocab, (SEQUENCES, PROMPT), generator=generator).tolist()

    def run_s(tokens: int) -> float:
        wanted = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begun = time.perf_counter()
        made.generate_batch(inputs=prompts, generation_config=wanted)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    run_s(2)
    times = [run_s(tokens) for tokens in TOKENS]
    yield "runs_s", times
    yield "step_us", (times[1] - times[0]) / (TOKENS[1] - TOKENS[0]) * 1e6

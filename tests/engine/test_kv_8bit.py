"""KV in 8 bits against transformers with a cache that is rounded by the formula, and the bytes that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicLayer

from services.worker.engine import Engine
from shared.wire.columns import pack, unpack
from tests.engine.driver import Driver, make_engine, tokens_of
from tests.engine.emulated import GAP, emulated, float16_model
from tests.engine.test_tokens import all_logits
from tests.kernels.sequences import coded
from tests.support import in_process
from tests.support.checkpoints.models import MIN_GAP, Reference, random_prompts
from tests.support.compiler import needs_compiler

MODEL = {"seed": 5, "requests": 3, "output_tokens": 1, "prompt_tokens": (2, 90)}

OUTPUTS = 64
LOGITS_ERROR = 1e-3
"""Of the largest logit: where x / scale is within the last bit of a half, engine and oracle may round it apart."""


@pytest.fixture(params=["int8", "fp8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rounded_cache(monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    """Let the caches of transformers hold rounded K and V."""
    update = DynamicLayer.update

    def round_and_update(self: Any, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return update(self, coded(keys, kv_dtype), coded(values, kv_dtype), *rest, **named)

    monkeypatch.setattr(DynamicLayer, "update", round_and_update)


def engine_of(reference: Reference, kv_dtype: str, **settings: Any) -> Engine:
    return make_engine(reference.path, kernels="cpu", block_size=16, kv_dtype=kv_dtype, **settings)


def greedy(reference: Reference, prompt: list[int], outputs: int = OUTPUTS) -> tuple[list[int], float]:
    """Return tokens, and the smallest gap between the two best logits."""
    tokens, gap = list(prompt), np.inf
    for _ in range(outputs):
        best = reference.logits(tokens)[-1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], gap


@pytest.mark.usefixtures("rounded_cache")
def test_tokens_and_logits_are_those_of_rounded_cache(reference: Reference, kv_dtype: str) -> None:
    engine = engine_of(reference, kv_dtype)
    found = Driver(engine, reference.prompts).run_all(OUTPUTS)
    expected = [greedy(reference, prompt) for prompt in reference.prompts]
    assert min(gap for _, gap in expected) > MIN_GAP, "choose another seed"
    assert found == [tokens for tokens, _ in expected]
    tokens = reference.prompts[0] + found[0]
    engine.reset()
    logits, expected = all_logits(engine, tokens), reference.logits(tokens)
    assert float((logits - expected).abs().max()) <= LOGITS_ERROR * float(expected.abs().max())


def test_logits_of_plain_cache_are_further_than_the_error_allowed(reference: Reference, kv_dtype: str) -> None:
    tokens = reference.prompts[0] * 2
    expected = reference.logits(tokens)
    error = float((all_logits(engine_of(reference, kv_dtype), tokens) - expected).abs().max())
    assert error > LOGITS_ERROR * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_same_in_chunks_and_with_one_thread(reference: Reference, dtype: str, kv_dtype: str) -> None:
    whole = Driver(engine_of(reference, kv_dtype, dtype=dtype), reference.prompts).run_all(OUTPUTS)
    assert (
        Driver(engine_of(reference, kv_dtype, dtype=dtype, threads=1), reference.prompts).run_all(OUTPUTS, 7) == whole
    )


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4), ("bfloat16", 2)])
def test_blocks_take_a_part_of_the_bytes(reference: Reference, dtype: str, times: int, kv_dtype: str) -> None:
    plain = make_engine(reference.path, kernels="cpu", block_size=16, dtype=dtype)
    held, info = plain.info(), engine_of(reference, kv_dtype, dtype=dtype).info()
    numbers = held.block_bytes // plain.dtype.itemsize
    scales = numbers // plain.cache.pool.head_stride
    assert info.block_bytes == numbers + 4 * scales
    assert held.block_bytes == times * numbers
    assert info.numerics == f"{held.numerics} kv {kv_dtype}" and info.kv_format != held.kv_format


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_swapped_out_and_back_give_the_same_tokens(reference: Reference, dtype: str, kv_dtype: str) -> None:
    """Another sequence overwrites the blocks meanwhile, and the KV comes back to others."""
    engine, prompt = engine_of(reference, kv_dtype, dtype=dtype, host_blocks=32), max(reference.prompts, key=len)
    expected = Driver(engine, [prompt]).run(0, OUTPUTS)
    engine.reset()
    driver = Driver(engine, [prompt])
    before = list(driver.run(0, 20))
    computed = driver.computed[0]
    count = -(-computed // 16)
    own, host, others = driver.blocks(0)[:count], np.arange(31, 31 - count, -1), driver.blocks(3)[:count]
    acknowledged = driver.step({}, swap_out_gpu=pack(own), swap_out_host=pack(host))
    assert sorted(unpack(acknowledged.swap_out_acks)) == sorted(own)
    driver.free(0)
    driver.enter(0, [7, 8, 9] * 40)
    driver.run(0, 30)
    assert not any(torch.equal(engine.cache.read_block(block), engine.cache.read_block(own[0])) for block in others)
    driver.enter(3, prompt + before, prompt=len(prompt), computed=computed)
    driver.step({3: 1}, swap_in_host=pack(host), swap_in_gpu=pack(others))
    assert driver.run(3, OUTPUTS)[:OUTPUTS] == expected


@needs_compiler
@pytest.mark.usefixtures("rounded_cache")
@pytest.mark.parametrize("kv_dtype", ["fp8"], indirect=True)
@pytest.mark.parametrize("order", [1, 3])
def test_emulated_gpu_with_preemption_swap_and_sharing_gives_tokens_of_rounded_cache(
    kv_dtype: str, order: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = random_prompts(1, (33, 33), 2)[0]
    prompts = random_prompts(30, (3, 40), 3) + [shared + end for end in random_prompts(10, (1, 9), 4)]
    reference = float16_model(tmp_path, prompts, 1)
    expected = [(prompt, *greedy(reference, prompt, 10)) for prompt in reference.prompts]
    kept = [(prompt, tokens) for prompt, tokens, gap in expected if gap > GAP]
    assert len(kept) >= 8
    engine = emulated(monkeypatch, reference.path, order, kv_blocks=9, host_blocks=12, kv_dtype=kv_dtype)
    engine.warm_up()
    requests = [in_process.request(f"r{i}", prompt, 10) for i, (prompt, _) in enumerate(kept)]
    policy = "orcinus:memory=watermark,relief=newest-swap"
    recorded, core = in_process.run(engine, requests, policy, lookahead=1, prefix_cache=True)
    assert tokens_of(recorded) == [tokens for _, tokens in kept]
    stats = core.stats()
    assert stats["swapped_blocks"] > 0 and stats["prefix_hit_tokens"] > 0
    assert engine.info().numerics.endswith(" kv fp8")

"""The engine in process against transformers: the same greedy tokens, close logits, however it is batched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protos import worker_pb2
from shared.text.logprobs import TokenLogprobs
from shared.wire.columns import pack
from tests.engine.driver import Driver, make_engine
from tests.kernels.sequences import batch_of
from tests.support.checkpoints.models import MIN_GAP, Reference, make_llama

MODEL = {"seed": 3, "requests": 6}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail when a logit differs by more than 1e-4 of the largest one."""
    error = float((found - expected).abs().max())
    assert error <= 1e-4 * max(1.0, float(expected.abs().max())), error


def all_logits(engine: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of every position in one pass over blocks 0, 1, 2, ..."""
    count, size = len(tokens), engine.info().block_size
    batch = batch_of([tokens], [0], np.arange(-(-count // size), dtype=np.int32)[None], block_size=size)
    batch = replace(batch, sample_rows=np.arange(count, dtype=np.int32))
    with torch.inference_mode():
        prepared = engine.ops.prepare(batch, engine.cache)
        return engine.decoder.forward(prepared, engine.cache).clone()


def test_bfloat16_stays_near_the_reference(reference: Reference) -> None:
    engine = make_engine(reference.path, dtype="bfloat16")
    expected = reference.logits(reference.prompts[0])
    error = (all_logits(engine, reference.prompts[0]) - expected).abs().max()
    assert MIN_GAP < error < 0.1 * expected.abs().max()
    assert engine.info().dtype == "bfloat16"


def test_the_checkpoints_type_is_the_default_and_float16_is_widened(tmp_path: Path, reference: Reference) -> None:
    for dtype, expected in (("bfloat16", "bfloat16"), ("float16", "float32")):
        path = make_llama(tmp_path / dtype, requests=1, output_tokens=1, dtype=dtype).path
        assert make_engine(path, dtype="auto").info().dtype == expected
    assert make_engine(reference.path, dtype="auto").info().dtype == "float32"


def test_seeded_draw_does_not_depend_on_batch_chunks_or_preemption(reference: Reference) -> None:
    sampling = worker_pb2.Sampling(
        temperature=0.9, top_p=0.95, top_k=40, min_p=0.001, seed=77, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=0.3, bias_ids=pack([70, 71]), bias_values=np.array([3.5, -50], np.float32).tobytes(),
    )  # fmt: skip
    engine = make_engine(reference.path)
    alone = Driver(engine)
    alone.enter(0, reference.prompts[0], sampling=sampling)
    expected = list(alone.run(0, 20))
    assert expected != reference.outputs[0][:20]
    engine.reset()
    busy = Driver(engine)
    busy.enter(4, reference.prompts[0], sampling=sampling)
    busy.enter(2, reference.prompts[1], sampling=worker_pb2.Sampling(temperature=1.5, top_p=1, seed=5))
    busy.enter(7, reference.prompts[2])
    while len(busy.outputs[4]) < 8:
        busy.step({7: 3, 4: 5, 2: 64})
    before = list(busy.outputs[4])
    busy.free(4)
    busy.enter(1, reference.prompts[0] + before, prompt=len(reference.prompts[0]), sampling=sampling)
    while len(busy.outputs[1]) < 20:
        busy.step({1: 11, 2: 64})
    assert busy.outputs[1] == expected
    engine.reset()
    other = Driver(engine)
    sampling.seed = 78
    other.enter(0, reference.prompts[0], sampling=sampling)
    assert other.run(0, 20) != expected


def test_log_probabilities_are_equal_after_chunks_company_and_preemption(reference: Reference) -> None:
    """Temperature, penalties and bias change the choice and not the model's distribution."""
    sampling = worker_pb2.Sampling(
        temperature=1.3, top_p=0.9, seed=9, repetition_penalty=1.2, logprobs=21,
        bias_ids=pack([7]), bias_values=np.float32(4).tobytes(),
    )  # fmt: skip
    prompt = reference.prompts[0]
    driver = Driver(make_engine(reference.path))
    driver.enter(4, prompt, sampling=sampling)
    driver.enter(2, prompt, sampling=worker_pb2.Sampling(logprobs=1))
    driver.enter(7, reference.prompts[2])
    while len(driver.outputs[4]) < 6:
        driver.step({7: 3, 4: 5, 2: 64})
    before, first = list(driver.outputs[4]), list(driver.logprobs[4])
    driver.free(4)
    driver.enter(1, prompt + before, prompt=len(prompt), sampling=sampling)
    while len(driver.outputs[1]) < 10:
        driver.step({1: 11, 7: 64})
    tokens, found = driver.outputs[1], first + driver.logprobs[1]
    exact = reference.logits(prompt + tokens).double().log_softmax(-1)[len(prompt) - 1 :]
    assert len(found) == len(tokens)
    assert driver.logprobs[7] == []
    greedy = reference.logits(prompt + driver.outputs[2]).double().log_softmax(-1)[len(prompt) - 1 :]
    for i, (token, one) in enumerate(zip(driver.outputs[2], driver.logprobs[2], strict=True)):
        assert one == TokenLogprobs(pytest.approx(float(greedy[i, token]), abs=1e-3), [])
    for i, token in enumerate(tokens):
        assert found[i].sampled_logprob == pytest.approx(float(exact[i, token]), abs=1e-3)
        assert_likely(found[i].best, exact[i], 20)


def assert_likely(found: list[tuple[int, float]], exact: Tensor, most: int) -> None:
    """found: the `most` likely ids of exact [V], best first."""
    best = exact.topk(most).values
    assert len({token for token, _ in found}) == most
    assert [value for _, value in found] == pytest.approx(best.tolist(), abs=1e-3)
    assert [float(exact[token]) for token, _ in found] == pytest.approx(best.tolist(), abs=1e-3)

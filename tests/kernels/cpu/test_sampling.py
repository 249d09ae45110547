"""Threads share the rows of the C++ sampler, and its longest rows. Its tokens are seen in ../test_samplers.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.program import Immediate
from kernels.cpu.sampling import SHARED, sample
from kernels.ops import STATUS_FINE, STATUS_NOT_FINITE, Sampled, SamplingRows
from tests.kernels.cpu_variants import library
from tests.kernels.sampling_cases import Array, normal, rows

pytestmark = pytest.mark.sanitized


def draw(variant: str, logits: Array, how: SamplingRows, threads: int = 1) -> Sampled:
    return sample(Immediate(library(variant), threads), torch.tensor(logits, dtype=torch.float32), how)


@pytest.mark.parametrize(("count", "threads"), [(1, 5), (3, 1), (3, 2), (9, 5)])
def test_long_greedy_row_is_cut_among_threads_without_a_trace(count: int, threads: int, float32_variant: str) -> None:
    vocab = SHARED + 3
    logits = normal(count, vocab, 1)
    for place in (0, 16_383, 16_384, 50_001, vocab - 1):
        logits[:, [place, min(place + 9000, vocab - 1)]] = 50
        found = draw(float32_variant, logits, rows(count), threads)
        assert found.tokens.tolist() == logits.argmax(-1).tolist()
        assert found.status.tolist() == [STATUS_FINE] * count
        broken = logits.copy()
        broken[-1, place] = np.nan
        status = draw(float32_variant, broken, rows(count), threads).status.tolist()
        assert status == [STATUS_FINE] * (count - 1) + [STATUS_NOT_FINITE]
        logits[:, [place, min(place + 9000, vocab - 1)]] = 0


@pytest.mark.parametrize(
    ("count", "vocab", "temperature", "threads"),
    [
        (1, 4096, 0.0, 1),
        (31, 4096, 0.0, 1),
        (1, SHARED, 0.0, 2),
        (1, SHARED, 1.0, 1),
        (2, 4096, 1.0, 1),
        (8, 4096, 1.0, 2),
    ],
)
def test_threads_are_woken_for_work_that_outlasts_it(
    count: int, vocab: int, temperature: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(Library, "run", lambda self, commands, count, step, threads, *_: used.append(threads))
    sample(Immediate(library("plain"), 2), torch.zeros((count, vocab)), rows(count, temperature=[temperature] * count))
    assert used == [threads]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_row_is_same_alone_in_batch_and_with_any_threads(threads: int, float32_variant: str) -> None:
    count, vocab = 23, 3001
    logits, rng = normal(count, vocab, 11), np.random.default_rng(11)
    columns = {"temperature": rng.choice([0.5, 1.0], count), "top_k": rng.choice([0, 50], count)}
    columns |= {"top_p": rng.choice([1.0, 0.9], count), "seed": np.arange(count)}
    together = draw(float32_variant, logits, rows(count, want_logprob=True, **columns), threads)
    alone = [
        draw(float32_variant, logits[i : i + 1], rows(1, want_logprob=True, **{k: v[i] for k, v in columns.items()}), 1)
        for i in range(count)
    ]
    assert together.tokens.tolist() == [int(one.tokens[0]) for one in alone]
    assert together.logprobs is not None
    assert together.logprobs.tolist() == [float(one.logprobs[0]) for one in alone if one.logprobs is not None]

"""Row-wise operations and the sampler's threads, beyond ../test_ops.py: extreme numbers, no stray write."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.cpu.backend import CpuOps
from kernels.cpu.commands import FLOAT32, NormArgs
from kernels.cpu.library import Library
from kernels.cpu.program import Immediate
from kernels.cpu.sampling import SHARED, sample
from kernels.ops import ACTIVATIONS, STATUS_FINE, STATUS_NOT_FINITE, Norm, Sampled, SamplingRows
from tests.kernels.cpu_variants import library
from tests.kernels.sampling_cases import Array, normal, rows
from tests.kernels.sequences import FORMULAS, near, normed, random, wide

pytestmark = pytest.mark.sanitized


@pytest.fixture
def ops(float32_variant: str) -> CpuOps:
    return CpuOps(library(float32_variant), 1)


def test_layer_norm_keeps_its_digits_beside_a_large_mean(ops: CpuOps) -> None:
    x, norm = random((3, 768), 1, torch.float32) + 1000, Norm(torch.ones(768), None, 1e-5, True)
    near(ops.norm(x, norm), normed(wide(x), norm), 2e-4)


def test_row_is_same_alone_in_batch_and_with_any_threads(ops: CpuOps) -> None:
    x, norm = random((41, 515), 1, torch.float32), Norm(random((515,), 2, torch.float32), None, 1e-5, True)
    alone = torch.cat([ops.norm(row[None].clone(), norm) for row in x])
    for threads in (1, 2, 5):
        assert torch.equal(CpuOps(ops.library, threads).norm(x, norm), alone)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations_hold_few_units_in_last_place_over_all_magnitudes(ops: CpuOps, kind: str) -> None:
    # Every 4,003rd float32 of either sign up to 80.
    bits = np.arange(0, np.float32(80).view(np.uint32), 4003, dtype=np.uint32)
    x = torch.from_numpy(np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32))
    expected = FORMULAS[kind](wide(x))
    error = np.abs(wide(ops.activate(x[None], kind)[0]) - expected) / np.maximum(np.abs(expected), 1e-35)
    # exp multiplies the rounding of its argument, which grows to 80.
    limit = {"silu": 4e-7 + 6e-8 * 80, "gelu": 5e-6, "gelu_tanh": 1e-5}[kind]
    reached = np.abs(expected) > (1e-9 if kind == "gelu_tanh" else 1e-35)
    assert error[reached].max() < limit and error[np.abs(expected) > 0.01].max() < 1e-6


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_huge_and_broken_numbers(ops: CpuOps, kind: str) -> None:
    found = ops.activate(torch.tensor([[1e30, -1e30, 3e38, -200.0, math.nan, math.inf]]), kind)[0]
    assert found[[0, 2, 5]].tolist() == torch.tensor([1e30, 3e38, math.inf]).tolist()
    assert found[1] == 0 and found[3] == 0 and found[4].isnan()


def test_nothing_is_written_beyond_the_last_number(ops: CpuOps) -> None:
    for width in (1, 7, 33):
        x, weight = random((1, width), 1, torch.float32), random((width,), 2, torch.float32)
        out = torch.full((width + 64,), 7.0)
        args = NormArgs(x.data_ptr(), None, out.data_ptr(), weight.data_ptr(), None, width, FLOAT32, False, 1e-5)
        Immediate(ops.library, 1).now(1, args)
        assert (out[width:] == 7).all()


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
def test_sampled_row_is_same_alone_in_batch_and_with_any_threads(threads: int, float32_variant: str) -> None:
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

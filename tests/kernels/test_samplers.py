"""The compiled samplers, on the CPU in every instruction set and by CUDA in three orders of threads: the tokens of the
reference backend for the same seeds, whatever the rows ask for.

That the reference's draws follow the distribution of float64 is seen in test_sampling.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.program import Immediate
from kernels.cpu.sampling import sample
from kernels.cuda.operations.sampling import Sampler
from kernels.ops import STATUS_FINE, STATUS_NOT_FINITE, STATUS_NOTHING_ALLOWED, Sampled, SamplingRows, Sparse
from tests.kernels import cpu_variants, sampling_cases
from tests.kernels.cuda.programs import ORDERS, assert_fences, device_of_threads, fenced
from tests.kernels.sampling_cases import FEATURES, Array, Draw, alone, mixed, normal, rows, same_as_reference, some
from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.sanitized]
SHORTLIST = 3584  # sampler_draw.cuh: ids of smaller vocabularies all fit into the list


PROCESSORS = {"cuda": 4, "cuda_split": 256}
"""So many that a row has one block, and so many that rows have several where they are long enough."""


@pytest.fixture(
    params=[
        *(f"cpu-{name}" for name in cpu_variants.widths()),
        *(f"{kind}-{order}" for kind in PROCESSORS for order in ORDERS),
    ]
)
def draw(request: pytest.FixtureRequest) -> Draw:
    """Draw once by one of the samplers. CUDA must not write outside its logits."""
    kind, name = request.param.split("-", 1)

    def by_cpu(logits: Array, how: SamplingRows) -> Sampled:
        return sample(Immediate(cpu_variants.library(name), 1), torch.tensor(logits, dtype=torch.float32), how)

    def by_cuda(logits: Array, how: SamplingRows) -> Sampled:
        given = fenced(torch.tensor(logits, dtype=torch.float32))
        found = Sampler(device_of_threads(int(name), PROCESSORS[kind]), given.shape[1], 4).sample(given, how)
        assert_fences(given)
        return found

    return by_cpu if kind == "cpu" else by_cuda


@pytest.mark.parametrize("vocab", [1, 2, 31, 64, 1027, 5003])
def test_greedy_takes_the_first_of_the_largest(vocab: int, draw: Draw) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.choice([0.0, -0.0], (8, vocab)).astype(np.float32) - rng.integers(0, 4, (8, vocab))
    found = draw(logits, rows(8))
    assert found.tokens.tolist() == logits.argmax(-1).tolist()
    assert found.status.tolist() == [STATUS_FINE] * 8
    assert found.logprobs is None


@pytest.mark.parametrize(
    ("feature", "vocab"),  # each with three sizes in turn
    [(feature, vocab) for at, feature in enumerate(FEATURES) for vocab in (1, 2, 33, 500, 1027, 5003)[at % 2 :: 2]],
)
def test_each_feature_alone_gives_the_tokens_of_the_reference(feature: str, vocab: int, draw: Draw) -> None:
    same_as_reference(draw, normal(24, vocab, 2), alone(feature, 24, vocab))


@pytest.mark.parametrize(("vocab", "seed"), [(33, 0), (998, 1), (998, 2), (5003, 3)])
def test_all_features_mixed_give_the_tokens_of_the_reference(vocab: int, seed: int, draw: Draw) -> None:
    same_as_reference(draw, normal(16, vocab, seed), mixed(seed, 16, vocab))


@pytest.mark.parametrize("vocab", [50_257, 128_256])
def test_large_vocabularies_give_the_tokens_of_the_reference(vocab: int, draw: Draw) -> None:
    given = {"seed": np.arange(6), "top_k": [0, 0, 50, 40_000, 100, 0], "top_p": [1, 0.9, 1, 1, 0.7, 1]}
    how = rows(6, temperature=[1, 0.8, 1, 2, 0.7, 50], want_logprob=[1, 0, 0, 1, 0, 0], **given)
    same_as_reference(draw, normal(6, vocab, 3), how)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.95},  # more ids than the list has
        {"top_p": 0.4, "min_p": 0.9},
        {"top_k": 4000},
        {"top_k": 4000, "top_p": 0.1},  # its nucleus would fit, of a mass that is not known
        {"top_k": 4000, "top_p": 0.3, "min_p": 0.5},
        {"min_p": 0.1},
    ],
)
def test_rows_too_flat_for_list_give_tokens_of_the_reference(options: dict[str, Any], draw: Draw) -> None:
    how = rows(6, temperature=1.0, seed=np.arange(6) + 40, **options)
    same_as_reference(draw, normal(6, 2 * SHORTLIST + 1, 4, 0.3), how)


@pytest.mark.parametrize("vocab", [40, 1500, 5003])
def test_ties_with_the_last_one_kept_are_kept(vocab: int, draw: Draw) -> None:
    count, rng = 24, np.random.default_rng(vocab)
    how = rows(
        count,
        temperature=rng.choice([0.5, 1.0, 1.3], count),
        top_k=rng.choice([0, 3, 30], count),
        top_p=rng.choice([1.0, 0.7123, 0.311], count),
        seed=rng.integers(0, 1 << 63, count, dtype=np.uint64),
    )
    same_as_reference(draw, rng.integers(-4, 4, (count, vocab)).astype(np.float32), how)


@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_p": 0.3}])
def test_more_ties_than_list_has_room_for_are_all_kept(options: dict[str, float], draw: Draw) -> None:
    logits = np.random.default_rng(20).integers(0, 2, (6, 3 * SHORTLIST)).astype(np.float32)
    same_as_reference(draw, logits, rows(6, temperature=1.0, seed=np.arange(6), **options))


def test_a_list_that_overflows_is_not_believed(draw: Draw) -> None:
    # A quarter of the threads has all the large logits, so the bound, of all threads' largest, lies below these.
    logits = normal(4, 8 * SHORTLIST, 21)
    logits[:, np.arange(logits.shape[1]) // 4 % 512 < 128] += 50
    how = rows(4, temperature=1.0, top_k=[40, 40, 0, 0], top_p=[1, 1, 0.05, 0.05], seed=np.arange(4) + 3)
    same_as_reference(draw, logits, how)


def test_scores_that_a_temperature_makes_equal_are_kept_together(draw: Draw) -> None:
    # A few multiples of the smallest number are left, of which the list's bound is one.
    logits = normal(8, 5003, 5, 1e-6)
    same_as_reference(draw, logits, rows(8, temperature=3e38, top_k=[1, 5, 700, 1500] * 2, seed=np.arange(8)))


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 30.0, 1e4, 1e30])
def test_cold_and_hot_rows_give_the_tokens_of_the_reference(temperature: float, draw: Draw) -> None:
    cuts = {"top_k": [0, 20, 0, 0] * 2, "top_p": [1, 1, 0.8, 1] * 2, "min_p": [0] * 7 + [0.1]}
    how = rows(8, temperature=temperature, seed=np.arange(8), **cuts)
    same_as_reference(draw, normal(8, 2001, 5, 8.0), how)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 6e-38, 1e-30, 1e-9])
def test_so_cold_that_noise_is_lost_in_rounding_takes_largest(temperature: float, draw: Draw) -> None:
    for shift in (100, 0, -100):
        logits = normal(3, 300, 6) + np.float32(shift)
        how = rows(3, temperature=temperature, top_k=[0, 20, 0], top_p=[1, 1, 0.8], seed=np.arange(3))
        assert draw(logits, how).tokens.tolist() == logits.argmax(-1).tolist()


def test_equal_logits_are_drawn_from_however_cold(draw: Draw) -> None:
    logits = -np.random.default_rng(22).integers(0, 2, (8, 300)).astype(np.float32)
    found = same_as_reference(draw, logits, rows(8, temperature=1e-45, top_p=[1, 0.9] * 4, seed=np.arange(8)))
    assert len(set(found.tokens.tolist())) > 4


def test_logits_as_large_as_numbers_are_draw_the_largest(draw: Draw) -> None:
    logits = normal(3, 300, 6) * np.float32(3e37)
    how = rows(3, temperature=[1, 1e-2, 1], top_p=[1, 1, 0.8], seed=np.arange(3))
    assert draw(logits, how).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("gap", [1e-44, 1e-37, 1e-30])
def test_logits_that_hardly_differ_give_the_tokens_of_the_reference(gap: float, draw: Draw) -> None:
    logits = np.zeros((2, 5003), np.float32)
    logits[:, ::7] = gap
    same_as_reference(draw, logits, rows(2, temperature=1.0, top_p=0.9, seed=np.arange(2)))


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_reported_alone(wild: float, draw: Draw) -> None:
    for vocab, place in ((3, 0), (33, 32), (1000, 500)):
        logits = normal(5, vocab, 8)
        logits[[1, 2], place] = wild
        how = rows(5, temperature=[0, 0, 1, 1, 1], seed=np.arange(5), top_p=0.9, want_logprob=[0, 1, 0, 1, 1])
        found = same_as_reference(draw, logits, how)
        assert found.status.tolist() == [0, STATUS_NOT_FINITE, STATUS_NOT_FINITE, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [3, 70])
def test_rows_without_an_allowed_token_say_so(vocab: int, temperature: float, draw: Draw) -> None:
    banned = Sparse(np.full(vocab, 1), np.arange(vocab)[::-1].copy())
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    how = rows(3, temperature=temperature, banned=banned, mask_rows=np.array([2]), mask_words=words)
    found = same_as_reference(draw, normal(3, vocab, 9), how)
    assert found.status.tolist() == [STATUS_FINE, STATUS_NOTHING_ALLOWED, STATUS_NOTHING_ALLOWED]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 1e-6}])
@pytest.mark.parametrize("vocab", [1000, 5003])
def test_the_only_allowed_token_is_drawn_however_unlikely(options: dict[str, Any], vocab: int, draw: Draw) -> None:
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    words[0, 20] = 1 << 7
    how = rows(1, temperature=1.0, mask_rows=np.array([0]), mask_words=words, **options)
    logits = normal(1, vocab, 10)
    logits[0, 647] = -500
    assert same_as_reference(draw, logits, how).tokens.tolist() == [647]


@pytest.mark.parametrize("vocab", [1, 7, 5003])
def test_log_probabilities_are_those_of_the_given_logits_in_float64(vocab: int, draw: Draw) -> None:
    count = 16
    logits, rng = normal(count, vocab, 12, 6.0), np.random.default_rng(12)
    asked = rng.random(count) < 0.6
    edits = {"bias": some(rng, count, vocab, 200), **sampling_cases.history(rng, count, vocab, 400)}
    how = rows(count, temperature=2.0, top_k=40, seed=np.arange(count), want_logprob=asked, **edits)
    found = draw(logits, how)
    assert found.logprobs is not None
    wide = logits.astype(np.float64)
    expected = wide[np.arange(count), found.tokens] - np.log(np.exp(wide).sum(-1))
    assert np.abs(found.logprobs - expected)[asked].max() < 1e-5
    assert np.isnan(found.logprobs[~asked]).all()


def test_a_penalty_is_rounded_before_it_is_subtracted(draw: Draw) -> None:
    count, rng = 60, np.random.default_rng(4)
    frequency = rng.random(count).astype(np.float32)
    logits = normal(count, 4, 4)
    for token in (1, 2):  # three times in the output; an untouched token has exactly the score that is left
        logits[:, 3 * (token - 1)] = logits[:, token] - frequency * np.float32(3)
        entries = Sparse(np.arange(count).repeat(3), np.full(3 * count, token), np.ones(3 * count, np.float32))
        same_as_reference(draw, logits, rows(count, history=entries, frequency=frequency, presence=0, repetition=1))


def test_penalised_logits_below_zero_are_multiplied(draw: Draw) -> None:
    same_as_reference(draw, normal(24, 97, 23, 0.5) - 8, alone("penalties", 24, 97))

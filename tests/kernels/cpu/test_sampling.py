"""The C++ sampler: the tokens of the reference backend for the same seeds, and the distribution of float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.program import Immediate
from kernels.cpu.sampling import sample
from kernels.ops import STATUS_FINE, STATUS_NOT_FINITE, STATUS_NOTHING_ALLOWED, Sampled, SamplingRows, Sparse
from tests.kernels import sampling_cases
from tests.kernels.cpu_variants import library
from tests.kernels.sampling_cases import FEATURES, SETTINGS, Array, alone, follows_float64, mixed, normal, rows, some

LIBRARY: Library


@pytest.fixture(autouse=True, scope="module")
def _library(variant: str) -> None:
    global LIBRARY
    LIBRARY = library(variant)


@pytest.fixture(autouse=True, scope="module")
def _reference_on_one_thread() -> Iterator[None]:
    """Its operations are small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(logits: Array, how: SamplingRows, threads: int = 1) -> Sampled:
    return sample(Immediate(LIBRARY, threads), torch.tensor(logits, dtype=torch.float32), how)


def same_as_reference(logits: Array, how: SamplingRows) -> Sampled:
    return sampling_cases.same_as_reference(draw, logits, how)


VOCABS = (1, 5, 31, 33, 64, 500, 1027, 5003)


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_first_of_the_largest(vocab: int) -> None:
    logits = np.random.default_rng(vocab).integers(-3, 3, (20, vocab)).astype(np.float32)
    logits *= np.where(np.arange(20) % 2, 1, -1)[:, None]  # zeros of both signs
    found = draw(logits, rows(20))
    assert found.tokens.tolist() == logits.argmax(-1).tolist()
    assert found.status.tolist() == [STATUS_FINE] * 20
    assert found.logprobs is None


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_long_greedy_row_is_cut_among_threads_without_a_trace(count: int, threads: int) -> None:
    vocab = 100_003
    logits = normal(count, vocab, 1)
    for place in (0, 16_383, 16_384, 50_001, vocab - 1):
        logits[:, [place, min(place + 9000, vocab - 1)]] = 50
        found = draw(logits, rows(count), threads)
        assert found.tokens.tolist() == logits.argmax(-1).tolist()
        assert found.status.tolist() == [STATUS_FINE] * count
        broken = logits.copy()
        broken[-1, place] = np.nan
        assert draw(broken, rows(count), threads).status.tolist() == [STATUS_FINE] * (count - 1) + [STATUS_NOT_FINITE]
        logits[:, [place, min(place + 9000, vocab - 1)]] = 0


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone_gives_the_tokens_of_the_reference(feature: str, vocab: int) -> None:
    same_as_reference(normal(48, vocab, 2), alone(feature, 48, vocab))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab", [33, 997, 5003])
def test_all_features_mixed_give_the_tokens_of_the_reference(vocab: int, seed: int) -> None:
    same_as_reference(normal(40, vocab, seed), mixed(seed, 40, vocab))


def test_the_largest_vocabulary_gives_the_tokens_of_the_reference() -> None:
    vocab = 262_144
    given = {"seed": np.arange(6), "top_k": [0, 0, 50, 40_000, 0, 100], "top_p": [1, 0.9, 1, 1, 0.99, 0.7]}
    same_as_reference(normal(6, vocab, 3), rows(6, temperature=[1, 1, 1, 2, 5, 0.7], **given))


def test_a_penalty_is_rounded_before_it_is_subtracted() -> None:
    count, rng = 200, np.random.default_rng(4)
    frequency = rng.random(count).astype(np.float32)
    logits = normal(count, 4, 4)
    for token in (1, 2):  # three times in the output; an untouched token has exactly the score that is left
        logits[:, 3 * (token - 1)] = logits[:, token] - frequency * np.float32(3)
        entries = Sparse(np.arange(count).repeat(3), np.full(3 * count, token), np.ones(3 * count, np.float32))
        same_as_reference(logits, rows(count, history=entries, frequency=frequency, presence=0, repetition=1))


@pytest.mark.parametrize("vocab", [40, 1500, 5003])
def test_ties_with_the_last_one_kept_are_kept(vocab: int) -> None:
    count, rng = 60, np.random.default_rng(vocab)
    logits = rng.integers(-4, 4, (count, vocab)).astype(np.float32)
    how = rows(
        count,
        temperature=rng.choice([0.5, 1.0, 1.3], count),
        top_k=rng.choice([0, 3, 30], count),
        top_p=rng.choice([1.0, 0.7123, 0.311], count),
        seed=rng.integers(0, 1 << 63, count, dtype=np.uint64),
    )
    same_as_reference(logits, how)
    # Two tokens tie for the second place of top-k 2: all three come up.
    logits = np.tile(np.array([1.0, 2.0, 1.0, 0.0], np.float32), (300, 1))
    assert set(draw(logits, rows(300, temperature=1.0, top_k=2, seed=np.arange(300))).tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 30.0, 1e4, 1e30])
def test_cold_and_hot_rows_give_the_tokens_of_the_reference(temperature: float) -> None:
    for options in ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}):
        how = rows(30, temperature=temperature, seed=np.arange(30), **options)
        same_as_reference(normal(30, 2001, 5, 8.0), how)


def test_a_temperature_that_overflows_is_its_limit() -> None:
    logits = normal(4, 300, 6)
    for sign in (1, -1):
        shifted = logits + np.float32(100 * sign)
        for options in ({}, {"top_k": 20}, {"top_p": 0.8}):
            how = rows(4, temperature=1e-38, seed=np.arange(4), **options)
            assert draw(shifted, how).tokens.tolist() == shifted.argmax(-1).tolist()


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_say_so_and_leave_the_others_alone(wild: float, temperature: float) -> None:
    for vocab in (3, 33, 1000):
        logits = normal(5, vocab, 8)
        for place in (0, vocab // 2, vocab - 1):
            broken = logits.copy()
            broken[2, place] = wild
            for more in ({}, {"want_logprob": True, "top_p": 0.9}):
                found = same_as_reference(broken, rows(5, temperature=temperature, seed=np.arange(5), **more))
                assert found.status.tolist() == [0, 0, STATUS_NOT_FINITE, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [3, 70])
def test_rows_without_an_allowed_token_say_so(vocab: int, temperature: float) -> None:
    banned = Sparse(np.full(vocab, 1), np.arange(vocab)[::-1].copy())
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    how = rows(3, temperature=temperature, banned=banned, mask_rows=np.array([2]), mask_words=words)
    found = same_as_reference(normal(3, vocab, 9), how)
    assert found.status.tolist() == [STATUS_FINE, STATUS_NOTHING_ALLOWED, STATUS_NOTHING_ALLOWED]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 1e-6}])
def test_the_only_allowed_token_is_drawn_however_unlikely(options: dict[str, Any]) -> None:
    vocab = 1000
    words = np.zeros((1, 32), np.uint32)
    words[0, 20] = 1 << 7
    how = rows(1, temperature=1.0, mask_rows=np.array([0]), mask_words=words, **options)
    logits = normal(1, vocab, 10)
    logits[0, 647] = -500
    assert same_as_reference(logits, how).tokens.tolist() == [647]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_the_same_alone_in_a_batch_and_with_any_threads(threads: int) -> None:
    count, vocab = 23, 3001
    logits, rng = normal(count, vocab, 11), np.random.default_rng(11)
    columns = {"temperature": rng.choice([0.5, 1.0], count), "top_k": rng.choice([0, 50], count)}
    columns |= {"top_p": rng.choice([1.0, 0.9], count), "seed": np.arange(count)}
    together = draw(logits, rows(count, want_logprob=True, **columns), threads)
    alone = [
        draw(logits[i : i + 1], rows(1, want_logprob=True, **{k: v[i] for k, v in columns.items()}), 1)
        for i in range(count)
    ]
    assert together.tokens.tolist() == [int(one.tokens[0]) for one in alone]
    assert together.logprobs is not None
    assert together.logprobs.tolist() == [float(one.logprobs[0]) for one in alone if one.logprobs is not None]


@pytest.mark.parametrize("vocab", [1, 7, 5003])
def test_log_probabilities_are_those_of_the_given_logits_in_float64(vocab: int) -> None:
    count = 24
    logits, rng = normal(count, vocab, 12, 6.0), np.random.default_rng(12)
    asked = rng.random(count) < 0.6
    bias = some(rng, count, vocab, 300)
    how = rows(count, temperature=2.0, top_k=40, seed=np.arange(count), want_logprob=asked, bias=bias)
    found = draw(logits, how)
    assert found.logprobs is not None
    wide = logits.astype(np.float64)
    expected = wide[np.arange(count), found.tokens.numpy()] - np.log(np.exp(wide).sum(-1))
    assert np.abs(found.logprobs.numpy() - expected)[asked].max() < 3e-6
    assert np.isnan(found.logprobs.numpy()[~asked]).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_distribution_of_float64(name: str) -> None:
    assert follows_float64(draw, name)

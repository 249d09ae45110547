"""The C++ sampler: the tokens of the reference backend for the same seeds, and the distribution of float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.program import Immediate
from kernels.cpu.sampling import sample
from kernels.ops import STATUS_FINE, STATUS_NOT_FINITE, STATUS_NOTHING_ALLOWED, Sampled, SamplingRows, Sparse
from kernels.reference.sampling import sample as sample_in_torch
from tests.kernels.cpu_variants import library

Array = npt.NDArray[Any]

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


COLUMNS: dict[str, tuple[float, Any]] = {
    "temperature": (0.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "seed": (0, np.uint64),
    "position": (0, np.int64),
    "want_logprob": (False, np.bool_),
}
PENALTIES = ("presence", "frequency", "repetition")


def rows(count: int, **given: Any) -> SamplingRows:
    """Greedy rows unless columns say otherwise; a scalar stands for every row."""
    made: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(given.pop(name, default), dtype), (count,)).copy()
        for name, (default, dtype) in COLUMNS.items()
    }
    for name in PENALTIES:
        if name in given:
            made[name] = np.broadcast_to(np.asarray(given.pop(name), np.float32), (count,)).copy()
    return SamplingRows(**made, **given)


def draw(logits: Array, how: SamplingRows, threads: int = 1) -> Sampled:
    return sample(Immediate(LIBRARY, threads), torch.tensor(logits, dtype=torch.float32), how)


def same_as_reference(logits: Array, how: SamplingRows) -> Sampled:
    """Draws with both; tokens, status and log-probabilities agree."""
    found, expected = draw(logits, how), sample_in_torch(torch.tensor(logits, dtype=torch.float32), how)
    assert found.status.tolist() == expected.status.tolist()
    fine = expected.status == STATUS_FINE
    assert found.tokens[fine].tolist() == expected.tokens[fine].tolist()
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        torch.testing.assert_close(found.logprobs[fine], expected.logprobs[fine], atol=1e-4, rtol=0, equal_nan=True)
    return found


def normal(count: int, vocab: int, seed: int, scale: float = 3.0) -> Array:
    return (np.random.default_rng((seed, vocab)).standard_normal((count, vocab)) * scale).astype(np.float32)


def some(rng: np.random.Generator, count: int, vocab: int, entries: int, values: bool = True) -> Sparse:
    """Entries of random rows in no order; ids repeat."""
    return Sparse(
        rng.integers(0, count, entries),
        rng.integers(0, vocab, entries),
        rng.standard_normal(entries).astype(np.float32) * 3 if values else None,
    )


def history(rng: np.random.Generator, count: int, vocab: int, entries: int) -> dict[str, Any]:
    found = some(rng, count, vocab, entries)
    return {
        "history": Sparse(found.rows, found.ids, rng.integers(0, 2, entries).astype(np.float32)),
        "presence": rng.choice([0, 0.5, -0.3], count),
        "frequency": rng.choice([0, 0.7, -0.2], count),
        "repetition": rng.choice([1, 1.3, 0.8], count),
    }


def masks(rng: np.random.Generator, count: int, vocab: int) -> dict[str, Any]:
    masked = np.flatnonzero(rng.random(count) < 0.7)
    words = rng.integers(0, 1 << 32, (len(masked), -(-vocab // 32)), dtype=np.uint64).astype(np.uint32)
    return {"mask_rows": masked, "mask_words": words}


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
@pytest.mark.parametrize("feature", ["temperature", "top_k", "top_p", "min_p", "bias", "banned", "mask", "penalties"])
def test_each_feature_alone_gives_the_tokens_of_the_reference(feature: str, vocab: int) -> None:
    count, rng = 48, np.random.default_rng((7, vocab))
    given: dict[str, Any] = {
        "temperature": rng.choice([0.3, 0.8, 1.0, 1.7], count),
        "seed": rng.integers(0, 1 << 63, count, dtype=np.uint64) * 2 + 1,
        "position": rng.integers(0, 1 << 40, count),
    }
    if feature == "top_k":
        given["top_k"] = rng.choice([0, 1, 2, 7, 50, 500, vocab - 1, vocab, 1 << 30], count)
    elif feature == "top_p":
        given["top_p"] = rng.choice([0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.99999, 1.0], count)
    elif feature == "min_p":
        given["min_p"] = rng.choice([0, 1e-9, 0.01, 0.1, 0.5, 1.0], count)
    elif feature == "bias":
        given["bias"] = some(rng, count, vocab, 500)
    elif feature == "banned":
        given["banned"] = some(rng, count, vocab, 500, values=False)
    elif feature == "mask":
        given |= masks(rng, count, vocab)
    elif feature == "penalties":
        given |= history(rng, count, vocab, 2000)
    same_as_reference(normal(count, vocab, 2), rows(count, **given))


def mixed(seed: int, count: int, vocab: int) -> SamplingRows:
    """Every feature in some row, many in most."""
    rng = np.random.default_rng((seed, vocab))
    return rows(
        count,
        temperature=rng.choice([0.0, 0.2, 0.9, 1.0, 3.0], count),
        top_k=rng.choice([0, 3, 40, 700], count),
        top_p=rng.choice([1.0, 0.95, 0.6], count),
        min_p=rng.choice([0.0, 0.0, 0.02], count),
        seed=rng.integers(0, 1 << 63, count, dtype=np.uint64),
        position=rng.integers(0, 1 << 20, count),
        want_logprob=rng.random(count) < 0.5,
        bias=some(rng, count, vocab, 60),
        banned=some(rng, count, vocab, 90, values=False),
        **masks(rng, count, vocab),
        **history(rng, count, vocab, 900),
    )


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


DRAWS, EACH, SMALL = 100_000, 10_000, 300
BIASES = ((3, 2.5), (40, -4.0), (40, 1.5), (299, 3.0))
BANNED = (0, 17, 200)
HISTORY = ((5, 1), (5, 1), (5, 0), (60, 0), (61, 1), (299, 1))
MASK = np.random.default_rng(13).integers(0, 1 << 32, 10, dtype=np.uint64).astype(np.uint32)
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.03},
    "penalties": {"temperature": 1.0, "presence": 0.8, "frequency": 0.6, "repetition": 1.4},
    "bias": {"temperature": 1.0, "bias": True},
    "mask": {"temperature": 1.0, "mask": True, "banned": True},
    "all": {
        "temperature": 1.5,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence": 0.8,
        "frequency": 0.6,
        "repetition": 1.4,
        "bias": True,
        "mask": True,
        "banned": True,
    },
}


def distribution(logits: Array, s: dict[str, Any]) -> npt.NDArray[np.float64]:
    """What SamplingRows says, token by token, in float64."""
    x = logits.astype(np.float64)
    if "bias" in s:
        for token, value in BIASES:
            x[token] += value
    if "banned" in s:
        x[list(BANNED)] = -np.inf
    if "mask" in s:
        for token in range(SMALL):
            if not int(MASK[token // 32]) >> (token % 32) & 1:
                x[token] = -np.inf
    if "repetition" in s:
        for token in {token for token, _ in HISTORY}:
            count = sum(is_output for other, is_output in HISTORY if other == token)
            x[token] = x[token] / s["repetition"] if x[token] > 0 else x[token] * s["repetition"]
            x[token] -= s["frequency"] * count + s["presence"] * (count > 0)
    x = x / s["temperature"]
    if "top_k" in s:
        x[x < np.sort(x)[-s["top_k"]]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if "top_p" in s:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[p < p[order][before < s["top_p"]].min()] = 0
    if "min_p" in s:
        p[p < s["min_p"] * p.max()] = 0
    return np.asarray(p / p.sum())


def is_drawn_from(counts: Array, p: npt.NDArray[np.float64]) -> bool:
    """Chi-square at p = 3e-5 (Wilson and Hilferty's normal approximation); rare tokens are put together."""
    assert counts[p == 0].sum() == 0, "a token outside the support was drawn"
    expected = p * counts.sum()
    rare = expected < 10
    cells = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(counts[~rare], counts[rare].sum())
    seen, cells = seen[cells > 0], cells[cells > 0]
    freedom = len(cells) - 1
    statistic = ((seen - cells) ** 2 / cells).sum()
    spread = 2 / (9 * freedom)
    return bool(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread) < 4)


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_distribution_of_float64(name: str) -> None:
    s = SETTINGS[name]
    logits = normal(1, SMALL, 14, 1.5)[0]
    counts, every = np.zeros(SMALL, np.int64), np.arange(EACH)

    def everywhere(pairs: tuple[tuple[int, float], ...]) -> Sparse:
        ids, values = zip(*pairs, strict=True)
        return Sparse(every.repeat(len(ids)), np.tile(ids, EACH), np.tile(np.array(values, np.float32), EACH))

    for first in range(0, DRAWS, EACH):
        given = {key: value for key, value in s.items() if key not in ("bias", "mask", "banned")}
        if "bias" in s:
            given["bias"] = everywhere(BIASES)
        if "banned" in s:
            given["banned"] = Sparse(every.repeat(len(BANNED)), np.tile(BANNED, EACH))
        if "mask" in s:
            given |= {"mask_rows": every, "mask_words": np.tile(MASK, (EACH, 1))}
        if "repetition" in s:
            given["history"] = everywhere(HISTORY)
        how = rows(EACH, seed=every + first, position=every % 7, **given)
        found = draw(np.broadcast_to(logits, (EACH, SMALL)), how)
        counts += np.bincount(found.tokens.numpy(), minlength=SMALL)
    assert is_drawn_from(counts, distribution(logits, s))

"""The CUDA sampler, emulated in three orders of threads: the reference's tokens for the same seeds; what it leaves on
the device; several draws under way on a device that puts off its work.

That its draws follow the distribution of float64 is seen in test_sampling.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda.device import Device
from kernels.cuda.gpu import CudaDevice
from kernels.cuda.sampling import Sampler
from kernels.emulator.device import EmulatedDevice
from kernels.emulator.program import FORWARD
from kernels.ops import STATUS_FINE, STATUS_NOT_FINITE, STATUS_NOTHING_ALLOWED, Sampled, SamplingRows, Sparse
from tests.kernels import sampling_cases
from tests.kernels.cuda.programs import DEVICE, FLAGS, ORDERS, assert_fences, fenced, needs_compiler
from tests.kernels.sampling_cases import FEATURES, Array, alone, mixed, normal, rows, some

pytestmark = needs_compiler
in_every_order = pytest.mark.parametrize("order", ORDERS)
SHORTLIST = 3072  # sampler_draw.cuh: ids of smaller vocabularies all fit into the list


@pytest.fixture(autouse=True, scope="module")
def _reference_on_one_thread() -> Iterator[None]:
    """Its operations are small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def device_of(order: int) -> Device:
    return CudaDevice(0) if order == DEVICE else EmulatedDevice(None, order, flags=FLAGS)


def draw(order: int, logits: Array, how: SamplingRows) -> Sampled:
    given = fenced(torch.tensor(logits, dtype=torch.float32))
    found = Sampler(device_of(order), given.shape[1], 4).sample(given, how)
    assert_fences(given)
    return found


def same_as_reference(order: int, logits: Array, how: SamplingRows) -> Sampled:
    return sampling_cases.same_as_reference(lambda *given: draw(order, *given), logits, how)


@in_every_order
@pytest.mark.parametrize("vocab", [1, 2, 31, 64, 1027, 5003])
def test_greedy_takes_the_first_of_the_largest(vocab: int, order: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.choice([0.0, -0.0], (8, vocab)).astype(np.float32) - rng.integers(0, 4, (8, vocab))
    found = draw(order, logits, rows(8))
    assert found.tokens.tolist() == logits.argmax(-1).tolist()
    assert found.status.tolist() == [STATUS_FINE] * 8
    assert found.logprobs is None


@in_every_order
@pytest.mark.parametrize("vocab", [1, 2, 33, 500, 5003])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone_gives_the_tokens_of_the_reference(feature: str, vocab: int, order: int) -> None:
    same_as_reference(order, normal(24, vocab, 2), alone(feature, 24, vocab))


@in_every_order
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", [33, 998, 5003])
def test_all_features_mixed_give_the_tokens_of_the_reference(vocab: int, seed: int, order: int) -> None:
    same_as_reference(order, normal(16, vocab, seed), mixed(seed, 16, vocab))


@in_every_order
@pytest.mark.parametrize("vocab", [50_257, 128_256])
def test_large_vocabularies_give_the_tokens_of_the_reference(vocab: int, order: int) -> None:
    given = {"seed": np.arange(6), "top_k": [0, 0, 50, 40_000, 100, 0], "top_p": [1, 0.9, 1, 1, 0.7, 1]}
    how = rows(6, temperature=[1, 0.8, 1, 2, 0.7, 50], want_logprob=[1, 0, 0, 1, 0, 0], **given)
    same_as_reference(order, normal(6, vocab, 3), how)


@in_every_order
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
def test_rows_too_flat_for_the_list_give_the_tokens_of_the_reference(options: dict[str, Any], order: int) -> None:
    how = rows(6, temperature=1.0, seed=np.arange(6) + 40, **options)
    same_as_reference(order, normal(6, 2 * SHORTLIST + 1, 4, 0.3), how)


@in_every_order
@pytest.mark.parametrize("vocab", [40, 1500, 5003])
def test_ties_with_the_last_one_kept_are_kept(vocab: int, order: int) -> None:
    count, rng = 24, np.random.default_rng(vocab)
    how = rows(
        count,
        temperature=rng.choice([0.5, 1.0, 1.3], count),
        top_k=rng.choice([0, 3, 30], count),
        top_p=rng.choice([1.0, 0.7123, 0.311], count),
        seed=rng.integers(0, 1 << 63, count, dtype=np.uint64),
    )
    same_as_reference(order, rng.integers(-4, 4, (count, vocab)).astype(np.float32), how)


@in_every_order
@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_p": 0.3}])
def test_more_ties_than_the_list_has_room_for_are_all_kept(options: dict[str, float], order: int) -> None:
    logits = np.random.default_rng(20).integers(0, 2, (6, 3 * SHORTLIST)).astype(np.float32)
    same_as_reference(order, logits, rows(6, temperature=1.0, seed=np.arange(6), **options))


@in_every_order
def test_a_list_that_overflows_is_not_believed(order: int) -> None:
    # A quarter of the threads has all the large logits, so the bound, of all threads' largest, lies below these.
    logits = normal(4, 8 * SHORTLIST, 21)
    logits[:, np.arange(logits.shape[1]) // 4 % 512 < 128] += 50
    how = rows(4, temperature=1.0, top_k=[40, 40, 0, 0], top_p=[1, 1, 0.05, 0.05], seed=np.arange(4) + 3)
    same_as_reference(order, logits, how)


@in_every_order
def test_scores_that_a_temperature_makes_equal_are_kept_together(order: int) -> None:
    # A few multiples of the smallest number are left, of which the list's bound is one.
    logits = normal(8, 5003, 5, 1e-6)
    same_as_reference(order, logits, rows(8, temperature=3e38, top_k=[1, 5, 700, 1500] * 2, seed=np.arange(8)))


@in_every_order
@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 30.0, 1e4, 1e30])
def test_cold_and_hot_rows_give_the_tokens_of_the_reference(temperature: float, order: int) -> None:
    how = rows(
        8,
        temperature=temperature,
        seed=np.arange(8),
        top_k=[0, 20, 0, 0] * 2,
        top_p=[1, 1, 0.8, 1] * 2,
        min_p=[0] * 7 + [0.1],
    )
    same_as_reference(order, normal(8, 2001, 5, 8.0), how)


@in_every_order
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 6e-38, 1e-30, 1e-9])
def test_so_cold_that_noise_is_lost_in_rounding_takes_the_largest(temperature: float, order: int) -> None:
    for shift in (100, 0, -100):
        logits = normal(3, 300, 6) + np.float32(shift)
        how = rows(3, temperature=temperature, top_k=[0, 20, 0], top_p=[1, 1, 0.8], seed=np.arange(3))
        assert draw(order, logits, how).tokens.tolist() == logits.argmax(-1).tolist()


@in_every_order
def test_equal_logits_are_drawn_from_however_cold(order: int) -> None:
    logits = -np.random.default_rng(22).integers(0, 2, (8, 300)).astype(np.float32)
    found = same_as_reference(order, logits, rows(8, temperature=1e-45, top_p=[1, 0.9] * 4, seed=np.arange(8)))
    assert len(set(found.tokens.tolist())) > 4


@in_every_order
def test_logits_as_large_as_numbers_are_draw_the_largest(order: int) -> None:
    logits = normal(3, 300, 6) * np.float32(3e37)
    how = rows(3, temperature=[1, 1e-2, 1], top_p=[1, 1, 0.8], seed=np.arange(3))
    assert draw(order, logits, how).tokens.tolist() == logits.argmax(-1).tolist()


@in_every_order
@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_say_so_and_leave_the_others_alone(wild: float, order: int) -> None:
    for vocab, place in ((3, 0), (33, 32), (1000, 500)):
        logits = normal(5, vocab, 8)
        logits[[1, 2], place] = wild
        how = rows(5, temperature=[0, 0, 1, 1, 1], seed=np.arange(5), top_p=0.9, want_logprob=[0, 1, 0, 1, 1])
        found = same_as_reference(order, logits, how)
        assert found.status.tolist() == [0, STATUS_NOT_FINITE, STATUS_NOT_FINITE, 0, 0]


@in_every_order
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [3, 70])
def test_rows_without_an_allowed_token_say_so(vocab: int, temperature: float, order: int) -> None:
    banned = Sparse(np.full(vocab, 1), np.arange(vocab)[::-1].copy())
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    how = rows(3, temperature=temperature, banned=banned, mask_rows=np.array([2]), mask_words=words)
    found = same_as_reference(order, normal(3, vocab, 9), how)
    assert found.status.tolist() == [STATUS_FINE, STATUS_NOTHING_ALLOWED, STATUS_NOTHING_ALLOWED]


@in_every_order
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 1e-6}])
@pytest.mark.parametrize("vocab", [1000, 5003])
def test_the_only_allowed_token_is_drawn_however_unlikely(options: dict[str, Any], vocab: int, order: int) -> None:
    words = np.zeros((1, -(-vocab // 32)), np.uint32)
    words[0, 20] = 1 << 7
    how = rows(1, temperature=1.0, mask_rows=np.array([0]), mask_words=words, **options)
    logits = normal(1, vocab, 10)
    logits[0, 647] = -500
    assert same_as_reference(order, logits, how).tokens.tolist() == [647]


@in_every_order
@pytest.mark.parametrize("vocab", [1, 7, 5003])
def test_log_probabilities_are_those_of_the_given_logits_in_float64(vocab: int, order: int) -> None:
    count = 16
    logits, rng = normal(count, vocab, 12, 6.0), np.random.default_rng(12)
    asked = rng.random(count) < 0.6
    edits = {"bias": some(rng, count, vocab, 200), **sampling_cases.history(rng, count, vocab, 400)}
    how = rows(count, temperature=2.0, top_k=40, seed=np.arange(count), want_logprob=asked, **edits)
    found = draw(order, logits, how)
    assert found.logprobs is not None
    wide = logits.astype(np.float64)
    expected = wide[np.arange(count), found.tokens.numpy()] - np.log(np.exp(wide).sum(-1))
    assert np.abs(found.logprobs.numpy() - expected)[asked].max() < 1e-5
    assert np.isnan(found.logprobs.numpy()[~asked]).all()


@in_every_order
def test_a_penalty_is_rounded_before_it_is_subtracted(order: int) -> None:
    count, rng = 60, np.random.default_rng(4)
    frequency = rng.random(count).astype(np.float32)
    logits = normal(count, 4, 4)
    for token in (1, 2):  # three times in the output; an untouched token has exactly the score that is left
        logits[:, 3 * (token - 1)] = logits[:, token] - frequency * np.float32(3)
        entries = Sparse(np.arange(count).repeat(3), np.full(3 * count, token), np.ones(3 * count, np.float32))
        same_as_reference(order, logits, rows(count, history=entries, frequency=frequency, presence=0, repetition=1))


def places(*tokens: int) -> Tensor:
    """last_tokens."""
    return fenced(torch.tensor(tokens, dtype=torch.int32))


@in_every_order
def test_penalised_logits_below_zero_are_multiplied(order: int) -> None:
    same_as_reference(order, normal(24, 97, 23, 0.5) - 8, alone("penalties", 24, 97))


@in_every_order
def test_tokens_stay_on_the_device_in_the_place_of_their_slots(order: int) -> None:
    count, vocab = 6, 97
    slots, last_tokens = np.array([7, 0, -1, 9, 3, 4], np.int32), places(*[-5] * 10)
    logits = normal(count, vocab, 15)
    logits[4, 50] = np.nan
    sampler = Sampler(device_of(order), vocab, count)
    how = rows(count, temperature=1.0, seed=np.arange(count))
    found = sampler.sample_later(fenced(torch.tensor(logits)), how, slots, last_tokens).wait()
    assert last_tokens[[7, 0, 9, 4]].tolist() == found.tokens[[0, 1, 3, 5]].tolist()
    assert (last_tokens[[1, 2, 5, 6, 8]] == -5).all()
    assert 0 <= last_tokens[3] < vocab, "a row that is not fine leaves some token"
    assert_fences(last_tokens)


@in_every_order
def test_a_history_may_name_the_last_token_of_its_own_slot(order: int) -> None:
    count, vocab, entries = 6, 97, 40
    rng = np.random.default_rng(17)
    slots, last_tokens = np.array([7, 0, 8, 9, 3, 4], np.int32), places(*range(50, 60))
    logits, found = normal(count, vocab, 16), sampling_cases.history(rng, count, vocab, entries)
    named: Sparse = found.pop("history")
    ids = np.where(rng.random(entries) < 0.5, ~slots[named.rows], named.ids)
    known = np.where(ids < 0, 50 + slots[named.rows], ids)
    how = {"temperature": 1.0, "seed": np.arange(count), "want_logprob": True, **found}
    expected = draw(order, logits, rows(count, history=Sparse(named.rows, known, named.values), **how))
    by_slot = rows(count, history=Sparse(named.rows, ids, named.values), **how)
    sampler = Sampler(device_of(order), vocab, count)
    drawn = sampler.sample_later(fenced(torch.tensor(logits)), by_slot, slots, last_tokens).wait()
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    assert drawn.logprobs is not None and torch.equal(drawn.logprobs, expected.logprobs)


def test_rows_beyond_those_that_sample_and_rows_without_edits_stay_as_they_are() -> None:
    given = fenced(torch.tensor(normal(7, 501, 18)))
    before = given.clone()
    how = rows(4, temperature=1.0, top_p=0.9, bias=Sparse(np.array([2]), np.array([500]), np.ones(1, np.float32)))
    Sampler(EmulatedDevice(flags=FLAGS), 501, 1).sample(given, how)
    assert torch.equal(given[[0, 1, 3, 4, 5, 6]], before[[0, 1, 3, 4, 5, 6]])
    assert given[2, 500] == before[2, 500] + 1
    assert_fences(given)


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_steps_that_are_under_way_together_draw_what_they_draw_one_by_one(seed: int | None) -> None:
    """Each punishes the token before, which only the device knows when the step is given to it."""
    vocab, slots = 61, np.array([3, 1, 0, 2], np.int32)
    sampler, last_tokens = Sampler(EmulatedDevice(seed, flags=FLAGS), vocab, 1), places(9, 9, 9, 9)
    known, expected, under_way = np.full(4, 9), [], []
    for step, count in enumerate([4, 2, 4, 3, 1, 4, 4]):
        logits, how, of = normal(4, vocab, step), mixed(step, count, vocab), slots[:count]
        expected.append(draw(FORWARD, logits[:count], with_history(how, known[of])).tokens.tolist())
        known[of] = expected[-1]
        under_way.append(sampler.sample_later(torch.tensor(logits), with_history(how, ~of), of, last_tokens))
        if step == 4:
            assert under_way[1].wait().tokens.tolist() == expected[1]
    assert [drawn.wait().tokens.tolist() for drawn in reversed(under_way)] == expected[::-1]
    assert all(drawn.ready() for drawn in under_way)
    assert [drawn.wait().tokens.tolist() for drawn in under_way] == expected, "a result may be asked for again"


@pytest.mark.parametrize("seed", range(3))
def test_most_likely_tokens_of_steps_that_are_under_way_are_each_steps_own(seed: int) -> None:
    vocab = 61
    sampler, expected, under_way = Sampler(EmulatedDevice(seed, flags=FLAGS), vocab, 1), [], []
    for step, most in enumerate([2, 0, 5, 1, 3]):
        logits = normal(2, vocab, step)
        given = {"likely": np.array([0, most], np.int32)} if most else {}
        how = rows(2, want_logprob=most > 0, bias=some(np.random.default_rng(step), 2, vocab, 50), **given)
        expected.append(np.argsort(-logits[1])[:most].tolist())
        nobody = np.full(2, -1, np.int32)
        under_way.append(sampler.sample_later(torch.tensor(logits), how, nobody, None))
    found = [drawn.wait().likely for drawn in reversed(under_way)][::-1]
    assert [[] if likely is None else likely.ids[1].tolist() for likely in found] == expected


def with_history(how: SamplingRows, last: Array) -> SamplingRows:
    """With one more token in each row's output."""
    assert how.history is not None and how.history.values is not None
    count = len(last)
    parts = zip(
        (how.history.rows, how.history.ids, how.history.values), (np.arange(count), last, np.ones(count)), strict=True
    )
    joined = Sparse(*(np.concatenate(part) for part in parts))
    return replace(how, history=joined, frequency=np.full(count, 5, np.float32))


class CountingDevice(EmulatedDevice):
    """Notes how much pinned memory it gave."""

    given_pinned = 0

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.given_pinned += 1
        return super().pinned(shape, dtype)


def test_memory_grows_with_rows_and_histories_and_is_used_again() -> None:
    device, given = CountingDevice(flags=FLAGS), torch.tensor(normal(40, 33, 19))
    sampler, taken = Sampler(device, 33, 1), []
    for count, entries in ((1, 0), (40, 9000), (3, 5), (40, 9000), (40, 8000)):
        how = rows(count, temperature=1.0, **sampling_cases.history(np.random.default_rng(1), count, 33, entries))
        expected = draw(FORWARD, given[:count].numpy(), how)
        assert sampler.sample(given.clone(), how).tokens.tolist() == expected.tokens.tolist()
        taken.append((device.peak_bytes(), device.given_pinned))
    assert taken[0] < taken[1] == taken[2] == taken[3] == taken[4]


def test_no_rows_give_no_tokens() -> None:
    found = Sampler(EmulatedDevice(flags=FLAGS), 33, 1).sample(torch.zeros(0, 33), rows(0))
    assert found.tokens.shape == found.status.shape == (0,) and found.logprobs is None


@pytest.mark.parametrize(
    ("logits", "given", "text"),
    [
        (torch.zeros(2, 33, dtype=torch.bfloat16), {}, "float32 logits of 33 ids"),
        (torch.zeros(33, 2).t(), {}, "contiguous"),
        (torch.zeros(2, 34), {}, "of 33 ids"),
        (torch.zeros(1, 33), {}, "2 rows with 2 slots and 1 rows of logits"),
        (
            torch.zeros(2, 33),
            {"mask_rows": np.array([0]), "mask_words": np.zeros((1, 3), np.uint32)},
            "masks of 3 words",
        ),
        (torch.zeros(2, 33), {"history": Sparse(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1))}, "penalty"),
    ],
)
def test_what_does_not_fit_is_refused(logits: Tensor, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Sampler(EmulatedDevice(flags=FLAGS), 33, 2).sample(logits, rows(2, **given))

"""The CUDA sampler, emulated: what it leaves on the device, and several draws under way on one that puts off its work.

Which tokens it draws is seen in ../test_samplers.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda.operations.sampling import Sampler
from kernels.emulator.device import EmulatedDevice
from kernels.emulator.program import FORWARD
from kernels.ops import Sampled, SamplingRows, Sparse
from tests.kernels import sampling_cases
from tests.kernels.cuda.programs import FLAGS, ORDERS, assert_fences, device_of_threads, fenced
from tests.kernels.sampling_cases import Array, mixed, normal, rows, some
from tests.support.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.sanitized]
in_every_order = pytest.mark.parametrize("order", ORDERS)


def draw(order: int, logits: Array, how: SamplingRows, processors: int = 4) -> Sampled:
    given = fenced(torch.tensor(logits, dtype=torch.float32))
    found = Sampler(device_of_threads(order, processors), given.shape[1], 4).sample(given, how)
    assert_fences(given)
    return found


def places(*tokens: int) -> Tensor:
    """last_tokens."""
    return fenced(torch.tensor(tokens, dtype=torch.int32))


@in_every_order
def test_tokens_stay_on_device_in_the_place_of_their_slots(order: int) -> None:
    count, vocab = 6, 97
    slots, last_tokens = np.array([7, 0, -1, 9, 3, 4], np.int32), places(*[-5] * 10)
    logits = normal(count, vocab, 15)
    logits[4, 50] = np.nan
    sampler = Sampler(device_of_threads(order), vocab, count)
    how = rows(count, temperature=1.0, seed=np.arange(count))
    found = sampler.sample_later(fenced(torch.tensor(logits)), how, slots, last_tokens).wait()
    assert last_tokens[[7, 0, 9, 4]].tolist() == found.tokens[[0, 1, 3, 5]].tolist()
    assert (last_tokens[[1, 2, 5, 6, 8]] == -5).all()
    assert 0 <= last_tokens[3] < vocab, "a row that is not fine leaves some token"
    assert_fences(last_tokens)


@in_every_order
def test_history_may_name_the_last_token_of_its_own_slot(order: int) -> None:
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
    sampler = Sampler(device_of_threads(order), vocab, count)
    drawn = sampler.sample_later(fenced(torch.tensor(logits)), by_slot, slots, last_tokens).wait()
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    assert drawn.logprobs is not None and np.array_equal(drawn.logprobs, expected.logprobs)


def test_rows_without_edits_or_sampling_stay_unchanged() -> None:
    given = fenced(torch.tensor(normal(7, 501, 18)))
    before = given.clone()
    how = rows(4, temperature=1.0, top_p=0.9, bias=Sparse(np.array([2]), np.array([500]), np.ones(1, np.float32)))
    Sampler(EmulatedDevice(flags=FLAGS), 501, 1).sample(given, how)
    assert torch.equal(given[[0, 1, 3, 4, 5, 6]], before[[0, 1, 3, 4, 5, 6]])
    assert given[2, 500] == before[2, 500] + 1
    assert_fences(given)


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_steps_under_way_together_draw_the_same_tokens(seed: int | None) -> None:
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
def test_most_likely_tokens_belong_to_their_own_step(seed: int) -> None:
    vocab = 61
    sampler, expected, under_way = Sampler(EmulatedDevice(seed, flags=FLAGS), vocab, 1), [], []
    for step, most in enumerate([2, 0, 5, 1, 3]):
        logits = normal(2, vocab, step)
        given = {"likely": np.array([0, most], np.int32)} if most else {}
        how = rows(2, want_logprob=most > 0, bias=some(np.random.default_rng(step), 2, vocab, 50), **given)
        expected.append(np.argsort(-logits[1])[:most].tolist())
        no_row = np.full(2, -1, np.int32)
        under_way.append(sampler.sample_later(torch.tensor(logits), how, no_row, None))
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

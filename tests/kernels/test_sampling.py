"""The reference's sampler: published vectors, the distribution it draws from, every rule of SamplingRows; and the most
likely tokens of every backend.

The compiled samplers draw the reference's tokens, test_samplers.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.ops import STATUS_FINE, AnyOps, Sparse
from kernels.reference.philox import gumbel, philox4x32
from kernels.reference.sampling import sample
from tests.kernels.sampling_cases import DRAWS, SETTINGS, follows_float64, is_drawn_from, rows
from tests.kernels.sequences import ops as ops  # the fixture: every backend


def sparse(triples: list[tuple[int, int, float]]) -> Sparse:
    row, ids, values = zip(*triples, strict=True)
    return Sparse(np.array(row, np.int64), np.array(ids, np.int64), np.array(values, np.float32))


def draw(logits: np.ndarray, **columns: Any) -> np.ndarray:
    return sample(torch.tensor(logits, dtype=torch.float32), rows(len(logits), **columns)).tokens


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123 1.14, tests/kat_vectors, philox4x32 10
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    found = philox4x32(np.array(counter, np.uint32)[:, None], np.array(key, np.uint32)[:, None])
    assert found[:, 0].tolist() == expected


def test_noise_is_the_documented_function_of_seed_position_and_token() -> None:
    seed, position, vocab = 0x123456789ABCDEF0, (3 << 32) + 41, 10
    found = gumbel(np.array([7, seed], np.uint64), np.array([0, position], np.int64), vocab)
    for token in range(vocab):
        counter = np.array([[token >> 2], [position & 0xFFFFFFFF], [position >> 32], [0]], np.uint32)
        key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], np.uint32)
        x = int(philox4x32(counter, key)[token & 3, 0])
        u = min((x + 0.5) * 2**-32, 1 - 2**-24)
        assert found[1, token] == pytest.approx(-np.log(-np.log1p(-u)), rel=1e-5, abs=1e-5)


def test_noise_does_not_depend_on_batch_it_is_drawn_in() -> None:
    seed, position = np.arange(40, dtype=np.uint64), np.arange(40, dtype=np.int64) * 3
    together = gumbel(seed, position, 5003)
    assert np.array_equal(together[17:18], gumbel(seed[17:18], position[17:18], 5003))
    assert len(np.unique(together)) > together.size * 0.98, "rows share their noise"


def nucleus(logits: np.ndarray, top_p: float) -> np.ndarray:
    """The ids that top-p keeps, in float64, by sorting."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    return np.sort(order[before < top_p * p.sum()])


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_distribution_of_float64(name: str) -> None:
    assert follows_float64(lambda logits, how: sample(torch.tensor(logits), how), name)


def test_draws_of_one_seed_at_different_positions_follow_distribution_too() -> None:
    logits = np.random.default_rng(5).normal(0, 1, 7).astype(np.float32)
    tokens = draw(np.tile(logits, (DRAWS, 1)), temperature=1.0, seed=1234, position=np.arange(DRAWS))
    p = np.exp(logits.astype(np.float64))
    assert is_drawn_from(np.bincount(tokens, minlength=7), p / p.sum())


def test_flat_and_peaked_rows_are_cut_by_their_own_mass() -> None:
    flat, peaked = np.linspace(0, 0.5, 800), np.linspace(0, 80, 800)
    logits = np.tile(np.stack([peaked, flat]), (300, 1)).astype(np.float32)
    tokens = draw(logits, temperature=1.0, top_p=0.5, seed=np.arange(600))
    for kind, found in ((peaked, tokens[0::2]), (flat, tokens[1::2])):
        allowed = nucleus(kind, 0.5)
        assert found.min() >= allowed.min() and len(np.unique(found)) > 0.5 * min(300, len(allowed))


def test_row_draws_the_same_alone_and_among_other_rows() -> None:
    logits = np.random.default_rng(3).normal(0, 2, (6, 50)).astype(np.float32)
    columns = {
        "temperature": [0.0, 0.7, 1.0, 1.3, 0.0, 1.0],
        "top_k": [0, 4, 0, 0, 0, 20],
        "top_p": [1.0, 1.0, 0.6, 1.0, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0, 0.02],
        "seed": [1, 2, 3, 4, 5, 2**63 + 6],
        "position": [7, 8, 9, 10, 11, 12],
    }
    together = draw(logits, **columns)
    alone = [
        int(draw(logits[i : i + 1], **{name: [values[i]] for name, values in columns.items()})[0]) for i in range(6)
    ]
    assert together.tolist() == alone
    assert together[[0, 4]].tolist() == logits[[0, 4]].argmax(1).tolist()


def test_bias_bans_and_masks_apply_to_their_rows_alone() -> None:
    logits = np.tile(np.arange(40, dtype=np.float32), (5, 1))
    mask = np.array([[0b1010, 0]], np.uint32)
    tokens = draw(
        logits,
        bias=sparse([(0, 3, 100.0), (1, 39, -20.0), (1, 39, -20.0), (2, 39, 1e30)]),  # a ban outweighs a bias
        banned=Sparse(np.array([2, 2]), np.array([39, 38])),
        mask_rows=np.array([3]),
        mask_words=mask,
    )
    assert tokens.tolist() == [3, 38, 37, 3, 39]


def test_penalties_are_the_formulas() -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[:, 1], logits[:, 2], logits[:, 3] = 4.0, 3.9, -1.0
    # Token 1 stands in the prompt of row 0 and twice in the output of rows 1 and 2.
    history = sparse([(0, 1, 0.0), (1, 1, 1.0), (1, 1, 1.0), (2, 1, 1.0), (2, 1, 1.0), (2, 2, 0.0)])
    columns = {"history": history, "presence": [0.05] * 3, "frequency": [0.04] * 3, "repetition": [1.0] * 3}
    assert draw(logits, **columns).tolist() == [1, 2, 2], "0.05 + 2 x 0.04 > 0.1, and a prompt counts for neither"
    columns = {"history": history, "presence": 0.0, "frequency": 0.0, "repetition": [1.1, 1.1, 1.5]}
    assert draw(logits, **columns).tolist() == [2, 2, 1], "repetition divides, in the prompt too: 4/1.5 > 3.9/1.5"
    negative = np.array([[-2.0, -1.9]], np.float32)
    columns = {"history": sparse([(0, 1, 0.0)]), "presence": 0.0, "frequency": 0.0, "repetition": 1.2}
    assert draw(negative, **columns).tolist() == [0], "a negative logit is multiplied"


def test_most_likely_tokens_are_the_models_own_before_any_edit(ops: AnyOps) -> None:
    count, vocab = 40, 300
    logits = np.random.default_rng(3).normal(0, 2, (count, vocab)).astype(np.float32)
    wanted = np.arange(1, count + 1, dtype=np.int32)
    wanted[[0, 3, 4, 24, 39]] = 0  # between them runs of a few rows, and of more than are looked at together
    bias = sparse([(row, 7, 50.0) for row in range(count)])
    found = ops.sample(torch.tensor(logits), rows(count, want_logprob=True, likely=wanted, temperature=0.7, bias=bias))
    assert found.likely is not None and found.tokens.tolist() == [7] * count
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    for row, most in enumerate(wanted.tolist()):
        assert found.likely.ids[row, :most].tolist() == np.argsort(-exact[row])[:most].tolist()
        assert found.likely.logprobs[row, :most].numpy() == pytest.approx(-np.sort(-exact[row])[:most], abs=1e-5)
    assert ops.sample(torch.tensor(logits), rows(count)).likely is None


def test_vocabulary_with_fewer_tokens_than_are_wanted_is_filled_up(ops: AnyOps) -> None:
    found = ops.sample(torch.zeros(1, 3), rows(1, want_logprob=True, likely=np.array([5], np.int32))).likely
    assert found is not None
    assert sorted(found.ids[0].tolist()) == [-1, -1, 0, 1, 2]
    assert found.logprobs[0].numpy() == pytest.approx([-np.log(3)] * 3 + [-np.inf] * 2, abs=1e-6)


def test_huge_finite_logits_are_not_taken_for_broken_ones() -> None:
    logits = np.full((1, 8), 3e38, np.float32)
    logits[0, 5] = 3.2e38
    found = sample(torch.tensor(logits), rows(1))
    assert found.status.tolist() == [STATUS_FINE] and found.tokens.tolist() == [5]

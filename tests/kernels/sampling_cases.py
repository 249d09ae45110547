"""Rows for the samplers of all backends: every feature alone and mixed, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.ops import STATUS_FINE, Sampled, SamplingRows, Sparse
from kernels.reference.sampling import sample as sample_in_torch

Array = npt.NDArray[Any]
Draw = Callable[[Array, SamplingRows], Sampled]

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
FEATURES = ("temperature", "top_k", "top_p", "min_p", "bias", "banned", "mask", "penalties")


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


def alone(feature: str, count: int, vocab: int) -> SamplingRows:
    """Rows with a temperature and one of the FEATURES."""
    rng = np.random.default_rng((7, vocab))
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
    return rows(count, **given)


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


def same_as_reference(draw: Draw, logits: Array, how: SamplingRows) -> Sampled:
    """Draws with both; tokens, status and log-probabilities agree."""
    found, expected = draw(logits, how), sample_in_torch(torch.tensor(logits, dtype=torch.float32), how)
    assert found.status.tolist() == expected.status.tolist()
    fine = expected.status == STATUS_FINE
    assert found.tokens[fine].tolist() == expected.tokens[fine].tolist()
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        np.testing.assert_allclose(found.logprobs[fine], expected.logprobs[fine], atol=1e-4, rtol=0)
    return found


DRAWS, EACH, SMALL = 100_000, 10_000, 120
BIASES = ((3, 2.5), (40, -4.0), (40, 1.5), (119, 3.0))
BANNED = (0, 17, 100)
HISTORY = ((5, 1), (5, 1), (5, 0), (60, 0), (61, 1), (119, 1))
MASK = np.random.default_rng(13).integers(0, 1 << 32, 4, dtype=np.uint64).astype(np.uint32)
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
        "temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence": 0.8, "frequency": 0.6,
        "repetition": 1.4, "bias": True, "mask": True, "banned": True,
    },
}  # fmt: skip
"""Of rows of SMALL tokens, for chi-square with DRAWS each."""


def follows_float64(draw: Draw, name: str) -> bool:
    """Whether DRAWS draws of a setting, EACH at a time, have the distribution of SamplingRows, made in float64."""
    setting = SETTINGS[name]
    logits, counts = normal(1, SMALL, 14, 1.5)[0], np.zeros(SMALL, np.int64)
    for first in range(0, DRAWS, EACH):
        found = draw(np.broadcast_to(logits, (EACH, SMALL)), _rows_of(setting, first))
        counts += np.bincount(found.tokens, minlength=SMALL)
    return is_drawn_from(counts, _distribution(logits, setting))


def _rows_of(setting: dict[str, Any], first: int) -> SamplingRows:
    every = np.arange(EACH)

    def everywhere(pairs: tuple[tuple[int, float], ...]) -> Sparse:
        ids, values = zip(*pairs, strict=True)
        return Sparse(every.repeat(len(ids)), np.tile(ids, EACH), np.tile(np.array(values, np.float32), EACH))

    given = {key: value for key, value in setting.items() if key not in ("bias", "mask", "banned")}
    if "bias" in setting:
        given["bias"] = everywhere(BIASES)
    if "banned" in setting:
        given["banned"] = Sparse(every.repeat(len(BANNED)), np.tile(BANNED, EACH))
    if "mask" in setting:
        given |= {"mask_rows": every, "mask_words": np.tile(MASK, (EACH, 1))}
    if "repetition" in setting:
        given["history"] = everywhere(HISTORY)
    return rows(EACH, seed=every + first, position=every % 7, **given)


def _distribution(logits: Array, s: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Token by token."""
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

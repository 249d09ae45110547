"""The sampler in plain torch; what it computes is defined at kernels.ops.SamplingRows.

Vectorised over rows; each feature runs only over the rows that use it. A truncation is a threshold on the logits, not a
sorted list, because that is what the GPU's sampler can compute.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.likely import likely_of
from kernels.ops import (
    STATUS_NOT_FINITE,
    STATUS_NOTHING_ALLOWED,
    Int64,
    Sampled,
    SamplingRows,
)
from kernels.reference.philox import gumbel

_SORTED_PREFIX = 128  # candidates that top-p sorts before it falls back to the whole row


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """Sample logits [R, V] float32 -> tokens, status, log-probabilities."""
    status = _finite_status(logits)
    if rows.is_plain_greedy:
        return Sampled(logits.argmax(-1).numpy(), status.numpy(), None)
    logits = torch.nan_to_num_(logits) if status.any() else logits
    likely = likely_of(logits, rows)
    scores = _edit(logits, rows)
    best = scores.argmax(-1)
    empty = scores.gather(1, best[:, None])[:, 0] == -torch.inf
    status = torch.where(empty & (status == 0), STATUS_NOTHING_ALLOWED, status)
    tokens = best
    random = np.flatnonzero(rows.temperature > 0)
    if random.size:
        chosen = torch.from_numpy(random)
        tokens = best.index_copy(0, chosen, _draw(scores.index_select(0, chosen), rows, random))
    logprobs = _logprobs(logits, tokens, rows)
    return Sampled(tokens.numpy(), status.numpy(), None if logprobs is None else logprobs.numpy(), likely)


def _finite_status(logits: Tensor) -> Tensor:
    """Return the status of each row: a sum is finite only if every term is; an overflowing sum is looked at again."""
    status = torch.zeros(logits.shape[0], dtype=torch.int64)
    suspects = torch.nonzero(~torch.isfinite(logits.sum(-1)))[:, 0]
    if suspects.numel():
        bad = ~torch.isfinite(logits[suspects]).all(-1)
        status[suspects[bad]] = STATUS_NOT_FINITE
    return status


def _edit(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the bias, bans, masks, penalties; the given logits stay as they are."""
    if rows.bias is None and rows.banned is None and rows.mask_rows is None and rows.history is None:
        return logits
    scores = logits.clone()
    if rows.bias is not None and rows.bias.values is not None:
        where = (torch.from_numpy(rows.bias.rows), torch.from_numpy(rows.bias.ids))
        scores.index_put_(where, torch.from_numpy(rows.bias.values), accumulate=True)
    if rows.banned is not None:
        scores[torch.from_numpy(rows.banned.rows), torch.from_numpy(rows.banned.ids)] = -torch.inf
    if rows.mask_rows is not None and rows.mask_words is not None:
        bits = np.unpackbits(rows.mask_words.astype("<u4").view(np.uint8), axis=1, bitorder="little")
        allowed = torch.from_numpy(bits[:, : scores.shape[1]].astype(np.bool_))
        masked = torch.from_numpy(rows.mask_rows)
        scores[masked] = torch.where(allowed, scores[masked], -torch.inf)
    if rows.history is not None:
        _penalise(scores, rows)
    return scores


def _penalise(scores: Tensor, rows: SamplingRows) -> None:
    history = rows.history
    if history is None or history.values is None:
        return
    if rows.presence is None or rows.frequency is None or rows.repetition is None:
        raise ValueError("a sampling batch with a history needs all three penalty columns")
    touched, local = np.unique(history.rows, return_inverse=True)
    vocab = scores.shape[1]
    cells = torch.from_numpy(local.astype(np.int64) * vocab + history.ids)
    size = len(touched) * vocab
    seen = torch.bincount(cells, minlength=size).view(-1, vocab) > 0
    outputs = torch.bincount(cells, torch.from_numpy(history.values), minlength=size).view(-1, vocab)
    outputs = outputs.to(torch.float32)
    index = torch.from_numpy(touched)
    picked = scores.index_select(0, index)
    repetition = torch.from_numpy(rows.repetition[touched])[:, None]
    picked = torch.where(seen, torch.where(picked > 0, picked / repetition, picked * repetition), picked)
    picked -= torch.from_numpy(rows.frequency[touched])[:, None] * outputs
    picked -= torch.from_numpy(rows.presence[touched])[:, None] * (outputs > 0)
    scores.index_copy_(0, index, picked)


def _draw(scores: Tensor, rows: SamplingRows, which: Int64) -> Tensor:
    """Draw from scores [r, V] of the rows `which`, overwritten -> tokens [r]."""
    scores /= torch.from_numpy(rows.temperature[which])[:, None]
    scores = _top_k(scores, rows.top_k[which])
    top_p = rows.top_p[which]
    nucleus = np.flatnonzero(top_p < 1)
    if nucleus.size:
        index = torch.from_numpy(nucleus)
        scores.index_copy_(0, index, _top_p(scores.index_select(0, index), torch.from_numpy(top_p[nucleus])))
    min_p = rows.min_p[which]
    if (min_p > 0).any():
        # log p_i >= log p_max + log min_p, and the normaliser cancels.
        floor = scores.amax(-1, keepdim=True) + torch.from_numpy(np.log(np.maximum(min_p, 1e-38)))[:, None]
        off = torch.from_numpy(min_p <= 0)[:, None]
        scores = torch.where(off | (scores >= floor), scores, -torch.inf)
    noise = gumbel(rows.seed[which], rows.position[which], scores.shape[1])
    return (scores + torch.from_numpy(noise)).argmax(-1)


def _top_k(scores: Tensor, top_k: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
    vocab = scores.shape[1]
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab))
    if not limited.size:
        return scores
    index = torch.from_numpy(limited)
    part = scores.index_select(0, index)
    k = torch.from_numpy(top_k[limited].astype(np.int64))
    best = part.topk(int(k.max()), dim=-1).values
    floor = best.gather(1, k[:, None] - 1)
    scores.index_copy_(0, index, part.masked_fill(part < floor, -torch.inf))
    return scores


def _top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens with a mass that reaches top_p, at least one, ties included."""
    total = scores.logsumexp(-1, keepdim=True)
    best = scores.topk(min(_SORTED_PREFIX, scores.shape[1]), dim=-1).values
    floor = _nucleus_floor(best, total, top_p)
    short = torch.nonzero((best - total).exp().sum(-1) < top_p)[:, 0]
    if short.numel():
        whole = scores.index_select(0, short).sort(dim=-1, descending=True).values
        floor.index_copy_(0, short, _nucleus_floor(whole, total[short], top_p[short]))
    return scores.masked_fill(scores < floor, -torch.inf)


def _nucleus_floor(best: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """Return from best [r, n] sorted scores, total [r, 1] -> [r, 1]: the smallest score kept.

    A token is kept while the mass before it is below top_p; the first always is.
    """
    mass = (best - total).exp().cumsum(-1)
    kept = ((mass < top_p[:, None]).sum(-1) + 1).clamp(max=best.shape[1])
    return best.gather(1, kept[:, None] - 1)


def _logprobs(logits: Tensor, tokens: Tensor, rows: SamplingRows) -> Tensor | None:
    asked = np.flatnonzero(rows.want_logprob)
    if not asked.size:
        return None
    index = torch.from_numpy(asked)
    part = logits.index_select(0, index)
    found = part.gather(1, tokens.index_select(0, index)[:, None])[:, 0] - part.logsumexp(-1)
    return torch.full((logits.shape[0],), torch.nan).index_copy(0, index, found)

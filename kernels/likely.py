"""Find the most likely tokens of the rows that ask for them, in torch: for backends with logits that torch can read.

A backend calls this before it samples, since the sampler may overwrite the logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Int32, Likely, SamplingRows

ROWS_AT_ONCE = 16
"""Bounds the memory that this takes beside the logits, which the memory plan does not count."""


def likely_of(logits: Tensor, rows: SamplingRows) -> Likely | None:
    """Return Sampled.likely of logits [R or more, V] float32 on the host."""
    if rows.likely is None:
        return None
    shape = (len(rows.likely), int(rows.likely.max()))
    found = Likely(torch.empty(shape, dtype=torch.int32), torch.empty(shape))
    write_likely(logits, rows.likely, found)
    return found


def write_likely(logits: Tensor, asked: Int32, found: Likely) -> None:
    """Write the rows of `found` that ask for at least one; no number is read back from the device.

    log softmax in float32. Ids beyond the vocabulary, where that has fewer, are -1 with -inf.
    """
    most = min(found.ids.shape[1], logits.shape[1])
    for first, end in _runs(asked):
        part = logits[first:end]
        best = part.topk(most)
        found.ids[first:end, :most].copy_(best.indices)
        found.logprobs[first:end, :most].copy_(best.values - part.logsumexp(-1, keepdim=True))
        found.ids[first:end, most:].fill_(-1)
        found.logprobs[first:end, most:].fill_(-torch.inf)


def _runs(asked: Int32) -> Iterator[tuple[int, int]]:
    """Yield [first, end) of the rows that ask, of neighbours at most ROWS_AT_ONCE together."""
    edges = np.flatnonzero(np.diff(asked > 0, prepend=False, append=False)).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        for start in range(first, end, ROWS_AT_ONCE):
            yield start, min(start + ROWS_AT_ONCE, end)

"""The most likely tokens of the rows that ask for them, in torch: for the backends whose logits torch can read.

A backend calls this before it samples, since the sampler may overwrite the logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Int32, Likely, SamplingRows

ROWS_AT_ONCE = 16
"""Bounds the memory that this takes beside the logits, which nobody has planned for."""


def likely_of(logits: Tensor, rows: SamplingRows) -> Likely | None:
    """logits [R or more, V] float32 on the host -> what Sampled.likely is."""
    if rows.likely is None:
        return None
    shape = (len(rows.likely), int(rows.likely.max()))
    found = Likely(torch.empty(shape, dtype=torch.int32), torch.empty(shape))
    write_likely(logits, rows.likely, found)
    return found


def write_likely(logits: Tensor, asked: Int32, found: Likely) -> None:
    """Writes the rows of `found` that ask for at least one; no number is read back from the device.

    log softmax in float32. Ids beyond the vocabulary, where that has fewer, are -1 with -inf.
    """
    most = min(found.ids.shape[1], logits.shape[1])
    asking = np.flatnonzero(asked).tolist()
    for first in range(0, len(asking), ROWS_AT_ONCE):
        group = asking[first : first + ROWS_AT_ONCE]
        part = torch.stack([logits[row] for row in group])
        best = part.topk(most)
        logprobs = best.values - part.logsumexp(-1, keepdim=True)
        for at, row in enumerate(group):
            found.ids[row, :most].copy_(best.indices[at])
            found.logprobs[row, :most].copy_(logprobs[at])
            found.ids[row, most:].fill_(-1)
            found.logprobs[row, most:].fill_(-torch.inf)

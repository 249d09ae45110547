"""Read an entry of `tokens:{gateway}`: gateways deliver it, and a scheduler that takes over a shard reads it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from protos import queue_pb2
from shared.wire.columns import Int32, unpack, unpack_list

LAST_FINISH = 5
MAX_VOCABULARY = 1 << 24
"""Bound of any model's vocabulary, for a reader that does not know the model's."""


def decode_batch(fields: Mapping[bytes, bytes], vocab_size: int = MAX_VOCABULARY) -> queue_pb2.TokenBatch:
    """Return the batch of a stream entry. Raises KeyError, DecodeError, or ValueError for columns that do not fit, and
    for a token outside the vocabulary.
    """
    batch = queue_pb2.TokenBatch.FromString(fields[b"b"])
    rows = len(batch.requests)
    choices, first, counts = unpack_list(batch.choices), unpack_list(batch.first), unpack_list(batch.counts)
    if not len(choices) == len(first) == len(counts) == len(batch.finish) == rows:
        raise ValueError(f"token batch: columns of other lengths than its {rows} rows")
    if rows and min(min(choices), min(first), min(counts)) < 0:
        raise ValueError("token batch: a negative choice, index or count")
    if 4 * sum(counts) != len(batch.tokens):
        raise ValueError(f"token batch: {len(batch.tokens)} bytes of tokens in rows of {sum(counts)}")
    check_tokens(unpack(batch.tokens), vocab_size)
    if rows and max(batch.finish) > LAST_FINISH:
        raise ValueError(f"token batch: finish {max(batch.finish)}; at most {LAST_FINISH}")
    drafts = unpack_list(batch.drafts)
    if drafts and (len(drafts) != rows or min(drafts) < 0):
        raise ValueError(f"token batch: {len(drafts)} counts of drafts for {rows} rows, or a negative one")
    return batch


def check_tokens(tokens: Int32 | Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for a token outside a vocabulary."""
    values = np.asarray(tokens, np.int32)
    if values.size and int(values.view(np.uint32).max()) >= vocab_size:  # a negative one is large
        worst = int(values.min()) if values.min() < 0 else int(values.max())
        raise ValueError(f"token {worst} is outside the vocabulary of {vocab_size}")

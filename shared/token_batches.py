"""Read an entry of `tokens:{gateway}`: gateways deliver it, and a scheduler that takes over a shard reads it again."""

from __future__ import annotations

from collections.abc import Mapping

from protos import queue_pb2
from shared.columns import unpack

LAST_FINISH = 5


def decode_batch(fields: Mapping[bytes, bytes]) -> queue_pb2.TokenBatch:
    """Return the batch of a stream entry. Raises KeyError, DecodeError, or ValueError for columns that do not fit."""
    batch = queue_pb2.TokenBatch.FromString(fields[b"b"])
    rows = len(batch.requests)
    choices, first, counts = unpack(batch.choices), unpack(batch.first), unpack(batch.counts)
    if not choices.size == first.size == counts.size == len(batch.finish) == rows:
        raise ValueError(f"token batch: columns of other lengths than its {rows} rows")
    if rows and min(int(choices.min()), int(first.min()), int(counts.min())) < 0:
        raise ValueError("token batch: a negative choice, index or count")
    if 4 * int(counts.sum(dtype="i8")) != len(batch.tokens):
        raise ValueError(f"token batch: {len(batch.tokens)} bytes of tokens in rows of {int(counts.sum())}")
    if rows and max(batch.finish) > LAST_FINISH:
        raise ValueError(f"token batch: finish {max(batch.finish)}; at most {LAST_FINISH}")
    drafts = unpack(batch.drafts)
    if drafts.size and (drafts.size != rows or int(drafts.min()) < 0):
        raise ValueError(f"token batch: {drafts.size} counts of drafts for {rows} rows, or a negative one")
    return batch

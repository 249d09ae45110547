"""Log-probabilities for those who asked: columns of a TokenBatch beside their tokens, and the records in Redis.

The publisher calls this for steps in which somebody asked; Python loops over the rows of those alone. Every record is
written with the entry that tells its token, so whoever reads tokens in `out` finds theirs, before and after a restart.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.types import Int32, Outcome, Records
from shared.columns import pack
from shared.redis_client import Value


def columns(records: Records, counts: Int32) -> dict[str, bytes]:
    """Fields of a TokenBatch whose rows have counts [rows] tokens, and these a record each; none if all are empty."""
    sizes = _sizes(records)
    if not sizes.any():
        return {}
    by_row = np.bincount(np.repeat(np.arange(counts.size), counts), sizes, counts.size)
    return {"logprobs": b"".join(records), "logprob_sizes": pack(by_row)}


def records(outcome: Outcome) -> list[Value]:
    """For publish.lua: id, choice, byte offset and record of each token that has one."""
    found: list[Value] = []
    if outcome.logprobs is None:
        return found
    sizes = _sizes(outcome.logprobs)
    row_of = np.repeat(np.arange(outcome.counts.size), outcome.counts)
    place = (outcome.first - np.cumsum(outcome.counts) + outcome.counts)[row_of] + np.arange(sizes.size)
    for token in np.flatnonzero(sizes).tolist():
        row = row_of[token]
        choice, offset = int(outcome.choices[row]), int(place[token] * sizes[token])
        found += [outcome.requests[row].id, choice, offset, outcome.logprobs[token]]
    return found


def _sizes(records: Records) -> Int32:
    """[n] bytes of each."""
    return np.fromiter(map(len, records), np.int32, records.size)

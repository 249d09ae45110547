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
    sizes = [len(record) for record in records]
    if not any(sizes):
        return {}
    by_row = np.bincount(np.repeat(np.arange(counts.size), counts), sizes, counts.size)
    return {"logprobs": b"".join(records), "logprob_sizes": pack(by_row)}


def records(outcome: Outcome) -> list[Value]:
    """For publish.lua: id, choice, byte offset and records of each row that has some."""
    found: list[Value] = []
    if outcome.logprobs is None:
        return found
    starts = np.cumsum(outcome.counts) - outcome.counts
    for row in np.flatnonzero(outcome.counts).tolist():
        first = outcome.logprobs[starts[row]]
        if first:
            own = outcome.logprobs[starts[row] : starts[row] + outcome.counts[row]]
            place = int(outcome.first[row]) * len(first)
            found += [outcome.requests[row].id, int(outcome.choices[row]), place, b"".join(own)]
    return found

"""The record of one token's log-probabilities, as gRPC and Redis carry it and `logprobs:{id}:{choice}` keeps it.

A prompt record, in `prompt_logprobs:{id}:{prompt}`, has the token's rank before it, as int32: how many tokens of the
vocabulary are at least as likely.

Little-endian: the log-probability of the sampled token as float32, the k most likely ids as int32 (-1 if the vocabulary
has fewer), and their log-probabilities as float32; best first, equal ones by id. `wanted` is k + 1 in every message, so
0 means none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.wire.columns import Float32, Int32

MAX_LOGPROBS = 20
"""Bound of the most likely tokens in a request, besides the sampled one."""

Columns = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one token; `best` holds (id, log-probability), the most likely first."""

    sampled_logprob: float
    best: list[tuple[int, float]]


def record_bytes(logprob_count: int) -> int:
    """Return the size of one token's record in bytes; 0 without log-probabilities.

    >>> [record_bytes(wanted) for wanted in (0, 1, 6)]
    [0, 4, 44]
    """
    return 4 * (2 * logprob_count - 1) if logprob_count else 0


def prompt_record_bytes(logprob_count: int) -> int:
    """Return the size of one prompt token's record in bytes; 0 without log-probabilities.

    >>> [prompt_record_bytes(wanted) for wanted in (0, 1, 6)]
    [0, 8, 48]
    """
    return record_bytes(logprob_count) + 4 if logprob_count else 0


def wrong_number(logprob_count: int, name: str = "logprobs") -> str:
    """Return the problem of a request's number of tokens; empty if there is none."""
    if logprob_count <= MAX_LOGPROBS + 1:
        return ""
    return f"{name}: {logprob_count - 1} tokens besides the sampled one; ask for at most {MAX_LOGPROBS}"


def pack_record(sampled_logprob: float, ids: Columns, logprobs: Columns) -> bytes:
    """Return the record of one token. ids, logprobs: [k], in any order."""
    order = np.lexsort((ids, -logprobs.astype(np.float32)))
    return b"".join(
        (
            np.float32(sampled_logprob).astype("<f4").tobytes(),
            ids[order].astype("<i4").tobytes(),
            logprobs[order].astype("<f4").tobytes(),
        )
    )


def unpack_records(records: bytes, logprob_count: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of consecutive records. Raises ValueError if the last record is incomplete."""
    if not records:
        return []
    rows = np.frombuffer(records, np.uint8).reshape(-1, record_bytes(logprob_count))
    sampled_logprobs: Float32 = rows[:, :4].copy().view("<f4")[:, 0]
    ids: Int32 = rows[:, 4 : 4 * logprob_count].copy().view("<i4")
    best: Float32 = rows[:, 4 * logprob_count :].copy().view("<f4")
    return [
        TokenLogprobs(logprob, [pair for pair in zip(row, values, strict=True) if pair[0] >= 0])
        for logprob, row, values in zip(sampled_logprobs.tolist(), ids.tolist(), best.tolist(), strict=True)
    ]


def check_records(records: bytes, logprob_count: int, vocab_size: int) -> None:
    """Raise ValueError for records with an id outside the vocabulary, or with a number that is no log-probability."""
    if not records:
        return
    rows = np.frombuffer(records, np.uint8).reshape(-1, record_bytes(logprob_count))
    ids: Int32 = rows[:, 4 : 4 * logprob_count].copy().view("<i4")
    if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"log-probabilities: ids {ids.min()} to {ids.max()}, and a vocabulary of {vocab_size}")
    values = np.concatenate([rows[:, :4], rows[:, 4 * logprob_count :]], 1).view("<f4")
    if not (values < np.inf).all():  # NaN is not, either
        raise ValueError("log-probabilities: a number that is none")


def pack_prompt_records(logprobs: Float32, ranks: Int32, ids: Int32, best: Float32) -> bytes:
    """Return the records of prompt tokens, one after another. logprobs, ranks: [T]; ids, best: [T, k], in any order."""
    order = np.lexsort((ids, -best), axis=-1)
    columns = (
        ranks.reshape(-1, 1).astype("<i4"),
        logprobs.reshape(-1, 1).astype("<f4").view("<i4"),
        np.take_along_axis(ids, order, -1).astype("<i4"),
        np.take_along_axis(best, order, -1).astype("<f4").view("<i4"),
    )
    return np.concatenate(columns, 1).tobytes()


def unpack_prompt_records(records: bytes, logprob_count: int) -> list[tuple[int, TokenLogprobs]]:
    """Return rank and log-probabilities of consecutive prompt records. Raises ValueError if the last is incomplete."""
    if not records:
        return []
    rows = np.frombuffer(records, np.uint8).reshape(-1, prompt_record_bytes(logprob_count))
    ranks: Int32 = rows[:, :4].copy().view("<i4")[:, 0]
    return list(zip(ranks.tolist(), unpack_records(rows[:, 4:].tobytes(), logprob_count), strict=True))


def split_records(records: bytes, sizes: Int32, rows: int) -> npt.NDArray[np.object_]:
    """Return [rows] bytes: the records of each row, empty without log-probabilities.

    Raises ValueError if the sizes do not fit the number of rows and bytes.
    """
    parts = np.full(rows, b"", object)
    if not records:
        return parts
    if len(sizes) != rows or (sizes < 0).any() or int(sizes.sum()) != len(records):
        raise ValueError(f"log-probabilities: {len(records)} bytes in {len(sizes)} rows do not fit {rows} rows")
    end = np.cumsum(sizes)
    for row in np.flatnonzero(sizes).tolist():
        parts[row] = records[end[row] - sizes[row] : end[row]]
    return parts

"""The record of one token's log-probabilities, as it crosses gRPC and Redis and lies in `logprobs:{id}:{choice}`.

Little-endian: the sampled token's as float32, then the k most likely ids as int32 (-1 where the vocabulary has fewer),
then theirs as float32, best first, equal ones by id. `wanted` is k + 1 everywhere, so 0 means none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.columns import Float32, Int32

MOST = 20
"""Most likely tokens that a request may ask for beside the sampled one."""

Columns = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token; `best`: (id, log-probability), most likely first."""

    sampled: float
    best: list[tuple[int, float]]


def record_bytes(wanted: int) -> int:
    """Bytes of one token's record; 0 without log-probabilities.

    >>> [record_bytes(wanted) for wanted in (0, 1, 6)]
    [0, 4, 44]
    """
    return 4 * (2 * wanted - 1) if wanted else 0


def wrong_number(wanted: int) -> str:
    """What is wrong with a request's number, or nothing."""
    return f"logprobs asks for {wanted - 1} tokens beside the sampled one; at most {MOST}" if wanted > MOST + 1 else ""


def pack_record(sampled: float, ids: Columns, logprobs: Columns) -> bytes:
    """ids, logprobs [k], in any order."""
    order = np.lexsort((ids, -logprobs.astype(np.float32)))
    return b"".join(
        (
            np.float32(sampled).astype("<f4").tobytes(),
            ids[order].astype("<i4").tobytes(),
            logprobs[order].astype("<f4").tobytes(),
        )
    )


def unpack_records(records: bytes, wanted: int) -> list[TokenLogprobs]:
    """Of tokens one behind the other. Raises ValueError when the bytes are no whole number of records."""
    if not records:
        return []
    rows = np.frombuffer(records, np.uint8).reshape(-1, record_bytes(wanted))
    sampled: Float32 = rows[:, :4].copy().view("<f4")[:, 0]
    ids: Int32 = rows[:, 4 : 4 * wanted].copy().view("<i4")
    best: Float32 = rows[:, 4 * wanted :].copy().view("<f4")
    return [
        TokenLogprobs(own, [pair for pair in zip(row, values, strict=True) if pair[0] >= 0])
        for own, row, values in zip(sampled.tolist(), ids.tolist(), best.tolist(), strict=True)
    ]


def split_records(records: bytes, sizes: Int32, rows: int) -> npt.NDArray[np.object_]:
    """[rows] bytes: each row's part, empty without log-probabilities.

    Raises ValueError when the sizes are not those of so many rows and bytes.
    """
    parts = np.full(rows, b"", object)
    if not records:
        return parts
    if len(sizes) != rows or (sizes < 0).any() or int(sizes.sum()) != len(records):
        raise ValueError(f"log-probabilities of {len(records)} bytes in {len(sizes)} rows; there are {rows} rows")
    end = np.cumsum(sizes)
    for row in np.flatnonzero(sizes).tolist():
        parts[row] = records[end[row] - sizes[row] : end[row]]
    return parts

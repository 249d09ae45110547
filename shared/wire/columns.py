"""Packed little-endian columns, the bytes fields of protos/. Unpacking makes no copy, so the array is read-only."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

EMPTY: Int32 = np.zeros(0, np.int32)

MAX_PREDICTION = 8192
"""Tokens of the column `prediction` of a request."""


def pack(values: npt.NDArray[np.generic] | Sequence[int]) -> bytes:
    """Return one column as int32 little-endian bytes."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack(column: bytes) -> Int32:
    """Return [n] int32, read-only. Raises ValueError if the length is not a multiple of 4."""
    return np.frombuffer(column, dtype="<i4")


def unpack_list(column: bytes) -> list[int]:
    """Return the same as a list, for a few rows at less cost than an array's."""
    values = array("i", column)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def pack_float(values: npt.NDArray[np.generic] | Sequence[float]) -> bytes:
    """Return one column as float32 little-endian bytes."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def unpack_float(column: bytes) -> Float32:
    """Return [n] float32, read-only. Raises ValueError if the length is not a multiple of 4."""
    return np.frombuffer(column, dtype="<f4")

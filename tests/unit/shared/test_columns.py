"""Columns of the wire as arrays and as lists."""

from __future__ import annotations

import numpy as np
import pytest

from shared.columns import pack, unpack, unpack_list


def test_list_of_a_column_is_that_of_its_array() -> None:
    for values in ([], [0], [-1, 2**31 - 1, -(2**31), 258]):
        column = pack(values)
        assert unpack_list(column) == unpack(column).tolist() == values
        assert column == np.array(values, "<i4").tobytes()


def test_list_of_a_broken_column_is_refused_as_its_array() -> None:
    for read in (unpack, unpack_list):
        with pytest.raises(ValueError, match=r"size|multiple"):
            read(b"\0" * 6)

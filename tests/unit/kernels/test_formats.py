"""Names and sizes of weight formats."""

from __future__ import annotations

import pytest

from kernels.formats import CUDA_FORMATS, TABLES, GroupFormat


@pytest.mark.parametrize(
    ("name", "format_", "bits_per_weight"),
    [
        ("int2-16-mins", GroupFormat(2, 16, has_mins=True), 6),
        ("int4-32", GroupFormat(4, 32), 5),
        ("int8-128-mins", GroupFormat(8, 128, has_mins=True), 8.5),
        ("float8-128", GroupFormat(8, 128, table="float8"), 8.25),
        *((f"{table}-32", GroupFormat(4, 32, table=table), 5) for table in TABLES),
    ],
)
def test_name_says_bits_group_minima_and_table(name: str, format_: GroupFormat, bits_per_weight: float) -> None:
    assert GroupFormat.parse(name) == format_
    assert (format_.name, format_.bits_per_weight) == (name, bits_per_weight)


def test_names_of_cuda_formats_are_those_of_formats() -> None:
    assert {GroupFormat.parse(name).name for name in CUDA_FORMATS} == CUDA_FORMATS

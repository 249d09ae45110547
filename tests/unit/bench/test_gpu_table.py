"""The table of CUDA kernels has each of them once, and a time only where a card measured one."""

from __future__ import annotations

from typing import Any

from bench.gpu import table
from kernels.cuda import residency

CASE = {"name": "norm 5, bfloat16", "right": True}
ROW = {"op": "norm", "shape": "4096 x 4096", "us": 35.43, "floor_us": 27.5}
RESULT: dict[str, Any] = {
    "parts": {
        "probes": {"peaks": {"copy_gb_s": 1000.0}},
        "rows": {"rows": [ROW | {"shape": "64 x 4096", "us": 1.0}, ROW]},
        "checks": {"checks": [CASE, CASE | {"right": False}, CASE | {"name": "add_norm 5, bfloat16"}]},
    }
}


def cells(kernel: str, result: dict[str, Any] | None) -> list[str]:
    row = next(row for row in table.rows(result) if row.startswith(f"| `{kernel}` |"))
    return [cell.strip() for cell in row.strip("| ").split("|")]


def test_table_has_every_kernel_once() -> None:
    names = sorted(kernel.block.name for kernel in table.kernels())
    assert names == sorted(name for name in residency.recorded()["sm_90"] if "_f16" not in name)


def test_times_and_cases_are_those_of_the_result() -> None:
    assert cells("rms_norm", RESULT)[-4:] == [
        "4096 x 4096",
        "27.5",
        "35.4",
        "emulator, PTX, races, H100 (1 of 2 cases)",
    ]


def test_kernel_that_no_card_timed_has_a_floor_from_its_bytes() -> None:
    assert cells("add", RESULT)[-3:] == ["100.7", "", "emulator, PTX, races"], "3 x 4096 x 4096 x 2 bytes at 1000 GB/s"


def test_table_without_a_result_has_no_times() -> None:
    assert {tuple(cells(name, None)[-4:-1]) for name in ("rms_norm", "add", "sample")} == {("", "", "")}


def test_part_comes_from_the_first_result_that_has_it() -> None:
    later = {"parts": {"rows": {"rows": [ROW | {"us": 1.0}]}}}
    row = next(row for row in table.rows(later, RESULT) if "`rms_norm`" in row)
    assert "| 1.0 |" in row and "1 of 2 cases" in row

"""The table of CUDA kernels has each of them once, and a time only where a card measured one."""

from __future__ import annotations

from typing import Any

from bench.gpu import table
from bench.result import read
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
    assert {tuple(cells(name, None)[-3:-1]) for name in ("rms_norm", "add", "sample")} == {("", "")}


def test_every_kernel_has_a_shape_with_a_floor_and_waves() -> None:
    for row in table.rows(read("gpu"), read("gpu-adapters")):
        _, _, blocks, waves, _, _, shape, floor_us, *_ = (cell.strip() for cell in row.strip("| ").split("|"))
        assert shape and float(floor_us.replace(",", "")) > 0, row
        for held, wave in zip(blocks.split(", "), waves.split(", "), strict=True):
            assert wave == "-" if held == "-" else float(wave) > 0, row


def test_waves_are_blocks_of_the_launch_over_those_at_once() -> None:
    # 4096 rows of 4096 numbers are 8192 blocks, of which 108 x 8 run at once on an A100.
    assert cells("add", RESULT)[3].split(", ")[0] == "9.5"
    # 64 sequences x 8 KV heads, whole, on 132 x 3; of one wave where few long ones are cut.
    assert cells("attention_decode_d128", RESULT)[3].split(", ")[3] == "1.3"


def test_floor_of_attention_is_its_bytes_or_its_products() -> None:
    rated = {"parts": {"probes": {"peaks": {"copy_gb_s": 1000.0, "tflop_s": {"bfloat16": 100.0}}}}}
    kv_bytes, q_bytes = 2 * 64 * 1024 * 8 * 64 * 2, 2 * 64 * 32 * 64 * 2
    assert cells("attention_decode_d64", rated)[-3] == f"{(kv_bytes + q_bytes) / 1e6:,.1f}"
    operations = 4 * (8192 * 8193 / 2) * 32 * 96
    assert cells("attention_prefill_d96", rated)[-3] == f"{operations / 1e8:,.1f}"


def test_part_comes_from_the_first_result_that_has_it() -> None:
    later = {"parts": {"rows": {"rows": [ROW | {"us": 1.0}]}}}
    row = next(row for row in table.rows(later, RESULT) if "`rms_norm`" in row)
    assert "| 1.0 |" in row and "1 of 2 cases" in row

"""`orcinus bench kernels`: figures of right kernels only, each beside its floor and beside torch's own."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
import torch

from bench.kernels import main as bench
from bench.kernels.backends import Peaks
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import TILE_FLAGS, cpu_flags
from kernels.ops import Ops
from tests.support.compiler import needs_compiler

OPERATIONS = {
    "attention",
    "embed",
    "norm",
    "add_norm",
    "rope_and_write",
    "act_and_mul",
    "select",
    "add_low_rank",
    "linear",
    "linear_q4",
    "logits",
    "sample",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run(["--device", "cpu", "--quick", "--repeats", "2"])


def run(words: list[str], code: int = 0) -> dict[str, Any]:
    """The JSON of a bench in this process, which ends with that code."""
    printed, threads = io.StringIO(), torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(printed):
            assert bench.main([*words, "--threads", "1", "--json"]) == code
    finally:
        torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads(printed.getvalue())
    return result


@needs_compiler
def test_every_operation_is_checked_timed_and_compared_with_torch(found: dict[str, Any]) -> None:
    assert {row["op"] for row in found["rows"]} == OPERATIONS | {"copy_out", "copy_in"}
    for row in found["rows"]:
        assert row["us"] > 0 and row["floor_us"] > 0 and row["said"] == "", row
        assert row["error"] < 1e-4
        assert row["peers_us"] and all(us > 0 for us in row["peers_us"].values()), row
    assert found["peaks"]["read_gb_s"] > 0 and min(found["peaks"]["tflop_s"].values()) > 0


@needs_compiler
def test_result_says_which_instructions_multiply_and_why_not_amx(found: dict[str, Any]) -> None:
    has_tiles = cpu_flags() >= TILE_FLAGS
    said = found["instructions"]
    assert said == "bfloat16 by AMX" or "AMX is absent: " in said
    assert has_tiles or "this CPU has no amx_bf16 and amx_tile" in said
    linear = next(row for row in found["rows"] if row["op"] == "linear")
    assert {"F.linear", "oneDNN, reordered"} == linear["peers_us"].keys()


@needs_compiler
def test_the_table_for_people_has_every_row(found: dict[str, Any]) -> None:
    lines = bench.table(found).splitlines()
    assert len(lines) == 3 + len(found["rows"]) and lines[1] == found["instructions"]
    assert lines[3].startswith("attention") and "SDPA" in lines[3]


@needs_compiler
def test_a_kernel_that_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuOps, "norm", lambda self, x, norm: x * 1.01)
    row = run(["--device", "cpu", "--quick", "--repeats", "1", "--ops", "norm"], 1)["rows"][0]
    assert row["us"] is None and row["of_floor"] is None
    assert row["said"].startswith("wrong: the error is")


@needs_compiler
def test_failing_case_is_a_row_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(CpuOps, "act_and_mul", broken)
    rows = run(["--device", "cpu", "--quick", "--repeats", "1", "--ops", "act_and_mul", "select"], 1)["rows"]
    assert [row["us"] is None for row in rows] == [True, False]
    assert rows[0]["said"] == "RuntimeError: no such kernel"


def test_a_floor_is_the_longer_of_moving_and_multiplying() -> None:
    peaks = Peaks("", copy_gb_s=100, read_gb_s=50, bandwidth_gb_s=50, tflop_s={"bfloat16": 2.0})
    assert peaks.floor_us(5e6, 1e6, torch.bfloat16) == pytest.approx(100.0)
    assert peaks.floor_us(5e6, 4e8, torch.bfloat16) == pytest.approx(200.0)
    assert peaks.floor_us(5e6, 4e8, torch.float32) == pytest.approx(100.0)


def test_every_operation_of_the_interface_is_timed_or_named_here() -> None:
    abstract = {name for name in Ops.__abstractmethods__ if not name.startswith("_")}
    not_timed = {"new_cache", "prepare", "pack_linear", "pack_embedding", "batch_sizes", "blank", "add", "activate"}
    assert abstract == OPERATIONS - {"linear_q4"} | not_timed  # another matrix of `linear`

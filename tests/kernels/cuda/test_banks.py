"""No kernel asks more of banks and sectors than its goal allows, and one with a bug that costs some is over it.

`python -m tests.kernels.cuda.banks` counts all kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.cuda import loader
from tests.kernels.cuda import banks
from tests.kernels.cuda.banks import COUNTED, Counting, by_line, by_space, count, over_goal, recorded
from tests.kernels.cuda.test_races import ORDERS, Plant, alone, planted
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

SOME = (
    "add_bf16",
    "attention_decode_bf16_d128",
    "attention_merge_bf16",
    "attention_prefill_bf16_d128",
    "rms_norm_bf16",
    "rope_and_write_bf16",
)
PLANTS = {
    "decode, results begin in one bank": Plant(
        "attention/attention_decode.cu", "PADDED = D + 8;", "PADDED = D;", "attention_decode_bf16_d128"
    ),
    "prefill, chunks change no places": Plant(
        "tiles.cuh", "D % 32 == 0 ? 4", "D % 32 == 0 ? 1", "attention_prefill_bf16_d96"
    ),
    "add, lanes have columns": Plant(
        "activations.cu",
        "AddParams& p) {\n  const int vectors = p.width / VECTOR, i = blockIdx.y * blockDim.x + threadIdx.x;",
        "AddParams& p) {\n  const int vectors = p.width / VECTOR;\n"
        "  const int i = blockIdx.y * blockDim.x + threadIdx.x % 32 * (blockDim.x / 32) + threadIdx.x / 32;",
        "add_bf16",
    ),
}  # fmt: skip


def compiled(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Compile a source beside its copied headers."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    monkeypatch.setattr(loader, "SOURCES", folder)
    return Counting(source, include=(folder,))


@pytest.mark.parametrize("kernel", SOME)
def test_kernel_is_within_its_goals(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "src"
    program = compiled(alone(kernel, folder), folder, monkeypatch)
    counts = by_space(count(kernel, lambda _: program))
    assert counts.keys() == recorded()[kernel].keys() and not over_goal(kernel, counts)


@pytest.mark.parametrize("name", PLANTS)
def test_planted_conflict_is_over_the_goal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, folder = PLANTS[name], tmp_path / "src"
    assert (loader.SOURCES / plant.file).read_text().count(plant.right) == 1
    program = compiled(planted(plant, folder), folder, monkeypatch)
    counted = count(plant.kernel, lambda _: program)
    space = "global" if plant.kernel == "add_bf16" else "shared"
    assert [text.partition(":")[0] for text in over_goal(plant.kernel, by_space(counted))] == [
        f"{plant.kernel}, {space}"
    ]
    assert by_line(counted)[0][1] == space


def test_every_counted_kernel_has_goals() -> None:
    assert list(recorded()) == COUNTED
    assert all(
        row["goal"] >= 1 and row["taken"] <= row["goal"] * row["least"]
        for kernel in recorded().values()
        for row in kernel.values()
    )


def test_kernels_of_sources_that_changed_are_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    counted = json.loads(banks.RECORDED.read_text())["sources"]
    assert counted.keys() == banks.digests().keys()
    monkeypatch.setattr(banks, "digests", lambda: counted | {"norms.cu": "another"})
    assert set(banks.changed()) == {f"{norm}_norm_{dtype}" for norm in ("rms", "layer") for dtype in ("bf16", "f16")}


def test_ptx_of_a_source_that_changed_is_run_in_all_its_types_and_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    launched = set()
    real = Counting.launch

    def launch(self: Counting, name: str, *given: Any, **named: Any) -> None:
        launched.add((name, named["order"]))
        real(self, name, *given, **named)

    monkeypatch.setattr(banks, "changed", lambda: ["select_rows", "embed_f16"])
    monkeypatch.setattr(Counting, "launch", launch)
    assert banks.main(["--changed"]) == 0
    assert launched == {(name, order) for name in ("select_rows", "embed_f16") for order in ORDERS}

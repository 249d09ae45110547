"""CUDA sources compile for GPUs on a machine without one; what comes out is cached, measured and compared."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

from kernels.cuda import calls, check, cubin, loader
from kernels.cuda.loader import ARCHITECTURES, CudaError, Program, compiled, sources

PTX = Path(__file__).parents[3] / "emulator" / "ptx.cu"
STRUCTS = {
    **{f"{name}_norm": calls.NORM for name in ("rms", "layer")},
    **{name: calls.ACTIVATION for name in ("gated", "activate")},
    "add": calls.ADD,
    "embed": calls.EMBED,
    "select_rows": calls.SELECT,
    "copy_blocks": calls.COPY,
    **{f"rope_and_write{kv}": calls.ROPE for kv in ("", "_fp8")},
    **{f"low_rank_{name}": calls.LOW_RANK for name in ("down", "up")},
    **{
        f"linear_{packing.name}_t{tiles}c{columns}": calls.LINEAR_PACKED
        for packing in (calls.Q4, calls.FP8)
        for tiles, columns in packing.shapes
    },
    **{f"unpack_{packing.name}": calls.UNPACK for packing in (calls.Q4, calls.FP8)},
    "route": calls.ROUTE,
    **{f"experts_r{rows}": calls.EXPERTS for rows in calls.EXPERTS_TILES},
    "combine": calls.COMBINE,
    **{
        f"attention_{kind}": calls.ATTENTION
        for kind in ("decode", "decode_fp8", "prefill", "prefill_fp8", "prefill_sm90")
    },
    "attention_merge": calls.MERGE,
    "sample": calls.SAMPLER,
}
"""By the kernel's name without type and head_dim."""
SPILLING = """
#include "ptx.cuh"
struct Params { float* x; };
__device__ void many(const Params& p) {
  float held[48];
  for (int i = 0; i < 48; i++) held[i] = p.x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 48; i++) for (int j = 0; j < 48; j++) p.x[i] = held[i] * held[j] + p.x[i * 48 + j];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(const __grid_constant__ Params p) { many(p); }
"""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cache of this test's own; the list grows with every compilation."""
    done: list[str] = []
    real = loader.compile_source

    def counted(source: Path, headers: list[Path], options: tuple[str, ...]) -> loader.Cubin:
        done.append(options[-1])
        return real(source, headers, options)

    monkeypatch.setattr(loader, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(loader, "compile_source", counted)
    return done


def small(folder: Path, body: str = "p.x[0] = 1;") -> Path:
    source = folder / "small.cu"
    source.write_text(
        '#include "ptx.cuh"\nstruct Params { int* x; };\n__device__ void f(const Params& p) { '
        + body
        + " }\nKERNEL(k, Params, 32, f)\n"
    )
    return source


def test_every_kernel_compiles_without_warning_and_within_the_recorded_registers() -> None:
    """Those that are as they were when they were recorded are not compiled again."""
    recorded = json.loads(check.RECORDED.read_text())
    found, complaints = check.current(recorded, sources())
    if recorded["nvrtc"] != loader.nvrtc_version():
        pytest.skip(f"registers are recorded for NVRTC {recorded['nvrtc']}")
    assert complaints == []
    assert check.compare(found, recorded["kernels"]) == []


def test_check_compiles_what_changed_since_it_was_recorded(
    empty: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "RECORDED", tmp_path / "registers.json")
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    for name in ("used", "other"):
        (tmp_path / f"{name}.cuh").write_text(f"constexpr int {name} = 1;\n")
    ptx = (Path(check.__file__).parent / "src" / "ptx.cuh").read_text()
    (tmp_path / "ptx.cuh").write_text(ptx.replace("#pragma once", '#pragma once\n#include "used.cuh"', 1))
    source = small(tmp_path)
    check.write([source])
    recorded = json.loads(check.RECORDED.read_text())
    monkeypatch.setattr(loader, "CACHE", tmp_path / "as on another machine")

    def compilations() -> int:
        before = len(empty)
        found, complaints = check.current(recorded, [source])
        assert found == recorded["kernels"] and complaints == []
        return len(empty) - before

    assert compilations() == 0
    (tmp_path / "other.cuh").write_text("constexpr int other = 2;\n")
    assert compilations() == 0
    (tmp_path / "used.cuh").write_text("constexpr int used = 2;\n")
    assert compilations() == len(ARCHITECTURES)
    small(tmp_path, "p.x[0] = 2;")
    assert compilations() == len(ARCHITECTURES)


def test_check_records_no_source_of_which_the_compiler_warns(
    empty: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "RECORDED", tmp_path / "registers.json")
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLING)
    check.write([source])
    assert json.loads(check.RECORDED.read_text())["sources"] == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_ptx_wrapper_is_taken_by_the_assembler(arch: str) -> None:
    made = compiled(PTX, arch)
    assert cubin.warnings(made.log) == []
    assert made.usage().keys() == made.params_bytes().keys() and len(made.usage()) == 10


def test_params_are_as_large_for_gpu_as_numpy_packs_them() -> None:
    found: dict[str, set[int]] = {}
    for source in sources():
        for name, size in compiled(source, "sm_90").params_bytes().items():
            found.setdefault(re.sub(r"_b?f16(_d\d+)?$", "", name), set()).add(size)
    assert found == {name: {struct.itemsize} for name, struct in STRUCTS.items()}


def test_a_cubin_has_all_its_bytes(empty: list[str], tmp_path: Path) -> None:
    image = compiled(small(tmp_path), "sm_90").image
    programs_at, (size, count) = struct.unpack_from("<Q", image, 32)[0], struct.unpack_from("<HH", image, 54)
    assert programs_at + size * count <= len(image), "the ELF file's last table"


def test_a_source_is_compiled_once_for_each_architecture(empty: list[str], tmp_path: Path) -> None:
    source = small(tmp_path)
    first = [compiled(source, arch) for arch in ("sm_80", "sm_90")]
    again = [compiled(source, arch) for arch in ("sm_80", "sm_90")]
    assert empty == ["-arch=sm_80", "-arch=sm_90"]
    assert first == again and first[0] != first[1]


def test_a_change_of_source_header_or_compiler_compiles_again(
    empty: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(small(tmp_path), "sm_90")
    compiled(small(tmp_path, "p.x[0] = 2;"), "sm_90")
    assert len(empty) == 2
    headers = tmp_path / "src"
    headers.mkdir()
    for path in loader.SOURCES.rglob("*.cuh"):
        (headers / path.name).write_text(path.read_text() + "\n")
    monkeypatch.setattr(loader, "SOURCES", headers)
    compiled(small(tmp_path), "sm_90")
    assert len(empty) == 3
    monkeypatch.setattr(loader, "nvrtc_version", lambda: "0.0.0")
    compiled(small(tmp_path), "sm_90")
    assert len(empty) == 4


def test_the_cache_of_cubins_is_bounded(empty: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "KEPT", 4)
    for number in range(4):
        compiled(small(tmp_path, f"p.x[0] = {number};"), "sm_90")
    assert len(list(loader.CACHE.iterdir())) == 4


def test_a_cache_that_cannot_be_written_costs_only_time(
    empty: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(loader, "CACHE", tmp_path / "file" / "cache")
    assert compiled(small(tmp_path), "sm_90").image[:4] == b"\x7fELF"


def test_an_error_of_the_compiler_is_shown_with_its_line(empty: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        CudaError, match=r"small\.cu does not compile(.|\n)*small\.cu\(3\): error: identifier \"wrong\""
    ):
        compiled(small(tmp_path, "p.x[0] = wrong;"), "sm_90")


def test_registers_that_spill_are_seen(empty: list[str], tmp_path: Path) -> None:
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLING)
    made = compiled(source, "sm_90")
    row = made.usage()["spilling"]
    assert row.registers <= 32 and row.spill_bytes > 0
    assert any("spill" in line.lower() for line in cubin.warnings(made.log))
    table = {"sm_90": cubin.as_json(made.usage())}
    local = row.stack_bytes + row.spill_bytes
    assert check.compare(table, table) == [f"spilling, sm_90: has {local} bytes in local memory, or spills them"]


SASS = """
	.section	.text.spilling,"ax",@progbits
        .global         spilling
.text.spilling:
        /*0010*/                   LDC R1, c[0x0][0x28] ;
        /*01c0*/                   STL.128 [R1+0x10], R12 ;
        /*01d0*/              @!P0 LDL R4, [R1] ;
        /*01e0*/                   LDSM.16.M88.4 R4, [R1] ;
	.section	.text.fine,"ax",@progbits
        /*0010*/                   STG.E [R2.64], R4 ;
"""


def test_accesses_to_local_memory_are_counted_in_sass() -> None:
    assert cubin.local_accesses(SASS) == {"spilling": 2, "fine": 0}


def test_local_memory_is_seen_in_the_cubin_itself(empty: list[str], tmp_path: Path) -> None:
    if (tool := cubin.disassembler()) is None:
        pytest.skip("nvdisasm is not installed")
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLING)
    assert cubin.local_accesses(cubin.sass_of(compiled(source, "sm_90").image, tool))["spilling"] > 0
    assert any("loads and stores of local memory in its SASS" in line for line in check.measure([source])[1])


@pytest.mark.skipif(cubin.disassembler() is None, reason="nvdisasm is not installed")
def test_disassembler_that_cannot_read_a_cubin_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"nvdisasm: .*; install the wheel nvidia-cuda-nvdisasm"):
        cubin.sass_of(b"no cubin", cubin.disassembler() or "")


def test_recorded_kernels_had_their_sass_read() -> None:
    assert json.loads(check.RECORDED.read_text())["sass_read"], "record again where nvdisasm is installed"


def test_what_is_worse_than_recorded_is_named() -> None:
    def table(**registers: int) -> check.Table:
        return {"sm_90": {name: {"registers": n, "shared_bytes": 0, "local_bytes": 0} for name, n in registers.items()}}

    assert check.compare(table(a=32, b=40), table(a=32, b=48)) == []
    assert check.compare(table(a=33), table(a=32)) == ["a, sm_90: registers 33, recorded 32"]
    assert check.compare(table(a=1, b=1), table(a=1)) == ["b, sm_90: not recorded"]
    assert check.compare(table(), table(a=1)) == ["a, sm_90: recorded, but there is no such kernel"]
    assert check.compare({}, table(a=1)) == ["a, sm_90: recorded, but there is no such kernel"]


def test_without_gpu_program_is_compiled_and_only_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "has_gpu", lambda: False)
    program = Program(sources()[0], "sm_80")
    call = calls.add(calls.BF16, 1, 8, 0, 0)
    with pytest.raises(CudaError, match="no GPU to launch add_bf16 on"):
        program.launch(*call, 0)
    with pytest.raises(KeyError, match=r"activations\.cu has no kernel 'nothing'"):
        program.launch("nothing", *call[1:], 0)
    with pytest.raises(ValueError, match="add_bf16 takes 24 bytes of parameters, not 8"):
        program.launch(*call[:-1], np.zeros(1, [("x", "u8")]), 0)


def test_launch_passes_struct_and_stream_and_reserves_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that only notes what it is asked: the GPU is the one part that cannot be had here."""
    import cupy.cuda

    launched: list[tuple[Any, ...]] = []
    asked: list[tuple[int, int, int]] = []

    class Module:
        def load(self, image: bytes) -> None:
            assert image[:4] == b"\x7fELF"

        def get_function(self, name: str) -> Any:
            def launch(grid: Any, block: Any, args: Any, shared: int, stream: Any) -> None:
                launched.append((name, grid, block, args, shared, stream.ptr))

            return type("Function", (), {"ptr": 5, "__call__": staticmethod(launch)})()

    driver = SimpleNamespace(
        funcSetAttribute=lambda *values: asked.append(values), funcGetAttribute=lambda which, function: 1000 * which
    )
    monkeypatch.setattr(loader, "has_gpu", lambda: True)
    monkeypatch.setattr(cupy.cuda, "function", SimpleNamespace(Module=Module))
    monkeypatch.setattr(cupy.cuda, "driver", driver)
    monkeypatch.setattr(cupy.cuda, "device", SimpleNamespace(get_device_id=lambda: 3))
    runtime = SimpleNamespace(deviceGetAttribute=lambda which, device: {(97, 3): 232448}[which, device])
    monkeypatch.setattr(cupy.cuda, "runtime", runtime)
    program = Program(sources()[0], "sm_90")
    call = calls.add(calls.BF16, 3, 8, 16, 32)
    assert "add_bf16" in program.kernels and asked == [(5, 8, 232448 - 1000)] * len(program.kernels)
    program.launch(call.name, call.grid, call.block, 96 << 10, call.params, 7)
    assert launched == [("add_bf16", (3, 1, 1), (32, 1, 1), (call.params,), 96 << 10, 7)]
    assert len(asked) == len(program.kernels)


def test_the_loader_needs_nothing_else_of_this_project() -> None:
    ours = "('kernels', 'services', 'shared', 'protos', 'torch')"
    listed = f"*sorted(name for name in sys.modules if name.split('.')[0] in {ours})"
    program = f"import sys, kernels.cuda.loader, kernels.cuda.calls; print({listed})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "kernels",
        "kernels.cuda",
        "kernels.cuda.calls",
        "kernels.cuda.cubin",
        "kernels.cuda.loader",
    }

"""Cubins that an image carries: which machine takes which, and that none of other sources is ever taken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

from kernels.cuda import loader, prebuilt
from kernels.cuda.loader import ARCHITECTURES, CudaError, Program

SMALL = """
#include "ptx.cuh"
struct Params { int* x; };
__device__ void f(const Params& p) { p.x[0] = 1; }
KERNEL(k, Params, 32, f)
"""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources with the real headers, and empty places for what is made of them."""
    folder = tmp_path / "src"
    folder.mkdir()
    for header in loader.SOURCES.rglob("*.cuh"):
        shutil.copy(header, folder)
    for name in ("one", "two"):
        (folder / f"{name}.cu").write_text(SMALL)
    monkeypatch.setattr(loader, "SOURCES", folder)
    monkeypatch.setattr(loader, "PREBUILT", tmp_path / "lib")
    monkeypatch.setattr(loader, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(loader, "has_gpu", lambda: False)
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every compilation."""
    done: list[str] = []
    real = loader.compile_source

    def counted(source: Path, headers: list[Path], options: tuple[str, ...]) -> loader.Cubin:
        done.append(f"{source.stem} {options[-1]}")
        return real(source, headers, options)

    monkeypatch.setattr(loader, "compile_source", counted)
    return done


def test_an_image_carries_every_source_for_every_architecture(image: Path, compiled: list[str]) -> None:
    made = prebuilt.build_all()
    expected = sorted(f"{source}-{arch}" for source in ("one", "two") for arch in ARCHITECTURES)
    assert [path.name.rpartition("-")[0] for path in made] == expected
    assert all(path.read_bytes()[:4] == b"\x7fELF" for path in made)
    assert len(compiled) == len(expected)
    assert prebuilt.build_all() == made
    assert len(compiled) == len(expected)


def test_a_source_for_one_architecture_is_compiled_for_it_alone(image: Path, compiled: list[str]) -> None:
    (image / "three_sm90.cu").write_text(SMALL)
    made = [path.name.rpartition("-")[0] for path in prebuilt.build_all()]
    assert [name for name in made if name.startswith("three")] == ["three_sm90-sm_90"]
    assert [line for line in compiled if line.startswith("three")] == ["three_sm90 -arch=sm_90a"]
    assert {arch: len(loader.sources(arch)) for arch in ARCHITECTURES} == dict.fromkeys(ARCHITECTURES, 2) | {"sm_90": 3}
    assert loader.prebuilt_architecture("sm_89") == "sm_89" and loader.prebuilt_architecture("sm_90") == "sm_90"


TAKEN = {
    "sm_80": "sm_80", "sm_86": "sm_86", "sm_89": "sm_89", "sm_90": "sm_90", "sm_75": None, "sm_100": "sm_100",
    "sm_110": None, "sm_88": "sm_86", "sm_121": "sm_120",
}  # fmt: skip
"""The cubin that each GPU takes."""


def test_gpu_takes_the_newest_cubin_of_its_own_major_version(image: Path, compiled: list[str]) -> None:
    made = {path.name.rpartition("-")[0]: path.read_bytes() for path in prebuilt.build_all()}
    compiled.clear()
    for present, taken in TAKEN.items():
        assert loader.prebuilt_architecture(present) == taken
        found = loader.prebuilt(image / "one.cu", present)
        assert (found.image if found else None) == made.get(f"one-{taken}"), present
    assert compiled == []


def test_program_runs_what_the_image_carries_and_compiles_the_rest(image: Path, compiled: list[str]) -> None:
    prebuilt.build_all()
    compiled.clear()
    assert Program(image / "one.cu", "sm_89").params_bytes("k") == 8
    assert compiled == []
    Program(image / "one.cu", "sm_110")
    assert compiled == ["one -arch=sm_110"]


@pytest.mark.parametrize("changed", ["one.cu", "ptx.cuh", "options"])
def test_a_cubin_of_other_sources_or_options_is_not_taken(
    image: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    old = prebuilt.build_all()
    if changed == "options":
        monkeypatch.setattr(loader, "OPTIONS", (*loader.OPTIONS, "-use_fast_math"))
    else:
        (image / changed).write_text((image / changed).read_text() + "\n")
    assert loader.prebuilt(image / "one.cu", "sm_90") is None
    assert loader.prebuilt_architecture("sm_90") is None
    new = prebuilt.build_all()
    assert loader.prebuilt_architecture("sm_90") == "sm_90"
    assert not any(path.exists() for path in set(old) - set(new))


def test_another_compiler_takes_them_all_the_same(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt.build_all()
    monkeypatch.setattr(loader, "nvrtc_version", lambda: "99.0")
    assert loader.prebuilt_architecture("sm_90") == "sm_90"


WITHOUT = """
import sys
from pathlib import Path
for name in {hidden!r}:
    sys.modules[name] = None
import cuda.pathfinder
from kernels.cuda import loader
loader.PREBUILT, loader.SOURCES, loader.CACHE = Path({lib!r}), Path({src!r}), Path({cache!r})
{setting}
loader._has_gpu = lambda: False
try:
    print(loader.Program(loader.sources()[0], {arch!r}).params_bytes("k"))
except loader.CudaError as error:
    print("CudaError:", error)
"""
NO_NVRTC = """
def nothing(name):
    raise cuda.pathfinder.DynamicLibNotFoundError(f"no {name} here")
cuda.pathfinder.load_nvidia_dynamic_lib = nothing
loader.metadata.version = lambda name: (_ for _ in ()).throw(loader.metadata.PackageNotFoundError(name))
"""


def without(image: Path, arch: str, hidden: tuple[str, ...] = (), setting: str = NO_NVRTC) -> str:
    """What a fresh process says that lacks something; without a setting, modules alone."""
    places: dict[str, Any] = {
        "lib": str(loader.PREBUILT),
        "src": str(image),
        "cache": str(image.parent / "another cache"),
    }
    program = WITHOUT.format(hidden=hidden, arch=arch, setting=setting, **places)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_image_without_compiler_runs_and_says_what_other_architectures_need(image: Path) -> None:
    prebuilt.build_all()
    assert without(image, "sm_86") == "8"
    said = without(image, "sm_110")
    assert said.startswith("CudaError: ") and "sm_110" in said
    assert "nvidia-cuda-nvrtc" in said and ", ".join(ARCHITECTURES) in said


def test_without_cupy_what_installs_it_is_named(image: Path) -> None:
    said = without(image, "sm_90", ("cupy", "cupy_backends", "cupy_backends.cuda.libs"), "")
    assert said.startswith("CudaError: ") and "CuPy is not installed (" in said


def test_a_source_that_does_not_compile_ends_the_image(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (image / "two.cu").write_text("wrong")
    with pytest.raises(CudaError, match=r"two\.cu does not compile"):
        prebuilt.build_all()
    assert prebuilt.main([]) == 1
    assert "two.cu does not compile" in capsys.readouterr().err

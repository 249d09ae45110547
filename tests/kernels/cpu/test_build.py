"""Which library of the CPU kernels a machine gets, and what happens where none can be had."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import build, library
from kernels.cpu.build import VARIANTS, BuildError, find_library, prebuilt_path
from services.worker import backend
from services.worker.models.config import load_config
from shared.errors import ConfigurationError
from shared.settings import DEMO_MODEL, WorkerSettings
from tests.support.compiler import needs_compiler

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = " avx512f avx512bw avx512cd avx512dq avx512vl"
AMX = " avx512_vnni avx512_bf16 amx_tile amx_bf16"


@pytest.fixture(autouse=True)
def _permission() -> Iterator[None]:
    """Each test asks the system anew, perhaps another one."""
    build.tiles_refusal.cache_clear()
    yield
    build.tiles_refusal.cache_clear()


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was built before, and whatever is built goes to a place of this test's."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "lib")
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build.Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)


def carry(*names: str) -> dict[str, Path]:
    """Empty files where an image has its libraries."""
    made = {}
    for variant in VARIANTS:
        if variant.name in names:
            made[variant.name] = prebuilt_path(variant)
            made[variant.name].parent.mkdir(exist_ok=True)
            made[variant.name].touch()
    return made


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (V3, "avx2"),
        (V3 + V4, "avx512"),
        (V3 + V4 + " avx512_vnni avx512_bf16", "avx512bf16"),
        (V3 + V4 + " avx512_bf16", "avx512"),  # as no CPU is
        (V3 + V4 + AMX, "amx"),
        (V3 + V4 + " amx_tile amx_bf16", "avx512"),
        (V3 + " avx512f avx512_bf16", "avx2"),  # no AVX-512 of the kind that servers have
    ],
)
def test_image_uses_the_best_library_that_the_cpu_can_run(
    empty: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: str
) -> None:
    paths = carry("avx2", "avx512", "avx512bf16", "amx")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(build, "request_tiles", lambda: 0)
    without_compiler(monkeypatch)
    assert find_library() == (paths[expected], expected)


def test_refused_tile_registers_leave_the_avx512_kernels_and_a_warning(
    empty: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset((V3 + V4 + AMX).split()))
    monkeypatch.setattr(build, "request_tiles", lambda: errno.EPERM)
    with caplog.at_level(logging.WARNING):
        assert find_library()[1] == "native"
    assert "AVX-512 kernels serve instead of AMX" in caplog.text and "Operation not permitted" in caplog.text
    assert "-mno-amx-tile" in build.native_flags()
    paths = carry("avx512bf16", "amx")
    assert find_library() == (paths["avx512bf16"], "avx512bf16")


def test_system_is_asked_for_tile_registers_only_where_cpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(build, "request_tiles", lambda: asked.append(1) or 0)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset((V3 + V4).split()))
    assert build.usable_flags() == frozenset((V3 + V4).split()) and not asked
    build.tiles_refusal.cache_clear()
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset((V3 + V4 + AMX).split()))
    assert build.usable_flags() == frozenset((V3 + V4 + AMX).split()) and asked == [1]


@pytest.mark.skipif(build.cpu_flags() >= build.TILE_FLAGS, reason="this CPU has tile registers")
def test_request_for_tile_registers_that_are_not_there_is_an_error() -> None:
    assert build.request_tiles() in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)


def test_a_library_of_other_sources_is_not_used(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = carry("avx2").values()
    path.rename(path.with_name("avx2-0123456789abcdef0123.so"))
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(V3.split()))
    without_compiler(monkeypatch)
    with pytest.raises(BuildError, match="g\\+\\+"):
        find_library()


def test_a_changed_source_gets_another_name(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prebuilt_path(VARIANTS[0])
    sources = empty / "src"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    assert prebuilt_path(VARIANTS[0]) == before
    changed = sources / "formats" / "int8.h"
    changed.write_text(changed.read_text() + "\n")
    assert prebuilt_path(VARIANTS[0]) != before


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was compiled, by a compiler that makes empty files."""
    made: list[Path] = []

    def pretend(target: Path, compiler: str, flags: object) -> None:
        made.append(target)
        target.touch()

    monkeypatch.setattr(build, "compile_to", pretend)
    monkeypatch.setattr(build, "run_command", lambda command: "12.2.0")
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    return made


def libraries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.so"))


def test_a_checkout_compiles_once(empty: Path, compiled: list[Path]) -> None:
    first, second = find_library(), find_library()
    assert first == second
    assert compiled == [first[0]]
    assert first[0].parent == empty / "cache"


@pytest.mark.parametrize("home_too", [False, True])
def test_checkout_that_cannot_be_written_compiles_once(empty: Path, compiled: list[Path], home_too: bool) -> None:
    (empty / "cache").touch()  # a file stands in the way, which stops root as well
    if home_too:
        (empty / "home").touch()
    first, second = find_library(), find_library()
    assert first == second
    assert compiled == [first[0]]
    place = f"orcinus-kernels-{os.getuid()}" if home_too else "home/.cache/orcinus/kernels"
    assert first[0].parent == empty / place


def test_place_into_which_others_may_write_is_not_loaded_from(empty: Path, compiled: list[Path]) -> None:
    (empty / "cache").touch()
    (empty / "home").touch()
    find_library()
    compiled[0].parent.chmod(0o777)
    with pytest.raises(BuildError, match="no place to keep compiled kernels"):
        find_library()


def test_the_cache_is_bounded_and_a_library_in_use_stays(empty: Path, compiled: list[Path]) -> None:
    build.compile_cached("g++", ["-O1"], "in use")
    for machine in range(2 * build.KEPT):
        os.utime(build.compile_cached("g++", ["-O1"], str(machine)), (machine, machine))
        os.utime(compiled[0], (0, 0))
        assert build.compile_cached("g++", ["-O1"], "in use") == compiled[0]
    assert len(libraries(empty / "cache")) == build.KEPT
    assert len(compiled) == 1 + 2 * build.KEPT


def test_processes_that_start_together_compile_once(
    empty: Path, compiled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    name = find_library()[0].name  # as it will be
    compiled.pop().unlink()
    found: list[Path] = []
    with caplog.at_level(logging.INFO), (empty / "cache" / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(find_library()[0]), daemon=True)
        thread.start()
        while "waiting for it" not in caplog.text and thread.is_alive():
            thread.join(0.01)
        assert not found and not compiled
        made = empty / "cache" / name
        made.touch()  # by the other process
        fcntl.flock(other, fcntl.LOCK_UN)
        thread.join(60)
    assert found == [made]
    assert not compiled


def test_missing_sources_and_a_full_disk_are_build_errors(
    empty: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(target: Path, compiler: str, flags: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "compile_to", full)
    with pytest.raises(BuildError, match="No space left"):
        find_library()
    monkeypatch.setattr(build, "SOURCES", empty / "nothing")
    with pytest.raises(BuildError, match="nothing"):
        find_library()


@needs_compiler
def test_an_error_of_the_compiler_is_shown(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = empty / "src"
    sources.mkdir()
    (sources / "wrong.cpp").write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(BuildError, match=r"wrong\.cpp.*expected"):
        find_library()


@needs_compiler
def test_a_library_of_other_structs_is_refused(empty: Path) -> None:
    source, target = empty / "other.cpp", empty / "other.so"
    source.write_text('extern "C" long orcinus_size(int) { return 7; }')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", target], check=True)
    with pytest.raises(BuildError, match="Command has 7 bytes"):
        library.Library(target, "other")


def unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> library.Library:
        raise BuildError("no g++ is installed")

    monkeypatch.setattr(backend, "load", fail)


def test_without_library_reference_kernels_serve_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unusable(monkeypatch)
    with caplog.at_level(logging.WARNING):
        ops, _ = backend.choose(WorkerSettings(), load_config(DEMO_MODEL))
    assert ops.name == "reference"
    assert "no g++ is installed" in caplog.text


@pytest.mark.parametrize("wanted", [{"kernels": "cpu"}, {"deterministic": True}, {"quantize": "int8"}])
def test_what_was_asked_for_by_name_is_refused_not_replaced(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str | bool]
) -> None:
    unusable(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"no g\+\+ is installed|--quantize int8 needs the cpu kernels"):
        backend.choose(WorkerSettings.model_validate(wanted), load_config(DEMO_MODEL))


def test_blocks_that_cpu_kernels_cannot_use_are_left_to_reference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ops, _ = backend.choose(WorkerSettings(block_size=24), load_config(DEMO_MODEL))
    assert ops.name == "reference"
    assert "--block-size 24" in caplog.text

"""The emulator finds planted bugs, and runs what is right in every order of threads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu import build
from kernels.cpu.build import BuildError
from kernels.emulator.program import FORWARD, REVERSE, SANITIZERS, EmulatorError, Program, compiled
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

SOURCE = Path(__file__).with_name("bugs.cu")
PARAMS = np.dtype([("in", "u8"), ("out", "u8"), ("n", "i4")], align=True)
ORDERS = (FORWARD, REVERSE, 2, 3)
MANY = 64


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(SOURCE)


def line_of(mark: str) -> int:
    """The line of bugs.cu that is marked so."""
    return next(number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if line.endswith(f"<- {mark}"))


def run(
    program: Program,
    name: str,
    given: Any = (),
    made: int = MANY,
    n: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (MANY, 1, 1),
    shared: int = MANY * 4,
    order: int = FORWARD,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    numbers = np.asarray(given, np.float32)
    out = np.zeros(made, np.float32)
    params = np.array([(numbers.ctypes.data, out.ctypes.data, n)], PARAMS)
    program.launch(name, grid, block, shared, params, order=order)
    return out


def mirrored(numbers: Any, width: int) -> Any:
    return numbers.reshape(-1, width)[:, ::-1].ravel()


NUMBERS = np.arange(1024, dtype=np.float32)


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_right_is_right_in_every_order(program: Program, order: int) -> None:
    found = run(program, "mirror_right", NUMBERS, 256, grid=(4, 1, 1), order=order)
    assert np.array_equal(found, mirrored(NUMBERS[:256], MANY))
    found = run(program, "ring_right", NUMBERS, 512, shared=MANY * 32, order=order)
    assert np.array_equal(found, NUMBERS[:512])
    found = run(program, "refill_right", NUMBERS, 768, n=3, shared=MANY * 16, order=order)
    assert np.array_equal(found, np.roll(NUMBERS[:768].reshape(3, MANY, 4), -1, axis=1).ravel())


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_wait_shows_in_every_order_that_can_show_it(program: Program, order: int) -> None:
    assert np.isnan(run(program, "mirror_unsynchronised", NUMBERS, order=order)).any()
    if order != REVERSE:  # one group too few is waited for
        assert np.isnan(run(program, "ring_short", NUMBERS, 512, shared=MANY * 32, order=order)).any()
    if order != FORWARD:  # what others still read is filled again
        found = run(program, "refill_unsynchronised", NUMBERS, 768, n=3, shared=MANY * 16, order=order)
        assert not np.array_equal(found, np.roll(NUMBERS[:768].reshape(3, MANY, 4), -1, axis=1).ravel())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("divergent_barrier_", "32 wait in __syncthreads at <divergent_barrier>, 32 have ended"),
        ("lane_missing_", "31 wait in __syncwarp at <lane_missing>, 33 have ended"),
        ("not_in_mask_", r"lane [123]\d calls __shfl_sync at <not_in_mask>"),
        ("misaligned_copy_", "<misaligned_copy> .*multiples of 16"),
        ("copy_to_global_", "<copy_to_global> .*outside of shared memory"),
        ("two_barriers_", "threads wait at two barriers(?=.*<first barrier>)(?=.*<second barrier>)"),
        ("divergent_warp_", r"lanes of warp \d diverge(?=.*<first shuffle>)(?=.*<second shuffle>)"),
    ],
)
def test_a_planted_bug_is_named_with_its_lines(program: Program, name: str, text: str, order: int) -> None:
    """<mark> is the line of bugs.cu that is marked so."""
    where = re.sub("<(.+?)>", lambda mark: rf"bugs\.cu:{line_of(mark[1])}", text)
    with pytest.raises(EmulatorError, match="(?s)" + where):
        run(program, name, NUMBERS, order=order)


def test_warps_need_all_32_lanes_of_the_mask_to_exist(program: Program) -> None:
    with pytest.raises(EmulatorError, match="deadlock: of 20 threads 19 wait"):
        run(program, "lane_missing_", block=(20, 1, 1))


@pytest.mark.parametrize("order", ORDERS)
def test_shared_memory_that_was_never_written_is_nan(program: Program, order: int) -> None:
    found = run(program, "uninitialised_dynamic_", order=order)
    assert np.isnan(found[0]) and (found[1:] == 1).all()


def test_declared_shared_memory_is_nan_again_in_the_next_block(program: Program) -> None:
    found = run(program, "uninitialised_declared_", made=2 * MANY, grid=(2, 1, 1))
    assert (found[:MANY] == 2).all() and np.isnan(found[MANY:]).all()


@pytest.mark.parametrize("order", ORDERS)
def test_every_thread_of_every_block_runs_once(program: Program, order: int) -> None:
    found = run(program, "places_", made=24 * 30, grid=(2, 3, 4), block=(5, 3, 2), order=order)
    assert np.array_equal(found, [block * 1000 + thread for block in range(24) for thread in range(30)])


def test_orders_are_what_they_say(program: Program) -> None:
    def order_of(order: int) -> list[float]:
        run(program, "arrivals_", n=1, block=(1, 1, 1))
        return list(run(program, "arrivals_", made=40, grid=(5, 1, 1), block=(8, 1, 1), order=order) - 1)

    assert order_of(FORWARD) == list(range(40))
    assert order_of(REVERSE) == list(range(39, -1, -1))
    assert order_of(2) == order_of(2) != order_of(3)
    assert sorted(order_of(2)) == list(range(40))


def test_after_an_error_the_next_launch_is_sound(program: Program) -> None:
    for _ in range(3):
        with pytest.raises(EmulatorError):
            run(program, "divergent_barrier_")
        assert np.array_equal(run(program, "mirror_right", NUMBERS), mirrored(NUMBERS[:MANY], MANY))


def test_what_no_gpu_would_launch_is_refused(program: Program) -> None:
    for wrong, text in (
        ({"block": (1025, 1, 1)}, "made for 1 to 1024"),
        ({"block": (64, 4, 5)}, "made for 1 to 1024"),
        ({"grid": (1, 65536, 1)}, "no GPU takes the grid"),
        ({"grid": (0, 1, 1)}, "no GPU takes the grid"),
        ({"shared": (99 << 10) + 16}, "dynamic shared memory"),  # the most that 8.6, 8.9 and 12.0 have
    ):
        with pytest.raises(EmulatorError, match=text):
            run(program, "mirror_right", NUMBERS, **wrong)  # type: ignore[arg-type]
    with pytest.raises(EmulatorError, match="made for 1 to 64"):
        run(program, "mirror_unsynchronised", NUMBERS, block=(128, 1, 1))
    with pytest.raises(KeyError, match=r"bugs\.cu has no kernel 'nothing'"):
        run(program, "nothing")
    with pytest.raises(ValueError, match="24 bytes of parameters, not 8"):
        program.launch("mirror_right", (1, 1, 1), (1, 1, 1), 4, np.zeros(1, [("in", "u8")]))


def test_the_portable_fibers_run_the_same_kernels() -> None:
    program = Program(SOURCE, flags=("-DEMULATOR_UCONTEXT",))
    for order in ORDERS:
        assert np.array_equal(run(program, "mirror_right", NUMBERS, order=order), mirrored(NUMBERS[:MANY], MANY))
        with pytest.raises(EmulatorError, match="two barriers"):
            run(program, "two_barriers_", order=order)


def test_a_warning_of_the_compiler_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "careless.cu"
    source.write_text('#include "cuda_emulator.h"\nint f() { int never_used; return 0; }\n')
    with pytest.raises(BuildError, match="never_used"):
        Program(source)


def test_source_is_compiled_once_until_it_or_a_header_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def pretend(command: list[str]) -> str:
        ran.append(command)
        if "-o" in command:
            Path(command[-1]).touch()
        return "version"

    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "run_command", pretend)
    source, header = tmp_path / "small.cu", tmp_path / "small.cuh"

    def made() -> Path:
        compiled.cache_clear()  # as in another process
        return compiled(source)

    source.touch()
    first = made()
    assert made() == first
    header.touch()
    second = made()
    source.write_text("int changed;")
    assert len({first, second, made()}) == 3
    assert sum("-o" in command for command in ran) == 3
    compiled.cache_clear()


SANITIZED_RUN = """
import ctypes, sys
path, name, n, shared = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lib = ctypes.CDLL(path)
given, made = (ctypes.c_float * 64)(), (ctypes.c_float * 64)()
class Params(ctypes.Structure):
    _fields_ = (("given", ctypes.c_void_p), ("made", ctypes.c_void_p), ("n", ctypes.c_int))
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
exact = libc.malloc(256)  # with red zones around it
ctypes.memset(exact, 0, 256)
params = Params(exact, exact, n)
sizes, shared, error = (ctypes.c_uint * 6)(1, 1, 1, 64, 1, 1), ctypes.c_size_t(shared), ctypes.create_string_buffer(999)
for _ in range(2):
    code = lib[name + "_launch"](ctypes.byref(params), sizes, shared, 0, error, ctypes.c_size_t(999))
print("code", code)
"""


def sanitized(name: str, n: int, shared: int = 256) -> subprocess.CompletedProcess[str]:
    """Runs a kernel of bugs.cu twice in a process of its own, on buffers of 64 numbers."""
    preload = [
        subprocess.run(
            ["g++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libubsan")
    ]
    environment = {"LD_PRELOAD": " ".join(preload), "ASAN_OPTIONS": "detect_leaks=0"}
    library = str(compiled(SOURCE, flags=SANITIZERS))
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", SANITIZED_RUN, library, name, str(n), str(shared)],
        capture_output=True, text=True, timeout=60, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["beyond_global", "beyond_dynamic", "beyond_declared"])
def test_an_access_out_of_bounds_is_found_under_the_sanitizers(name: str) -> None:
    within, beyond = sanitized(f"{name}_", 0), sanitized(f"{name}_", 1)
    assert within.returncode == 0 and within.stdout == "code 0\n", within.stderr
    assert beyond.returncode != 0
    assert re.search(r"buffer-overflow|out of bounds", beyond.stderr) and "bugs.cu" in beyond.stderr


def test_reports_and_errors_of_threads_work_under_the_sanitizers() -> None:
    for name, code in (("mirror_right", 0), ("two_barriers_", 1), ("divergent_warp_", 1)):
        done = sanitized(name, 0)
        assert done.stdout == f"code {code}\n", done.stderr

"""What the compilation of the CPU kernels says, and how many threads they get."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build
from kernels.cpu.threads import SELDOM, TRIED_EVERY, ThreadChoice
from tests.support.waiting import until


def write_compiler(folder: Path, before: str = "") -> Path:
    """Return a compiler that writes its last argument; `before` that it runs a line of shell."""
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\n{before}\nfor last; do :; done\necho made > "$last"\n')
    compiler.chmod(0o755)
    return compiler


def test_compilation_is_shown_in_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = write_compiler(tmp_path)
    sources = [tmp_path / f"{name}.cpp" for name in "abcd"]
    monkeypatch.setattr(build, "source_files", lambda: sources)
    with caplog.at_level(logging.INFO):
        build.compile_to(tmp_path / "all.so", str(compiler), [])
    assert (tmp_path / "all.so").read_text() == "made\n"
    said = [record.getMessage() for record in caplog.records]
    assert set(said) <= {f"compiling the CPU kernels: {percent} %, 0 s" for percent in (25, 50, 75, 100)}
    assert said[-1].startswith("compiling the CPU kernels: 100 %")


def test_compilation_has_a_line_while_no_file_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    compiler = write_compiler(tmp_path, f'case "$*" in *" -c "*) cat "{gate}" > /dev/null;; esac')
    monkeypatch.setattr(build, "source_files", lambda: [tmp_path / "a.cpp"])
    monkeypatch.setattr(build, "PROGRESS_S", 0.01)

    def lines_of_nothing() -> int:
        return sum(": 0 %, " in record.getMessage() for record in caplog.records)

    def open_gate() -> None:
        until("two lines came", lambda: lines_of_nothing() >= 2)
        gate.write_text("")

    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_gate)
        build.compile_to(tmp_path / "all.so", str(compiler), [])
        opened.result()
    assert lines_of_nothing() >= 2


def test_run_without_compiler_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    assert build.main(["--for-run"]) == 0
    assert "slower kernels will serve: no g++ is installed" in capsys.readouterr().err
    assert build.main([]) == 1


def drive(choice: ThreadChoice, steps: int, cost: Callable[[int, int], int], rows: int = 8) -> Counter[int]:
    """Run steps that take cost(rows, threads); return how often each number of threads was picked."""
    picked: Counter[int] = Counter()
    for _ in range(steps):
        threads = choice.pick(rows)
        picked[threads] += 1
        choice.took(rows, threads, cost(rows, threads))
    return picked


def test_one_thread_is_always_picked_alone() -> None:
    assert drive(ThreadChoice(1), 50, lambda rows, threads: 1000) == {1: 50}


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("fast", [-1, 0])
def test_faster_thread_count_is_found_and_the_other_retried(threads: int, fast: int) -> None:
    best = threads + fast
    choice = ThreadChoice(threads)
    drive(choice, 100, lambda rows, used: 1000 if used == best else 1200)
    later = drive(choice, 3200, lambda rows, used: 1000 if used == best else 1200)
    assert set(later) == {threads, threads - 1}
    assert later.total() - later[best] == pytest.approx(3200 / TRIED_EVERY, abs=2)


def test_much_slower_thread_count_is_tried_seldom() -> None:
    choice = ThreadChoice(2)
    drive(choice, 100, lambda rows, used: 1000 if used == 2 else 2000)
    later = drive(choice, 10 * SELDOM, lambda rows, used: 1000 if used == 2 else 2000)
    assert later[1] == pytest.approx(10, abs=1)


def test_step_sizes_are_judged_apart() -> None:
    choice = ThreadChoice(2)
    for _ in range(300):
        drive(choice, 1, lambda rows, used: 900 if used == 1 else 1200, rows=1)
        drive(choice, 1, lambda rows, used: 9000 if used == 2 else 18000, rows=32)
    assert drive(choice, 20, lambda rows, used: 1000, rows=1)[1] >= 19
    assert drive(choice, 20, lambda rows, used: 1000, rows=32)[2] >= 19


def test_thread_count_follows_a_machine_that_changes() -> None:
    choice = ThreadChoice(2)
    drive(choice, 200, lambda rows, used: 1000 if used == 2 else 1400)
    drive(choice, 40 * TRIED_EVERY, lambda rows, used: 1500 if used == 2 else 1400)
    assert drive(choice, 31, lambda rows, used: 1500 if used == 2 else 1400)[1] >= 30


def test_single_slow_step_changes_no_thread_count() -> None:
    choice = ThreadChoice(2)
    drive(choice, 200, lambda rows, used: 1000 if used == 2 else 1100)
    choice.took(8, 2, 1_000_000)
    assert drive(choice, 31, lambda rows, used: 1000 if used == 2 else 1100)[2] >= 30


@pytest.mark.parametrize("rows", [65, 512, 2048])
def test_large_step_always_has_all_threads(rows: int) -> None:
    assert drive(ThreadChoice(4), 400, lambda rows, used: 1000 if used == 3 else 2000, rows) == {4: 400}

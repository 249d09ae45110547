"""What a first start says while the CPU kernels are compiled, and where no compiler is."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build
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

"""What a first start says while the CPU kernels are compiled, and where no compiler is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kernels.cpu import build


def test_compilation_is_shown_in_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho made > "$last"\n')
    compiler.chmod(0o755)
    sources = [tmp_path / f"{name}.cpp" for name in "abcd"]
    monkeypatch.setattr(build, "_sources", lambda: sources)
    with caplog.at_level(logging.INFO):
        build.compile_to(tmp_path / "all.so", str(compiler), [])
    assert (tmp_path / "all.so").read_text() == "made\n"
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["25 %", "50 %", "75 %", "100 %"]


def test_run_without_compiler_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    assert build.main(["--for-run"]) == 0
    assert "slower kernels will serve: no g++ is installed" in capsys.readouterr().err
    assert build.main([]) == 1

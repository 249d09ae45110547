"""What `make run` says while pip works: names, sizes, counts; and the end of pip's output when it fails."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from services.launcher import pip_progress
from services.launcher.pip_progress import Progress, run

OUTPUT = """Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (188.2 MB)
Collecting numpy>=2 (from torch)
Requirement already satisfied: pip in ./lib
"""


def test_progress_names_the_package_and_its_size(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    for line in OUTPUT.splitlines()[:2]:
        progress.read(line)
    assert progress.text().startswith("installing: downloading torch (188.2 MB), 1 package found, ")
    for line in OUTPUT.splitlines()[2:]:
        progress.read(line)
    assert progress.text().startswith("installing: collecting numpy, 2 packages found, ")


def test_progress_counts_written_packages(tmp_path: Path) -> None:
    (tmp_path / "pip-23.dist-info").mkdir()
    progress = Progress(tmp_path)
    progress.read("Installing collected packages: mpmath, sympy, torch")
    (tmp_path / "mpmath-1.dist-info").mkdir()
    assert progress.text().startswith("installing: 1 of 3 packages written, now sympy, ")
    for name in ("sympy", "torch"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
    assert progress.text().startswith("installing: 3 of 3 packages written, ") and "now" not in progress.text()


def test_line_comes_while_pip_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_progress, "EVERY_S", 0.01)
    go_on = tmp_path / "go-on"

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            go_on.touch()  # a line has come; pip may end now
            return super().write(text)

    pip = (
        f"import pathlib\nprint('Collecting torch', flush=True)\nwhile not pathlib.Path({str(go_on)!r}).exists(): pass"
    )
    out = Out()
    assert run([sys.executable, "-c", pip], tmp_path, out) == 0
    assert "installing: " in out.getvalue()


def test_failure_shows_the_end_of_the_output(tmp_path: Path) -> None:
    out = io.StringIO()
    assert run([sys.executable, "-c", "print('ERROR: no such package'); raise SystemExit(3)"], tmp_path, out) == 3
    assert out.getvalue().splitlines()[-2:] == [
        "ERROR: no such package",
        "error: pip ended with 3; the lines above say why",
    ]

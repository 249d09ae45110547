"""What `make run` says while pip works: names, sizes, counts; and the end of pip's output when it fails."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from services.launcher import pip_progress
from services.launcher.pip_progress import Progress, run


def test_progress_names_the_package_and_its_size_and_counts(tmp_path: Path) -> None:
    (tmp_path / "pip-23.dist-info").mkdir()
    progress = Progress(tmp_path)
    for lines, written, said in (
        (
            ["Collecting torch==2.13.0", "  Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (188.2 MB)"], [],
            "downloading torch (188.2 MB), 1 package found, ",
        ),
        (
            ["Collecting numpy>=2 (from torch)", "Requirement already satisfied: pip in ./lib"], [],
            "collecting numpy, 2 packages found, ",
        ),
        (
            ["Installing collected packages: mpmath, sympy, torch"], ["mpmath"],
            "1 of 3 packages written, now sympy, ",
        ),
        ([], ["sympy", "torch"], "3 of 3 packages written, compiling their modules, "),
    ):  # fmt: skip
        for line in lines:
            progress.read(line)
        for name in written:
            (tmp_path / f"{name}-1.dist-info").mkdir()
        assert progress.text().startswith(f"installing: {said}")
    assert "now" not in progress.text()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            ": the disk is full; free some",
        ),
        (
            "WARNING: Failed to establish a new connection: [Errno 111] Connection refused",
            ": no package index was reached; check",
        ),
        ("WARNING: NameResolutionError: Failed to resolve 'pypi.org'", ": no package index was reached; check"),
        ("ERROR: No matching distribution found for torch", "; the lines above say why"),
    ],
)
def test_failure_names_a_full_disk_and_a_missing_network(tmp_path: Path, line: str, why: str) -> None:
    progress = Progress(tmp_path)
    for each in (line, "ERROR: ResolutionImpossible"):
        progress.read(each)
    assert progress.failure(1).startswith(f"error: pip ended with 1{why}")


def test_line_comes_while_pip_is_silent_and_failure_shows_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pip_progress, "EVERY_S", 0.01)
    go_on = tmp_path / "go-on"

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            go_on.touch()  # a line has come; pip may end now
            return super().write(text)

    waiting = f"print('Collecting torch', flush=True)\nwhile not pathlib.Path({str(go_on)!r}).exists(): pass"
    pip = f"import pathlib\n{waiting}\nprint('ERROR: no such package'); raise SystemExit(3)"
    out = Out()
    assert run([sys.executable, "-c", pip], tmp_path, out) == 3
    assert "installing: " in out.getvalue()
    assert out.getvalue().splitlines()[-2:] == [
        "ERROR: no such package", "error: pip ended with 3; the lines above say why",
    ]  # fmt: skip
    well = io.StringIO()
    assert run([sys.executable, "-c", "print('Collecting torch')"], tmp_path, well) == 0
    assert "Collecting" not in well.getvalue() and "error" not in well.getvalue()

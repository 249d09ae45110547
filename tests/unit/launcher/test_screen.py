"""The lines of a start that is not on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher import screen
from shared.supervisor import Service, ServiceSpec


def test_service_that_loads_has_lines_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "worker.log"
    log.write_text("loading large: 1 of 8 MiB, 12 %, 7 s left\n")
    worker = Service(ServiceSpec("worker", ["true"], {}), log)
    worker.state = "starting"
    shown = screen.Screen()
    shown.update([worker])
    shown.update([worker])
    assert "MiB" not in capsys.readouterr().err, "not more often than every LINE_S"
    monkeypatch.setattr(screen, "LINE_S", 0.0)
    shown.update([worker])
    assert "loading large: 1 of 8 MiB, 12 %, 7 s left" in capsys.readouterr().err
    worker.state = "ready"
    shown.update([worker])
    shown.update([worker])
    assert capsys.readouterr().err == "worker: ready\n"

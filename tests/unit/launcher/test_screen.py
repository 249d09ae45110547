"""What a start shows of a service that loads: lines, and on a terminal a bar."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.launcher import screen
from shared.processes.supervisor import Service, ServiceSpec

LOADING = "loading large: 1 of 8 MiB, 12 %, 7 s left"


def starting(log: Path, line: str = LOADING) -> Service:
    log.write_text(f"2026-11-24 09:12:08 INFO orcinus.worker: {line}\n")
    worker = Service(ServiceSpec("worker", ["true"], {}), log)
    worker.state = "starting"
    return worker


def test_service_that_loads_has_lines_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = starting(tmp_path / "worker.log")
    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    shown = screen.Screen()
    now[0] = 60.0  # of compiling
    shown.update([worker])
    shown.update([worker])
    assert "MiB" not in capsys.readouterr().err, "not more often than every LINE_S"
    now[0] += screen.LINE_S
    shown.update([worker])
    assert capsys.readouterr().err.endswith(f", 3 s: {LOADING}\n"), "without time and level"
    worker.state = "ready"
    shown.update([worker])
    shown.update([worker])
    assert capsys.readouterr().err == "worker: ready\n"


def test_processes_of_several_models_have_the_model_and_what_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "gateway.log"
    log.write_text("listening\n")
    probe = SimpleNamespace(awaited="org/Two (loading)", arm=lambda: None, ready=lambda: False)
    gateway = Service(ServiceSpec("gateway-0", ["true"], probe=probe), log)
    worker = Service(ServiceSpec("worker-1", ["true"], model="org/Two"), log)
    gateway.state = worker.state = "starting"
    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    shown = screen.Screen()
    shown.update([gateway, worker])
    now[0] = screen.LINE_S
    shown.update([gateway, worker])
    assert capsys.readouterr().err.splitlines()[2:] == [
        "gateway-0: starting (pid None), 3 s: waiting for org/Two (loading)",
        "worker-1 of org/Two: starting (pid None), 3 s: listening",
    ]


def test_service_that_loads_has_a_bar_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "120", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = screen.Screen()
    for line, done in ((LOADING.replace("12 %", "25 %"), 6), (LOADING.replace("12 %", "50 %"), 12), ("warming up", 0)):
        shown.update([starting(tmp_path / "worker.log", line)])
        text = capsys.readouterr().err
        assert line in text
        bar = re.search(r"\x1b\[[\d;]*m(━+)", text)  # what is not done has another colour
        assert len(bar[1] if bar else "") == done
    shown.settle()


def test_services_with_the_same_output_are_not_erased_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "120", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    worker = Service(ServiceSpec("worker-0", ["true"], model="one"))
    worker.state = "ready"
    with caplog.at_level(logging.INFO):
        shown = screen.Screen(logging.getLogger("orcinus.engines"))
        shown.update([worker])
        shown.event("worker-0 died; restart in 0.2 s", "warning")
    assert capsys.readouterr().err == ""
    said = [(logging.INFO, "worker-0 of one: ready"), (logging.WARNING, "worker-0 died; restart in 0.2 s")]
    assert [(line.levelno, line.message) for line in caplog.records] == said

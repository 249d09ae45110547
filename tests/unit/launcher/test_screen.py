"""Commands of the launcher: lines while pip installs, the greeting, the screen."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.launcher import pip_progress, screen, up
from services.launcher.pip_progress import Progress, run
from shared.processes.supervisor import Service, ServiceSpec
from shared.settings import DEMO_MODEL, GatewaySettings

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
    probe = SimpleNamespace(wait_reason="org/Two (loading)", arm=lambda: None, ready=lambda: False)
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


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an environment of its own, which the shell has not activated."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "orcinus"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_command_is_named_by_its_path_in_a_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert up.own_command() == ".venv/bin/orcinus"
    monkeypatch.chdir("/usr")
    assert up.own_command() == str(checkout / ".venv/bin/orcinus")
    monkeypatch.setenv("PATH", str(checkout / ".venv/bin"))
    assert up.own_command() == "orcinus"


def test_greeting_names_addresses_and_a_line_to_send(checkout: Path) -> None:
    lines = up.greeting(GatewaySettings(model=DEMO_MODEL, port=8000, ops_port=8001))
    assert "http://127.0.0.1:8000/v1" in lines[0] and "toy" in lines[1]
    assert "http://127.0.0.1:8000/ " in lines[2] and "http://127.0.0.1:8001/dashboard" in lines[2]
    assert lines[2].endswith(".venv/bin/orcinus status")
    assert lines[3].startswith("curl http://127.0.0.1:8000/v1/chat/completions ") and up.DEMO_PROMPT in lines[3]
    assert "Authorization" not in lines[3]
    lines = up.greeting(GatewaySettings(model=DEMO_MODEL), needs_key=True)
    assert '-H "Authorization: Bearer $ORCINUS_API_KEY"' in lines[3]


@pytest.mark.parametrize(
    ("architecture", "endpoint", "field"),
    [
        ("LlamaForCausalLM", "completions", "prompt"),
        ("BertModel", "embeddings", "input"),
        ("BertForSequenceClassification", "rerank", "documents"),
    ],
)
def test_line_to_send_is_one_that_the_model_is_for(
    tmp_path: Path, architecture: str, endpoint: str, field: str
) -> None:
    config = {
        "architectures": [architecture], "model_type": "bert" if "Bert" in architecture else "llama", "num_labels": 1,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": 128, "vocab_size": 300, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    *_, addresses, line = up.greeting(GatewaySettings(model=tmp_path))
    assert f"/v1/{endpoint} " in line
    assert json.loads(shlex.split(line)[-1]).keys() - {"max_tokens", "temperature"} >= {"model", field}
    assert ("max_tokens" in line) == addresses.startswith("chat: ") == (endpoint == "completions")


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

"""The command line: every setting is an option, every mistake names its option, secrets are never printed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.cli.app import EVERYTHING, SERVICES, run_tool
from services.cli.options import build
from services.launcher.rundir import RunDir
from shared.command_line.options import effective, env_name, fields_of, flag, hide_secrets, source
from shared.errors import ConfigurationError
from shared.messages import hide_password
from shared.settings import ChatSettings, GatewaySettings, WorkerSettings
from tests.support.launcher import ROOT, clean_env

Orcinus = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def orcinus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Orcinus:
    """Return a function that runs the command in this process: only what it prints and its exit code count."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        for name in [name for name in os.environ if name.startswith("ORCINUS_")]:
            monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["orcinus", *args])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return subprocess.CompletedProcess(args, int(str(ended.value.code or 0)), *capsys.readouterr())

    return run


@pytest.mark.parametrize("command", [*SERVICES, "up", "config", "doctor"])
def test_every_setting_is_an_option_with_its_variable(orcinus: Orcinus, command: str) -> None:
    text = " ".join(orcinus(command, "--help").stdout.split())
    classes = [SERVICES[command]] if command in SERVICES else EVERYTHING
    for name, field in fields_of(*classes).items():
        assert flag(name) in text
        assert env_name(name) in text
        if field.description:
            assert " ".join(field.description.split()) in text


def test_help_imports_no_service_no_torch_and_no_web_framework() -> None:
    program = (
        "import sys\nsys.argv = ['orcinus', '--help']\nfrom services.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'grpc', 'redis', 'transformers', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
    assert "doctor" in done.stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["up", "--no-such-thing", "1"], "--no-such-thing"),
        (["worker", "--max-seqs", "0"], "error: --max-seqs=0: input should be greater than or equal to 1\n"),
        (["up", "--port", "x"], "error: --port=x: not a whole number; give one\n"),
        (["up", "--policy", "best"], "--policy=best: no policy 'best'; there are fastgen, "),
        (["config", "--policy", "orcinus:order=odd"], "--policy=orcinus:order=odd: no order 'odd'; there are fcfs, "),
        (["doctor", "--policy", "orca:tokens=fixed"], "no tokens 'fixed'; there are unlimited, fixed-N, "),
        (["scheduler", "--policy", "orca:colour=red"], "no part 'colour=red'"),
        (
            ["bench", "serve", "--rat", "3"],
            "error: unrecognized arguments: --rat 3; orcinus bench serve --help lists the options\n",
        ),
        (["up", "--kv-dtype", "int8", "--kernels", "reference"], "and --kernels reference rules them out"),
        (["policy", "orca", "--timeout-s=nan"], "error: --timeout-s nan: "),
        (["up", "--tp", "3"], "error: --tp 3 does not divide the model's num_attention_heads 4; --tp 2 does\n"),
        (["up", "--model", ""], "error: --model=: empty; give a Hugging Face directory or ORG/NAME\n"),
        (
            ["up", "--model", "https://huggingface.co/acme/tiny"],
            "an address, not a directory; give the name, acme/tiny",
        ),
        (["top", "--redis-url", "nonsense"], "error: --redis-url=nonsense: no address of Redis; write redis://"),
        (
            ["status", "--redis-url", "redis://:secret@here:99999"],
            "--redis-url=redis://:********@here:99999: no address",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_option_is_refused_with_its_value_and_the_limit(orcinus: Orcinus, command: list[str], words: str) -> None:
    done = orcinus(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_bad_value_of_a_variable_names_the_variable(orcinus: Orcinus) -> None:
    done = orcinus("gateway", ORCINUS_PORT="eighty")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("error: ORCINUS_PORT=eighty: ")


@pytest.mark.parametrize(
    ("settings", "values", "said"),
    [
        (ChatSettings, {"url": "A B"}, "--url=A B: not allowed; give http://HOST:PORT$"),
        (WorkerSettings, {"worker_id": "A B"}, r"--worker-id=A B: not allowed; give characters of \[a-z0-9._-\]$"),
        (WorkerSettings, {"max_seqs": "x", "device": "gpu"}, "--device=gpu: .*--max-seqs=x: "),
        (WorkerSettings, {"served_model_name": "Demo Model"}, "^served model name 'Demo Model': only"),
        (GatewaySettings, {"api_key": ["key-secret"]}, "--api-key"),
    ],
)
def test_every_bad_value_is_refused_by_its_option(settings: type[Any], values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        build(settings, values)
    assert "key-secret" not in str(caught.value)


def test_option_wins_over_variable_and_variable_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCINUS_PORT", "9001")
    monkeypatch.setenv("ORCINUS_HOST", "localhost")
    settings = build(GatewaySettings, {"port": "9002"})
    assert (settings.port, settings.host, settings.ops_port) == (9002, "localhost", 9003)
    origin = {name: source(settings, name, {"port": "9002"}) for name in ("port", "host", "drain_s", "ops_port")}
    assert origin == {"port": "option", "host": "environment", "drain_s": "default", "ops_port": "derived"}


def test_config_prints_every_setting_as_json_without_secrets(orcinus: Orcinus, tmp_path: Path) -> None:
    policy = "sarathi:order=fair,relief=newest-swap+slo"
    done = orcinus(
        "config", "--json", "--redis-url", "redis://me:url-secret@example:1/0", "--port", "8100", ORCINUS_POLICY=policy,
        ORCINUS_API_KEY="key-secret", ORCINUS_REDIS_PASSWORD="redis-secret", ORCINUS_RUN_DIR=str(tmp_path),
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found.pop("pid") is None
    assert set(found) == {"gateway", "scheduler", "worker", "up"}
    assert set(found["worker"]) == set(WorkerSettings.model_fields)
    assert (found["gateway"]["port"], found["gateway"]["ops_port"]) == (8100, 8101)
    assert found["gateway"]["redis_url"] == "redis://me:********@example:1/0"
    assert (found["up"]["run_dir"], found["scheduler"]["policy"]) == (str(tmp_path), policy)
    assert "secret" not in done.stdout + done.stderr


def test_config_shows_the_source_of_each_value_without_secrets(orcinus: Orcinus) -> None:
    done = orcinus("config", "--max-seqs", "7", ORCINUS_API_KEY="key-secret", ORCINUS_LOG_LEVEL="debug")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["max_seqs", "7", "option", "ORCINUS_MAX_SEQS"] in lines
    assert ["log_level", "debug", "environment", "ORCINUS_LOG_LEVEL"] in lines
    assert ["api_key", "********", "environment", "ORCINUS_API_KEY"] in lines
    assert "key-secret" not in done.stdout


def test_config_shows_the_stack_that_runs_unless_a_new_start_is_asked_for(tmp_path: Path) -> None:
    values = {"port": "8101", "api_key": "key-secret"}
    settings = build(GatewaySettings, values)

    def config(*options: str) -> str:
        where = {"ORCINUS_RUN_DIR": str(tmp_path), "ORCINUS_PORT": "8102"}
        return CliRunner().invoke(app.app, ["config", *options], env=where, catch_exceptions=False).stdout

    with RunDir(tmp_path) as run_dir:
        env = {"ORCINUS_DRAIN_S": "5.0", "ORCINUS_REDIS_URL": "redis://:url-secret@here:1", "ORCINUS_API_KEY": "other"}
        env["ORCINUS_REDIS_PASSWORD"] = "redis-secret"
        run_dir.write_settings({"gateway": effective(settings, values, env)})
        shown = config()
        lines = [line.split() for line in shown.splitlines()]
        assert f"The stack that runs here (pid {os.getpid()})" in shown
        assert ["port", "8101", "option", "ORCINUS_PORT"] in lines
        assert ["drain_s", "5.0", "derived", "ORCINUS_DRAIN_S"] in lines
        assert ["redis_url", "redis://:********@here:1", "derived", "ORCINUS_REDIS_URL"] in lines
        assert ["api_key", "********", "option", "ORCINUS_API_KEY"] in lines
        assert ["redis_password", "********", "derived", "ORCINUS_REDIS_PASSWORD"] in lines
        assert "secret" not in run_dir.settings.read_text() + shown
        of_stack = json.loads(config("--json"))
        assert (of_stack["pid"], of_stack["gateway"]["port"]) == (os.getpid(), 8101)
        for option in (["--new"], ["--max-seqs", "7"]):
            new = config(*option)
            assert "A new start would have these settings" in new and " 8102 " in new
    assert not run_dir.settings.exists()
    assert " 8102 " in config()


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:pw@h:1/0", "redis://:********@h:1/0"),
        ("redis://token@h:1", "redis://********@h:1"),
        ("unix:///run/redis.sock?db=1&password=pw", "unix:///run/redis.sock?db=1&password=********"),
    ],
)
def test_url_is_shown_without_its_password(url: str, safe: str) -> None:
    assert hide_password(url) == hide_secrets(url) == safe


def test_version_is_that_of_the_project(orcinus: Orcinus) -> None:
    """In a process, as users start it."""
    command = [sys.executable, "-m", "services.cli", "version"]
    done = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    number = json.loads(orcinus("version", "--json").stdout)["version"]
    assert done.stdout == f"orcinus {number}\n"
    assert f'version = "{number}"' in (ROOT / "pyproject.toml").read_text()


def test_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/run/redis.conf")

    monkeypatch.setattr(app, "app", full)
    with pytest.raises(SystemExit, match="2"):
        app.main()
    said = capsys.readouterr().err
    assert said.startswith("error: /run/redis.conf: No space left on device; make room") and said.count("\n") == 1


def test_tool_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.app.entry_points", lambda **wanted: ())
    with pytest.raises(ConfigurationError, match="orcinus chaos: not part of this installation"):
        run_tool("chaos", [])

"""`orcinus policy` refuses a wrong command before it talks to Redis."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.cli import policy as cli_policy
from shared.errors import ConfigurationError
from shared.settings import CommonSettings, LauncherSettings

UNREACHABLE = "redis://127.0.0.1:1/0"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when the command looks for Redis."""

    def fail(*_: object, **__: object) -> None:
        pytest.fail("talked to Redis")

    for name in ("check_server", "client", "local"):
        monkeypatch.setattr(cli_policy.redis_server, name, fail)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("wait", ["inf", "nan", "-3", "0"])
def test_invalid_timeout_is_refused(wait: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"--timeout-s {wait}: out of range; give a finite number of seconds above 0"
    ):
        cli_policy.switch("orca", CommonSettings(redis_url=UNREACHABLE), LauncherSettings(), float(wait), print)


@pytest.mark.usefixtures("silent")
def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fifo"):
        cli_policy.switch("fifo", CommonSettings(redis_url=UNREACHABLE), LauncherSettings(), 1.0, print)


@pytest.mark.parametrize("wait", ["inf", "nan", "-3"])
def test_invalid_timeout_ends_with_exit_code_2(wait: str) -> None:
    command = [
        sys.executable, "-m", "services.cli", "policy", "orca", "--redis-url", UNREACHABLE, f"--timeout-s={wait}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --timeout-s")

"""`orcinus policy`: what is wrong with the command is told before anything is sent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.cli import policy as cli_policy
from shared.errors import ConfigurationError
from shared.settings import CommonSettings, LauncherSettings

NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Redis is looked for and none is talked to."""

    def fail(*_: object, **__: object) -> None:
        pytest.fail("talked to Redis")

    for name in ("check_server", "client", "local"):
        monkeypatch.setattr(cli_policy.redis_server, name, fail)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("wait", ["inf", "nan", "-3", "0"])
def test_a_wait_that_is_no_time_is_refused(wait: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"--timeout-s {wait}: out of range; give a finite number of seconds above 0"
    ):
        cli_policy.switch("orca", CommonSettings(redis_url=NOBODY), LauncherSettings(), float(wait))


@pytest.mark.usefixtures("silent")
def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fifo"):
        cli_policy.switch("fifo", CommonSettings(redis_url=NOBODY), LauncherSettings(), 1.0)


@pytest.mark.parametrize("wait", ["inf", "nan", "-3"])
def test_the_command_ends_with_2_and_one_line(wait: str) -> None:
    command = [sys.executable, "-m", "services.cli", "policy", "orca", "--redis-url", NOBODY, f"--timeout-s={wait}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --timeout-s")

"""`orcinus policy` refuses a wrong command before it talks to Redis."""

from __future__ import annotations

import pytest

from services.cli import policy as cli_policy
from shared.errors import ConfigurationError
from shared.settings import CommonSettings, LauncherSettings

OUT_OF_RANGE = "out of range; give a finite number of seconds above 0"


@pytest.mark.parametrize(
    ("name", "wait_s", "said"),
    [
        *(("orca", wait, f"--timeout-s {wait}: {OUT_OF_RANGE}") for wait in ("inf", "nan", "-3", "0")),
        ("fifo", "1", "fifo"),
        ("sarathi:batch=chunked-99999999999999999999999", "1", "1 to 2147483647, not 99999999999999999999999"),
    ],
)
def test_wrong_policy_or_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, wait_s: str, said: str) -> None:
    for function in ("check_server", "client", "local"):
        monkeypatch.setattr(cli_policy.redis_server, function, lambda *_, **__: pytest.fail("talked to Redis"))
    with pytest.raises(ConfigurationError, match=said):
        cli_policy.switch(name, CommonSettings(), LauncherSettings(), float(wait_s), print)

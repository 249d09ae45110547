"""The Redis of a command: what is said where none answers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.cli import stack, top
from services.cli.options import build
from services.cli.top import RedisSource, look_once
from services.launcher.rundir import RunDir
from shared.errors import ConfigurationError
from shared.settings import CommonSettings, LauncherSettings

CLOSED = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCINUS_")]:
        monkeypatch.delenv(name)
    for module in (stack, top):  # a server of another may answer at the default address
        monkeypatch.setattr(module, "redis_address", lambda *_: (CLOSED, {}))


def settings(run_dir: Path, **values: str) -> tuple[CommonSettings, LauncherSettings]:
    return build(CommonSettings, values), build(LauncherSettings, {"run_dir": run_dir})


@pytest.mark.parametrize(
    ("given", "said"), [({}, stack.NO_STACK), ({"redis_url": CLOSED}, "127.0.0.1:1/0 does not answer")]
)
def test_silent_redis_is_named_where_it_was_given_and_else_the_stack_is_missing(
    tmp_path: Path, given: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        stack.reachable_redis(*settings(tmp_path, **given))
    assert said in asyncio.run(look_once(RedisSource(*settings(tmp_path, **given))))["error"]
    with RunDir(tmp_path), pytest.raises(ConfigurationError, match="does not answer"):
        stack.reachable_redis(*settings(tmp_path, **given))

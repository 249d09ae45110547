"""Commands: one that is wrong or finds no Redis is refused, and one that waits says so."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.cli import policy as cli_policy
from services.cli import stack, top
from services.cli.options import build
from services.cli.top import RedisSource, look_once
from services.cli.waiting import LINE_S, Waiting
from services.launcher.rundir import RunDir
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


def test_waiting_says_each_change_and_breaks_every_silence() -> None:
    said: list[tuple[float, str]] = []
    now = 0.0
    waiting = Waiting(lambda line: said.append((now, line)), clock=lambda: now)
    for tick in range(24):
        now = tick / 2
        waiting.look("3 run" if now < 7 else "2 run")
    assert said == [
        (0.0, "3 run"),
        (LINE_S, "3 run, after 3 s"),
        (2 * LINE_S, "3 run, after 6 s"),
        (7.0, "2 run"),
        (7.0 + LINE_S, "2 run, after 10 s"),
    ]

"""`orcinus policy` against a real Redis: what it says when the change does not come in time, and when Redis is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import queue_pb2
from services.cli.policy import switch
from shared.errors import ConfigurationError
from shared.keys import Keys
from shared.settings import CommonSettings, LauncherSettings
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import free_port


def test_late_switch_is_pending_and_can_be_undone(redis_server: RedisServer, model: Path) -> None:
    settings = CommonSettings(redis_url=redis_server.url, model=str(model))
    scheduler = ScriptedScheduler(redis_server.client, Keys(settings.keys.model)).lead(policy="orca", running=3)
    said: list[str] = []
    answer = switch("tgi:order=fair", settings, LauncherSettings(), 0.3, said.append)
    assert not answer.changed
    assert said == ["shard-0: orca is in force; tgi:order=fair takes over when the running sequences (3) have ended"]
    for words in ("orca is still in force after 0.3 s", "running sequences (3)", "tgi:order=fair stays pending"):
        assert words in answer.text
    assert "no sequence starts until then; `orcinus policy orca` undoes it" in answer.text
    rows = redis_server.client.xrange(scheduler.keys.control("shard-0"))
    assert [queue_pb2.Control.FromString(fields[b"c"]).policy.name for _, fields in rows] == ["tgi:order=fair"]


def test_silent_redis_is_an_error() -> None:
    nowhere = CommonSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(ConfigurationError, match="Redis"):
        switch("tgi", nowhere, LauncherSettings(), 0.3, print)

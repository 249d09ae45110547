"""`orcinus drain` against a real Redis: which service it drains, what it writes, what it waits for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from protos import queue_pb2
from services.cli.drain import drain
from shared.errors import ConfigurationError
from shared.settings import CommonSettings, LauncherSettings
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import free_port, until


@pytest.fixture
def settings(redis_server: RedisServer, model: Path) -> CommonSettings:
    return CommonSettings(redis_url=redis_server.url, model=str(model))


@pytest.fixture
def shard(redis_server: RedisServer, settings: CommonSettings) -> ScriptedScheduler:
    """A shard with a worker, both with a gateway beside them."""
    scheduler = ScriptedScheduler(redis_server.client, settings.keys).lead(running=3, waiting=2)
    redis_server.client.zadd(settings.keys.workers, {"worker-0": 1})
    redis_server.client.set(settings.keys.alive("gateway", "gateway-x"), 7)
    return scheduler


def test_scheduler_that_stays_is_named_with_its_requests(shard: ScriptedScheduler, settings: CommonSettings) -> None:
    said: list[str] = []
    (end,) = drain("shard-0", settings, LauncherSettings(), 0.3, said.append)
    assert (end.role, end.id, end.drained) == ("scheduler", "shard-0", False)
    assert end.text == "has not left after 0.3 s: sequences: 3 running, 2 waiting"
    assert said == ["scheduler shard-0 drains: sequences: 3 running, 2 waiting"]
    rows = shard.client.xrange(shard.keys.control("shard-0"))
    assert [queue_pb2.Control.FromString(fields[b"c"]).WhichOneof("command") for _, fields in rows] == ["drain"]


def test_worker_has_left_when_its_next_start_registers(shard: ScriptedScheduler, settings: CommonSettings) -> None:
    keys, client = settings.keys, shard.client

    def restart() -> None:
        until("the drain is written", lambda: client.get(keys.drain("worker", "worker-0")) == b"x")
        client.hset(keys.worker("worker-0"), "identity", "the next start")

    other = threading.Thread(target=restart)
    other.start()
    (end,) = drain("worker", settings, LauncherSettings(), 20.0, lambda _: None)
    other.join()
    assert (end.id, end.drained) == ("worker-0", True)
    assert 0 < client.pttl(keys.drain("worker", "worker-0")) <= 60_000


def test_gateway_has_left_when_its_heartbeat_ends(shard: ScriptedScheduler, settings: CommonSettings) -> None:
    client, key = shard.client, settings.keys.drain("gateway", "gateway-x")

    def leave() -> None:
        until("the drain is written", lambda: client.exists(key))
        client.delete(settings.keys.alive("gateway", "gateway-x"))

    other = threading.Thread(target=leave)
    other.start()
    said: list[str] = []
    (end,) = drain("gateway-x", settings, LauncherSettings(), 20.0, said.append)
    other.join()
    assert end.drained and said[-1].startswith("gateway gateway-x has left after ")


@pytest.mark.usefixtures("shard")
def test_unknown_name_is_an_error_with_the_running_services(settings: CommonSettings) -> None:
    with pytest.raises(ConfigurationError, match=r"worker-9: no such service .*; running: gateway-x, shard-0"):
        drain("worker-9", settings, LauncherSettings(), 1.0, lambda _: None)


def test_bad_timeout_and_silent_redis_are_errors() -> None:
    nowhere = CommonSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(ConfigurationError, match="--timeout-s nan"):
        drain("worker", nowhere, LauncherSettings(), float("nan"), lambda _: None)
    with pytest.raises(ConfigurationError, match="Redis"):
        drain("worker", nowhere, LauncherSettings(), 1.0, lambda _: None)

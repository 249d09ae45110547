"""Commands that wait for a change at shards or workers, against a real Redis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protos import queue_pb2
from services.cli.drain import drain
from services.cli.policy import switch
from shared.errors import ConfigurationError
from shared.keys import PLACER_KEYS, Keys
from shared.placement import Placement
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


@pytest.mark.parametrize("name", ["worker", "gateway-x"])
def test_service_has_left_when_its_next_start_registers_or_its_heartbeat_ends(
    shard: ScriptedScheduler, settings: CommonSettings, name: str
) -> None:
    keys, client, said = settings.keys, shard.client, list[str]()
    role, member = ("worker", "worker-0") if name == "worker" else ("gateway", name)

    def leave() -> None:
        until("the drain is written and waits", lambda: client.exists(keys.drain(role, member)) and said)
        assert "has left" not in "".join(said)
        if role == "worker":
            assert client.get(keys.drain(role, member)) == b"x"
            client.hset(keys.worker(member), "identity", "the next start")
        else:
            client.delete(keys.alive(role, member))

    with ThreadPoolExecutor() as pool:
        left = pool.submit(leave)
        (end,) = drain(name, settings, LauncherSettings(), 20.0, said.append)
        left.result(60)
    assert (end.id, end.drained) == (member, True)
    assert said[-1].startswith(f"{role} {member} has left after ")
    assert 0 < client.pttl(keys.drain(role, member)) <= 60_000


@pytest.fixture
def further(shard: ScriptedScheduler) -> ScriptedScheduler:
    """A shard of another model, with a worker, behind the same gateway."""
    scheduler = ScriptedScheduler(shard.client, Keys("org/Second"), worker="worker-1").lead(running=1)
    shard.client.set(scheduler.keys.alive("gateway", "gateway-x"), 1)
    return scheduler


def test_services_of_all_models_are_drained(
    shard: ScriptedScheduler, further: ScriptedScheduler, settings: CommonSettings
) -> None:
    models = [settings.served_model_name, "org/Second"]

    def ends(name: str) -> list[tuple[str, str, str]]:
        found = drain(name, settings, LauncherSettings(), 0.1, said.append, models)
        return [(end.id, end.model, end.text.rpartition(": ")[2]) for end in found]

    said: list[str] = []
    assert ends("scheduler") == [
        ("shard-0", models[0], "3 running, 2 waiting"), ("shard-0", models[1], "1 running, 0 waiting")
    ]  # fmt: skip
    assert said[1] == "scheduler shard-0 of org/Second drains: sequences: 1 running, 0 waiting"
    assert [(id, model) for id, model, _ in ends("worker")] == [("worker-0", models[0]), ("worker-1", models[1])]
    assert [(id, model) for id, model, _ in ends("gateway")] == [("gateway-x", models[0])]  # once
    assert further.client.xlen(further.keys.control("shard-0")) == 1
    with pytest.raises(ConfigurationError, match=r"no such service for models .*, org/Second; running: gateway-x, sh"):
        ends("worker-9")


@pytest.mark.usefixtures("further")
@pytest.mark.parametrize("awake", [True, False])
def test_missing_name_is_an_error_with_the_ids_and_sleeping_models(
    redis_server: RedisServer, settings: CommonSettings, awake: bool
) -> None:
    client, third = redis_server.client, Keys("third")
    client.set(third.lease("shard-0"), "z")
    for model in ("org/Second", "third"):
        client.hset(PLACER_KEYS.placements, model, Placement(model == "org/Second" or awake).encode())
    first = settings.served_model_name
    with pytest.raises(ConfigurationError) as error:
        drain("", settings, LauncherSettings(), 1.0, lambda _: None, [first, "org/Second", "third"])
    assert str(error.value) == (
        "NAME: missing; give gateway, scheduler or worker for all of them, or an id of one; running: gateway-x, "
        f"shard-0 ({first}, org/Second, third), worker-0 ({first}), worker-1 (org/Second)"
        + ("" if awake else "; asleep, without a worker until a request comes: third")
    )


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


def test_late_switch_is_pending_and_can_be_undone(redis_server: RedisServer, model: Path) -> None:
    settings = CommonSettings(redis_url=redis_server.url, model=str(model))
    scheduler = ScriptedScheduler(redis_server.client, Keys(settings.keys.model)).lead(policy="orca", running=3)
    redis_server.client.delete(scheduler.keys.control("shard-0"))
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

"""`orcinus status` and `orcinus policy` without a name, over a Redis with known figures; the local stack is found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import policy, stack, status, top
from services.launcher import doctor
from services.launcher.doctor import CONTAINER
from services.launcher.rundir import RunDir, StackFacts
from shared.keys import PLACER, PLACER_KEYS, Keys
from shared.placement import Placement
from shared.settings import CommonSettings, LauncherSettings
from tests.support.stack import RedisServer
from tests.support.stand_ins.written_stack import WrittenStack
from tests.support.waiting import free_port

MODEL = "Some/Model-7B"


@pytest.fixture
def written(redis_server: RedisServer) -> Iterator[WrittenStack]:
    redis_server.client.flushall()
    written = WrittenStack(redis_server.client, Keys(MODEL)).lead()
    written.worker()
    written.tell(policy="sarathi", running=0, waiting=0)
    yield written
    redis_server.client.flushall()


@pytest.fixture
def local(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """The run directory of a stack that this process has started."""
    for name in [name for name in os.environ if name.startswith("ORCINUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ORCINUS_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("ORCINUS_REDIS_URL", redis_server.url)
    with RunDir(tmp_path) as run_dir:
        run_dir.write_facts(
            StackFacts(MODEL, "shard-0", "http://127.0.0.1:8123", "http://127.0.0.1:8124", redis_server.url)
        )
        yield run_dir


def test_command_finds_local_stack_and_its_model(local: RunDir) -> None:
    assert stack.find({}).settings.served_model_name == MODEL
    assert stack.find({"shard": "shard-7"}).settings.shard == "shard-7"
    named = stack.find({"served_model_name": "other"})
    assert (named.settings.served_model_name, named.facts) == ("other", None)
    elsewhere = stack.find({"redis_url": "redis://127.0.0.1:1/0"})
    assert (elsewhere.settings.served_model_name, elsewhere.facts) == ("demo-model", None)
    local.facts.write_text("{broken")
    assert stack.find({}).facts is None


def test_facts_of_an_ended_launcher_are_not_believed(local: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "ended")
    with other:
        other.write_facts(StackFacts("old", "shard-0", "", "", ""))
        assert other.running() == StackFacts("old", "shard-0", "", "", "")
    assert not other.facts.exists()
    other.facts.write_text(local.facts.read_text())  # of a launcher that was killed
    assert other.running() is None


@pytest.mark.usefixtures("local")
def test_status_shows_addresses_state_and_figures(written: WrittenStack, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.run(stack.find({}), as_json=False) == 0
    text = capsys.readouterr().out
    for words in ("● idle", MODEL, "policy sarathi", "http://127.0.0.1:8123/v1", "8124/dashboard", "worker-0"):
        assert words in text
    assert status.run(stack.find({}), as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["state"], answer["stack"]["model"]) == (True, "idle", MODEL)
    written.leave()
    assert status.run(stack.find({}), as_json=False) == 1
    assert "no scheduler leads shard-0" in capsys.readouterr().out


@pytest.fixture
def file(local: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of models that the stack was started with."""
    path = tmp_path / "models.yaml"
    path.write_text(f"models: {{{MODEL}: {{source: a}}, second: {{source: b}}}}")
    monkeypatch.setenv("ORCINUS_MODELS", str(path))


@pytest.mark.usefixtures("file")
def test_options_name_one_model_else_all_are_meant() -> None:
    for values, models in (({}, [MODEL, "second"]), ({"served_model_name": "second"}, ["second"])):
        assert stack.models_of(stack.find(values), values) == models


def test_models_of_a_stack_elsewhere_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: {aaa: {source: a}, bbb: {source: b}}")
    settings = {"MODELS": str(path), "RUN_DIR": str(tmp_path / "none"), "REDIS_URL": "redis://127.0.0.1:1/0"}
    for name, value in settings.items():
        monkeypatch.setenv(f"ORCINUS_{name}", value)
    for values, models in (({}, ["aaa", "bbb"]), ({"served_model_name": "bbb"}, ["bbb"])):
        found = stack.find(values)
        assert (stack.models_of(found, values), found.settings.served_model_name) == (models, models[0])


@pytest.mark.usefixtures("file")
def test_status_shows_each_model(
    written: WrittenStack, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    second = WrittenStack(redis_server.client, Keys("second")).lead()
    second.tell(running=5)

    def shown(as_json: bool) -> tuple[int, str]:
        target = stack.find({})
        code = status.run(target, as_json, stack.models_of(target, {}))
        return code, capsys.readouterr().out

    code, text = shown(False)
    assert code == 0 and "second  no worker is registered  running 5" in text
    redis_server.client.set(PLACER_KEYS.lease(PLACER), "1")
    for is_awake, state in ((False, "asleep"), (True, "loading")):
        redis_server.client.hset(PLACER_KEYS.placements, "second", Placement(is_awake).encode())
        assert f"second  {state}  running 5" in shown(False)[1]
    second.worker()
    written.leave()
    code, text = shown(True)
    states = {MODEL: "no scheduler leads shard-0", "second": "live"}
    assert (code, json.loads(text)["models"]) == (0, states)
    second.leave()
    assert shown(False)[0] == 1


def test_status_without_stack_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ORCINUS_REDIS_URL", raising=False)
    address = f"redis://127.0.0.1:{free_port()}/0"
    monkeypatch.setattr(top, "redis_address", lambda *_: (address, {}))  # the default one may run here
    target = stack.Target(CommonSettings(), LauncherSettings(run_dir=tmp_path), None)
    assert status.run(target, as_json=False) == 1
    assert "no stack runs here; start one with `make run`" in capsys.readouterr().err


@pytest.mark.usefixtures("local")
def test_doctor_in_a_container_checks_services_instead_of_the_machine(
    written: WrittenStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker compose run --rm ops doctor`: no compiler, port or writable disk is needed there."""
    monkeypatch.setenv(CONTAINER, "1")
    found = {check.name: check.status for check in doctor.examine({})}
    assert set(found) == {"python", "redis", "model"} and found["redis"] == "ok"
    assert status.check(stack.find({})).status == "ok"
    written.leave()
    gone = status.check(stack.find({}))
    assert gone.status == "fail" and "docker compose ps" in gone.fix


@pytest.mark.usefixtures("local")
def test_policy_without_name_shows_it_and_presets(written: WrittenStack, redis_server: RedisServer) -> None:
    target = stack.find({})
    shown = policy.show(target.settings, target.launcher)
    assert (shown.policy, shown.set_at_run_time) == ("sarathi", False)
    assert "  * sarathi" in shown.text().splitlines() and "    orca" in shown.text().splitlines()
    redis_server.client.set(target.settings.keys.policy("shard-0"), b"{}")
    assert policy.show(target.settings, target.launcher).set_at_run_time
    written.leave()
    assert policy.show(target.settings, target.launcher).policy == ""

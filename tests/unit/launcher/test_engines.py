"""What `orcinus engines` gives each process, what it says of its models, and what it refuses before anything starts."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from services.cli.options import check_policy
from services.launcher import engines, up
from services.launcher.engines import RedisUsers, engine_specs, model_states, worker_env
from services.launcher.rundir import RunDir
from shared.errors import ConfigurationError
from shared.keys import model_tag
from shared.processes.supervisor import Service
from shared.settings import GatewaySettings, WorkerSettings
from shared.telemetry import logs

FILE = """
awake: 1
models:
  small: {source: ./a, workers: 2}
  large: {source: ./b}
"""
URL = "redis://10.0.0.9:6379/0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "models.yaml").write_text(FILE)
    for user in ("scheduler", "worker", "placer"):
        (tmp_path / f"{user}.password").write_text(f"of-{user}\n")
    return tmp_path


def services(folder: Path, **values: str) -> list[Service]:
    given = {"run_dir": str(folder / "run"), "models": str(folder / "models.yaml"), "redis_url": URL, "device": "cpu"}
    stacks = [up.ModelStack.of(each) for each in up.options_by_model(given | values)]
    users, run_dir = RedisUsers(stacks[0].gateway, folder), RunDir(stacks[0].launcher.run_dir)
    most = stacks[0].gateway.models_file().awake
    return [Service(spec) for spec in engine_specs(stacks, most, users, run_dir, up.SHARED_MEMORY / "kv")]


def test_each_process_is_its_own_user_of_redis_and_knows_its_model(folder: Path) -> None:
    specs = {one.name: one.spec for one in services(folder)}
    assert list(specs) == ["worker-0", "worker-1", "scheduler-0", "worker-2", "scheduler-1", "placer-0"]
    for name, spec in specs.items():
        role = name.rpartition("-")[0]
        assert spec.argv[-1] == role and spec.env["ORCINUS_REDIS_URL"] == URL
        user = spec.env["ORCINUS_REDIS_USERNAME"], spec.env["ORCINUS_REDIS_PASSWORD"]
        assert user == (role, f"of-{role}")
        assert spec.after == (("placer-0",) if role == "worker" else ())
    shared = {name for name, spec in specs.items() if "ORCINUS_KV_SHARE_DIR" in spec.env}
    assert shared == {"worker-0", "worker-1", "worker-2"}, "their KV outlives them while their model sleeps"
    of_models = {name: spec.env["ORCINUS_SERVED_MODEL_NAME"] for name, spec in specs.items() if spec.model}
    assert of_models == {name: spec.model for name, spec in specs.items() if spec.model}
    assert of_models == {name: spec.env[logs.MODEL] for name, spec in specs.items() if spec.model}
    assert [of_models[f"worker-{number}"] for number in range(3)] == ["small", "small", "large"]
    assert specs["placer-0"].env["ORCINUS_MODELS"] == str(folder / "models.yaml")


def test_workers_of_two_machines_have_different_names_and_ports_behind_each_other(folder: Path) -> None:
    host = model_tag(socket.gethostname())
    alone = [one.spec.env for one in services(folder) if one.name.startswith("worker")]
    names = [env["ORCINUS_WORKER_ID"] for env in alone]
    assert all(re.fullmatch(rf"worker-{host}-[0-9a-f]{{6}}\.{number}", name) for number, name in enumerate(names))
    beside = services(folder, run_dir=str(folder / "second"))
    assert not {one.spec.env.get("ORCINUS_WORKER_ID") for one in beside} & set(names)
    assert {env["ORCINUS_LISTEN"] for env in alone} == {"127.0.0.1:0"}
    listed = services(folder, listen="0.0.0.0:50051", advertise="box-1:600", worker_id="w")
    env = listed[3].spec.env
    variables = ("ORCINUS_WORKER_ID", "ORCINUS_LISTEN", "ORCINUS_ADVERTISE")
    assert [env[name] for name in variables] == ["w.2", "0.0.0.0:50053", "box-1:602"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "0.0.0.0"}, "--listen=0.0.0.0: not HOST:PORT"),
        ({"listen": "0.0.0.0:99999"}, "--listen=0.0.0.0:99999: not HOST:PORT"),
        ({"listen": "0.0.0.0:65534"}, "--listen=0.0.0.0:65534: 3 workers need as many ports"),
        ({"advertise": "box:50051"}, "--advertise=box:50051: needs a port that is known"),
        ({"listen": "0.0.0.0:50051", "advertise": "box"}, "--advertise=box: not HOST:PORT"),
    ],
)
def test_addresses_that_workers_cannot_have_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        worker_env(WorkerSettings(**settings), Path("/run"), 0, 3)


def test_passwords_that_cannot_be_read_are_refused_by_file(tmp_path: Path) -> None:
    users = RedisUsers(GatewaySettings(redis_url=URL), tmp_path)
    with pytest.raises(ConfigurationError, match=r"--redis-users: .*worker\.password: cannot be read: No such file"):
        users.env("worker")
    (tmp_path / "worker.password").write_text("\n")
    with pytest.raises(ConfigurationError, match=r"worker\.password: empty; deploy/redis_users\.py writes it"):
        users.env("worker")
    (tmp_path / "worker.password").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"worker\.password: cannot be read"):
        users.env("worker")


@pytest.mark.parametrize(
    "url", ["redis://:secret@10.0.0.9:6379/0", "redis://me@10.0.0.9", "redis://10.0.0.9/0?username=me&password=x"]
)
def test_users_beside_an_address_with_a_user_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has a user already"):
        RedisUsers(GatewaySettings(redis_url=url), tmp_path)
    RedisUsers(GatewaySettings(redis_url=url), None)


def test_address_that_redis_cannot_parse_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^ORCINUS_REDIS_URL: Invalid value for 'db' in connection URL; "):
        RedisUsers(GatewaySettings(redis_url=URL + "?db=first"), None)


def test_one_user_for_all_is_that_of_the_settings() -> None:
    settings = GatewaySettings.model_validate({"redis_url": URL, "redis_username": "me", "redis_password": "secret"})
    users = RedisUsers(settings, None)
    assert users.env("worker") == {"ORCINUS_REDIS_USERNAME": "me", "ORCINUS_REDIS_PASSWORD": "secret"}
    assert RedisUsers(GatewaySettings(redis_url=URL), None).env("worker") == {}


def test_no_model_counts_as_asleep_before_the_placer_has_spoken(folder: Path) -> None:
    found = services(folder)
    for one in found:
        one.state = "asleep" if one.name.startswith("worker-") else "ready"
    states = {"model 'small'": "loading", "model 'large'": "loading", "placer": "ready"}
    assert model_states(found, is_placed=False) == states


def test_model_is_ready_with_one_worker_and_a_scheduler(folder: Path) -> None:
    found = services(folder)
    by_name = {one.name: one for one in found}
    for one in found:
        one.state = "asleep" if one.name == "worker-2" else "ready"
    assert model_states(found) == {"model 'small'": "ready", "model 'large'": "asleep", "placer": "ready"}
    by_name["worker-1"].state = "backoff"
    assert model_states(found)["model 'small'"] == "ready"
    by_name["worker-0"].state = "starting"
    assert model_states(found)["model 'small'"] == "loading"
    by_name["scheduler-1"].state = by_name["placer-0"].state = "backoff"
    assert model_states(found) == {"model 'small'": "loading", "model 'large'": "loading", "placer": "loading"}


@pytest.mark.parametrize("source", ["./models/b", "/models/b"])
def test_model_that_is_not_in_the_container_is_refused_by_file_model_and_field(folder: Path, source: str) -> None:
    file = folder / "models.yaml"
    file.write_text(FILE.replace("./a", source))
    problem = rf"^{file}: model 'small': model directory .*/models/b does not exist; give .* \(source\)$"
    with pytest.raises(ConfigurationError, match=problem):
        engines.engines({"models": str(file), "run_dir": str(folder / "run")}, check_policy)
    assert not (folder / "run").exists()


def test_run_directory_in_use_is_refused_with_the_command_for_another(folder: Path) -> None:
    with RunDir(folder / "run"), pytest.raises(ConfigurationError) as refused, RunDir(folder / "run", engines.ANOTHER):
        pass
    said = "with its own directory: orcinus engines --run-dir .run2, with --worker-id and --listen of its own"
    assert said in str(refused.value)


def test_file_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"/models\.yaml: cannot be read: No such file .*; check --models$"):
        engines.engines({}, check_policy)

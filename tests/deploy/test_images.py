"""The files of deploy/: what compose makes of them, and that images take the pins of pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deploy import healthcheck, keys, redis_users, requirements
from kernels.cuda import loader
from tests.support.launcher import ROOT, clean_env

OVERLAY = ("-f", "compose.yaml", "-f", "deploy/compose.gpu.yaml")
ROLES = ("-f", "deploy/compose.roles.yaml")
MODELS = ("-f", "compose.yaml", "-f", "deploy/compose.models.yaml")
USERS_OF_OTHERS = {"viewer": "grafana"}
DATASOURCES = ROOT / "deploy" / "observability" / "grafana" / "datasources" / "datasources.yml"


def have_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


def composed(*files: str, **env: str) -> dict[str, Any]:
    command = ["docker", "compose", *files, "--env-file", "/dev/null", "config", "--format", "json"]
    drop = {"MODEL", "DEVICE", "WORKER_MEMORY", "GPU", "TORCH_INDEX", "COMPOSE_PROFILES"}
    here = {name: value for name, value in clean_env(**env).items() if name not in drop or name in env}
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["services"])


def printed(*arguments: str) -> list[str]:
    command = [sys.executable, "deploy/requirements.py", "pyproject.toml", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


needs_compose = pytest.mark.skipif(
    not have_compose(), reason="no docker compose; make compose-test reads the files too"
)


@needs_compose
def test_gpu_overlay_changes_the_worker_only_and_keeps_it_confined() -> None:
    without, with_gpu = composed("-f", "compose.yaml"), composed(*OVERLAY, GPU="3", WORKER_MEMORY="64g")
    worker = with_gpu["worker"]
    assert {**with_gpu, "worker": None} == {**without, "worker": None}
    assert worker["build"]["target"] == "worker-gpu"
    assert worker["image"] != without["worker"].get("image")
    assert worker["environment"]["ORCINUS_DEVICE"] == "cuda"
    assert worker["mem_limit"] == str(64 << 30)
    assert worker["ulimits"]["memlock"] in (-1, {"single": -1}, {"soft": -1, "hard": -1})
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["device_ids"], device["capabilities"]) == ("nvidia", ["3"], ["gpu"])
    for kept in ("read_only", "cap_drop", "security_opt", "networks", "volumes", "healthcheck", "command"):
        assert worker[kept] == without["worker"][kept], kept


@needs_compose
def test_roles_overlay_adds_a_confined_worker_and_private_memory() -> None:
    without, with_roles = composed("-f", "compose.yaml"), composed("-f", "compose.yaml", *ROLES)
    first, second = with_roles["worker"], with_roles["worker-decode"]
    assert set(with_roles) == set(without) | {"worker-decode"}
    for name in set(without) - {"worker"}:
        assert with_roles[name] == without[name]
    for name in first:
        if name != "environment":
            assert first[name] == second[name], name
            assert name == "volumes" or first[name] == without["worker"][name], name
    assert [one["environment"].pop("ORCINUS_WORKER_ROLE") for one in (first, second)] == ["prefill", "decode"]
    assert first["environment"] == second["environment"]
    shared = first["environment"]["ORCINUS_KV_SHARE_DIR"]
    (mount,) = [volume for volume in first["volumes"] if volume["target"] == shared]
    assert not mount.get("read_only")
    options = yaml.safe_load((ROOT / "deploy" / "compose.roles.yaml").read_text())["volumes"][mount["source"]]
    user = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert {f"uid={uid},gid={gid},mode=0700" for uid, gid in user} == {options["driver_opts"]["o"].partition(",")[2]}
    assert options["driver_opts"]["type"] == "tmpfs"


@needs_compose
def test_models_overlay_replaces_worker_and_scheduler_by_confined_engines(tmp_path: Path) -> None:
    (tmp_path / "several.yaml").touch()
    (tmp_path / "large").mkdir()
    env = {"MODELS": str(tmp_path / "several.yaml"), "MODELS_DIR": str(tmp_path / "large"), "POLICY": "sarathi"}
    without, found = composed("-f", "compose.yaml"), composed(*MODELS, ENGINES_MEMORY="64g", **env)
    engines, gateway, worker = found["engines"], found["gateway"], without["worker"]
    assert set(found) == set(without) - {"worker", "scheduler"} | {"engines"}
    assert {**found, "gateway": None, "engines": None} == {
        **{name: one for name, one in without.items() if name not in ("worker", "scheduler")},
        "gateway": None, "engines": None,
    }  # fmt: skip
    for kept in (
        "read_only",
        "cap_drop",
        "security_opt",
        "networks",
        "init",
        "build",
        "tmpfs",
        "restart",
        "depends_on",
    ):
        assert engines[kept] == worker[kept], kept
    assert (engines["command"], engines["mem_limit"]) == (["engines"], str(64 << 30)) and engines["pids_limit"]
    mounts = {each["target"]: (each["source"], each.get("read_only")) for each in engines["volumes"]}
    users = ("scheduler", "worker", "placer")
    assert mounts == {
        "/models.yaml": (env["MODELS"], True), "/models": (env["MODELS_DIR"], True), "/hub": ("hub", True),
        **{f"/secrets/redis-{user}": (f"redis-{user}", True) for user in users},
    }  # fmt: skip
    assert engines["environment"]["ORCINUS_POLICY"] == "sarathi"
    shared = ("ORCINUS_MODELS", "ORCINUS_MODEL", "ORCINUS_SERVED_MODEL_NAME", "ORCINUS_REDIS_URL")
    assert [engines["environment"][name] for name in shared] == [gateway["environment"][name] for name in shared]
    assert gateway["environment"]["ORCINUS_MODELS"] == "/models.yaml"
    assert [each for each in gateway["volumes"] if each not in without["gateway"]["volumes"]] == [
        each for each in engines["volumes"] if each["target"].startswith("/models")
    ]
    assert set(gateway["depends_on"]) == {"pull", "redis", "engines"}
    assert gateway["networks"] == without["gateway"]["networks"]
    assert composed(*MODELS, COMPOSE_PROFILES="ops", **env)["ops"]["environment"]["ORCINUS_MODELS"] == "/models.yaml"


def test_entrypoint_names_passwords_and_address_of_the_engines(tmp_path: Path) -> None:
    """Run the entrypoint with the environment that compose gives it; the command prints its own."""
    (tmp_path / "orcinus").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "orcinus").chmod(0o755)
    script = (ROOT / "deploy" / "entrypoint.sh").read_text().replace("/tmp/", f"{tmp_path}/")
    (tmp_path / "entrypoint.sh").write_text(script)
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin", "ORCINUS_LISTEN": "0.0.0.0:50051", "ORCINUS_REDIS_USERNAME": ""}
    command = ["sh", str(tmp_path / "entrypoint.sh"), "engines"]
    for _ in range(2):  # a container that starts again finds the links
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert found["ORCINUS_ADVERTISE"] == f"{socket.gethostname()}:50051"
    assert "ORCINUS_REDIS_USERNAME" not in found and "ORCINUS_WORKER_ID" not in found
    files = {path.name: os.readlink(path) for path in Path(found["ORCINUS_REDIS_USERS"]).iterdir()}
    users = ("scheduler", "worker", "placer")
    assert files == {f"{user}.password": f"/secrets/redis-{user}/password" for user in users}


def test_engines_are_healthy_while_each_model_serves_or_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCINUS_RUN_DIR", str(tmp_path))
    assert "No such file" in healthcheck.engines()
    file = tmp_path / "states.json"
    file.write_text(json.dumps({"model 'a'": "ready", "model 'b'": "asleep", "placer": "ready"}))
    assert healthcheck.engines() == ""
    os.utime(file, (0, 0))
    assert healthcheck.engines().endswith("the supervisor hangs")
    file.write_text(json.dumps({"model 'a'": "loading", "model 'b'": "asleep", "placer": "loading"}))
    assert healthcheck.engines() == "model 'a' is loading, placer is loading"


def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


@pytest.mark.parametrize("name", services())
def test_container_has_no_root_and_no_capability_and_has_limits(name: str) -> None:
    one = services()[name]
    assert one["read_only"] is True and one["cap_drop"] == ["ALL"] and not one.get("cap_add")
    assert one["security_opt"] == ["no-new-privileges:true"] and not one.get("privileged")
    assert one["mem_limit"] and one["pids_limit"]
    assert not {"devices", "ipc", "pid", "userns_mode", "volumes_from"} & one.keys()
    assert not [volume for volume in one.get("volumes", []) if "docker.sock" in str(volume)]
    if "build" not in one:  # ours have a USER, below
        assert not str(one["user"]).startswith(("0", "root"))
    assert all(str(port).startswith("127.0.0.1:") for port in one.get("ports", []))


def test_only_the_front_is_published() -> None:
    networks = yaml.safe_load((ROOT / "compose.yaml").read_text())["networks"]
    assert networks["core"]["internal"] is networks["door"]["internal"] is True
    expected = {
        "redis": ["core"], "worker": ["core"], "scheduler": ["core"], "gateway": ["door", "core"], "ops": ["core"],
        "front": ["edge", "door"], "front-grpc": ["edge", "door"],
    }  # fmt: skip
    ours = {name: one for name, one in services().items() if name in expected}
    assert {name: one["networks"] for name, one in ours.items()} == expected
    assert [name for name, one in ours.items() if one.get("ports")] == ["front", "front-grpc"]
    assert services()["keys"]["network_mode"] == "none"


def test_one_service_fetches_the_model_and_other_services_read_it() -> None:
    found = services()
    networks = yaml.safe_load((ROOT / "compose.yaml").read_text())["networks"]
    assert [name for name, one in found.items() if "egress" in one.get("networks", [])] == ["pull"]
    assert not (networks["egress"] or {}).get("internal")
    assert found["pull"]["networks"] == ["egress"] and found["pull"]["volumes"] == ["hub:/hub"]
    for name in ("worker", "scheduler", "gateway", "ops"):
        one = found[name]
        assert "hub:/hub:ro" in one["volumes"] and "edge" not in one["networks"]
        assert one["environment"]["HF_HUB_OFFLINE"] == "1" and "HF_TOKEN" not in one["environment"]
        assert one["environment"]["HF_HOME"] == found["pull"]["environment"]["HF_HOME"] == "/hub"
        assert one["environment"]["ORCINUS_MODEL"].startswith("${PULL:-")
        if name != "ops":
            assert one["depends_on"]["pull"] == {"condition": "service_completed_successfully"}
    assert "/hub" in (ROOT / "deploy" / "Dockerfile").read_text()


def test_gateways_write_one_volume_of_files() -> None:
    found = services()
    gateway = found["gateway"]
    folder = gateway["environment"]["ORCINUS_FILES_DIR"]
    assert f"files:{folder}" in gateway["volumes"] and gateway["read_only"] is True
    assert [name for name, one in found.items() if "files" in str(one.get("volumes"))] == ["gateway"]
    assert "files" in yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    (owned,) = re.findall(r"install -d -o 10001 -g 10001 -m 0750 (.+)", dockerfile)
    assert folder in owned.split()
    assert gateway["environment"]["ORCINUS_TENANT_FILE_BYTES"] == "${TENANT_FILE_BYTES:-}"


def test_pull_service_ends_at_once_without_a_name(tmp_path: Path) -> None:
    shell, _, script = services()["pull"]["entrypoint"]
    (tmp_path / "orcinus").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "orcinus").chmod(0o755)
    for name, said in (("", ""), ("acme/tiny@v1", "pull -- acme/tiny@v1\n")):
        env = {"PULL": name, "PATH": f"{tmp_path}:/bin:/usr/bin"}
        done = subprocess.run([shell, "-c", script.replace("$$", "$")], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, said)


def test_front_forwards_the_port_of_the_gateway() -> None:
    gateway, config = services()["gateway"]["environment"], (ROOT / "deploy" / "front.cfg").read_text()
    for name, port in (("front", gateway["ORCINUS_PORT"]), ("front-grpc", gateway["ORCINUS_GRPC_PORT"])):
        one = services()[name]
        assert one["environment"] == {"FRONT_PORT": port}
        (published,) = one["ports"]
        assert published.endswith(f":{port}")
        assert one["stop_signal"] == "SIGUSR1"  # at SIGTERM HAProxy cuts streams
    assert f"check port {gateway['ORCINUS_PORT']} " in config
    (address,) = re.findall(r"bind (127\.0\.0\.1:\d+)", config)
    assert address in str(services()["front"]["healthcheck"]["test"])
    assert services()["front-grpc"]["profiles"] == ["grpc"] and "profiles" not in services()["front"]


def test_each_service_has_only_the_password_of_its_user() -> None:
    for role in redis_users.ROLES:
        if role == "placer":  # of deploy/compose.models.yaml
            continue
        one = services()[USERS_OF_OTHERS.get(role, role)]
        mounted = [volume for volume in one["volumes"] if "/secrets/redis" in volume]
        assert mounted == [f"redis-{role}:/secrets/redis:ro"]
        if role in USERS_OF_OTHERS:
            assert f"user: {role}," in DATASOURCES.read_text()
        else:
            assert one["environment"]["ORCINUS_REDIS_USERNAME"] == role


def test_secrets_are_made_once_and_rules_follow_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SECRETS", tmp_path)
    monkeypatch.setattr(keys, "API_KEYS", tmp_path / "api" / "keys")
    for name in ("api", "redis-users", *(f"redis-{role}" for role in redis_users.ROLES)):
        (tmp_path / name).mkdir()
    umask = os.umask(0o077)
    try:
        assert keys.main([]) == 0
        made = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
        (tmp_path / "redis-users" / "users.acl").write_text("the rules of an older version")
        assert keys.main([]) == 0
    finally:
        os.umask(umask)
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == made
    passwords = [(tmp_path / f"redis-{role}" / "password").read_text() for role in redis_users.ROLES]
    acl = made[tmp_path / "redis-users" / "users.acl"]
    assert len(set(passwords)) == 6 and not [one for one in passwords if one in acl]
    assert [line.split()[1] for line in acl.splitlines()] == ["default", *redis_users.ROLES] and "{gateway}" not in acl
    assert all(path.stat().st_mode & 0o777 in (0o600, 0o640) for path in made)


def test_images_take_the_pins_of_pyproject() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    torch = next(pin for pin in document["project"]["dependencies"] if pin.startswith("torch=="))
    assert printed("--only", "torch") == [torch]
    (exact,) = printed("--only", "torch", "--exact")
    version = torch.removeprefix("torch==")
    # What pip makes of it: 1.0+cpu satisfies ==1.0, but not ===1.0.
    assert (SpecifierSet(exact.removeprefix("torch")).contains(version), torch != exact) == (True, True)
    assert not SpecifierSet(exact.removeprefix("torch")).contains(f"{version}+cpu")
    assert printed("--extra", "cuda") == document["project"]["optional-dependencies"]["cuda"]
    (nvrtc,) = printed("--extra", "dev", "--only", "nvidia-cuda-nvrtc")
    assert nvrtc.startswith("nvidia-cuda-nvrtc==")


def test_constraints_hold_the_pins_and_versions_alone() -> None:
    """No path, address, label of a build or option of pip."""
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    held = dict(line.split("==") for line in lines)
    assert lines == sorted(lines, key=lambda line: line.split("==")[0]) and len(held) == len(lines)
    pins = requirements.direct_pins(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    assert len(pins) > 40 and pins == {name: held.get(name) for name in pins}


def test_constraints_name_all_that_the_project_needs_in_turn() -> None:
    held = {line.split("==")[0] for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()}
    wanted, seen = [("orcinus", extra) for extra in ("", "build", "embedded", "load", "test", "dev")], set()
    while wanted:
        name, extra = pair = wanted.pop()
        if pair in seen:
            continue
        seen.add(pair)
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                other = requirements.name_of(needed.name)
                wanted += [(other, "")] + [(other, more) for more in needed.extras]
    assert {name for name, _ in seen} - held == {"orcinus"}


def test_installations_use_the_constraints() -> None:
    for name, command in (
        ("Makefile", r"^\t@\$\(PIP\) .*"),
        ("deploy/Dockerfile", r"^RUN [^\n]*pip install[^\n]*-r .*"),
    ):
        text = (ROOT / name).read_text().replace("\\\n", " ")
        found = re.findall(command, text, re.MULTILINE)
        assert len(found) > 3
        assert [line for line in found if "-c " not in line and "torch" not in line.lower()] == [], name
    for line in re.findall(r"(?:image|PYTHON_IMAGE): .*", (ROOT / "compose.yaml").read_text()):
        version = re.search(r":(?:v|-.*:)?(\d+\.\d+\.\d+)", line)
        assert version or "orcinus-" in line, line
    front = re.search(r"AS front\n(.*?)\nFROM ", (ROOT / "deploy" / "Dockerfile").read_text(), re.DOTALL)
    assert front is not None and '"haproxy=${HAPROXY_VERSION}"' in front[1]
    assert re.search(r"^ARG HAPROXY_VERSION=\d+\.\d+\.\d+-", front[1], re.MULTILINE)


def test_stages_of_the_dockerfile_exist_and_carry_the_kernels() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)
    assert set(re.findall(r"--from=(\S+)", text)) <= set(stages)
    last = {name: part for name, part in zip(stages, re.split(r"^FROM ", text, flags=re.MULTILINE)[1:], strict=True)}
    carried = loader.PREBUILT.relative_to(ROOT)
    assert f"COPY --from=cuda-kernels /build/{carried} /app/{carried}" in last["worker-gpu"]
    assert "cuda" not in last["worker"] and "cuda" not in last["control"]
    for name in ("control", "worker", "worker-gpu", "front"):
        assert "USER 10001:10001" in last[name]


def test_libraries_of_a_checkout_stay_out_of_images() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"kernels/cpu/lib", "kernels/cuda/lib"} <= set(ignored)
    tracked = (ROOT / ".gitignore").read_text().split()
    assert {"kernels/cpu/lib/", "kernels/cuda/lib/"} <= set(tracked)

"""The files of deploy/: what compose makes of them, and that images take the pins of pyproject.toml."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from kernels.cuda import loader
from tests.services.launcher_support import ROOT, clean_env

OVERLAY = ("-f", "compose.yaml", "-f", "deploy/compose.gpu.yaml")


def have_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


def composed(*files: str, **env: str) -> dict[str, Any]:
    command = ["docker", "compose", *files, "--env-file", "/dev/null", "config", "--format", "json"]
    drop = {"MODEL", "DEVICE", "WORKER_MEMORY", "GPU", "TORCH_INDEX"}
    here = {name: value for name, value in clean_env(**env).items() if name not in drop or name in env}
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def printed(*arguments: str) -> list[str]:
    command = [sys.executable, "deploy/requirements.py", "pyproject.toml", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


@pytest.mark.skipif(not have_compose(), reason="no docker compose; make compose-test reads the files too")
def test_the_gpu_file_changes_the_worker_alone_and_keeps_it_confined() -> None:
    without, with_gpu = composed("-f", "compose.yaml"), composed(*OVERLAY, GPU="3", WORKER_MEMORY="64g")
    assert {name: one for name, one in with_gpu.items() if name != "worker"} == {
        name: one for name, one in without.items() if name != "worker"
    }
    worker = with_gpu["worker"]
    assert worker["build"]["target"] == "worker-gpu"
    assert worker["image"] != without["worker"].get("image")
    assert worker["environment"]["ORCINUS_DEVICE"] == "cuda"
    assert worker["mem_limit"] == str(64 << 30)
    assert worker["ulimits"]["memlock"] in (-1, {"single": -1}, {"soft": -1, "hard": -1})
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["device_ids"], device["capabilities"]) == ("nvidia", ["3"], ["gpu"])
    for kept in ("read_only", "cap_drop", "security_opt", "networks", "volumes", "healthcheck", "command"):
        assert worker[kept] == without["worker"][kept], kept


def test_images_take_the_pins_of_pyproject_and_for_a_gpu_no_build_for_cpus() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    torch = next(pin for pin in document["project"]["dependencies"] if pin.startswith("torch=="))
    assert printed("--only", "torch") == [torch]
    (exact,) = printed("--only", "torch", "--exact")
    version = torch.removeprefix("torch==")
    # What pip makes of it: 1.0+cpu satisfies ==1.0, but not ===1.0.
    assert (SpecifierSet(exact.removeprefix("torch")).contains(version), torch != exact) == (True, True)
    assert not SpecifierSet(exact.removeprefix("torch")).contains(f"{version}+cpu")
    assert printed("--extra", "cuda") == document["project"]["optional-dependencies"]["cuda"]
    assert [pin.split("==")[0] for pin in printed("--extra", "dev", "--only", "nvidia-cuda-nvrtc")] == [
        "nvidia-cuda-nvrtc"
    ]


def test_every_stage_that_an_image_copies_from_exists_and_carries_the_kernels() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)
    assert set(re.findall(r"--from=(\S+)", text)) <= set(stages)
    last = {name: part for name, part in zip(stages, re.split(r"^FROM ", text, flags=re.MULTILINE)[1:], strict=True)}
    carried = loader.PREBUILT.relative_to(ROOT)
    assert f"COPY --from=cuda-kernels /build/{carried} /app/{carried}" in last["worker-gpu"]
    assert "cuda" not in last["worker"] and "cuda" not in last["control"]
    for name in ("control", "worker", "worker-gpu"):
        assert "USER 10001:10001" in last[name]


def test_what_was_built_in_a_checkout_does_not_get_into_an_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"kernels/cpu/lib", "kernels/cuda/lib"} <= set(ignored)
    tracked = (ROOT / ".gitignore").read_text().split()
    assert {"kernels/cpu/lib/", "kernels/cuda/lib/"} <= set(tracked)

"""`orcinus doctor`: each thing that a machine may lack is named, with what to do, and only a real lack fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from kernels.cpu import build
from services.cli.app import app
from services.launcher import doctor, redis_server
from services.launcher.gpu.checks import judge
from services.launcher.gpu.facts import Facts
from services.launcher.model_check import model_problem
from services.launcher.rundir import RunDir
from shared.errors import ConfigurationError
from shared.settings import GatewaySettings, WorkerSettings
from tests.support.launcher import ROOT, clean_env
from tests.support.stand_ins.recorded_gpus import machine
from tests.support.waiting import free_port

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def model_directory(path: Path) -> Path:
    path.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **SIZES}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    write_weights(path / "model.safetensors", rows=2)
    return path


def write_weights(path: Path, rows: int) -> None:
    """Write one tensor of `rows` x 1 MiB in bfloat16, all zeros in a sparse file."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [rows, 1 << 19], "data_offsets": [0, rows << 20]}}).encode()
    with path.open("wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header)
        weights.truncate(8 + len(header) + (rows << 20))


def free_ports() -> int:
    """Return a free port; the port after it is free, too."""
    port, after = free_port(), free_port()
    while after != port + 1:
        port, after = after, free_port()
    return port


def run_doctor(*args: str, **env: str) -> tuple[int, dict[str, dict[str, str]], bool]:
    unset = {name: None for name in os.environ if name.startswith("ORCINUS_")}
    done = CliRunner().invoke(app, ["doctor", "--json", *args], env={**unset, **env}, catch_exceptions=False)
    report = json.loads(done.stdout)
    return done.exit_code, {check["name"]: check for check in report["checks"]}, report["ok"]


def test_machine_of_these_tests_is_ok(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    code, checks, ok = run_doctor("--model", str(model), "--port", str(free_ports()), "--run-dir", str(tmp_path))
    assert (code, ok) == (0, True), checks
    gpus = {check.name for check in judge(machine(), "auto")} - {"gpu"}  # where the tests run on a machine with one
    assert ("amx" in checks) == (build.cpu_flags() >= build.TILE_FLAGS)
    names = [name for name in checks if name not in gpus | {"amx"}]
    assert names == ["python", "compiler", "redis", "gpu", "port", "ops port", "disk", "memory", "model"]
    assert all(check["fix"] for check in checks.values() if check["status"] != "ok")


def test_taken_port_fails_but_is_a_warning_where_orcinus_runs(tmp_path: Path) -> None:
    with socket.socket() as taken, RunDir(tmp_path / "run"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, checks, ok = run_doctor("--port", port, "--run-dir", str(tmp_path), "--model", str(tmp_path / "no"))
        here = doctor.check_ports(GatewaySettings(port=int(port)), tmp_path / "run")[0]
    assert (code, ok) == (1, False)
    assert checks["port"]["status"] == "fail" and port in checks["port"]["detail"] and "PORT=" in checks["port"]["fix"]
    assert here.status == "warn" and "Orcinus runs here" in here.detail
    model = checks["model"]
    assert model["status"] == "fail" and str(tmp_path / "no") in model["detail"] and "MODEL=" in model["fix"]


@pytest.mark.parametrize(
    ("missing", "load_format", "said"),
    [
        ("config.json", "auto", "config.json"), ("model.safetensors", "auto", "weights"), (None, "auto", ""),
        ("config.json", "dummy", "config.json"), ("model.safetensors", "dummy", ""),  # made up by the worker
    ],
)  # fmt: skip
def test_incomplete_model_directory_fails(tmp_path: Path, missing: str | None, load_format: str, said: str) -> None:
    model = model_directory(tmp_path / "model")
    if missing:
        (model / missing).unlink()
    assert said in model_problem(model, load_format)
    assert doctor.check_model(model, load_format).status == ("fail" if said else "ok")


def test_silent_redis_fails_without_its_password(tmp_path: Path) -> None:
    port = free_port()
    code, checks, _ = run_doctor("--run-dir", str(tmp_path), ORCINUS_REDIS_URL=f"redis://me:hidden@127.0.0.1:{port}/0")
    assert (code, checks["redis"]["status"]) == (1, "fail") and f"127.0.0.1:{port}" in checks["redis"]["detail"]
    assert "hidden" not in json.dumps(checks)


def test_missing_tools_fail_with_the_command_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "bundled_binary", lambda: None)
    (tmp_path / "clang++").write_text("#!/bin/sh\n")  # which compiles no kernels
    (tmp_path / "clang++").chmod(0o755)
    compiler = doctor.check_compiler()
    assert (compiler.status, compiler.fix) == ("warn", "sudo apt-get install g++")
    redis = doctor.check_redis(GatewaySettings(), tmp_path)
    assert redis.status == "fail" and "apt-get install redis-server" in redis.fix


def test_redis_with_known_faults_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_redis(GatewaySettings(), tmp_path).status == "ok"  # the bundled one
    monkeypatch.setattr(redis_server, "bundled_binary", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    server = tmp_path / "redis-server"
    for version, status in (("7.4.5", "warn"), ("7.4.6", "ok")):
        server.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
        server.chmod(0o755)
        line = doctor.check_redis(GatewaySettings(), tmp_path)
        assert line.status == status and f"{version} ({server})" in line.detail
        assert ("CVE-2025-49844" in line.detail) == (status == "warn")


def test_redis_that_cannot_read_the_data_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher starts a server that reads what an earlier one left, whichever it prefers."""
    base = tmp_path / "redis" / "appendonlydir" / "appendonly.aof.1.base.rdb"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"REDIS0012")
    monkeypatch.setenv("PATH", str(tmp_path))
    line = doctor.check_redis(GatewaySettings(), tmp_path)
    assert line.status == "fail" and "written by a newer Redis, which Valkey cannot read" in line.detail
    assert line.fix == "install redis-server, or move that directory away"


def test_image_with_kernels_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "cpu_flags", lambda: build.VARIANTS[-1].needs)
    build.prebuilt_path(build.VARIANTS[0]).touch()  # for a better CPU than this one
    assert doctor.check_compiler().status == "warn"
    build.prebuilt_path(build.VARIANTS[-1]).touch()
    assert doctor.check_compiler().status == "ok"


def test_refused_tile_registers_are_a_warning_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "the system refuses tile registers: Operation not permitted"
    monkeypatch.setattr(build, "cpu_flags", lambda: build.VARIANTS[0].needs)
    monkeypatch.setattr(build, "tiles_refusal", lambda: refusal)
    (line,) = doctor.check_tiles()
    assert line.status == "warn" and line.detail.startswith(refusal) and "AVX-512" in line.detail
    monkeypatch.setattr(build, "tiles_refusal", lambda: "")
    assert [check.status for check in doctor.check_tiles()] == ["ok"]
    monkeypatch.setattr(build, "cpu_flags", lambda: build.VARIANTS[1].needs)
    assert doctor.check_tiles() == []


def test_gpu_is_needed_only_when_the_device_is_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: Facts())
    for device, status in (("auto", "ok"), ("cuda", "fail")):
        assert [check.status for check in doctor.check_gpu(device, tmp_path)] == [status]
    monkeypatch.setattr(doctor, "gather", lambda: pytest.fail("it was read"))
    assert [check.status for check in doctor.check_gpu("cpu", tmp_path)] == ["ok"]
    monkeypatch.setattr(doctor, "gather", machine)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(1 << 38)  # sparse
    assert {check.name: check.status for check in doctor.check_gpu("cuda", tmp_path)}["gpu mem"] == "fail"
    first = tmp_path / "x-00001-of-00002.gguf"  # small beside the other part
    for part in (first, tmp_path / "x-00002-of-00002.gguf"):
        assert {check.name: check.status for check in doctor.check_gpu("cuda", first)}["gpu mem"] == "ok"
        with part.open("wb") as weights:
            weights.truncate(1 << 20 if part == first else 1 << 38)
    assert {check.name: check.status for check in doctor.check_gpu("cuda", first)}["gpu mem"] == "fail"


def test_stored_and_random_weights_must_fit_in_memory(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    stored = WorkerSettings(model=model, device="cpu")
    assert doctor.check_memory(stored).status == "ok"
    write_weights(model / "model.safetensors", rows=1 << 22)  # 4 TiB
    assert doctor.check_memory(stored).status == "fail" and "needs 4096.5 GiB" in doctor.check_memory(stored).fix
    (model / "model.safetensors").unlink()
    dummy = WorkerSettings(model=model, device="cpu", load_format="dummy")
    assert doctor.check_memory(dummy).status == "ok"
    config = json.loads((model / "config.json").read_text())
    # 4096 layers, each 4 x 2^20 attention weights and 3 x 2^30 of the MLP, in two bytes: 24,608 GiB.
    large = {**config, "hidden_size": 1 << 10, "intermediate_size": 1 << 20, "num_hidden_layers": 4096}
    (model / "config.json").write_text(json.dumps(large))
    assert f"{model}: needs 24608.5 GiB, " in doctor.check_memory(dummy).fix
    options = ["up", "--model", str(model), "--load-format", "dummy", "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, ConfigurationError) and "needs 24608.5 GiB" in str(result.exception)
    assert not list((tmp_path / "run").glob("redis*"))


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        ({"tp": 1, "pp": 1}, 0, []),
        ({"tp": 2, "pp": 1, "device": "cpu"}, 0, [("ok", "TP=2 x PP=1: 2 processes")]),
        ({"tp": 2, "pp": 2, "device": "cpu"}, 0, [("warn", "TP=2 x PP=2: 4 processes, 2 cores")]),
        ({"tp": 2, "pp": 2, "device": "cuda"}, 1, [("fail", "TP=2 x PP=2: 4 processes, 1 GPU")]),
    ],
)
def test_ranks_need_a_core_or_a_gpu_each(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], gpus: int, said: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 2)
    facts = machine() if gpus else Facts()
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert len(facts.devices) == gpus
    checks = doctor.check_ranks(WorkerSettings(**settings))
    assert [(check.status, check.detail) for check in checks] == said


def test_doctor_in_an_image_needs_no_torch() -> None:
    """The image of gateway, scheduler and operations has none."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from services.launcher.doctor import examine\n"
        "print([check.name for check in examine({})])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_env(**{doctor.CONTAINER: "1"}), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "['python', 'redis', 'model']", done.stderr

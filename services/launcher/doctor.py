"""Run `orcinus doctor`: check what a local stack needs here, each line ok, warn or fail, with what to do."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from services.launcher import redis_server
from services.launcher.check import Check
from services.launcher.gpu.checks import judge
from services.launcher.gpu.facts import Facts, device_files, gather
from services.launcher.model_check import free_memory, memory_problem, model_problem, read_model, wants_gpu
from services.launcher.rundir import RunDir
from services.launcher.up import port_problem
from services.worker.gpu_choice import demands_gpu
from services.worker.models.config import load_config
from shared.command_line.options import Values, build
from shared.errors import ConfigurationError, ModelError
from shared.messages import hide_password, quantity
from shared.models.gguf.parts import part_names
from shared.models.hub import gguf_in
from shared.settings import GatewaySettings, LauncherSettings, SchedulerSettings, WorkerSettings

GIB = 1 << 30
TESTED = ((3, 11), (3, 12), (3, 13))


CONTAINER = "ORCINUS_CONTAINER"
"""Set in the images. There the services run in other containers: what the launcher needs of a machine says nothing."""


def in_image() -> bool:
    return bool(os.environ.get(CONTAINER))


def examine(values: Values) -> Iterator[Check]:
    """Yield every check, none of which changes anything. Raise ConfigurationError when a setting cannot be read."""
    launcher = build(LauncherSettings, values)
    gateway = build(GatewaySettings, values)
    worker = build(WorkerSettings, values)
    build(SchedulerSettings, values)
    yield check_python()
    if in_image():
        yield check_redis(gateway, launcher.run_dir)
        yield check_model(worker.model, worker.load_format)
        return
    yield check_compiler()
    yield from check_tiles()
    yield check_redis(gateway, launcher.run_dir)
    yield from check_gpu(worker.device, worker.model)
    yield from check_ports(gateway, launcher.run_dir)
    yield check_disk(launcher.run_dir)
    yield from check_ranks(worker)
    yield check_memory(worker, len(launcher.roles()))
    yield check_model(worker.model, worker.load_format)


def show(checks: Iterable[Check]) -> list[Check]:
    """Print checks as they come, and return them."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    styles, shown = {"ok": "green", "warn": "yellow", "fail": "bold red"}, []
    for check in checks:
        shown.append(check)
        console.print(f"[{styles[check.status]}]{check.status:4}[/]  {check.name:9} {escape(check.detail)}")
        if check.fix:
            console.print(f"                {escape('-> ' + check.fix)}")
    return shown


def check_python() -> Check:
    number = platform.python_version()
    detail = f"{number} ({sys.executable})"
    if tuple(int(part) for part in number.split(".")[:2]) not in TESTED:
        return Check("python", "warn", f"{detail}: not tested", "make clean, then make run PYTHON=python3.12")
    return Check("python", "ok", detail)


def check_compiler() -> Check:
    from kernels.cpu.build import VARIANTS, prebuilt_path, usable_flags  # imports torch, which not every image has

    if any(variant.needs <= usable_flags() and prebuilt_path(variant).is_file() for variant in VARIANTS):
        return Check("compiler", "ok", "not needed: the CPU kernels came compiled")
    if compiler := shutil.which("g++"):
        first = _output([compiler, "--version"]).splitlines()
        return Check("compiler", "ok", first[0] if first else compiler)
    return Check(
        "compiler",
        "warn",
        "no g++: CPU kernels cannot be compiled, the slower reference kernels run",
        "sudo apt-get install g++",
    )


def check_tiles() -> list[Check]:
    """Return one line on a CPU with AMX: do its tile registers serve? None on another."""
    from kernels.cpu.build import TILE_FLAGS, cpu_flags, tiles_refusal

    if not cpu_flags() >= TILE_FLAGS:
        return []
    if refusal := tiles_refusal():
        fix = "allow arch_prctl in the seccomp profile; Linux 5.16 or newer is needed"
        return [Check("amx", "warn", f"{refusal}; the slower AVX-512 kernels serve bfloat16", fix)]
    return [Check("amx", "ok", "tile registers serve bfloat16")]


def check_redis(gateway: GatewaySettings, run_dir: Path) -> Check:
    """Return one line: does the Redis of the settings answer, or may the server be used that `up` would start?"""
    if "redis_url" in gateway.model_fields_set:
        try:
            version = redis_server.check_server(gateway.redis_url, **gateway.redis_options())
        except ConfigurationError as error:
            fix = "docker compose ps redis" if in_image() else "start that Redis, or unset ORCINUS_REDIS_URL"
            return Check("redis", "fail", str(error), fix)
        return _check_version(f"{version} at {hide_password(gateway.redis_url)}", version, version.startswith("Valkey"))
    try:
        binary = redis_server.binary_for(run_dir)
    except ConfigurationError as error:
        problem, _, fix = str(error).rpartition("; ")
        return Check("redis", "fail", problem, fix)
    text = _output([str(binary), "--version"])
    found = re.search(r"v=(\d+)\.(\d+)\.(\S+)", text)
    if found is None:
        return Check("redis", "fail", f"{binary} does not run", "sudo apt-get install redis-server")
    detail = f"{'.'.join(found.groups())} ({binary}), started by the launcher"
    if (int(found[1]), int(found[2])) < redis_server.OLDEST:
        return Check("redis", "fail", f"{detail}: older than 6.2", "sudo apt-get install redis-server")
    return _check_version(detail, ".".join(found.groups()), "valkey" in text.lower())


def _check_version(detail: str, version: str, is_valkey: bool) -> Check:
    """Return the line of a Redis that can be used; a warning where its version has known faults."""
    if redis_server.is_mended(version, is_valkey):
        return Check("redis", "ok", detail)
    fix = "update it, unless its distribution has mended that under the old number; the bundled Valkey has it mended"
    return Check("redis", "warn", f"{detail}: clients may run code in it (CVE-2025-49844)", fix)


def check_gpu(device: str, model: Path) -> list[Check]:
    """Return one line without a GPU; with one, a line for each thing that must fit."""
    return judge(Facts() if device == "cpu" else gather(), device, _weights_bytes(model))


def check_ports(gateway: GatewaySettings, run_dir: Path) -> list[Check]:
    launcher = RunDir(run_dir).owner()
    checks = []
    ports = [("port", gateway.host, gateway.port), ("ops port", gateway.ops_host, gateway.ops_port)]
    if gateway.grpc_port:
        ports.append(("gRPC port", gateway.host, gateway.grpc_port))
    for name, host, port in ports:
        problem = port_problem(host, port)
        if problem and launcher:
            checks.append(Check(name, "warn", f"{host}:{port}: {problem} (Orcinus runs here: pid {launcher})"))
        elif problem:
            option = "PORT=" if name == "port" else f"--{name.lower().replace(' ', '-')}"
            checks.append(Check(name, "fail", f"{host}:{port}: {problem}", f"choose another with {option}"))
        else:
            checks.append(Check(name, "ok", f"{host}:{port} is free"))
    return checks


def check_disk(run_dir: Path) -> Check:
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / GIB:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Check("disk", "fail", f"{place} cannot be written", "choose another place with --run-dir")
    if free < GIB:
        return Check("disk", "fail", detail, "Redis' file, logs and kernels need 1 GiB: free some, or --run-dir")
    if free < 4 * GIB:
        return Check("disk", "warn", detail, "Redis' file and logs grow under load: 4 GiB are comfortable")
    return Check("disk", "ok", detail)


def check_ranks(worker: WorkerSettings) -> list[Check]:
    """Return one line for a replica of several processes; none for a single one."""
    ranks, cores = worker.tp * worker.pp, psutil.cpu_count(logical=False) or 1
    if ranks == 1:
        return []
    detail = f"TP={worker.tp} x PP={worker.pp}: {ranks} processes"
    on_gpu = wants_gpu(worker) and (demands_gpu(worker) or device_files())
    if on_gpu and (gpus := len(gather().devices)) < ranks:
        return [
            Check(
                "ranks", "fail", f"{detail}, {quantity(gpus, 'GPU')}", "one GPU a rank: lower TP or PP, or DEVICE=cpu"
            )
        ]
    if not on_gpu and cores < ranks:
        return [
            Check(
                "ranks",
                "warn",
                f"{detail}, {quantity(cores, 'core')}",
                "ranks that share a core are slower than one process",
            )
        ]
    return [Check("ranks", "ok", detail)]


def check_memory(worker: WorkerSettings, replicas: int = 1) -> Check:
    """One line: do the weights, as they are held, fit into what is free?"""
    available = free_memory()
    try:
        facts, config = read_model(worker.model, worker.load_format), load_config(gguf_in(worker.model))
        held = replicas * facts.held_bytes(worker, config)
        problem = memory_problem(worker.model, worker, replicas)
    except ModelError:
        return Check("memory", "ok", f"{available / GIB:.1f} GiB available")  # the line of the model says more
    detail = f"{available / GIB:.1f} GiB available, weights {held / GIB:.2f} GiB"
    if problem:
        return Check("memory", "fail", detail, problem)
    if available < 2 * held + GIB:
        return Check("memory", "warn", detail, "little is left for KV blocks: lower --max-seqs")
    return Check("memory", "ok", detail)


def check_model(model: Path, load_format: str) -> Check:
    if problem := model_problem(model, load_format):
        return Check("model", "fail", problem, "give a Hugging Face directory with MODEL=, --model or ORCINUS_MODEL")
    return Check("model", "ok", str(model))


def _weights_bytes(model: Path) -> int:
    files = model.glob("*.safetensors") if model.is_dir() else map(Path, part_names(str(model)))
    return sum(file.stat().st_size for file in files if file.is_file())


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""

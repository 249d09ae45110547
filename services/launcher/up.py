"""Run `orcinus up`: check all that can be checked before anything starts, then supervise the local stack."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from services.hub.store import hold
from services.launcher import redis_server
from services.launcher.gpu.facts import cupy_packages, device_count, device_files, torch_cuda
from services.launcher.model_check import (
    expected_bytes,
    free_memory,
    memory_problem,
    model_problem,
    read_config,
    shape_problem,
    share_of,
    size_problem,
    sum_problem,
    wants_gpu,
)
from services.launcher.placements import SleepingServices
from services.launcher.probes import GatewayProbe, RedisProbe, SchedulerProbe, WorkerProbe
from services.launcher.rundir import RunDir, StackFacts
from services.launcher.screen import Screen
from services.launcher.supervisor import StackSupervisor
from services.worker.checkpoint.stored import read_stored
from services.worker.gpu_choice import demands_gpu, refused_on_gpu
from services.worker.models.config import check_split, load_config
from shared import kept_files
from shared.command_line.options import Values, build, effective, env_name, fields_of, flag
from shared.errors import ConfigurationError
from shared.keys import PLACER, PLACER_KEYS
from shared.messages import hide_password, quantity
from shared.models.hub import as_hub_name, parse_name
from shared.processes.listeners import listen
from shared.processes.supervisor import WRAPPER, ServiceSpec
from shared.settings import DEMO_MODEL, ROOT, GatewaySettings, LauncherSettings, SchedulerSettings, WorkerSettings

CLASSES: tuple[type[BaseSettings], ...] = (GatewaySettings, WorkerSettings, SchedulerSettings, LauncherSettings)
PR_SET_PDEATHSIG = 1
MODEL_SOURCES = "MODEL=, --model or ORCINUS_MODEL"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder in it, which the workers check
OWN_FOLDER_S, OWN_FOLDER_AGAIN_S = 5.0, 0.02
"""How long the lock of a stack's folder there is waited for, and between two tries."""
DEMO_PROMPT = "Read and return a line from the stream."
"""The docstring of a function: the demo model was trained to answer with one."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of one model. where: its place in the file of `--models`, which gives those in `of_file`."""

    values: Values
    where: str = ""
    of_file: Mapping[str, str] = field(default_factory=dict)  # names of settings to fields of the file

    def source_of(self, name: str) -> str:
        """Return how an error calls the source of an option."""
        return f"{self.where}: {self.of_file[name]}" if name in self.of_file else flag(name)

    @contextlib.contextmanager
    def prefix_errors(self) -> Iterator[None]:
        """Let errors inside begin with the model's place in the file."""
        try:
            yield
        except ConfigurationError as error:
            if not self.where or str(error).startswith(self.where):
                raise
            raise ConfigurationError(f"{self.where}: {error}") from error


@dataclass(frozen=True, slots=True)
class ModelStack:
    """The settings of what runs for one model, and the options from which they were made."""

    options: ModelOptions
    launcher: LauncherSettings
    gateway: GatewaySettings
    scheduler: SchedulerSettings
    worker: WorkerSettings

    @classmethod
    def of(cls, options: ModelOptions) -> ModelStack:
        """Raise ConfigurationError."""
        values, named = options.values, options.source_of
        with options.prefix_errors():
            return cls(
                options,
                build(LauncherSettings, values, named),
                build(GatewaySettings, values, named),
                build(SchedulerSettings, values, named),
                build(WorkerSettings, values, named),
            )


def options_by_model(values: Values) -> list[ModelOptions]:
    """Return the options of each model, the gateway's own first: those of `--models`, else of the one of `--model`.

    Raise ConfigurationError.
    """
    gateway = build(GatewaySettings, values)
    entries = gateway.models_file().models
    if not entries:
        return [ModelOptions(values)]
    first = [entry for entry in entries if entry.name == gateway.served_model_name]
    if not first:
        raise ConfigurationError(
            f"--models {gateway.models}: has no model {gateway.served_model_name!r}; leave out MODEL, or name one of it"
        )
    launcher = build(LauncherSettings, values)
    if launcher.prefill or launcher.decode:
        raise ConfigurationError("--models: excludes PREFILL and DECODE; give `workers` in the file")
    others = [entry for entry in entries if entry is not first[0]]
    return [
        ModelOptions({**values, **entry.values()}, f"{gateway.models}: model {entry.name!r}", entry.fields())
        for entry in [*first, *others]
    ]


def up(values: Values, check_policy: Callable[[str, str], None], stop_with_parent: bool = False) -> int:
    """Run until stopped. Return the exit code; raise ConfigurationError before anything was started.

    check_policy: raises it for a policy that no scheduler knows; it gets the policy and the name of its source.
    """
    values = absolute_paths(values)
    if stop_with_parent:
        _die_with_parent()
    stacks, most = read_stacks(values, check_policy)
    for stack in stacks:
        with stack.options.prefix_errors():
            stack.gateway.api_keys()
            check_addresses(at_once(stacks, most), stack.worker)
    for stack in stacks:
        with stack.options.prefix_errors():
            _fetch_model(stack.launcher, stack.worker)
    stacks = [ModelStack.of(stack.options) for stack in stacks]  # which find the models now
    check_models(stacks, most)
    for stack in stacks:
        hold(stack.worker.model)
    launcher, gateway, scheduler, worker = stacks[0].launcher, stacks[0].gateway, stacks[0].scheduler, stacks[0].worker
    screen = Screen()
    if problem := unused_gpu(worker):
        screen.event(f"the GPU of this machine is not used: {problem}")
    with RunDir(launcher.run_dir) as run_dir, contextlib.ExitStack() as held:
        check_ports(gateway)
        compile_kernels(worker)
        local_redis = None
        access: dict[str, Any]
        if "redis_url" not in gateway.model_fields_set:
            local_redis = redis_server.configure(run_dir.path, launcher.redis_memory_mb * redis_server.MIB)
            url, access = local_redis.url, {"password": local_redis.password}
        else:
            url, access = gateway.redis_url, gateway.redis_options()
            version = redis_server.check_server(url, **access)
            screen.event(f"redis: {version} at {hide_password(url)}")
        sockets = {
            "port": held.enter_context(listen(gateway.host, gateway.port, "port")),
            "ops port": held.enter_context(listen(gateway.ops_host, gateway.ops_port, "ops port")),
        }
        folder = held.enter_context(shared_folder(run_dir.path, worker.kv_share_dir, stacks, most > 0))
        if most and worker.kv_share_dir is None and (problem := share_problem(run_dir.path)):
            screen.event(f"the KV of a model that sleeps is not kept: {problem}")
        client = redis_server.client(url, **access)
        specs = process_specs(stacks, local_redis, url, access.get("password"), client, folder, sockets, most)

        run_dir.write_facts(
            StackFacts(
                gateway.served_model_name,
                scheduler.shard,
                api_url(gateway),
                ops_url(gateway),
                "" if local_redis else hide_password(url),
            )
        )

        run_dir.write_settings(
            {
                **{
                    spec.name.removesuffix("-0"): effective(_settings_of(spec, stacks), values, spec.env)
                    for spec in specs
                    if spec.name.startswith(("gateway-", "scheduler-", "worker-"))
                },
                "up": effective(launcher, values),
            }
        )

        def on_ready() -> None:
            screen.settle()
            screen.event(f"ready in {screen.elapsed_s():.1f} s; logs in {run_dir.logs}; Ctrl-C stops everything")
            others = [stack.gateway.served_model_name for stack in stacks[1:]]
            screen.result(greeting(gateway, others, needs_key=has_made_keys(client, gateway)))

        try:
            sleeping = sleeping_services(client, specs, most) if most else None
            return StackSupervisor(
                run_dir, specs, screen, on_ready=on_ready, stop_with_parent=stop_with_parent, sleeping=sleeping
            ).run()
        finally:
            screen.settle()
            if local_redis is not None:
                local_redis.remove()


def read_stacks(values: Values, check_policy: Callable[[str, str], None]) -> tuple[list[ModelStack], int]:
    """Return the models and how many of them are awake at a time, 0 for all. check_policy: as for `up`.

    Raise ConfigurationError for what the machine does not have.
    """
    stacks = [ModelStack.of(each) for each in options_by_model(values)]
    most = stacks[0].gateway.models_file().awake
    for stack in stacks:
        with stack.options.prefix_errors():
            if "policy" in stack.options.of_file:
                check_policy(stack.scheduler.policy, stack.options.source_of("policy"))
            check_device(at_once(stacks, most), stack.worker)
            if most > 1 and on_gpu(stack.worker):
                raise ConfigurationError(
                    f"{stack.gateway.models}: awake: {most} models on GPUs; write 1, or leave it out and give each "
                    "model GPUs of its own"
                )
    return stacks, most


def check_ports(gateway: GatewaySettings) -> None:
    """Raise ConfigurationError for a port that is taken, with the setting that chooses another."""
    ports = [(gateway.host, gateway.port, "port"), (gateway.ops_host, gateway.ops_port, "ops_port")]
    if gateway.grpc_port:
        ports.append((gateway.host, gateway.grpc_port, "grpc_port"))
    for host, port, name in ports:
        if problem := port_problem(host, port):
            choose = f"PORT={_other_port(port)} with make run, or {flag(name)} or {env_name(name)}"
            raise ConfigurationError(f"port {port} on {host} cannot be used ({problem}); choose another: {choose}")


def port_problem(host: str, port: int) -> str:
    """Return why a server cannot listen there; empty when it can."""
    try:
        info = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(info[0], info[1]) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(info[4])
            listener.listen(1)
    except OverflowError:
        return "it is past 65535"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def cuda_problem() -> str:
    """Return what DEVICE=cuda lacks at first sight; empty when nothing. `orcinus doctor` and the worker look closer."""
    if not device_files():
        return "this machine shows no NVIDIA GPU; use DEVICE=cpu, or install its driver"
    if not torch_cuda():
        return "torch is a build for CPUs; make run DEVICE=cuda installs the one for GPUs"
    if not cupy_packages():
        return "CuPy is not installed; make run DEVICE=cuda installs it"
    return ""


def kv_problem(worker: WorkerSettings) -> str:
    """Return why the KV cache cannot have its type with these kernels, with the remedy; empty when it can."""
    without = {"int8": ("reference", "cuda", "emulator"), "fp8": ("reference",)}.get(worker.kv_dtype, ())
    given = f"--kernels {worker.kernels}" if worker.kernels in without else ""
    if worker.kv_dtype == "int8" and worker.device == "cuda":
        given = "DEVICE=cuda"
    if not given:
        return ""
    kernels, remedy = {"int8": ("cpu", "DEVICE=cpu and --kernels cpu"), "fp8": ("cpu or cuda", "--kernels auto")}[
        worker.kv_dtype
    ]
    return (
        f"--kv-dtype {worker.kv_dtype} needs the {kernels} kernels, and {given} rules them out; "
        f"give {remedy}, or --kv-dtype auto"
    )


def unused_gpu(worker: WorkerSettings) -> str:
    """Return why a GPU that is here and may be used will not be used; empty when it will, or there is none."""
    return "" if demands_gpu(worker) or not wants_gpu(worker) or not device_files() else cuda_problem()


def api_url(gateway: GatewaySettings) -> str:
    """Return the address of the API as a program on this machine reaches it, without /v1."""
    return f"{'https' if gateway.tls_cert else 'http'}://{_reachable(gateway.host)}:{gateway.port}"


def ops_url(gateway: GatewaySettings) -> str:
    """Return the address of the live page, health and metrics as a program on this machine reaches it."""
    return f"http://{_reachable(gateway.ops_host)}:{gateway.ops_port}"


def _reachable(host: str) -> str:
    """Return a host of this machine for a URL; a server on all addresses is reached by the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(host, host)  # noqa: S104
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def has_made_keys(client: Any, gateway: GatewaySettings) -> bool:
    """Return whether `orcinus keys` has made a key, so that requests need one; False where Redis does not say."""
    import redis

    try:
        return bool(client.exists(gateway.keys.keys_version))
    except (redis.RedisError, OSError):
        return False


def greeting(gateway: GatewaySettings, others: Sequence[str] = (), needs_key: bool = False) -> list[str]:
    """Return the address, and one curl line that works as it stands.

    others: further models at the address. needs_key: also where no setting asks for one.
    """
    url = api_url(gateway)
    endpoint, fields = first_request(gateway.model)
    request = {"model": gateway.served_model_name, **fields}
    curl = f"curl {url}/v1/{endpoint} -H 'Content-Type: application/json'"
    if gateway.api_key is None and gateway.api_key_file is not None:
        curl += f' -H "Authorization: Bearer $(head -n 1 {shlex.quote(str(gateway.api_key_file))})"'
    elif gateway.api_key is not None or gateway.require_key or needs_key:
        curl += ' -H "Authorization: Bearer $ORCINUS_API_KEY"'
    lines = [f"Orcinus serves {', '.join([gateway.served_model_name, *others])} at {url}/v1"]
    if gateway.model == DEMO_MODEL:
        lines.append(
            "The demo model is a toy of 4 million parameters that shows the system; MODEL=ORG/NAME serves another"
        )
    chat = "" if endpoint in ("embeddings", "rerank") else f"chat: {url}/   "
    lines.append(f"{chat}live page: {ops_url(gateway)}/dashboard   state: {own_command()} status")
    return [*lines, f"{curl} -d {shlex.quote(json.dumps(request))}"]


def first_request(model: Path) -> tuple[str, dict[str, Any]]:
    """Return an endpoint that a model is for, and fields of a request to it."""
    generated = {"max_tokens": 64, "temperature": 0}
    if model == DEMO_MODEL:
        return "chat/completions", generated | {"messages": [{"role": "user", "content": DEMO_PROMPT}]}
    family = load_config(model).family
    if not family.is_encoder:  # not every model has a chat template
        return "completions", generated | {"prompt": "The capital of France is"}
    if not family.scores:
        return "embeddings", {"input": "The capital of France is Paris."}
    return "rerank", {"query": "What is the capital of France?", "documents": ["Paris.", "A river."]}


def own_command() -> str:
    """Return what to type for `orcinus` here: its path where no active environment has it on PATH."""
    path = Path(sys.executable).with_name("orcinus")
    if shutil.which("orcinus") or not path.exists():
        return "orcinus"
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _fetch_model(launcher: LauncherSettings, worker: WorkerSettings) -> None:
    """Fetch a model that is given by its Hub name, unless it is on this machine. Raise ConfigurationError.

    What its config.json and the sizes of its files tell is checked before the weights are fetched.
    """
    name = as_hub_name(worker.model)
    if name is None:
        return
    from services.hub.fetch import pull  # half a second, for a network that most starts do not need
    from services.hub.progress import Bars

    def look(snapshot: Path, weights_bytes: int) -> None:
        config = read_config(snapshot)
        held = expected_bytes(config, weights_bytes, worker, load_config(snapshot))
        is_quantized = read_stored(config, str(name)) is not None
        if problem := size_problem(str(name), held, worker, len(launcher.roles()), is_quantized):
            raise ConfigurationError(problem)

    bars = Bars()
    bars.note(f"{name} is not on this machine: fetching it")
    pull(name, bars, before_weights=look)


def check_model(launcher: LauncherSettings, worker: WorkerSettings, sources: str) -> None:
    """sources: where the model can be given."""
    if problem := model_problem(worker.model, worker.load_format):
        raise ConfigurationError(f"{problem} ({sources})")
    if problem := shape_problem(worker.model, worker.load_format):
        raise ConfigurationError(problem)
    config = load_config(worker.model)
    check_split(config, worker.tp, worker.pp)
    if on_gpu(worker) and (refusal := refused_on_gpu(config, "give DEVICE=cpu")):
        raise ConfigurationError(refusal)
    if problem := memory_problem(worker.model, worker, len(launcher.roles())):
        raise ConfigurationError(problem)


def compile_kernels(worker: WorkerSettings) -> None:
    """Compile the CPU kernels unless that was done before, and show the progress.

    Without a compiler the worker takes slower ones.

    A process that ends with this one does it: the launcher never imports torch.
    """
    if on_gpu(worker) or worker.kernels not in ("auto", "cpu"):
        return
    guarded = [sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid())]
    subprocess.run([*guarded, sys.executable, str(ROOT / "kernels/cpu/build.py"), "--for-run"], check=False)


def at_once(stacks: Sequence[ModelStack], most: int) -> int:
    """Return how many workers run at a time at most. most: models that are awake; 0 means all."""
    counts = sorted((len(stack.launcher.roles()) for stack in stacks), reverse=True)
    return sum(counts[: most or None])


def sleeping_services(client: Any, specs: Sequence[ServiceSpec], most: int) -> SleepingServices:
    """Return the workers with their models: the placer decides by model which of them run."""
    workers = [spec for spec in specs if spec.name.startswith("worker-")]
    return SleepingServices(client, {spec.name: spec.env[env_name("served_model_name")] for spec in workers}, most)


def check_models(stacks: Sequence[ModelStack], most: int = 0) -> None:
    """Raise ConfigurationError for a model that cannot be served, or models that do not fit together. most: that are
    awake at a time; 0 means all.
    """
    for stack in stacks:
        with stack.options.prefix_errors():
            check_model(stack.launcher, stack.worker, stack.options.of_file.get("model", MODEL_SOURCES))
    shares = [
        share_of(stack.worker.model, stack.worker, len(stack.launcher.roles()))
        for stack in stacks
        if not on_gpu(stack.worker)  # there each worker has its own
    ]
    free = free_memory()
    largest = sorted(shares, key=lambda share: share.needed_bytes(free), reverse=True)[: most or None]
    largest.sort(key=shares.index)
    if len(shares) > 1 and (problem := sum_problem(largest, free)):
        raise ConfigurationError(problem)


def check_device(workers: int, worker: WorkerSettings) -> None:
    """Raise ConfigurationError for what this machine does not have. workers: of all models, at a time."""
    if problem := kv_problem(worker):
        raise ConfigurationError(problem)
    if worker.device == "cuda" and (problem := cuda_problem()):
        raise ConfigurationError(f"DEVICE=cuda: {problem}")
    ranks = worker.tp * worker.pp
    if workers > 1 and on_gpu(worker) and workers * ranks > (gpus := device_count()):
        raise ConfigurationError(
            f"{workers} replicas: each needs {quantity(ranks, 'GPU')} of its own, this machine shows {gpus}; "
            f"lower {flag('replicas')}, serve fewer models at a time, or give DEVICE=cpu"
        )


def check_addresses(replicas: int, worker: WorkerSettings) -> None:
    """Raise ConfigurationError for an address that several workers on one machine cannot share."""
    if replicas == 1:
        return
    if not worker.listen.endswith(":0"):
        raise ConfigurationError(f"{replicas} replicas: {flag('listen')} {worker.listen} is one port; let each choose")
    if worker.advertise:
        raise ConfigurationError(
            f"{replicas} replicas: {flag('advertise')} {worker.advertise} is one worker's address; leave it out"
        )


def on_gpu(worker: WorkerSettings) -> bool:
    """Will a worker with these settings compute on a GPU?"""
    return device_files() and wants_gpu(worker) and not unused_gpu(worker)


def replica_env(worker: WorkerSettings, number: int, replicas: int, gpu: int = -1, running: int = 0) -> dict[str, str]:
    """Return the settings of one of several workers: its name, its GPU or its part of the cores.

    Its part of the memory follows from that of the cores (services/worker/kv/cache.py). gpu: its number among those
    that run, where not all do at a time; running: how many do.
    """
    if replicas == 1:
        return {}
    env, ranks = {env_name("worker_id"): replica_id(worker.worker_id, number)}, worker.tp * worker.pp
    if worker.worker_metrics_port:
        env[env_name("worker_metrics_port")] = str(worker.worker_metrics_port + number)
    if on_gpu(worker):
        first = (number if gpu < 0 else gpu) * ranks
        return env | {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in range(first, first + ranks))}
    if not worker.threads:
        env[env_name("threads")] = str(max(1, len(os.sched_getaffinity(0)) // ((running or replicas) * ranks)))
    return env


def share_env(role: str, folder: Path, sleeps: bool) -> dict[str, str]:
    """Return the settings of a worker that shares its host tier: with other roles, or with the next worker of a model
    that sleeps, if that tier would lie in memory. folder: for these tiers.
    """
    if role == "both":
        is_in_memory = folder.is_relative_to(SHARED_MEMORY)
        return {env_name("kv_share_dir"): str(folder)} if sleeps and is_in_memory else {}
    return {env_name("worker_role"): role, env_name("kv_share_dir"): str(folder)}


def share_folder(run_dir: Path) -> Path:
    """Return the folder for the host tiers of a stack's workers, the same each time: in memory where possible."""
    return run_dir / "kv" if share_problem(run_dir) else _folder_in_memory(run_dir)


def share_problem(run_dir: Path) -> str:
    """Return why the host tiers of a stack's workers do not lie in memory; empty if they do."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return f"{SHARED_MEMORY}: is not there or cannot be written; name a folder with {env_name('kv_share_dir')}"
    return _folder_problem(_folder_in_memory(run_dir))


def _folder_problem(folder: Path) -> str:
    """Return why this user may not use a folder; empty for a folder of this user, not a link to one, or for none."""
    try:
        return "" if _is_private(folder.lstat()) else _not_private(folder)
    except FileNotFoundError:
        return ""


def _not_private(folder: Path) -> str:
    return f"{folder}: is no folder of user {os.geteuid()}; remove it, or choose another --run-dir"


def _is_private(status: os.stat_result) -> bool:
    """Return whether this is the status of a folder of this user."""
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)


def _folder_in_memory(run_dir: Path) -> Path:
    """Return a name of its own for each run directory of a user and a host: containers may share the memory."""
    place = f"{socket.gethostname()}\n{run_dir}"
    return SHARED_MEMORY / f"{folder_prefix()}{hashlib.sha256(os.fsencode(place)).hexdigest()[:12]}"


def folder_prefix() -> str:
    return f"orcinus-{os.geteuid()}-"


def lock_own(path: str | Path, folder: int | None = None) -> int | None:
    """Return an open file or folder that this process locks now; None where another one has the lock, or it is gone.

    path: relative to the open `folder`, where it is given. Raise OSError for one that cannot be opened or locked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as opened, contextlib.suppress(BlockingIOError, FileNotFoundError):
        opened.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=folder, follow_symlinks=False)):
            opened.pop_all()
            return descriptor
    return None


def remove_abandoned() -> None:
    """Remove the folders in memory of launchers that were killed, whatever their run directories.

    A launcher holds the lock of its folder while it lives, and a worker that of its file: neither is free by then. An
    older launcher holds none, so the files decide, too.
    """
    names = re.compile(re.escape(folder_prefix()) + "[0-9a-f]{12}")
    try:
        folders = [SHARED_MEMORY / name for name in filter(names.fullmatch, os.listdir(SHARED_MEMORY))]
    except OSError:
        return
    for folder in folders:
        with contextlib.ExitStack() as descriptors, contextlib.suppress(OSError):
            if _folder_problem(folder) or (descriptor := lock_own(folder)) is None:
                continue
            descriptors.callback(os.close, descriptor)
            in_use = False
            for name in os.listdir(descriptor):
                with contextlib.suppress(OSError):  # a link or a socket: no worker makes one, so none uses it
                    file = lock_own(name, descriptor)
                    in_use |= file is None
                    if file is not None:
                        descriptors.callback(os.close, file)
            if not in_use:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Make the folder, or empty it, hold its lock, and remove it at the end. Raise ConfigurationError."""
    deadline = time.monotonic() + OWN_FOLDER_S
    while True:
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
            if problem := _folder_problem(folder):
                raise ConfigurationError(problem)
            descriptor = lock_own(folder)
        except OSError as error:
            raise ConfigurationError(f"{folder}: {error.strerror}; choose another --run-dir") from error
        if descriptor is not None:
            break
        if time.monotonic() > deadline:
            raise ConfigurationError(f"{folder}: another stack uses it; choose another --run-dir")
        time.sleep(OWN_FOLDER_AGAIN_S)  # a launcher that looks for abandoned ones holds it for a moment
    try:
        if not _is_private(os.fstat(descriptor)):  # another user has made it since
            raise ConfigurationError(_not_private(folder))
        os.fchmod(descriptor, 0o700)  # workers refuse any other mode
        for name in os.listdir(descriptor):  # of a launcher of this run directory that was killed
            with contextlib.suppress(OSError):
                _remove_unlocked(name, descriptor)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def shared_folder(run_dir: Path, given: Path | None, stacks: Sequence[ModelStack], sleeps: bool) -> Iterator[Path]:
    """Yield the folder for host tiers: the `given` one, or one that goes with the stack. It is made where workers of
    the stack use it. sleeps: as for `share_env`.

    Files that killed workers, and workers of models that sleep, have left there would keep memory: they are removed at
    the end. In a given folder only those of `stacks` are. Folders in memory of killed launchers are removed at the
    start. Raise ConfigurationError.
    """
    remove_abandoned()
    if given is None:
        folder = share_folder(run_dir)
        is_used = any(share_env(role, folder, sleeps) for stack in stacks for role in stack.launcher.roles())
        with _own_folder(folder) if is_used else contextlib.nullcontext():
            yield folder
        return
    try:
        yield given
    finally:
        for owner in {kept_files.owner_of(stack.gateway.served_model_name, stack.scheduler.shard) for stack in stacks}:
            for file in [*given.glob(f"*.{owner}.kept"), *given.glob(f"*.{owner}.*.reserved")]:
                with contextlib.suppress(OSError):
                    _remove_unlocked(file)


def _remove_unlocked(path: str | Path, folder: int | None = None) -> None:
    """Remove a file that no process has locked, or a folder with all in it. Raise OSError. folder: see `lock_own`."""
    status = os.stat(path, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(path, dir_fd=folder)
    elif not stat.S_ISREG(status.st_mode):
        os.unlink(path, dir_fd=folder)
    elif (descriptor := lock_own(path, folder)) is not None:
        try:
            os.unlink(path, dir_fd=folder)
        finally:
            os.close(descriptor)


def replica_id(worker_id: str, number: int) -> str:
    """Return worker-0, worker-1, ...; another name gets a number behind it from the second worker on."""
    return f"{worker_id.removesuffix('-0')}-{number}" if number else worker_id


def process_specs(
    stacks: Sequence[ModelStack],
    local_redis: redis_server.LocalRedis | None,
    url: str,
    password: str | None,
    client: Any,
    folder: Path,
    sockets: Mapping[str, socket.socket],
    most: int = 0,
) -> list[ServiceSpec]:
    """Return all processes: Redis, workers and a scheduler of each model, one gateway. The workers are counted over all
    models: they share the machine. most: models that are awake at a time, which needs a placer; 0 means all.
    """
    launcher, gateway = stacks[0].launcher, stacks[0].gateway
    after = ("redis",) if local_redis else ()
    worker_after = after
    if most:  # until the placer leads, another stack may run workers with these names
        worker_after = (*after, "placer-0")
    specs = []
    if local_redis:
        specs.append(ServiceSpec("redis", local_redis.argv, probe=RedisProbe(client), stop_s=launcher.stop_s))
    total = sum(len(stack.launcher.roles()) for stack in stacks)
    number = 0
    for at, stack in enumerate(stacks):
        keys, worker = stack.gateway.keys, stack.worker
        name = stack.gateway.served_model_name if len(stacks) > 1 else ""
        env = child_env(stack.options.values, stack.launcher, stack.gateway, url, password)
        for place, role in enumerate(stack.launcher.roles()):
            gpu, running = (place, at_once(stacks, most)) if most else (-1, 0)
            replica = {**env, **replica_env(worker, number, total, gpu, running), **share_env(role, folder, most > 0)}
            probe = WorkerProbe(client, keys.worker(replica_id(worker.worker_id, number)))
            argv = service_argv("worker")
            specs.append(
                ServiceSpec(f"worker-{number}", argv, replica, probe, worker_after, launcher.stop_s, ROOT, model=name)
            )
            number += 1
        if at and stack.scheduler.scheduler_metrics_port:
            env[env_name("scheduler_metrics_port")] = str(stack.scheduler.scheduler_metrics_port + at)
        lease = SchedulerProbe(client, keys.lease(stack.scheduler.shard))
        specs.append(
            ServiceSpec(
                f"scheduler-{at}", service_argv("scheduler"), env, lease, after, launcher.stop_s, ROOT, model=name
            )
        )
    drain_s = gateway.drain_s if "drain_s" in gateway.model_fields_set else launcher.stop_s / 2
    env = child_env(stacks[0].options.values, launcher, gateway, url, password)
    serves = GatewayProbe(
        gateway.host, gateway.port, gateway.tls_cert is not None, next(iter(gateway.api_keys()), None)
    )
    stop_s = max(launcher.stop_s, drain_s + 5)
    if most:
        lease_probe = SchedulerProbe(client, PLACER_KEYS.lease(PLACER))
        specs.append(ServiceSpec("placer-0", service_argv("placer"), env, lease_probe, after, launcher.stop_s, ROOT))
    return [
        *specs,
        ServiceSpec("gateway-0", service_argv("gateway"), env, serves, after, stop_s, ROOT, sockets=sockets),
    ]


def service_argv(role: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", role]


def _settings_of(spec: ServiceSpec, stacks: Sequence[ModelStack]) -> BaseSettings:
    """Return the settings that a process was started with."""
    name = (spec.env or {}).get("ORCINUS_SERVED_MODEL_NAME")
    stack = next((each for each in stacks if each.gateway.served_model_name == name), stacks[0])
    of: dict[str, BaseSettings] = {"gateway": stack.gateway, "scheduler": stack.scheduler, "worker": stack.worker}
    return of[spec.name.rpartition("-")[0]]


def child_env(
    values: Values, launcher: LauncherSettings, gateway: GatewaySettings, url: str, password: str | None
) -> dict[str, str]:
    """Return the options as environment variables: a password or a key never stands on a command line."""
    env = {env_name(name): str(value) for name, value in values.items()}
    env["ORCINUS_REDIS_URL"] = url
    if password is not None:
        env["ORCINUS_REDIS_PASSWORD"] = password
    env["ORCINUS_MODEL"] = str(gateway.model.absolute())
    env["ORCINUS_SERVED_MODEL_NAME"] = gateway.served_model_name
    env |= {"HF_HUB_OFFLINE": "1", "HF_TOKEN": ""}  # services fetch nothing
    if gateway.api_key_file is not None:
        env["ORCINUS_API_KEY_FILE"] = str(gateway.api_key_file.absolute())
    if gateway.files_dir is None:
        env["ORCINUS_FILES_DIR"] = str(launcher.run_dir.expanduser().absolute() / "files")
    if "drain_s" not in gateway.model_fields_set:
        env["ORCINUS_DRAIN_S"] = str(launcher.stop_s / 2)  # a user waits at the terminal
    env["PYTHONUNBUFFERED"] = "1"
    return env


def absolute_paths(values: Values) -> Values:
    """Return the values with absolute paths: services run in another directory than the one where they were typed."""

    def is_name(name: str, value: str) -> bool:
        """Tell a Hub name from a path: `./org/name` is never one."""
        return name == "model" and parse_name(value) is not None and not Path(value).exists()

    paths = {name for name, field in fields_of(*CLASSES).items() if "Path" in str(field.annotation)}
    return {
        name: str(Path(value).expanduser().absolute()) if name in paths and not is_name(name, value) else value
        for name, value in values.items()
    }


def _die_with_parent() -> None:
    """Let the kernel send SIGTERM when `make` is killed outright; the supervisor also watches its parent's pid."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _other_port(port: int) -> int:
    return port + 10 if port + 11 <= 65535 else port - 10

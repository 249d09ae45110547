"""Run `orcinus engines`: the schedulers and workers of the models of a file, and the placer where they take turns.

Redis and gateways run elsewhere. Several of these at one Redis, each with the same file, serve the models together:
each has workers of every model that is awake, one scheduler of a model leads and one placer decides.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.hub.store import hold
from services.launcher import redis_server
from services.launcher.placements import SleepingServices
from services.launcher.probes import LedProbe, PlacedProbe, SharedClient, WorkerProbe
from services.launcher.rundir import RunDir
from services.launcher.screen import Screen
from services.launcher.supervisor import StackSupervisor
from services.launcher.up import (
    ModelStack,
    absolute_paths,
    at_once,
    check_models,
    child_env,
    compile_kernels,
    read_stacks,
    replica_env,
    service_argv,
    share_env,
    share_folder,
    share_problem,
    shared_folder,
    sleeping_services,
    unused_gpu,
)
from shared.command_line.options import Values, build, env_name, flag
from shared.errors import ConfigurationError
from shared.keys import model_tag
from shared.messages import hide_password, quantity
from shared.processes.begun import BEGUN_FILE
from shared.processes.supervisor import Service, ServiceSpec
from shared.settings import ROOT, EnginesSettings, GatewaySettings, PlacerSettings, WorkerSettings
from shared.telemetry import logs

STATES_S = 5.0
"""The states of the models are written at least this often: an older file means a supervisor that hangs."""
MAX_PORT = 65535
ANOTHER = (
    f"orcinus engines {flag('run_dir')} .run2, with {flag('worker_id')} and {flag('listen')} of its own where this one "
    "has them"
)


def engines(values: Values, check_policy: Callable[[str, str], None]) -> int:
    """Run until stopped. Return the exit code; raise ConfigurationError before anything was started.

    check_policy: called with a policy and the name of its source; raises ConfigurationError for an unknown policy.
    """
    values = absolute_paths({**values, "models": str(build(PlacerSettings, values).models)})
    stacks, most = read_stacks(values, check_policy)
    check_models(stacks, most)
    for stack in stacks:
        hold(stack.worker.model)
    first = stacks[0]
    users = RedisUsers(first.gateway, build(EnginesSettings, values).redis_users)
    run_dir = RunDir(first.launcher.run_dir, another=ANOTHER)
    folder = first.worker.kv_share_dir or share_folder(run_dir.path)
    specs = engine_specs(stacks, most, users, run_dir, folder)
    screen = Screen(logs.setup("engines", first.gateway.log_level, first.gateway.log_json))
    if problem := unused_gpu(first.worker):
        screen.event(f"the GPU of this machine is not used: {problem}")
    if most and first.worker.kv_share_dir is None and (problem := share_problem(run_dir.path)):
        screen.event(f"the KV of a model that sleeps is not kept: {problem}")
    with run_dir, shared_folder(run_dir.path, first.worker.kv_share_dir, stacks, most > 0):
        compile_kernels(first.worker)

        def on_ready() -> None:
            screen.settle()
            models = f"{quantity(len(stacks), 'model')}, {most or 'all'} of them awake"
            at = hide_password(first.gateway.redis_url)
            screen.event(f"ready in {screen.elapsed_s():.1f} s: {models}, for the gateways at Redis {at}")

        sleeping = sleeping_services(users.client("placer"), specs, most) if most else None
        report = _Report(screen, run_dir, sleeping)
        return StackSupervisor(run_dir, specs, report, on_ready=on_ready, sleeping=sleeping, has_logs=False).run()


class RedisUsers:
    """The Redis users of the processes: one user for each kind, or the user of the settings for all."""

    def __init__(self, settings: GatewaySettings, folder: Path | None) -> None:
        """folder: holds the passwords of the users; None means one user for all. Raise ConfigurationError."""
        import redis

        parse: Callable[[str], dict[str, Any]] = redis.connection.parse_url
        try:
            address = parse(settings.redis_url)
        except ValueError as error:
            raise ConfigurationError(
                f"{env_name('redis_url')}: {str(error).rstrip('.')}; check its part behind the port"
            ) from error
        if folder is not None and address.keys() & {"username", "password"}:
            raise ConfigurationError(
                f"{flag('redis_users')}={folder}: the address of Redis has a user already; take it out of "
                f"{env_name('redis_url')}, or leave {flag('redis_users')} out"
            )
        self._url = settings.redis_url
        self._options = settings.redis_options()
        self._folder = folder

    def options(self, user: str) -> dict[str, Any]:
        """Return name and password, and a CA, as redis-py takes them beside the URL. Raise ConfigurationError."""
        if self._folder is None:
            return self._options
        file = self._folder / f"{user}.password"
        try:
            password = file.read_text().strip()
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigurationError(
                f"{flag('redis_users')}: {file}: cannot be read: {why}; deploy/redis_users.py writes it"
            ) from error
        if not password:
            raise ConfigurationError(f"{flag('redis_users')}: {file}: empty; deploy/redis_users.py writes it")
        return {**self._options, "username": user, "password": password}

    def env(self, user: str) -> dict[str, str]:
        """Return the settings of a process that is this user."""
        options = self.options(user)
        return {env_name(f"redis_{name}"): options[name] for name in ("username", "password") if name in options}

    def client(self, user: str) -> Any:
        return redis_server.client(self._url, **self.options(user))


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT of the first of several workers; each further worker has the next port."""

    setting: str  # option and value, for errors
    host: str
    port: int

    @classmethod
    def of(cls, worker: WorkerSettings, name: str, workers: int) -> Address:
        """Return the address in the setting `name` for so many workers. Raise ConfigurationError."""
        setting, (host, _, port) = f"{flag(name)}={getattr(worker, name)}", getattr(worker, name).rpartition(":")
        if not host or not port.isdecimal() or int(port[:6]) > MAX_PORT:
            raise ConfigurationError(f"{setting}: not HOST:PORT; write it so")
        if int(port) and int(port) + workers - 1 > MAX_PORT:
            raise ConfigurationError(f"{setting}: {workers} workers need as many ports from it on; choose a lower one")
        return cls(setting, host, int(port))

    def at(self, number: int) -> str:
        return f"{self.host}:{self.port + number if self.port else 0}"


def worker_env(worker: WorkerSettings, run_dir: Path, number: int, workers: int) -> dict[str, str]:
    """Return the settings that name one of the workers and its addresses. Raise ConfigurationError.

    Names differ between machines, and between run directories of one machine.
    """
    name = worker.worker_id
    if "worker_id" not in worker.model_fields_set:
        name = f"worker-{model_tag(socket.gethostname())}-{hashlib.sha256(bytes(run_dir)).hexdigest()[:6]}"
    listen = Address.of(worker, "listen", workers)
    env = {env_name("worker_id"): f"{name}.{number}", env_name("listen"): listen.at(number)}
    if worker.advertise:
        advertise = Address.of(worker, "advertise", workers)
        if not (listen.port and advertise.port):
            raise ConfigurationError(
                f"{advertise.setting}: needs a port that is known, as does {flag('listen')}; "
                f"write {flag('listen')} 0.0.0.0:50051 and the same port behind the host's name"
            )
        env[env_name("advertise")] = advertise.at(number)
    return env


def engine_specs(
    stacks: Sequence[ModelStack], most: int, users: RedisUsers, run_dir: RunDir, folder: Path
) -> list[ServiceSpec]:
    """Return workers and a scheduler of each model, and a placer where they take turns. The workers are counted over
    all models: they share the machine. most: models that are awake at a time; 0 means all. folder: for host tiers that
    outlive their workers.
    """
    launcher, url = stacks[0].launcher, stacks[0].gateway.redis_url
    client = SharedClient(users.client("scheduler"))
    total = sum(len(stack.launcher.roles()) for stack in stacks)
    specs: list[ServiceSpec] = []
    number = 0
    for at, stack in enumerate(stacks):
        keys, worker, name = stack.gateway.keys, stack.worker, stack.gateway.served_model_name
        env = child_env(stack.options.values, stack.launcher, stack.gateway, url, None) | {logs.MODEL: name}
        for place in range(len(stack.launcher.roles())):
            gpu, running = (place, at_once(stacks, most)) if most else (-1, 0)
            of_worker = replica_env(worker, number, total, gpu, running)
            of_worker |= worker_env(worker, run_dir.path, number, total)
            of_worker |= share_env("both", folder, most > 0)
            spec = ServiceSpec(
                f"worker-{number}",
                service_argv("worker"),
                {**env, **of_worker, **users.env("worker")},
                WorkerProbe(client, keys.worker(of_worker[env_name("worker_id")])),
                ("placer-0",) if most else (),  # another stack's placer ends this one, before it has taken memory
                launcher.stop_s,
                ROOT,
                model=name,
            )
            specs.append(spec)
            number += 1
        if at and stack.scheduler.scheduler_metrics_port:
            env[env_name("scheduler_metrics_port")] = str(stack.scheduler.scheduler_metrics_port + at)
        scheduler = f"scheduler-{at}"
        begun = run_dir.begin_file(scheduler)
        probe = LedProbe(client, keys.lease(stack.scheduler.shard), begun)
        env = {**env, **users.env("scheduler"), BEGUN_FILE: str(begun)}
        specs.append(
            ServiceSpec(scheduler, service_argv("scheduler"), env, probe, (), launcher.stop_s, ROOT, model=name)
        )
    if most:
        begun = run_dir.begin_file("placer-0")
        env = child_env(stacks[0].options.values, launcher, stacks[0].gateway, url, None)
        env = {**env, **users.env("placer"), BEGUN_FILE: str(begun)}
        placed = PlacedProbe(
            SharedClient(users.client("placer")), [stack.gateway.served_model_name for stack in stacks], begun
        )
        specs.append(ServiceSpec("placer-0", service_argv("placer"), env, placed, (), launcher.stop_s, ROOT))
    return specs


def model_states(services: Sequence[Service], is_placed: bool = True) -> dict[str, str]:
    """Return the state of each model, and of the placer: ready, asleep or loading. A model is ready with a worker that
    serves and a scheduler, asleep while the placer wants none of its workers awake. is_placed: a placer decides.
    """
    states = {}
    for model in dict.fromkeys(service.spec.model for service in services):
        members = [service for service in services if service.spec.model == model]
        workers = {service.state for service in members if service.name.startswith("worker-")}
        is_led = all(service.state == "ready" for service in members if not service.name.startswith("worker-"))
        is_asleep = is_placed and workers == {"asleep"}
        state = "ready" if "ready" in workers or not workers else "asleep" if is_asleep else "loading"
        states[f"model {model!r}" if model else "placer"] = state if is_led else "loading"
    return states


class _Report:
    """Shows what happens, and writes the states of the models for the health check."""

    def __init__(self, screen: Screen, run_dir: RunDir, sleeping: SleepingServices | None) -> None:
        self._screen = screen
        self._run_dir = run_dir
        self._sleeping = sleeping
        self._states: dict[str, str] = {}
        self._next = 0.0

    def event(self, text: str, kind: str = "info") -> None:
        self._screen.event(text, kind)

    def update(self, services: list[Service]) -> None:
        self._screen.update(services)
        is_placed = self._sleeping is None or self._sleeping.is_followed
        states, now = model_states(services, is_placed), time.monotonic()
        if states == self._states and now < self._next:
            return
        self._states, self._next = states, now + STATES_S
        try:
            self._run_dir.write_states(states)
        except OSError as error:
            self.event(f"cannot write {self._run_dir.states}: {error}", "warning")

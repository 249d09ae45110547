"""Stacks to be hurt: one of its own, or the one that `orcinus up` runs here, as it is.

One of its own is Redis, a worker, two schedulers of one shard and two gateways. Every process that ends is started
again, as the launcher or compose would, and none outlives this one. Each service reaches Redis by its own proxy, and
the scheduler reaches the worker by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.cli.options import build
from services.cli.stack import Target, redis_address
from services.launcher.redis_server import find_binary, missing_binary_message
from services.launcher.rundir import RunDir, StackFacts
from shared.errors import ConfigurationError
from shared.keys import Keys, model_tag
from shared.processes.supervisor import WRAPPER
from shared.settings import ROOT, CommonSettings, LauncherSettings
from tests.chaos.harness.clock import Deadline
from tests.chaos.harness.target.proxy import Proxy
from tests.chaos.harness.target.redis_clock import RedisClock
from tests.support.launcher import settings_env
from tests.support.waiting import free_port

GATEWAYS, SCHEDULERS = ("gateway-0", "gateway-1"), ("scheduler-0", "scheduler-1")
WORKER, REDIS = "worker", "redis"
SERVICES = (WORKER, *SCHEDULERS, *GATEWAYS)
SHARD = "shard-0"
MAXMEMORY = "512mb"
RESTART_S = 0.2
START_S = 90.0
LEASE_LOST = 1  # exit code of a scheduler
STOP_S = 15.0


class NotReadyError(RuntimeError):
    """Something did not come true in its time; the message says what."""


async def until(what: str, condition: Callable[[], Awaitable[Any]], seconds: float, every: float = 0.05) -> Any:
    """The first true value of condition(). Raises NotReadyError; the seconds are those of a machine that keeps up."""
    begun, deadline = time.monotonic(), Deadline(seconds)
    while not (value := await condition()):
        if deadline.passed():
            raise NotReadyError(f"{what}: not within {time.monotonic() - begun:.0f} s")
        await asyncio.sleep(every)
    return value


class Process(Protocol):
    """A process that is started again whenever it ends."""

    log: Path
    exits: list[int]  # statuses of all its ends, where they are known

    @property
    def pid(self) -> int:
        """0 while it is down."""
        ...

    def signal(self, number: int) -> None: ...


class Stack(ABC):
    """Where a stack is, its processes by their names, and what is so with it now."""

    name: str  # of the model
    shard: str
    keys: Keys
    redis: Redis
    urls: list[str]  # of the gateways, in their order
    gateways: Sequence[str]
    schedulers: Sequence[str]
    worker: str  # the one that is hurt
    processes: Mapping[str, Any]  # each a Process
    replicas = "1"
    step_log: Path | None = None
    lasting: frozenset[str] = frozenset()
    """Keys without a TTL that are no business of the services."""

    @abstractmethod
    def drain_settings(self) -> tuple[CommonSettings, LauncherSettings]:
        """Return what `orcinus drain` needs to find this stack."""

    def leader(self) -> str:
        """Return the scheduler that talks to the worker, or the first that runs."""
        running = [name for name in self.schedulers if self.processes[name].pid]
        return running[0] if running else self.schedulers[0]

    async def ready(self) -> bool:
        """Do all gateways take new work, are all workers connected, and do all schedulers run?"""
        gateways = [await self.gateway_ready(number) for number in range(len(self.gateways))]
        schedulers = all(self.processes[name].pid for name in self.schedulers)
        return all(gateways) and schedulers and (await self.stats()).get("workers") == self.replicas

    async def gateway_ready(self, number: int) -> bool:
        timeout = aiohttp.ClientTimeout(total=2)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            url = f"{self.urls[number]}/health/ready"
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
                return answer.status == 200
        return False

    async def redis_answers(self) -> bool:
        with contextlib.suppress(RedisError, OSError):
            return bool(await self.redis.ping())
        return False

    async def stats(self) -> dict[str, str]:
        """stats:{shard}; empty while Redis is away."""
        return await self.hash(self.keys.stats(self.shard))

    async def hash(self, key: str) -> dict[str, str]:
        """Any hash as text; empty while Redis is away."""
        with contextlib.suppress(RedisError, OSError):
            found: Any = await self.redis.hgetall(key)
            return {name.decode(): value.decode("utf-8", "replace") for name, value in found.items()}
        return {}

    async def alive(self, role: str) -> list[str]:
        """Ids of all that have a heartbeat."""
        prefix = self.keys.alive(role, "")
        with contextlib.suppress(RedisError, OSError):
            found: list[bytes] = [key async for key in self.redis.scan_iter(match=f"{prefix}*", count=5000)]
            return [key.decode().removeprefix(prefix) for key in found]
        return []

    async def worker_pid(self) -> int:
        """Of the worker that is registered; 0 when none is."""
        for member in await self._members():
            if pid := (await self.hash(self.keys.worker(member))).get("pid"):
                return int(pid)
        return 0

    async def _members(self) -> list[str]:
        with contextlib.suppress(RedisError, OSError):
            members: Any = await self.redis.zrange(self.keys.workers, 0, -1)
            return [member.decode() for member in members]
        return []


class Supervised:
    """One process that is started again whenever it ends."""

    def __init__(self, name: str, argv: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.argv, self.environment, self.log = name, argv, environment, log
        self.exits: list[int] = []
        self.before_start: Callable[[], None] | None = None  # called before it is started again
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._running: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """0 while it is down."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def start(self) -> None:
        await self._spawn()
        self._running = asyncio.create_task(self._supervise())

    async def _spawn(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid()), *self.argv,
                env=self.environment, cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    async def _supervise(self) -> None:
        while self._process is not None:
            self.exits.append(await self._process.wait())
            if self._stopping:
                return
            await asyncio.sleep(RESTART_S)
            if self.before_start is not None:
                self.before_start()
            await self._spawn()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)

    async def stop(self) -> None:
        self._stopping = True
        if self._running is None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.shield(self._running)
        self.signal(signal.SIGKILL)
        await self._running


class ChaosStack(Stack):
    """A stack of its own: one of each, and twice what can be twice.

    `async with` starts it and waits until it is ready.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        programs: Mapping[str, Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        """programs: by role, what to run in place of the service, behind `python -m`. settings: ORCINUS_*
        of every service, in lower case. Raises ConfigurationError without a Redis or a compiler."""
        binary = find_binary()
        if binary is None:
            raise ConfigurationError(missing_binary_message())
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.settings = directory, settings
        self.name, self.shard = model_tag(model.resolve().name), SHARD
        self.gateways, self.schedulers, self.worker = GATEWAYS, SCHEDULERS, WORKER
        self.keys = Keys(self.name)
        self.redis_clock = RedisClock(directory)
        self._redis_port, worker_port = free_port(), free_port()
        self.redis_url = f"redis://127.0.0.1:{self._redis_port}/0"
        self.redis = Redis(port=self._redis_port, socket_timeout=5, socket_connect_timeout=2)
        self.proxies = {name: Proxy(free_port(), self._redis_port) for name in SERVICES}
        self.worker_proxy = Proxy(free_port(), worker_port)
        self._http = {name: (free_port(), free_port()) for name in GATEWAYS}
        self.urls = [f"http://127.0.0.1:{self._http[name][0]}" for name in GATEWAYS]
        self.step_log = directory / "steps.jsonl"
        self.orders = directory / "orders"  # to the worker, what its next step shall do (chaos_worker.py)
        self._programs = {WORKER: ("tests.chaos.harness.target.worker", str(self.orders)), **(programs or {})}
        self._replica_port, self._replica_link = free_port(), Proxy(free_port(), self._redis_port)
        self.replica = self._redis_process(binary, "replica", self._replica_port)  # runs once it is told to follow
        self.processes: dict[str, Supervised] = {REDIS: self._redis_process(binary, "redis", self._redis_port)}
        for name in SERVICES:
            own = {"listen": f"127.0.0.1:{worker_port}"} if name == WORKER else {}
            self.processes[name] = self._service(name, model, own)

    def _redis_process(self, binary: Path, name: str, port: int) -> Supervised:
        data = self.directory / name
        data.mkdir(exist_ok=True)
        argv = [
            str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(data), "--save", "",
            "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory", MAXMEMORY,
            "--maxmemory-policy", "noeviction",
        ]  # fmt: skip
        environment = {**os.environ, **self.redis_clock.environment}
        return Supervised(REDIS, argv, environment, self.directory / f"{name}.log")

    def _service(self, name: str, model: Path, own: dict[str, Any]) -> Supervised:
        values = {
            "redis_url": f"redis://127.0.0.1:{self.proxies[name].port}/0",
            "model": model,
            "shard": SHARD,
            **own,
            **self.settings,
        }
        if name == WORKER:
            values |= {"advertise": f"127.0.0.1:{self.worker_proxy.port}", "step_log": self.step_log}
        if name in self._http:
            values |= dict(zip(("port", "ops_port"), self._http[name], strict=True))
        role = name.partition("-")[0]
        argv = [sys.executable, "-m", *self._programs.get(role, ("services.cli", role))]
        return Supervised(name, argv, settings_env(**values), self.directory / f"{name}.log")

    async def __aenter__(self) -> ChaosStack:
        try:
            for proxy in (*self.proxies.values(), self.worker_proxy):
                await proxy.start()
            for process in self.processes.values():
                await process.start()
            await until("the stack is ready", self._started, START_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for proxy in (*self.proxies.values(), self.worker_proxy):
            proxy.heal()
        for names in (GATEWAYS, SCHEDULERS, (WORKER,), (REDIS,)):
            await asyncio.gather(*(self.processes[name].stop() for name in names))
        await self.replica.stop()
        self._replica_link.heal()
        for proxy in (*self.proxies.values(), self.worker_proxy, self._replica_link):
            await proxy.stop()
        await self.redis.aclose()

    async def _started(self) -> bool:
        for name, process in self.processes.items():
            # A scheduler without processor time for a whole lease loses it to the standby, rightly, and starts again.
            if any(code != LEASE_LOST or name not in SCHEDULERS for code in process.exits):
                raise NotReadyError(f"{name} ended with {process.exits} while the stack started: see {process.log}")
        return await self.ready()

    def drain_settings(self) -> tuple[CommonSettings, LauncherSettings]:
        values = {"redis_url": self.redis_url, "served_model_name": self.name}
        return build(CommonSettings, values), build(LauncherSettings, {})

    def leader(self) -> str:
        for name in self.schedulers:
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(self.processes[name].pid or None).net_connections("tcp")
                if self.processes[name].pid and any(
                    one.raddr and one.raddr.port == self.worker_proxy.port for one in connections
                ):
                    return name
        return super().leader()

    # What it is told

    def order(self, what: str) -> None:
        """The worker's next step: `error`, `memory`, `hang` or `hang SECONDS`."""
        written = self.orders.with_suffix(".new")
        written.write_text(what)
        written.rename(self.orders)

    async def set_memory(self, most: str) -> None:
        """Bounds Redis's memory anew. Raises NotReadyError."""

        async def taken() -> bool:
            with contextlib.suppress(RedisError, OSError):
                return bool(await self.redis.config_set("maxmemory", most))
            return False

        await until("Redis takes a setting", taken, START_S)

    async def step_redis_clock(self, seconds: int) -> None:
        """Set the clock of Redis forward or back, for good. Raise NotReadyError unless Redis tells the other time."""
        self.redis_clock.step(seconds)

        async def stepped() -> bool:
            with contextlib.suppress(RedisError, OSError):
                return abs((await self.redis.time())[0] - time.time() - self.redis_clock.offset_s) < 2
            return False

        await until("Redis tells the other time", stepped, START_S)

    async def follow(self) -> None:
        """Start a replica of Redis and wait until it has everything. Raise NotReadyError."""
        await self._replica_link.start()
        await self.replica.start()
        async with Redis(port=self._replica_port, socket_timeout=5, socket_connect_timeout=2) as replica:

            async def follows() -> bool:
                with contextlib.suppress(RedisError, OSError):
                    await replica.replicaof("127.0.0.1", self._replica_link.port)
                    return (await replica.info("replication"))["master_link_status"] == "up"
                return False

            await until("the replica has everything", follows, START_S)

    def unfollow(self) -> None:
        """Let nothing reach the replica any more."""
        self._replica_link.go_silent()

    async def promote(self) -> None:
        """End Redis for good and let the replica take its place, with what it has."""
        await self.processes[REDIS].stop()
        await self.redis.aclose()
        self.redis = Redis(port=self._replica_port, socket_timeout=5, socket_connect_timeout=2)
        await self.redis.replicaof("NO", "ONE")
        self.processes[REDIS] = self.replica
        for proxy in self.proxies.values():
            proxy.target = self._replica_port
            proxy.cut()


class Running:
    """A process of the launcher's, which starts it again."""

    def __init__(self, name: str, run_dir: RunDir) -> None:
        self._name, self._run_dir = name, run_dir
        self.log = run_dir.logs / f"{name}.log"
        self.exits: list[int] = []  # the launcher alone knows

    @property
    def pid(self) -> int:
        return self._run_dir.pids().get(self._name, 0)

    def signal(self, number: int) -> None:
        if pid := self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


IDLE = {
    "running": "wait for their end",
    "waiting": "wait for their end",
    "parked": "their gateway went away with them; they end within five minutes, or by DELETE /v1/requests/{id}",
}
"""What to do about requests that a stack still has."""
STATS_S = 5.0
"""By then statistics show that a request has ended, such as the last of a bench: they are written once a second."""


class RunningStack(Stack):
    """The stack that `orcinus up` runs on this machine. Its Redis, its network and its settings are left alone."""

    def __init__(self, target: Target, facts: StackFacts) -> None:
        """Raise ConfigurationError if its processes are not known."""
        self._target = target
        run_dir = RunDir(target.launcher.run_dir)
        self.logs = run_dir.logs
        names = sorted(run_dir.pids())
        self.name, self.shard, self.keys = facts.model, facts.shard, target.settings.keys
        self.gateways, self.schedulers, workers = (
            [name for name in names if name.startswith(f"{role}-")] for role in ("gateway", "scheduler", "worker")
        )
        if not (self.gateways and self.schedulers and workers):
            raise ConfigurationError(f"{run_dir.path}: names no gateway, scheduler or worker; wait until it is ready")
        self.worker, self.replicas = workers[0], str(len(workers))
        self.processes = {name: Running(name, run_dir) for name in (*self.gateways, *self.schedulers, *workers)}
        self.urls = [facts.url] * len(self.gateways)
        url, access = redis_address(target.settings, target.launcher)
        options: dict[str, Any] = {"socket_timeout": 5, "socket_connect_timeout": 2, **access}
        self.redis = Redis.from_url(url, **options)

    def drain_settings(self) -> tuple[CommonSettings, LauncherSettings]:
        return self._target.settings, self._target.launcher

    async def __aenter__(self) -> RunningStack:
        """Wait until it is ready. Raise NotReadyError if it is not, or if it has work: what is left must be ours."""
        await until(f"the stack at {self.urls[0]} is ready", self.ready, START_S)
        deadline = Deadline(STATS_S)
        while busy := await self._busy():
            if deadline.passed():
                raise NotReadyError(f"{self.urls[0]} has requests {busy}: chaos needs it idle; {IDLE[busy]}")
            await asyncio.sleep(0.1)
        known: list[bytes] = [key async for key in self.redis.scan_iter(count=1000)]
        self.lasting = frozenset([key.decode() for key in known if await self.redis.ttl(key) == -1])
        return self

    async def _busy(self) -> str:
        """Return what its requests do; empty without any."""
        stats = await self.stats()
        return next((name for name in IDLE if int(stats.get(name, 0))), "")

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.signal(signal.SIGCONT)
        await self.redis.aclose()

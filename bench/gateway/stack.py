"""The processes of the gateway bench: a Redis and a real gateway, and the CPU time of each.

The gateway has a core to itself; Redis, the publisher and the clients share another. The kernel says to the nanosecond
how long a thread ran and how long it stood in line for its core, so a gateway that was idle is told from one that
another process kept from running.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import redis

from bench.local import free_ports
from services.launcher.redis_server import find_binary, missing_binary_message
from shared.errors import ConfigurationError
from shared.keys import Keys, model_tag
from shared.processes.supervisor import WRAPPER
from shared.settings import ROOT

CONTEXT = 1 << 20
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Core:
    """Seconds since its start in which a process ran, and in which it could have but had to wait for a core."""

    ran_s: float
    waited_s: float

    @classmethod
    def of(cls, pid: int) -> Core:
        ran = waited = 0
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                numbers = (thread / "schedstat").read_text().split()
                ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
        return cls(ran / 1e9, waited / 1e9)

    def since(self, before: Core) -> Core:
        return Core(self.ran_s - before.ran_s, self.waited_s - before.waited_s)


@dataclass(frozen=True, slots=True)
class Stack:
    """What runs."""

    gateway_pid: int
    redis_pid: int
    port: int
    client: redis.Redis
    keys: Keys

    def is_ready(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/health/ready"
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def wait_ready(self) -> None:
        """Wait until the gateway is ready. Raises TimeoutError."""
        _until("the gateway is ready", self.is_ready)


@contextlib.contextmanager
def running(directory: Path, model: Path) -> Iterator[Stack]:
    """Start both on different cores, with this process beside Redis. Raises ConfigurationError, TimeoutError."""
    binary = find_binary()
    if binary is None:
        raise ConfigurationError(missing_binary_message())
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigurationError("the gateway needs a core to itself and its clients another: here is one")
    redis_port, port, ops_port = free_ports(3)
    endless = _endless(model, directory)
    values = {
        "redis_url": f"redis://127.0.0.1:{redis_port}/0", "model": endless, "port": port, "ops_port": ops_port,
        "drain_s": 0,
    }  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORCINUS_")}
    environment = {**clean, **{f"ORCINUS_{name.upper()}": str(value) for name, value in values.items()}}
    redis_argv = [
        str(binary), "--port", str(redis_port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "",
        "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    with contextlib.ExitStack() as ending:
        log = ending.enter_context((directory / "processes.log").open("ab"))
        ending.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, {cores[1]})
        redis_process = ending.enter_context(_process(redis_argv, clean, log))
        client = ending.enter_context(redis.Redis(port=redis_port, socket_timeout=30))
        _until("Redis answers", lambda: _answers(client))
        os.sched_setaffinity(0, {cores[0]})  # for the child; threads of it inherit it
        gateway_argv = [sys.executable, "-m", "services.cli", "gateway"]
        gateway = ending.enter_context(_process(gateway_argv, environment, log))
        os.sched_setaffinity(0, {cores[1]})
        yield Stack(gateway.pid, redis_process.pid, port, client, Keys(model_tag(endless.name)))


def _endless(model: Path, directory: Path) -> Path:
    """Return the model with a context that no run fills; a gateway reads only its tokenizer and configuration."""
    made = directory / model.resolve().name
    made.mkdir()
    for path in model.resolve().iterdir():
        if path.name != "config.json":
            (made / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return made


@contextlib.contextmanager
def _process(argv: list[str], environment: dict[str, str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that ends with the block, and with this process in any case."""
    wrapped = [sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid()), *argv]
    process = subprocess.Popen(wrapped, env=environment, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


def _until(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {START_S:.0f} s")
        time.sleep(0.02)

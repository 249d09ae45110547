"""Processes that benches start on this machine: a Redis, a stack. Each ends with its block, and with this process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

import redis

from services.launcher.redis_server import find_binary, missing_binary_message
from shared.errors import ConfigurationError
from shared.processes.supervisor import WRAPPER
from shared.settings import ROOT

START_S, STACK_START_S, STOP_S = 60.0, 180.0, 60.0


def free_ports(count: int) -> list[int]:
    """Return `count` different loopback ports on which nothing listened a moment ago."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


def clean_environment() -> dict[str, str]:
    """Return the environment without settings of Orcinus."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ORCINUS_")}


@contextlib.contextmanager
def process(argv: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a running process."""
    wrapped = [sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid()), *argv]
    started = subprocess.Popen(wrapped, env=environment, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(STOP_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait(STOP_S)


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], redis.Redis]]:
    """Yield a Redis on a loopback port, with an append-only file as deployed, and a client of it.

    Raise ConfigurationError without a binary, TimeoutError where it does not answer.
    """
    binary = find_binary()
    if binary is None:
        raise ConfigurationError(missing_binary_message())
    (port,) = free_ports(1)
    argv = [
        str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "",
        "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    with (
        (directory / "redis.log").open("wb") as log,
        process(argv, clean_environment(), log) as server,
        redis.Redis(port=port, socket_timeout=60) as client,
    ):
        until("Redis answers", lambda: _pings(client))
        yield server, client


@contextlib.contextmanager
def stack(
    directory: Path, options: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the address of `orcinus up` with these options; its run directory is `directory / "run"`.

    environment: variables beside those of this process. Raise RuntimeError where it ends, TimeoutError where it does
    not serve; any error in the block prints the end of its log.
    """
    port, ops_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "services.cli", "up", "--run-dir", str(directory / "run"), *options]
    argv += ["--port", str(port), "--ops-port", str(ops_port)]
    path = directory / "up.log"
    with path.open("wb") as log, process(argv, {**clean_environment(), **environment}, log) as started:

        def serves() -> bool:
            if (status := started.poll()) is not None:
                raise RuntimeError(f"orcinus up: ended with {status}")
            return is_ready(port)

        try:
            until("the stack is ready", serves, STACK_START_S)
            yield url
        except BaseException:
            print(path.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise


def is_ready(port: int) -> bool:
    """Return whether the gateway at this port serves."""
    url = f"http://127.0.0.1:{port}/health/ready"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def until(what: str, condition: Callable[[], bool], seconds: float = START_S) -> None:
    """Wait for a condition. Raise TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)


def _pings(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False

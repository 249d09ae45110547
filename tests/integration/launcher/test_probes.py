"""How the launcher sees that a service works: only what the process started last has left counts."""

from __future__ import annotations

import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy import certs
from services.launcher import probes
from services.launcher.probes import (
    GatewayProbe,
    LedProbe,
    PlacedProbe,
    RedisProbe,
    SchedulerProbe,
    SharedClient,
    WorkerProbe,
)
from services.launcher.redis_server import client, configure
from shared.keys import PLACER, PLACER_KEYS
from shared.placement import Placement
from shared.processes.begun import BEGUN_FILE
from shared.processes.listeners import listen
from shared.processes.supervisor import Service, ServiceSpec
from shared.settings import ROOT
from tests.support import http_server
from tests.support.waiting import free_port, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    local = configure(tmp_path, memory_bytes=64 << 20)
    connection = client(local.url, local.password)
    probe = RedisProbe(connection)
    assert not probe.ready()
    process = subprocess.Popen(local.argv, stdout=subprocess.DEVNULL)
    try:
        until("Redis is ready", probe.ready)
        yield connection
    finally:
        process.terminate()
        process.wait(60)
        assert not probe.ready()


def test_record_of_the_former_worker_does_not_count(server: redis.Redis) -> None:
    probe = WorkerProbe(server, "worker:worker-0")
    probe.arm()
    assert not probe.ready()
    server.hset("worker:worker-0", mapping={"identity": "first", "address": "127.0.0.1:1"})
    assert probe.ready()
    probe.arm()  # that worker died; its record has not expired yet
    assert not probe.ready()
    server.hset("worker:worker-0", "identity", "second")
    assert probe.ready()


def test_lease_of_the_former_scheduler_does_not_count(server: redis.Redis) -> None:
    probe = SchedulerProbe(server, "lease:shard-0")
    server.set("lease:shard-0", "7")
    probe.arm()
    assert not probe.ready()
    server.delete("lease:shard-0")
    assert not probe.ready()
    server.set("lease:shard-0", "8")
    assert probe.ready()


BEGINS = "from shared.processes.begun import has_begun\nhas_begun()\n"


def test_standby_is_ready_while_another_scheduler_leads(server: redis.Redis, tmp_path: Path) -> None:
    begun = tmp_path / "scheduler-0.begun"
    probe = LedProbe(server, "lease:shard-0", begun)
    server.set("lease:shard-0", "7")
    refusing, serving = (
        Service(ServiceSpec("scheduler-0", [sys.executable, "-c", source], {BEGUN_FILE: str(begun)}, probe, cwd=ROOT))
        for source in ("raise SystemExit(2)", BEGINS + "import signal\nsignal.pause()")
    )
    for _ in range(2):
        refusing.start()
        assert until("the process has refused", refusing.exit_code) == 2
        assert not probe.ready()
        serving.start()
        until("the process stands by", probe.ready)
        server.delete("lease:shard-0")
        assert not probe.ready()
        server.set("lease:shard-0", "8")
        assert probe.ready()
        serving.signal_group(signal.SIGKILL)
        until("the process has ended", serving.exit_code)


def test_standby_of_a_placer_is_ready_while_one_for_the_same_models_leads(server: redis.Redis, tmp_path: Path) -> None:
    begun = tmp_path / "placer-0.begun"
    probe = PlacedProbe(server, ["a", "org/B"], begun)
    begun.touch()
    server.set(PLACER_KEYS.lease(PLACER), "7:another")
    placed = {"a": Placement(True).encode(), "org/B": Placement(False).encode()}
    server.hset(PLACER_KEYS.placements, mapping=dict[Any, Any](placed | {"c": Placement(False).encode()}))
    assert not probe.ready()
    server.hdel(PLACER_KEYS.placements, "c")
    assert probe.ready()
    probe.arm()
    assert not probe.ready()
    begun.touch()
    assert probe.ready()
    server.delete(PLACER_KEYS.lease(PLACER))
    assert not probe.ready()


class SilentRedis:
    """A client of a Redis that does not answer in time at first."""

    def __init__(self) -> None:
        self.waits = 0
        self.answer: bytes | None = None

    def get(self, _: str) -> bytes | None:
        if self.answer is None:
            self.waits += 1
            raise redis.TimeoutError("Timeout reading from socket")
        return self.answer


def test_probes_of_a_silent_redis_wait_for_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, now = SilentRedis(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shared = SharedClient(silent)
    each = [SchedulerProbe(shared, f"lease:{number}") for number in range(6)]
    for probe in each:
        probe.arm()
        assert not probe.ready()
    assert silent.waits == 1
    silent.answer = b"7"
    now[0] += probes.TIMEOUT_S
    assert all(probe.ready() for probe in each)


class Handler(http_server.Handler):
    server: Health

    def answer(self) -> None:
        states = self.server.states if self.headers["Authorization"] == "Bearer key" else {}
        self.reply(self.server.status if self.path == "/health/ready" else 200, {"models": states})


class Health(http_server.HttpServer):
    handler = Handler
    status = 503

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, str] = {}


@pytest.mark.parametrize("tls", [False, True])
def test_gateway_is_ready_when_its_health_is(tls: bool, tmp_path: Path) -> None:
    gateway = Health()
    if tls:
        certs.make(tmp_path, [])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "gateway.pem", tmp_path / "gateway-key.pem")
        gateway.socket = context.wrap_socket(gateway.socket, server_side=True)
    with gateway:
        probe = GatewayProbe("0.0.0.0", gateway.server_port, tls)
        assert not probe.ready()
        gateway.status = 200
        until("the probe has its answer", probe.ready)


def test_gateway_of_several_models_is_ready_with_the_last_of_them_and_then_with_one() -> None:
    with Health() as gateway:
        gateway.status, gateway.states = 200, {"one": "ready", "org/Two": "loading"}
        probe = GatewayProbe("127.0.0.1", gateway.server_port, key="key")
        probe.arm()
        until("the probe has its answer", lambda: probe.ready() or probe.wait_reason)
        assert not probe.ready() and probe.wait_reason == "org/Two (loading)"
        without_key = GatewayProbe("127.0.0.1", gateway.server_port)
        until("no models are named", without_key.ready)
        gateway.states = {"one": "ready", "org/Two": "ready"}
        until("all are ready", probe.ready)
        assert probe.wait_reason == ""
        gateway.states = {"one": "ready", "org/Two": "unavailable"}
        probe.arm()
        until("one is ready after a restart", probe.ready)


def test_gateway_that_starts_later_answers_the_request_that_waits() -> None:
    port = free_port()
    assert not GatewayProbe("127.0.0.1", port).ready(), "closed"
    with listen("127.0.0.1", port, "port") as held:
        probe = GatewayProbe(*held.getsockname())
        assert not probe.ready() and not probe.ready()
        held.setblocking(True)
        connection, _ = held.accept()
        with connection:
            assert connection.recv(4096).startswith(b"GET /health/ready")
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            until("the probe has its answer", probe.ready)
        held.setblocking(False)
        with pytest.raises(BlockingIOError):  # it asked once
            held.accept()

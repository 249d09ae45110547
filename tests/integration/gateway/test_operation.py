"""A gateway in operation: health, what it waits for at start and leaves behind at its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import KEY
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_scheduler import ScriptedScheduler
from tests.support.stack import PLAIN, ROOT, RedisServer
from tests.support.tokenizers import CONTEXT, write_model
from tests.support.waiting import free_port, until


def post(gateway: GatewayProcess, path: str, body: Any, key: str = KEY, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(gateway.url + path, json=body, headers=headers, timeout=60, verify=PLAIN, **options)


def get(gateway: GatewayProcess, path: str, key: str = KEY) -> httpx.Response:
    return httpx.get(
        gateway.url + path, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60, verify=PLAIN
    )


def test_a_schedulers_word_that_there_are_workers_makes_a_gateway_ready(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    redis_server.client.flushdb()
    with running_gateway(tmp_path, model, redis_server) as own:
        scheduler = ScriptedScheduler(redis_server.client, own.keys).lead(workers=0, max_model_len=100)
        redis_server.client.delete(own.keys.worker("worker-0"))
        until("no worker", lambda: "no worker" in httpx.get(own.url + "/ready", verify=PLAIN).json().get("reason", ""))
        scheduler.stats(workers=1)
        own.wait_ready()
        assert httpx.get(own.url + "/v1/models", verify=PLAIN).json()["data"][0]["max_model_len"] == 100
    redis_server.client.flushdb()  # its limit is not for the gateway of other tests


def test_without_a_scheduler_new_work_is_503_and_the_reason_is_told(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    scheduler.resign()
    until("not ready", lambda: gateway.status("/ready") == 503)
    assert "scheduler" in httpx.get(gateway.url + "/health/ready", verify=PLAIN).json()["reason"]
    answer = post(gateway, "/v1/completions", {"model": gateway.name, "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_scheduler")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_redis_without_memory_is_503(
    gateway: GatewayProcess, scheduler: ScriptedScheduler, redis_server: RedisServer
) -> None:
    redis_server.client.config_set("maxmemory", "1mb")
    try:
        until("not ready", lambda: gateway.status("/health/ready") == 503)
        answer = post(gateway, "/v1/completions", {"model": gateway.name, "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_memory")
    finally:
        redis_server.client.config_set("maxmemory", "64mb")
    gateway.wait_ready()


# Health


def test_limits_of_a_worker_are_the_gateways(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    key = gateway.keys.worker("worker-0")
    scheduler.client.hset(key, mapping={"max_model_len": 100, "max_input_tokens": 40, "max_output_tokens": 20})
    try:
        until("the limit is known", lambda: get(gateway, "/v1/models").json()["data"][0]["max_model_len"] == 100)
        long = post(gateway, "/v1/completions", {"model": gateway.name, "prompt": [5] * 41})
        wide = post(gateway, "/v1/completions", {"model": gateway.name, "prompt": [5], "max_tokens": 21})
        assert ("at most 40" in long.text, "at most 20" in wide.text) == (True, True)
    finally:
        scheduler.client.hdel(key, "max_model_len", "max_input_tokens", "max_output_tokens")
    until("the limit is gone", lambda: get(gateway, "/v1/models").json()["data"][0]["max_model_len"] == CONTEXT)


def test_a_hung_worker_or_scheduler_is_seen_though_the_statistics_say_that_nothing_runs(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    with running_gateway(tmp_path, model, redis_server, progress_timeout_s=1.5) as own:
        scheduler = ScriptedScheduler(redis_server.client, own.keys).lead(running=0)
        own.wait_ready()
        assert own.status("/health/progress") == 200
        body = {"prompt": "x", "background": True}
        assert own.post("/v1/completions", body).status_code == 202
        until("no progress", lambda: own.status("/health/progress") == 503)
        assert "no step was answered" in httpx.get(own.url + "/health/progress", verify=PLAIN).json()["reason"]
        scheduler.resign()  # as when it hangs: the lease runs out, its last words stay
        until("not ready", lambda: own.status("/health/ready") == 503)
        assert own.status("/health/progress") == 503
        scheduler.lead()
        claimed = scheduler.claim()
        scheduler.serve(claimed, [50])
        until("it has ended", lambda: own.status("/health/progress") == 200)


# Start and stop


def test_a_gateway_that_an_operator_asks_to_leave_drains_as_at_sigterm(
    tmp_path: Path, model: Path, redis_server: RedisServer
) -> None:
    with running_gateway(tmp_path, model, redis_server, drain_s=30) as own:
        scheduler = ScriptedScheduler(redis_server.client, own.keys).lead()
        own.wait_ready()
        body = {"model": own.name, "prompt": "x", "stream": True, "max_tokens": 5}
        with httpx.stream("POST", own.url + "/v1/completions", json=body, timeout=30) as stream:
            claimed = scheduler.claim()
            redis_server.client.set(own.keys.drain("gateway", claimed.request.gateway), 1, px=60_000)
            until("not ready", lambda: own.status("/health/ready") == 503)
            assert "shutting down" in httpx.get(own.url + "/health/ready", verify=PLAIN).json()["reason"]
            scheduler.serve(claimed, [50, 51])
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert own.process is not None
        assert own.process.wait(20) == 0


DYING = """
import asyncio, sys
from services.gateway.delivery.dispatcher import Dispatcher

async def dies(self):
    raise RuntimeError("a task of a test")

Dispatcher._watch = dies
from services.cli.app import main
sys.argv = ["orcinus", "gateway"]
main()
"""


def test_a_gateway_with_a_dead_task_ends_with_an_error_and_says_why(tmp_path: Path, model: Path) -> None:
    own = GatewayProcess(tmp_path, model, f"redis://127.0.0.1:{free_port()}/0")
    ended = subprocess.run(
        [sys.executable, "-c", DYING], env=own.environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1, ended.stderr
    assert "a task of a test" in ended.stdout + ended.stderr


def test_a_gateway_waits_for_redis_alive_but_not_ready(tmp_path: Path, model: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    with running_gateway(tmp_path, model, server) as own:
        assert own.status("/health/live") == 200
        ready = httpx.get(own.url + "/health/ready", verify=PLAIN)
        assert ready.status_code == 503
        assert "Redis" in ready.json()["reason"]
        assert own.post("/v1/completions", {"prompt": "x"}).status_code == 503
        until("it says what it waits for", lambda: "waiting for Redis" in own.log())
        with server:
            ScriptedScheduler(server.client, own.keys).lead()
            own.wait_ready()


def test_sigterm_lets_streams_end_and_leaves_nothing(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    with running_gateway(tmp_path, model, redis_server, drain_s=30) as own:
        scheduler = ScriptedScheduler(redis_server.client, own.keys).lead()
        own.wait_ready()
        body = {"model": own.name, "prompt": "x", "stream": True, "max_tokens": 5}
        with httpx.stream("POST", own.url + "/v1/completions", json=body, timeout=30) as stream:
            claimed = scheduler.claim()
            assert own.process is not None
            own.process.send_signal(signal.SIGTERM)
            until("not ready", lambda: own.status("/health/ready") == 503)
            assert own.post("/v1/completions", {"prompt": "x"}).json()["error"]["code"] == "shutting_down"
            scheduler.serve(claimed, [50, 51])
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert own.process.wait(20) == 0
    own_keys = [key for key in redis_server.client.scan_iter() if f"-{own.process.pid}-".encode() in key]
    assert own_keys == []


@pytest.mark.slow
def test_sigterm_hands_over_streams_that_take_too_long(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    with running_gateway(tmp_path, model, redis_server, drain_s=0.2) as own:
        scheduler = ScriptedScheduler(redis_server.client, own.keys).lead()
        own.wait_ready()
        body = {"model": own.name, "prompt": "x", "stream": True}
        with httpx.stream("POST", own.url + "/v1/completions", json=body, timeout=30) as stream:
            claimed = scheduler.claim()
            assert own.process is not None
            own.process.send_signal(signal.SIGTERM)
            assert b"handed_over" in stream.read()
        assert own.process.wait(20) == 0
    with running_gateway(tmp_path, model, redis_server) as other:
        other.wait_ready()
        with httpx.stream("GET", f"{other.url}/v1/requests/{claimed.id}/stream", timeout=30) as stream:
            (command,) = until("it is adopted, and was not cancelled", scheduler.controls)
            claimed.request.gateway = command.adopt.gateway
            scheduler.serve(claimed, [50, 51])
            assert stream.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("which", ["port", "ops_port"])
def test_a_port_in_use_is_one_clear_line(tmp_path: Path, model: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = _run(model, **{"port": free_port(), "ops_port": free_port(), which: port})
    assert result.returncode == 2
    assert f"{port} on 127.0.0.1 is in use" in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_listening_beyond_loopback_needs_a_key(model: Path) -> None:
    result = _run(model, host="0.0.0.0", port=free_port())
    assert result.returncode == 2
    assert "ORCINUS_API_KEY" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_directory_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    model = write_model(tmp_path / "bare")
    (model / "tokenizer.json").unlink()
    result = _run(model, port=free_port())
    assert result.returncode == 2
    assert "tokenizer.json" in result.stderr
    assert "Traceback" not in result.stderr


def _run(model: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    gateway = GatewayProcess(model.parent, model, "redis://127.0.0.1:1/0")
    gateway.environment.update({f"ORCINUS_{name.upper()}": str(value) for name, value in settings.items()})
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "gateway"],
        env=gateway.environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

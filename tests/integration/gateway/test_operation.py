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

from services.gateway import cluster
from services.gateway.gateway import Gateway
from tests.integration.conftest import TEXT
from tests.support.checkpoints.tokenizers import (
    CONTEXT,
    PANIC,
    change_tokenizer,
    write_model,
    write_panicking_model,
)
from tests.support.gateway.process import GatewayProcess, led_gateway, running_gateway
from tests.support.stack import ROOT, RedisServer
from tests.support.stand_ins.scripted_scheduler import STOP, ScriptedScheduler, answering
from tests.support.waiting import free_port, until, wait_until


def until_not_ready(gateway: GatewayProcess) -> None:
    until("not ready", lambda: gateway.status("/health/ready") == 503)


def max_model_len(gateway: GatewayProcess) -> int:
    return int(gateway.get("/v1/models").json()["data"][0]["max_model_len"])


async def test_gateway_is_ready_while_a_scheduler_leads_a_registered_worker(
    local_gateway: Gateway, redis_server: RedisServer
) -> None:
    """A worker that is registered and refused by each scheduler serves nothing."""
    keys = local_gateway.settings.keys
    scheduler = ScriptedScheduler(redis_server.client, keys).lead(workers=0, max_model_len=100)
    await wait_until(lambda: local_gateway.reason_not_ready() == "no worker is linked to a scheduler")
    scheduler.stats(workers=1)
    await wait_until(lambda: not local_gateway.reason_not_ready())
    assert local_gateway.cluster.limits.max_model_len == 100
    redis_server.client.delete(keys.worker("worker-0"))
    await wait_until(lambda: local_gateway.reason_not_ready() == "no worker is registered")
    scheduler.resign()
    await wait_until(lambda: local_gateway.reason_not_ready() == "no scheduler is alive")


@pytest.mark.parametrize("has_scheduler", [False, True], ids=["no scheduler", "no worker"])
async def test_gateway_that_is_not_served_looks_several_times_a_second(
    local_gateway: Gateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, has_scheduler: bool
) -> None:
    seen: set[float] = set()

    def has_looked_often() -> bool:
        assert local_gateway.cluster.snapshot is not None
        seen.add(local_gateway.cluster.snapshot.at)
        return len(seen) > 5

    scheduler = ScriptedScheduler(redis_server.client, local_gateway.settings.keys)
    if has_scheduler:
        scheduler.lead(workers=0)
    else:
        scheduler.resign()
    await wait_until(lambda: local_gateway.reason_not_ready())
    monkeypatch.setattr(cluster, "EVERY_S", 3600.0)  # the pace of a gateway that is served
    await wait_until(has_looked_often, 20)


def test_new_work_is_503_without_a_scheduler(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    scheduler.resign()
    until_not_ready(gateway)
    assert gateway.status("/ready") == 503
    assert "scheduler" in gateway.reason()
    answer = gateway.post("/v1/completions", {"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_scheduler")
    assert int(answer.headers["retry-after"]) >= 1


def test_limits_of_the_statistics_bound_the_gateway(gateway: GatewayProcess, scheduler: ScriptedScheduler) -> None:
    key = gateway.keys.stats(scheduler.shard)
    foreign = gateway.keys.worker("x")  # no worker writes these fields there
    scheduler.client.hset(key, mapping={"max_model_len": 100, "max_input_tokens": 40, "max_output_tokens": 20})
    scheduler.client.hset(foreign, mapping={"max_model_len": 50, "max_input_tokens": 1, "max_output_tokens": 1})
    scheduler.client.zadd(gateway.keys.workers, {"x": 1})
    try:
        until("the record is seen", lambda: gateway.metric("orcinus_stack_workers") == 2)
        until("the limit is known", lambda: max_model_len(gateway) == 100)
        long = gateway.post("/v1/completions", {"prompt": [5] * 41})
        wide = gateway.post("/v1/completions", {"prompt": [5], "max_tokens": 21})
        assert ("at most 40" in long.text, "at most 20" in wide.text) == (True, True)
    finally:
        scheduler.client.hdel(key, "max_model_len", "max_input_tokens", "max_output_tokens")
        scheduler.client.delete(foreign)
    until("the limit is gone", lambda: max_model_len(gateway) == CONTEXT)


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


def test_gateway_with_a_dead_task_ends_with_its_error(tmp_path: Path, model: Path) -> None:
    own = GatewayProcess(tmp_path, model, f"redis://127.0.0.1:{free_port()}/0")
    ended = subprocess.run(
        [sys.executable, "-c", DYING], env=own.environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1, ended.stderr
    assert "a task of a test" in ended.stdout + ended.stderr


PATIENT = """
import sys
from services.gateway import models
from shared import redis_client
models.FIRST_LOOK_S = 3600
redis_client.connect.__defaults__ = (4, 3600.0)  # connections, seconds for an answer
from services.cli.app import main
sys.argv = ["orcinus", "gateway"]
main()
"""


def test_sigterm_ends_a_start_beside_a_silent_redis(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = GatewayProcess(tmp_path, model, f"redis://127.0.0.1:{silent.getsockname()[1]}/0", grpc_port=free_port())
        with subprocess.Popen([sys.executable, "-c", PATIENT], env=own.environment, cwd=ROOT) as process:
            silent.settimeout(60)
            with silent.accept()[0]:  # it asks, so it has begun to start
                process.send_signal(signal.SIGTERM)
                try:
                    assert process.wait(60) == 0
                finally:
                    process.kill()


def test_gateway_without_redis_is_live_and_not_ready(tmp_path: Path, model: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    with running_gateway(tmp_path, model, server) as own:
        assert own.status("/health/live") == 200
        assert own.status("/health/ready") == 503
        assert "Redis" in own.reason()
        assert own.post("/v1/completions", {"prompt": "x"}).status_code == 503
        until("it logs what it waits for", lambda: "waiting for Redis" in own.log())
        with server:
            ScriptedScheduler(server.client, own.keys).lead()
            own.wait_ready()


def test_first_request_behind_a_start_is_served(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    own = GatewayProcess(tmp_path, model, redis_server.url, served_model_name="first", grpc_port=free_port())
    scheduler = ScriptedScheduler(redis_server.client, own.keys).lead()
    redis_server.client.client_pause(3000)  # the start takes less: it waits for what Redis says
    try:
        with answering(scheduler, lambda _: [50], STOP):
            own.start()
            until("it listens", lambda: "serving first" in own.log(), 60)
            assert own.post("/v1/completions", {"prompt": "x"}).status_code == 200
    finally:
        own.stop()


@pytest.mark.parametrize("by_operator", [False, True], ids=["SIGTERM", "drain"])
def test_gateway_that_drains_lets_streams_end_and_leaves_nothing(
    tmp_path: Path, model: Path, redis_server: RedisServer, by_operator: bool
) -> None:
    with led_gateway(tmp_path, model, redis_server, drain_s=30) as (own, scheduler):
        assert own.process is not None
        with own.stream({"prompt": "x", "max_tokens": 5}) as stream:
            claimed = scheduler.claim()
            if by_operator:
                redis_server.client.set(own.keys.drain("gateway", claimed.request.gateway), 1, px=60_000)
            else:
                own.process.send_signal(signal.SIGTERM)
            until_not_ready(own)
            assert "shutting down" in own.reason()
            assert own.post("/v1/completions", {"prompt": "x"}).json()["error"]["code"] == "shutting_down"
            scheduler.serve(claimed, [50, 51])
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert own.process.wait(60) == 0
    keys = [key for key in redis_server.client.scan_iter() if f"-{own.process.pid}-".encode() in key]
    assert not by_operator or keys == [own.keys.drain("gateway", claimed.request.gateway).encode()]
    assert by_operator or keys == []


@pytest.mark.slow
def test_sigterm_hands_over_streams_that_take_too_long(tmp_path: Path, model: Path, redis_server: RedisServer) -> None:
    with led_gateway(tmp_path, model, redis_server, drain_s=0.2) as (own, scheduler):
        with own.stream({"prompt": "x"}) as stream:
            claimed = scheduler.claim()
            assert own.process is not None
            own.process.send_signal(signal.SIGTERM)
            assert b"handed_over" in stream.read()
        assert own.process.wait(60) == 0
    with running_gateway(tmp_path, model, redis_server) as other:
        other.wait_ready()
        with httpx.stream("GET", f"{other.url}/v1/requests/{claimed.id}/stream", timeout=60) as stream:
            (command,) = until("it is adopted, and was not cancelled", scheduler.controls)
            claimed.request.gateway = command.adopt.gateway
            scheduler.serve(claimed, [50, 51])
            assert stream.read().endswith(b"data: [DONE]\n\n")


def test_port_in_use_is_one_clear_line(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refusal(model, port=free_port(), ops_port=port)
    assert f"ops port {port} on 127.0.0.1 is in use" in error.replace("\n", " ")


def test_listening_beyond_loopback_needs_a_key(model: Path) -> None:
    assert "ORCINUS_API_KEY" in refusal(model, host="0.0.0.0", port=free_port())


def refusal(model: Path, **settings: Any) -> str:
    """Return what a gateway writes that refuses to start."""
    gateway = GatewayProcess(model.parent, model, "redis://127.0.0.1:1/0")
    gateway.environment.update({f"ORCINUS_{name.upper()}": str(value) for name, value in settings.items()})
    process = gateway.start().process
    assert process is not None
    assert process.wait(60) == 2 and "Traceback" not in gateway.log(), gateway.log()
    return gateway.log()


MESSAGE = {"role": "user", "content": PANIC}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_panicking_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": PANIC}, "prompt"),
        ("/v1/completions", {"prompt": ["x", PANIC], "stream": True}, "prompt"),
        ("/v1/chat/completions", {"messages": [MESSAGE]}, "messages"),
        ("/v1/responses", {"input": PANIC}, "input"),
        ("/tokenize", {"prompt": PANIC}, "prompt"),
        ("/tokenize", {"messages": [MESSAGE]}, "messages"),
    ],
)
def test_panic_refuses_one_request_and_the_next_is_answered(
    gateway: GatewayProcess, answers: None, path: str, body: dict[str, Any], param: str
) -> None:
    refused = gateway.post(path, body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("tokenizer_failed", param)
    assert f"{param} cannot be tokenized by this model's tokenizer: " in error["message"]
    answer = gateway.post("/v1/completions", {"prompt": "ac", "max_tokens": 100})
    assert answer.json()["choices"][0]["text"] == TEXT


def test_gateway_does_not_start_with_an_unbounded_tokenizer(tmp_path: Path, redis_server: RedisServer) -> None:
    grow = {"type": "Replace", "pattern": {"Regex": "[ab]"}, "content": "a" * 100}
    step = {"type": "Sequence", "normalizers": [grow] * 5}
    gateway = GatewayProcess(
        tmp_path, change_tokenizer(write_model(tmp_path / "m"), normalizer=step), redis_server.url
    ).start()
    process = gateway.process
    assert process is not None
    try:
        until("the gateway ends", lambda: process.poll() is not None, 60)
    finally:
        gateway.stop()
    assert process.returncode == 2 and "Traceback" not in gateway.log()
    assert "tokenizer.json: normalizer: one byte of text can become 21020201002, at most 4096; remove" in gateway.log()

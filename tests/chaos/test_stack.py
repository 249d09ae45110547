"""The first faults: clients that leave, a worker and a scheduler killed under load, Redis away at the start."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from protos import queue_pb2
from tests.support.models import Reference, make_llama
from tests.support.stack import ROOT, Stack, running_stack
from tests.support.waiting import free_port, until

REQUESTS = 8
CONTEXT = 4096
LONG = 1000  # tokens of a stream that a fault shall hit; the reference says what the first 96 are


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_llama(
        tmp_path_factory.mktemp("faults") / "tiny",
        requests=REQUESTS,
        output_tokens=96,
        max_position_embeddings=CONTEXT,
        seed=20261122,
    )


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), reference.path, dtype="float32") as running:
        yield running


def running(stack: Stack) -> int:
    return int(stack.stats().get("running", "0"))


def endless(stack: Stack) -> dict[str, object]:
    return {"model": stack.name, "prompt": [5, 6, 7], "max_tokens": CONTEXT - 10, "ignore_eos": True}


def test_client_that_leaves_a_stream_frees_its_blocks(stack: Stack) -> None:
    with httpx.stream("POST", f"{stack.url}/v1/completions", json={**endless(stack), "stream": True}) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    after = stack.settled()
    assert after["blocks"] == after["total"]
    until("the cancel is counted", lambda: int(stack.stats()["cancelled"]) > 0)


def records(stack: Stack) -> int:
    return sum(1 for _ in stack.redis.client.scan_iter(match="*}:req:*", count=1000))


def test_clients_that_leave_calls_without_streaming_free_their_blocks_whenever_they_leave(stack: Stack) -> None:
    cancelled = int(stack.stats()["cancelled"])
    body = json.dumps({**endless(stack), "n": 4}).encode()
    for _ in range(40):  # the moment matters: a cancel may overtake the claim of its request
        known = records(stack)
        with socket.create_connection(("127.0.0.1", stack.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            until("the request is known", lambda known=known: records(stack) > known, every=0.0005)
    until("every cancel is counted", lambda: int(stack.stats()["cancelled"]) == cancelled + 40)
    after = stack.settled()
    assert after["blocks"] == after["total"]


@pytest.fixture
def streams(stack: Stack, reference: Reference) -> Iterator[list[Future[list[int]]]]:
    """One stream for each of the reference's prompts, once all are accepted and tokens flow."""
    seen = threading.Event()
    accepted: list[int] = []

    def client(index: int) -> list[int]:
        ids: list[int] = []
        body = {
            "model": stack.name,
            "prompt": reference.prompts[index],
            "max_tokens": LONG,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200
            accepted.append(index)
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    for choice in event["choices"]:
                        ids += choice.get("token_ids") or []
                    if len(ids) > 4:
                        seen.set()
        return ids

    with ThreadPoolExecutor(REQUESTS) as clients:
        answers = [clients.submit(client, index) for index in range(REQUESTS)]
        until(
            "tokens flow",
            lambda: (seen.is_set() and len(accepted) == REQUESTS) or any(answer.done() for answer in answers),
            60,
        )
        yield answers


def assert_nothing_is_lost(stack: Stack, reference: Reference, streams: list[Future[list[int]]]) -> None:
    got = [answer.result(120) for answer in streams]
    assert [ids[: len(output)] for ids, output in zip(got, reference.outputs, strict=True)] == reference.outputs
    assert [len(ids) for ids in got] == [LONG] * REQUESTS
    after = stack.settled()
    assert after["blocks"] == after["total"]
    assert after["pending"] == [0, 0, 0, 0]


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_a_killed_service_costs_a_pause_and_no_token(
    stack: Stack, reference: Reference, streams: list[Future[list[int]]], service: str
) -> None:
    stack.kill(service)
    stack.start(service)
    assert_nothing_is_lost(stack, reference, streams)


def test_a_redis_without_memory_costs_a_pause_and_no_token(
    stack: Stack, reference: Reference, streams: list[Future[list[int]]]
) -> None:
    scheduler = stack.pid("scheduler")
    stack.redis.client.config_set("maxmemory", "1mb")
    until("the scheduler waits", lambda: "waiting for Redis to publish tokens" in stack.log("scheduler"), 30)
    assert stack.post("/v1/completions", {"prompt": [5], "max_tokens": 1}).status_code == 503
    stack.redis.client.config_set("maxmemory", "0")
    assert_nothing_is_lost(stack, reference, streams)
    assert psutil.pid_exists(scheduler) and stack.ready()


def test_a_killed_redis_costs_a_pause_and_no_token(
    stack: Stack, reference: Reference, streams: list[Future[list[int]]]
) -> None:
    said = stack.log("scheduler").count("waiting for Redis to publish")
    stack.redis.stop(signal.SIGKILL)
    until("the scheduler waits", lambda: stack.log("scheduler").count("waiting for Redis to publish") > said, 30)
    stack.redis.start()
    assert_nothing_is_lost(stack, reference, streams)


def pending(stack: Stack, stream: str) -> int:
    found: Any = stack.redis.client.xpending(stream, "schedulers")
    return int(found["pending"])


def test_a_draining_scheduler_hands_back_what_never_ran_and_the_next_one_serves_it(
    reference: Reference, tmp_path: Path
) -> None:
    with (
        running_stack(tmp_path, reference.path, dtype="float32", max_seqs=1) as stack,
        ThreadPoolExecutor(1) as clients,
    ):
        # It holds the only slot for long: eight choices, one after another.
        body = {**endless(stack), "n": 8, "stream": True}
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as first:
            lines = first.iter_lines()  # held: httpx closes the stream of an iterator that nobody holds
            next(lines)
            stream = stack.keys.requests("normal")
            second = clients.submit(
                stack.complete, reference.prompts[1], len(reference.outputs[1]), ignore_eos=True, priority="normal"
            )
            until("the second is claimed", lambda: pending(stack, stream) == 2)
            drain = queue_pb2.Control(drain=queue_pb2.Control.Drain()).SerializeToString()
            stack.redis.client.xadd(stack.keys.control("shard-0"), {"c": drain})
            until("the second is handed back", lambda: pending(stack, stream) == 1)
            assert stack.redis.client.xlen(stream) == 2
            assert not second.done()
        # The cancel of the first frees the slot; the next scheduler claims the second.
        stack.kill("scheduler", signal.SIGTERM)
        stack.start("scheduler")
        assert second.result(120) == reference.outputs[1]


def test_services_wait_for_a_redis_that_comes_late(reference: Reference, tmp_path: Path) -> None:
    stack = Stack(tmp_path, reference.path, dtype="float32")
    try:
        for service in ("gateway", "scheduler", "worker"):
            stack.start(service)
        until("the gateway says what it waits for", lambda: "Redis" in stack.log("gateway"), 60)
        with pytest.raises((httpx.HTTPStatusError, httpx.TransportError)):
            httpx.get(f"{stack.url}/health/ready", timeout=5).raise_for_status()
        stack.redis.start()
        until("the stack is ready", stack.ready, 90)
        assert stack.complete(reference.prompts[0], len(reference.outputs[0]), ignore_eos=True) == reference.outputs[0]
    finally:
        stack.__exit__(None, None, None)


def service_fails(stack: Stack, service: str, **settings: str) -> str:
    """stderr of a service that must refuse to start with exit code 2."""
    environment = {**stack.environment(), **{f"ORCINUS_{name.upper()}": value for name, value in settings.items()}}
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli", service],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_port_in_use_is_named(stack: Stack) -> None:
    assert str(stack.port) in service_fails(stack, "gateway", ops_port=str(free_port()))


def test_a_model_directory_without_weights_is_named(stack: Stack, reference: Reference, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((reference.path / name).read_bytes())
    text = service_fails(stack, "worker", model=str(tmp_path))
    assert "safetensors" in text
    assert str(tmp_path) in text


def test_lengths_that_do_not_fit_name_their_setting(stack: Stack) -> None:
    text = service_fails(stack, "worker", max_input_tokens="100000")
    assert "max-input-tokens" in text or "max_input_tokens" in text
    assert "100000" in text

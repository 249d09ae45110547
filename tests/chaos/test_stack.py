"""Clients that leave, services that are stopped or told to end, and a scheduler that drains, on a whole stack.

SIGTERM ends the scheduler within its bound, whatever is gone or silent at that moment.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from protos import queue_pb2
from tests.chaos.streams import load
from tests.support import sse
from tests.support.checkpoints.models import Reference
from tests.support.gateway.process import GatewayProcess, running_gateway
from tests.support.stack import PLAIN, START_S, Stack
from tests.support.waiting import until

REQUESTS = 4
LONG = 600  # tokens; the reference says what the first 64 are
CONTEXT = 4096
EXIT_S = 5.0 + 25.0
"""What docs/operations.md promises, and what a busy machine may add. One that lost the order to end never does."""
MODEL = {"requests": REQUESTS, "output_tokens": 64, "max_position_embeddings": CONTEXT, "seed": 20261122}
STACK = {"dtype": "float32", "stats_ms": 100}


def endless(stack: Stack) -> dict[str, object]:
    return {"model": stack.name, "prompt": [5, 6, 7], "max_tokens": CONTEXT - 10, "ignore_eos": True}


def records(stack: Stack) -> int:
    return sum(1 for _ in stack.redis.client.scan_iter(match="*}:req:*", count=1000))


def test_clients_leaving_calls_without_streaming_free_their_blocks(stack: Stack) -> None:
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
    stack.settled_empty()


def events(stack: Stack, kind: str) -> int:
    rows: Any = stack.redis.client.xrange(stack.keys.events)
    return sum(fields[b"kind"] == kind.encode() for _, fields in rows)


def test_worker_told_to_end_answers_its_steps_and_restart_continues(stack: Stack, reference: Reference) -> None:
    lost = events(stack, "worker_lost")
    with load(stack, reference, LONG) as under_way:
        assert stack.kill("worker", signal.SIGTERM) == 0
        assert not stack.redis.client.exists(stack.keys.worker("worker-0"))
        stack.start("worker")
        under_way.check(LONG)
        records = [stack.keys.req(stream.request) for stream in under_way.streams]
        assert [stack.redis.client.hget(record, "attempts") for record in records] == [b"1"] * REQUESTS
    assert (events(stack, "worker_left"), events(stack, "worker_lost")) == (1, lost)
    assert "worker worker-0 left: worker drained" in stack.log("scheduler")
    stack.settled_empty()


def test_stopped_scheduler_shows_in_health_until_it_continues(
    stack: Stack, reference: Reference, tmp_path: Path
) -> None:
    """At a gateway that is quick to say that work stands still."""
    with running_gateway(tmp_path, stack.model, stack.redis, progress_timeout_s=2) as other:
        until("all is well", lambda: health(other) == {"live": 200, "ready": 200, "progress": 200})
        with load(stack, reference, LONG) as under_way:
            asked = other.post("/v1/completions", {**endless(stack), "background": True})
            assert asked.status_code == 202, asked.text
            request = f"/v1/requests/{asked.json()['id']}"
            until("it runs", lambda: other.get(request).json()["status"] == "running")
            stack.signal("scheduler", signal.SIGSTOP)
            try:
                until("work stands still", lambda: health(other) == {"live": 200, "ready": 503, "progress": 503})
                assert "no step was answered" in other.reason("/health/progress")
            finally:
                stack.signal("scheduler", signal.SIGCONT)
            under_way.check(LONG)
        until("all is well", lambda: health(other) == {"live": 200, "ready": 200, "progress": 200})
        assert other.request("DELETE", request).status_code == 200
    stack.settled_empty()


def used(stack: Stack) -> int:
    memory: Any = stack.redis.client.info("memory")
    return int(memory["used_memory"])


def refusals(stack: Stack) -> int:
    errors: Any = stack.redis.client.info("errorstats")
    return int(errors.get("errorstat_OOM", {"count": 0})["count"])


def test_nearly_full_redis_refuses_work_and_a_full_one_delays(stack: Stack, reference: Reference) -> None:
    client, tokens = stack.redis.client, 1000
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(stack.complete, prompt, tokens, ignore_eos=True, speculate=False)
            for prompt in reference.prompts[:2]
        ]
        until("they run", lambda: stack.stats().get("running") == "2")
        try:
            client.set("filler:", b"x" * (16 << 20))
            client.config_set("maxmemory", int(used(stack) / 0.8))
            refused = stack.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_memory")
            assert int(refused.headers["retry-after"]) >= 1
            before = refusals(stack)
            client.config_set("maxmemory", used(stack) // 2)
            until("output is refused as well", lambda: refusals(stack) > before + 3)
        finally:
            client.delete("filler:")
            client.config_set("maxmemory", 0)
        for answer, output in zip(answers, reference.outputs, strict=False):
            ids = answer.result(120)
            assert (ids[: len(output)], len(ids)) == (output, tokens)
    until("the stack is ready by itself", stack.ready)
    assert stack.complete(reference.prompts[0], 8) == reference.outputs[0][:8]
    assert "wait to be adopted" not in stack.log("scheduler").rpartition("is back")[2]


def health(gateway: GatewayProcess) -> dict[str, int]:
    return {name: gateway.status(f"/health/{name}") for name in ("live", "ready", "progress")}


def pending(stack: Stack, stream: str) -> int:
    found: Any = stack.redis.client.xpending(stream, "schedulers")
    return int(found["pending"])


def tokens_of_an_endless_stream(stack: Stack) -> Iterator[Any]:
    body = {**endless(stack), "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60, verify=PLAIN) as answer:
        assert answer.status_code == 200
        for event in sse.objects(answer.iter_lines()):
            if event.get("choices"):
                yield event


@pytest.fixture
def streaming(stack: Stack) -> Iterator[Stack]:
    """Everything runs, and a stream is under way; afterwards what was killed or stopped runs again."""
    until("the stack is ready", stack.ready, START_S)
    stream = tokens_of_an_endless_stream(stack)
    next(stream)
    yield stack
    redis = stack.redis.process
    if redis is not None and redis.poll() is None:
        redis.send_signal(signal.SIGCONT)
    else:
        stack.redis.start()
    for service in ("worker", "scheduler"):
        process = psutil.Process(stack.pid(service)) if psutil.pid_exists(stack.pid(service)) else None
        if process is None or process.status() == psutil.STATUS_ZOMBIE:
            stack.start(service)
        else:
            process.send_signal(signal.SIGCONT)
    stream.close()
    until("the stack is ready again", stack.ready, START_S)
    stack.settled()
    until("the gateway has seen the scheduler that was restarted", stack.ready)


def told_to_end(stack: Stack) -> int:
    """The exit status of the scheduler after SIGTERM."""
    stack.signal("scheduler", signal.SIGTERM)
    try:
        return stack.wait("scheduler", EXIT_S)
    except subprocess.TimeoutExpired:
        stack.kill("scheduler")
        raise


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_scheduler_ends_without_redis(streaming: Stack, how: signal.Signals) -> None:
    assert streaming.redis.process is not None
    streaming.redis.process.send_signal(how)
    if how is signal.SIGKILL:
        streaming.redis.process.wait(60)
    assert told_to_end(streaming) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_scheduler_ends_without_the_worker(streaming: Stack, how: signal.Signals) -> None:
    psutil.Process(streaming.pid("worker")).send_signal(how)
    assert told_to_end(streaming) == 0


def test_scheduler_ends_while_it_waits_for_a_shard_and_redis_is_silent(reference: Reference, tmp_path: Path) -> None:
    stack = Stack(tmp_path, reference.path)
    try:
        stack.redis.start()
        stack.redis.client.set(stack.keys.lease("shard-0"), "another", ex=60)
        stack.start("scheduler")
        until("it waits", lambda: "waiting for the lease of" in stack.log("scheduler"), START_S)
        assert told_to_end(stack) == 0
        stack.start("scheduler")
        until("it waits", lambda: stack.log("scheduler").count("waiting for the lease of") == 2, START_S)
        assert stack.redis.process is not None
        stack.redis.process.send_signal(signal.SIGSTOP)
        assert told_to_end(stack) == 0
        stack.redis.process.send_signal(signal.SIGCONT)
    finally:
        stack.__exit__(None, None, None)


def test_draining_scheduler_hands_back_what_never_ran(stack: Stack, reference: Reference) -> None:
    """The last test: its worker has one slot."""
    assert stack.kill("worker", signal.SIGTERM) == 0
    stack.start("worker", max_seqs=1)
    with ThreadPoolExecutor(1) as clients:
        # It holds the only slot for long: eight choices, one after another.
        body = {**endless(stack), "n": 8, "stream": True}
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as first:
            chunks = sse.objects(first.iter_lines())  # held: httpx closes the stream of an iterator without a reference
            next(chunks)  # a token: a line may be a comment, which comes while the worker starts, too
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

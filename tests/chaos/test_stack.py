"""Clients that leave, and a scheduler that drains, on a whole stack."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos import queue_pb2
from tests.support.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

REQUESTS = 8
CONTEXT = 4096
MODEL = {"requests": REQUESTS, "output_tokens": 96, "max_position_embeddings": CONTEXT, "seed": 20261122}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), reference.path, dtype="float32") as running:
        yield running


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


def pending(stack: Stack, stream: str) -> int:
    found: Any = stack.redis.client.xpending(stream, "schedulers")
    return int(found["pending"])


def test_draining_scheduler_hands_back_what_never_ran(reference: Reference, tmp_path: Path) -> None:
    with (
        running_stack(tmp_path, reference.path, dtype="float32", max_seqs=1) as stack,
        ThreadPoolExecutor(1) as clients,
    ):
        # It holds the only slot for long: eight choices, one after another.
        body = {**endless(stack), "n": 8, "stream": True}
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as first:
            lines = first.iter_lines()  # held: httpx closes the stream of an iterator without a reference
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

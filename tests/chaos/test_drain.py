"""Services are drained under load: what they have goes on elsewhere or at their next start; no client sees an error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.streams import Stream, clients, load
from tests.support.models import Reference
from tests.support.stack import ROOT, Stack, running_stack
from tests.support.waiting import free_port, until

STREAMS = 4
LONG = 1500
SHORT = 400
STANDBY = "scheduler-standby"
SPARE = {"worker_id": "worker-1"}
MODEL = {"requests": STREAMS, "output_tokens": 64, "max_position_embeddings": 4096, "seed": 20261204}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(directory, reference.path, dtype="float32", drain_s=0, max_seqs=8, threads=1) as running:
        yield running


def drain(stack: Stack, name: str) -> dict[str, Any]:
    """What `orcinus drain NAME --json` says of the one service that it found."""
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli", "drain", name, "--json", "--timeout-s", "60"],
        env=stack.environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (told,) = json.loads(ended.stdout)["services"]
    return dict(told)


def events(stack: Stack, kind: str) -> int:
    return sum(fields[b"kind"] == kind.encode() for _, fields in stack.redis.client.xrange(stack.keys.events))  # type: ignore[union-attr]


def attempts(stack: Stack, streams: list[Stream]) -> list[int]:
    found = [stack.redis.client.hget(stack.keys.req(stream.request), "attempts") for stream in streams]
    return [int(count or 0) for count in found]  # type: ignore[arg-type]


def test_worker_told_to_end_answers_its_steps_and_restart_continues(stack: Stack, reference: Reference) -> None:
    lost = events(stack, "worker_lost")
    with load(stack, reference, LONG) as under_way:
        assert stack.kill("worker", signal.SIGTERM) == 0
        assert not stack.redis.client.exists(stack.keys.worker("worker-0"))
        stack.start("worker")
        under_way.check(LONG)
        assert attempts(stack, under_way.streams) == [1] * STREAMS
    assert events(stack, "worker_left") == 1
    assert events(stack, "worker_lost") == lost
    assert "worker worker-0 left: worker drained" in stack.log("scheduler")
    stack.settled_empty()


def test_services_drain_and_restart_under_load_without_client_errors(stack: Stack, reference: Reference) -> None:
    stack.start("scheduler", STANDBY)
    stack.start("worker", "worker-1", **SPARE)
    port = free_port()
    stack.start("gateway", "gateway-1", port=port, ops_port=free_port())
    second = f"http://127.0.0.1:{port}"
    until("the standby waits", lambda: "another scheduler holds it" in stack.log(STANDBY), 60)
    until("the second gateway is ready", lambda: ready(second), 60)
    until("the spare worker is there", lambda: stack.redis.client.exists(stack.keys.worker("worker-1")), 60)
    gateways = [key.decode() for key in stack.redis.client.scan_iter(match="*alive:gateway:*")]
    (first,) = [name for name in gateways if f"-{stack.pid('gateway')}-" in name]
    with clients(stack, reference, SHORT, second) as streams:

        def goes_on() -> None:
            begun = len(streams)
            until("requests come to their ends", lambda: len(streams) > begun + STREAMS, 60)

        assert drain(stack, "worker-0")["role"] == "worker"
        assert stack.wait("worker") == 0
        stack.start("worker")
        goes_on()
        assert drain(stack, "shard-0")["role"] == "scheduler"
        assert stack.wait("scheduler") == 0
        stack.start("scheduler")
        goes_on()
        assert drain(stack, first.rpartition(":")[2])["role"] == "gateway"
        assert stack.wait("gateway") == 0
        goes_on()  # at the other gateway
        stack.start("gateway")
        until("the gateway is ready again", stack.ready, 60)
        goes_on()
    assert stack.settled()["pending"] == [0, 0, 0, 0]


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False

"""The services may start in any order: each says what it waits for, and the last one makes the stack ready."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from tests.support.checkpoints.models import Reference
from tests.support.stack import PLAIN, Stack
from tests.support.waiting import until

MODEL = {"requests": 1, "output_tokens": 16, "seed": 20261207}


def test_each_service_waits_for_what_it_needs_and_says_so(reference: Reference, tmp_path: Path) -> None:
    """All start without Redis; scheduler and worker then stand still, so that each finds only those before it.

    The launcher's own order is that of every other test.
    """
    stack = Stack(tmp_path, reference.path, dtype="float32", threads=1)

    def says(reason: str) -> None:
        until(f"the gateway says: {reason}", lambda: reason in reason_of(stack))

    try:
        stack.start("gateway")
        says("Redis does not answer")
        for service in ("scheduler", "worker"):
            stack.start(service)
            until(f"{service} waits", lambda service=service: "waiting for Redis" in stack.log(service))
            stack.signal(service, signal.SIGSTOP)
        stack.redis.start()
        says("no scheduler is alive")
        stack.signal("scheduler", signal.SIGCONT)
        until("the scheduler waits", lambda: "waiting for a ready worker" in stack.log("scheduler"))
        says("no worker is registered")
        stack.signal("worker", signal.SIGCONT)
        until("the stack is ready", stack.ready)
        assert stack.complete(reference.prompts[0], 16) == reference.outputs[0]
    finally:
        stack.__exit__(None, None, None)


def reason_of(stack: Stack) -> str:
    """Return why the gateway is not ready; empty while it does not answer."""
    try:
        return str(httpx.get(f"{stack.url}/health/ready", timeout=60, verify=PLAIN).json().get("reason", "it is ready"))
    except httpx.TransportError:
        return ""

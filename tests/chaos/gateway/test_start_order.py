"""The services may start in any order: each says what it waits for, and the last one makes the stack ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack
from tests.support.waiting import until

ORDERS = (("gateway", "scheduler", "worker", "redis"), ("gateway", "redis", "scheduler", "worker"))
"""With them each says all that it can wait for. The launcher's own order is that of every other test."""
MODEL = {"requests": 1, "output_tokens": 16, "seed": 20261207}


def missing(running: set[str]) -> str:
    """What a gateway says that it waits for."""
    if "redis" not in running:
        return "Redis does not answer"
    return "no scheduler is alive" if "scheduler" not in running else "no worker is registered"


def reason(stack: Stack) -> str:
    try:
        return str(httpx.get(f"{stack.url}/health/ready", timeout=60).json().get("reason", "it is ready"))
    except httpx.TransportError:
        return ""


def told(stack: Stack, service: str, running: set[str]) -> Callable[[], Any]:
    """Has it said what it waits for, or that it waits for nothing?"""
    if service == "gateway":
        return lambda: missing(running) in reason(stack)
    if "redis" not in running:
        return lambda: "waiting for Redis" in stack.log(service)
    words = {"worker": "registered as", "scheduler": "waiting for a ready worker"}
    return lambda: words[service] in stack.log(service)


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_each_service_waits_for_what_it_needs_and_says_so(
    order: tuple[str, ...], reference: Reference, tmp_path: Path
) -> None:
    stack = Stack(tmp_path, reference.path, dtype="float32", threads=1)
    running: set[str] = set()
    try:
        for service in order[:-1]:
            start(stack, service)
            running.add(service)
            for each in running - {"redis"}:
                until(f"{each} says what it waits for", told(stack, each, running), 60)
        start(stack, order[-1])
        until("the stack is ready", stack.ready, 60)
        assert stack.complete(reference.prompts[0], 16) == reference.outputs[0]
    finally:
        stack.__exit__(None, None, None)


def start(stack: Stack, service: str) -> None:
    if service == "redis":
        stack.redis.start()
    else:
        stack.start(service)

"""SIGTERM ends the scheduler within its bound, whatever is gone or silent at that moment. Real processes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support import sse
from tests.support.checkpoints.models import Reference
from tests.support.stack import PLAIN, START_S, Stack, running_stack
from tests.support.waiting import until

EXIT_S = 5.0 + 25.0
"""What docs/operations.md promises, and what a busy machine may add. One that lost the order to end never does."""

MODEL = {"requests": 1, "max_position_embeddings": 4096, "seed": 20261125}


@pytest.fixture(scope="module")
def whole(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), reference.path, dtype="float32") as running:
        yield running


def tokens_of_an_endless_stream(stack: Stack) -> Iterator[Any]:
    body = {"model": stack.name, "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60, verify=PLAIN) as answer:
        assert answer.status_code == 200
        for event in sse.objects(answer.iter_lines()):
            if event.get("choices"):
                yield event


@pytest.fixture
def stack(whole: Stack) -> Iterator[Stack]:
    """Everything runs, and a stream is under way; afterwards what was killed or stopped runs again."""
    until("the stack is ready", whole.ready, START_S)
    stream = tokens_of_an_endless_stream(whole)
    next(stream)
    yield whole
    redis = whole.redis.process
    if redis is not None and redis.poll() is None:
        redis.send_signal(signal.SIGCONT)
    else:
        whole.redis.start()
    for service in ("worker", "scheduler"):
        process = psutil.Process(whole.pid(service)) if psutil.pid_exists(whole.pid(service)) else None
        if process is None or process.status() == psutil.STATUS_ZOMBIE:
            whole.start(service)
        else:
            process.send_signal(signal.SIGCONT)
    stream.close()
    until("the stack is ready again", whole.ready, START_S)
    whole.settled()


def told_to_end(stack: Stack) -> int:
    """The exit status of the scheduler after SIGTERM."""
    stack.signal("scheduler", signal.SIGTERM)
    try:
        return stack.wait("scheduler", EXIT_S)
    except subprocess.TimeoutExpired:
        stack.kill("scheduler")
        raise


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_redis(stack: Stack, how: signal.Signals) -> None:
    assert stack.redis.process is not None
    stack.redis.process.send_signal(how)
    if how is signal.SIGKILL:
        stack.redis.process.wait(60)
    assert told_to_end(stack) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_worker(stack: Stack, how: signal.Signals) -> None:
    psutil.Process(stack.pid("worker")).send_signal(how)
    assert told_to_end(stack) == 0


def test_while_it_waits_for_a_shard_and_redis_is_silent(reference: Reference, tmp_path: Path) -> None:
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

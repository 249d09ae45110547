"""SIGTERM ends the scheduler within its bound, whatever is gone or silent at that moment. Real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.worker.engine import Engine
from services.worker.main import record
from services.worker.registration import Registration
from services.worker.server import WorkerServer
from shared.settings import WorkerSettings
from tests.support import sse
from tests.support.models import Reference
from tests.support.stack import ROOT, START_S, RedisServer, Stack, running_stack
from tests.support.waiting import until

EXIT_S = 5.0 + 25.0
"""What docs/operations.md promises, and what a busy machine may add. Who lost the order to end never does."""

TOGETHER = 4
ROUNDS = 5
MODEL = {"requests": 1, "max_position_embeddings": 4096, "seed": 20261125}


@pytest.fixture(scope="module")
def whole(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), reference.path, dtype="float32") as running:
        yield running


def tokens_of_an_endless_stream(stack: Stack) -> Iterator[Any]:
    body = {"model": stack.name, "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as answer:
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


def test_while_everybody_answers(stack: Stack) -> None:
    assert told_to_end(stack) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_redis(stack: Stack, how: signal.Signals) -> None:
    assert stack.redis.process is not None
    stack.redis.process.send_signal(how)
    if how is signal.SIGKILL:
        stack.redis.process.wait(10)
    assert told_to_end(stack) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_worker(stack: Stack, how: signal.Signals) -> None:
    psutil.Process(stack.pid("worker")).send_signal(how)
    assert told_to_end(stack) == 0


def test_while_it_waits_for_a_shard_of_another_and_for_a_redis_that_is_silent(
    reference: Reference, tmp_path: Path
) -> None:
    stack = Stack(tmp_path, reference.path)
    try:
        stack.redis.start()
        stack.redis.client.set(stack.keys.lease("shard-0"), "another", ex=60)
        stack.start("scheduler")
        until("it waits", lambda: "waiting for shard" in stack.log("scheduler"), START_S)
        assert told_to_end(stack) == 0
        stack.start("scheduler")
        until("it waits", lambda: stack.log("scheduler").count("waiting for shard") == 2, START_S)
        assert stack.redis.process is not None
        stack.redis.process.send_signal(signal.SIGSTOP)
        assert told_to_end(stack) == 0
        stack.redis.process.send_signal(signal.SIGCONT)
    finally:
        stack.__exit__(None, None, None)


class Shards:
    """Several schedulers, each with a worker of its own, which is lost when they are told to end."""

    def __init__(self, directory: Path, model: Path, redis: RedisServer) -> None:
        self._stack = Stack(directory, model)
        self._stack.redis = redis
        self._redis = redis
        settings = WorkerSettings(model=model, dtype="float32", redis_url=redis.url, max_seqs=4, threads=1)
        self._settings = [settings.model_copy(update={"worker_id": f"worker-{i}"}) for i in range(TOGETHER)]
        self._engines = [Engine(each) for each in self._settings]
        for engine in self._engines:
            engine.warm_up()

    def scheduler(self, number: int) -> subprocess.Popen[bytes]:
        environment = {**self._stack.environment(), "ORCINUS_SHARD": f"shard-{number}"}
        with (self._stack.directory / "schedulers.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "services.cli", "scheduler"], stdout=log, stderr=log, env=environment, cwd=ROOT
            )

    def round(self) -> list[int | None]:
        """The exit status of each scheduler; None for one that had to be killed."""
        servers = [WorkerServer("127.0.0.1:0") for _ in range(TOGETHER)]
        registrations = []
        for server, engine, settings in zip(servers, self._engines, self._settings, strict=True):
            server.serve(engine)
            registrations.append(Registration(settings, record(engine, server.address), lambda: 0))
            registrations[-1].start()
        schedulers = [self.scheduler(number) for number in range(TOGETHER)]
        try:
            until("every shard has a worker", lambda: self.shards() == TOGETHER, START_S)
            until("every worker is led", lambda: all(self.busy(server) for server in servers), START_S)
            with ThreadPoolExecutor(TOGETHER) as stops:
                stopped = [stops.submit(server.stop, 0.1) for server in servers]
                for process in schedulers:
                    process.send_signal(signal.SIGTERM)
                ends = [self.ended(process) for process in schedulers]
                for stop in stopped:
                    stop.result(30)
            return ends
        finally:
            for process in schedulers:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            for registration in registrations:
                registration.stop()

    def shards(self) -> int:
        """How many of them lead workers: those that come first take what there is, and give it back to the others."""
        keys = [settings.keys.worker(settings.worker_id) for settings in self._settings]
        return len({self._redis.client.hget(key, "shard") for key in keys} - {None, b""})

    @staticmethod
    def busy(server: WorkerServer) -> bool:
        return server.is_led

    @staticmethod
    def ended(process: subprocess.Popen[bytes]) -> int | None:
        try:
            return process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return None


def test_at_the_moment_when_the_worker_is_lost(reference: Reference, tmp_path: Path) -> None:
    """Then it looks for another one, with many short calls to Redis: a cancellation can get lost in each."""
    with RedisServer(tmp_path / "redis") as redis:
        shards = Shards(tmp_path, reference.path, redis)
        for _ in range(ROUNDS):
            assert shards.round() == [0] * TOGETHER

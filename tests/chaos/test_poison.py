"""Requests that make a step fail, on the real scheduler: only they are given up, their batch mates get right tokens.

The worker is the real one but for an engine that fails every step that reads a certain token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.main import record
from services.worker.registration import Registration
from services.worker.server import WorkerServer
from shared.columns import unpack
from shared.settings import WorkerSettings
from tests.support.models import EOS, Reference
from tests.support.stack import START_S, Stack
from tests.support.waiting import until

POISON = 255
REQUESTS = 9


class PoisonedEngine(Engine):
    """Cannot run a step in which a sequence that began with POISON has a chunk."""

    failed = 0  # steps
    open = threading.Event()  # nobody gets an answer to Describe before it is set

    def info(self) -> worker_pb2.WorkerInfo:
        if not PoisonedEngine.open.wait(4):
            raise TimeoutError("nobody opened the worker")
        return super().info()

    def submit(self, step: worker_pb2.Step, received_ns: int = 0) -> InFlightStep:
        for enter in step.enters:
            self.poisoned = getattr(self, "poisoned", set()) - {enter.slot}
            if unpack(enter.tokens)[0] == POISON:
                self.poisoned.add(enter.slot)
        if set(unpack(step.chunk_slots).tolist()) & getattr(self, "poisoned", set()):
            PoisonedEngine.failed += 1
            raise RuntimeError("poison")
        return super().submit(step, received_ns)


MODEL = {"requests": REQUESTS, "seed": 20261124}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), reference.path)
    settings = WorkerSettings(model=reference.path, dtype="float32", redis_url=stack.redis.url, max_seqs=16, threads=1)
    server = WorkerServer("127.0.0.1:0")
    registration: Registration | None = None
    try:
        stack.redis.start()
        engine = PoisonedEngine(settings)
        engine.warm_up()
        PoisonedEngine.open.set()
        server.serve(engine)
        registration = Registration(settings, record(engine, server.address), lambda: server.last_step_id)
        registration.start()
        for service in ("scheduler", "gateway"):
            stack.start(service)
        until("the stack is ready", stack.ready, START_S)
        yield stack
    finally:
        if registration:
            registration.stop()
        server.stop()
        stack.__exit__(None, None, None)


class Clients:
    """Requests under way, good and bad."""

    def __init__(self, stack: Stack, reference: Reference, pool: ThreadPoolExecutor) -> None:
        self._stack = stack
        self._pool = pool
        self._known = [
            (prompt, output)
            for prompt, output in zip(reference.prompts, reference.outputs, strict=True)
            if prompt[0] != POISON
        ]
        self._good: list[tuple[list[int], Future[list[int]]]] = []
        self._bad: list[Future[httpx.Response]] = []
        self._buried = stack.redis.client.xlen(stack.keys.dead)

    def good(self, numbers: range) -> None:
        for prompt, output in [self._known[number] for number in numbers if number < len(self._known)]:
            answer = self._pool.submit(self._stack.complete, prompt, len(output), ignore_eos=True)
            self._good.append((output, answer))

    def bad(self) -> None:
        body = {"prompt": [POISON, EOS, len(self._bad)], "max_tokens": 8}
        self._bad.append(self._pool.submit(self._stack.post, "/v1/completions", body))

    def claimed(self) -> int:
        found = [self._stack.redis.client.xpending(name, "schedulers") for name in self._stack.keys.request_streams()]
        return sum(row["pending"] for row in found)  # type: ignore[index]

    def check(self) -> None:
        """Waits for all: only the bad were given up."""
        answers = [answer.result(120) for _, answer in self._good]
        assert answers == [output for output, _ in self._good]
        for error in [answer.result(120) for answer in self._bad]:
            assert error.status_code == 500
            assert "one suspect" in error.json()["error"]["message"]
        assert self._stack.redis.client.xlen(self._stack.keys.dead) == self._buried + len(self._bad)
        self._stack.settled()
        assert self._stack.stats()["parked"] == "0"


@pytest.fixture
def clients(stack: Stack, reference: Reference) -> Iterator[Clients]:
    with ThreadPoolExecutor(2 * REQUESTS) as pool:
        try:
            yield Clients(stack, reference, pool)
        finally:
            PoisonedEngine.open.set()


@pytest.mark.parametrize("poisons", [1, 2])
def test_only_the_poison_is_given_up(clients: Clients, poisons: int) -> None:
    for _ in range(poisons):
        clients.bad()
    clients.good(range(REQUESTS))
    clients.check()


@pytest.mark.parametrize("attempt", range(4))  # who is tried first depends on the ids, which are drawn
def test_a_poison_that_comes_during_the_trial_of_another_costs_no_innocent(clients: Clients, attempt: int) -> None:
    failed = PoisonedEngine.failed
    PoisonedEngine.open.clear()
    clients.bad()
    clients.good(range(2))
    until("a step fails", lambda: PoisonedEngine.failed > failed)
    # The link is lost and not opened again: the newcomers are there before the first step of the trial is planned.
    held = clients.claimed()
    clients.bad()
    clients.good(range(2, REQUESTS))
    until("the newcomers are claimed", lambda: clients.claimed() > held + 1)
    PoisonedEngine.open.set()
    clients.check()

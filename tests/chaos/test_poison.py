"""Requests that make a step fail, on the real scheduler: only they are given up, their batch mates get right tokens.

The worker is the real one but for an engine that fails every step that reads a certain token.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.main import record
from services.worker.registration import Registration
from services.worker.serving.server import WorkerServer
from shared.settings import WorkerSettings
from shared.wire.columns import unpack
from tests.support.checkpoints.models import EOS, Reference
from tests.support.stack import START_S, Stack
from tests.support.waiting import until

POISON = 255
REQUESTS = 9


class PoisonedEngine(Engine):
    """Cannot run a step in which a sequence that began with POISON has a chunk."""

    def submit(self, step: worker_pb2.Step, received_ns: int = 0) -> InFlightStep:
        for enter in step.enters:
            self.poisoned = getattr(self, "poisoned", set()) - {enter.slot}
            if unpack(enter.tokens)[0] == POISON:
                self.poisoned.add(enter.slot)
        if set(unpack(step.chunk_slots).tolist()) & getattr(self, "poisoned", set()):
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
        registration = Registration(settings, record(engine, server.address), lambda: server.last_step_id)
        server.serve(engine, registration.refusal)
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


def test_only_the_poison_is_given_up(stack: Stack, reference: Reference) -> None:
    known = [case for case in zip(reference.prompts, reference.outputs, strict=True) if case[0][0] != POISON]
    bodies = [{"prompt": [POISON, EOS, number], "max_tokens": 8} for number in range(2)]
    with ThreadPoolExecutor(2 * REQUESTS) as pool:
        bad = [pool.submit(stack.post, "/v1/completions", body) for body in bodies]
        good = [pool.submit(stack.complete, prompt, len(output), ignore_eos=True) for prompt, output in known]
        assert [answer.result(120) for answer in good] == [output for _, output in known]
        for error in [answer.result(120) for answer in bad]:
            assert error.status_code == 500
            assert "one suspect" in error.json()["error"]["message"]
    assert stack.redis.client.xlen(stack.keys.dead) == len(bad)
    stack.settled()
    assert stack.stats()["parked"] == "0"

"""Requests that make a step fail, on the real scheduler: only they are given up, their batch mates get right tokens.

The worker is the real one but for an engine that fails every step that reads a certain token.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.main import record
from services.worker.registration import Registration
from services.worker.server import WorkerServer
from shared.columns import unpack
from shared.settings import WorkerSettings
from tests.models import EOS, Reference, make_llama
from tests.stack import START_S, Stack
from tests.waiting import until

POISON = 255
REQUESTS = 9


class PoisonedEngine(Engine):
    """Cannot run a step in which a sequence that began with POISON has a chunk."""

    def execute(self, step: worker_pb2.Step, received_ns: int = 0) -> worker_pb2.Result:
        for enter in step.enters:
            self.poisoned = getattr(self, "poisoned", set()) - {enter.slot}
            if unpack(enter.tokens)[0] == POISON:
                self.poisoned.add(enter.slot)
        if set(unpack(step.chunk_slots).tolist()) & getattr(self, "poisoned", set()):
            raise RuntimeError("poison")
        return super().execute(step, received_ns)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_llama(tmp_path_factory.mktemp("poison") / "tiny", requests=REQUESTS, seed=20261124)


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


@pytest.mark.parametrize("poisons", [1, 2])
def test_only_the_poison_is_given_up(stack: Stack, reference: Reference, poisons: int) -> None:
    buried = stack.redis.client.xlen(stack.keys.dead)
    with ThreadPoolExecutor(REQUESTS + poisons) as clients:
        bad = [
            clients.submit(stack.post, "/v1/completions", {"prompt": [POISON, EOS, index], "max_tokens": 8})
            for index in range(poisons)
        ]
        good = [
            clients.submit(stack.complete, prompt, len(output), ignore_eos=True)
            for prompt, output in zip(reference.prompts, reference.outputs, strict=True)
            if prompt[0] != POISON
        ]
        answers = [answer.result(120) for answer in good]
        errors = [answer.result(120) for answer in bad]
    assert answers == [
        output for prompt, output in zip(reference.prompts, reference.outputs, strict=True) if prompt[0] != POISON
    ]
    for error in errors:
        assert error.status_code == 500
        assert "one suspect" in error.json()["error"]["message"]
    assert stack.redis.client.xlen(stack.keys.dead) == buried + poisons
    stack.settled()

"""The worker's pipeline over gRPC while steps overlap: order, at most two in flight, errors, acks, a lost device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from protos import worker_pb2
from services.worker.engine import STEPS_IN_FLIGHT, Engine
from services.worker.in_flight import InFlightStep, InFlightSteps
from services.worker.serving import pipeline
from services.worker.serving.pipeline import Item, Pipeline, RunState
from shared.wire.columns import pack, unpack
from tests.engine.late_engine import make_late_engine
from tests.engine.worker.test_server import DEADLINE_S, Client, begun, chunk, first_step
from tests.engine.worker.test_server import rpc as rpc  # the fixtures
from tests.engine.worker.test_server import server as server
from tests.support.checkpoints.models import Reference
from tests.support.waiting import until

MODEL = {"seed": 9, "requests": 2}


@pytest.fixture
def kind() -> str:
    """Return what takes Runs."""
    return "grpc"


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Engine:
    return make_late_engine(reference.path, host_blocks=8)


class Held:
    """The engine with its finishing held until `go` is set; `submitted` and `finished` are step ids in order.

    The step `failing` fails when it is to be finished and the next is out.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, failing: int = 0) -> None:
        self.failing = failing
        self.submitted: deque[int] = deque()
        self.in_flight: list[InFlightStep] = []
        self.finished: deque[int] = deque()
        self.most = 0
        self.go = threading.Event()
        self._submit, self._finish = engine.submit, engine.finish
        monkeypatch.setattr(engine, "submit", self.submit)
        monkeypatch.setattr(engine, "finish", self.finish)

    def submit(self, step: worker_pb2.Step, received_ns: int = 0) -> InFlightStep:
        inflight = self._submit(step, received_ns)
        self.in_flight.append(inflight)
        self.submitted.append(step.id)
        self.most = max(self.most, len(self.submitted) - len(self.finished))
        return inflight

    def finish(self, inflight: InFlightStep, more: Callable[[], bool]) -> worker_pb2.Result:
        if not self.go.wait(DEADLINE_S):
            raise TimeoutError("the test never let the step end")
        if inflight.id == self.failing:
            until("the next is out", lambda: inflight.id + 1 in self.submitted)
            raise MemoryError("no memory left for the tokens")
        result = self._finish(inflight, more)
        self.finished.append(inflight.id)
        return result


@pytest.fixture
def held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(engine, monkeypatch)


def decodes(run: Client, prompt: list[int], count: int, first: int = 2) -> None:
    for k in range(count):
        run.send(first + k, **chunk(len(prompt) + first - 2 + k, 1))


def test_step_is_submitted_while_one_before_runs_and_never_third(
    rpc: grpc.Channel, held: Held, reference: Reference
) -> None:
    prompt, output = reference.prompts[0], reference.outputs[0]
    run = Client(rpc, epoch=1)
    run.send(1, **first_step(prompt, 24))
    decodes(run, prompt, 23)
    run.close()
    until("two are out", lambda: len(held.submitted) == STEPS_IN_FLIGHT == 2)
    held.go.set()
    results = list(run.call)
    assert [result.id for result in results] == list(held.finished) == list(range(1, 25))
    assert [unpack(result.tokens).tolist() for result in results] == [[token] for token in output]
    assert held.most == 2


def test_failure_with_steps_out_answers_that_and_later_steps(
    rpc: grpc.Channel, engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, output = reference.prompts[0], reference.outputs[0]
    with monkeypatch.context() as patch:
        held = Held(engine, patch, failing=2)
        run = Client(rpc, epoch=1)
        run.send(1, **first_step(prompt, 24))
        decodes(run, prompt, 3)
        until("two are out", lambda: len(held.submitted) == 2)
        held.go.set()
        results = [next(run.call) for _ in range(4)]
    assert unpack(results[0].tokens).tolist() == output[:1]
    assert results[1].error == "MemoryError: no memory left for the tokens"
    assert all("begin a new Run" in result.error and not result.tokens for result in results[2:])
    begun(rpc, 1, reference).call.cancel()


def test_refused_step_leaves_earlier_answers_alone(rpc: grpc.Channel, held: Held, reference: Reference) -> None:
    run = Client(rpc, epoch=1)
    run.send(1, **first_step(reference.prompts[0], 24))
    run.send(2, free_slots=pack([3]))
    run.send(3)
    until("the first is out", lambda: list(held.submitted) == [1])
    held.go.set()
    results = [next(run.call) for _ in range(3)]
    assert unpack(results[0].tokens).tolist() == reference.outputs[0][:1]
    assert "slot 3 holds no sequence" in results[1].error
    assert "begin a new Run" in results[2].error
    run.call.cancel()


def test_new_run_begins_while_steps_of_the_old_are_out(rpc: grpc.Channel, held: Held, reference: Reference) -> None:
    old = Client(rpc, epoch=1)
    old.send(1, **first_step(reference.prompts[0], 24))
    decodes(old, reference.prompts[0], 10)
    until("two are out", lambda: len(held.submitted) == 2)
    new = Client(rpc, epoch=2)
    prompt, output = reference.prompts[1], reference.outputs[1]
    new.send(1, **first_step(prompt, 24))
    decodes(new, prompt, 23)
    assert old.ended_with() == grpc.StatusCode.ABORTED
    held.go.set()
    assert [unpack(next(new.call).tokens).tolist() for _ in range(24)] == [[token] for token in output]
    assert list(held.submitted)[:2] == [1, 2] and len(held.submitted) == 26
    new.call.cancel()


def test_remains_of_an_older_run_acknowledge_no_copies(
    rpc: grpc.Channel, engine: Engine, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines, put = [], Pipeline.put
    monkeypatch.setattr(Pipeline, "put", lambda self, item: (pipelines.append(self), put(self, item))[1])
    older = RunState(epoch=0)
    older.end()
    run = Client(rpc, epoch=1)
    run.send(1, swap_out_gpu=pack([3]), swap_out_host=pack([0]))
    until("it is out", lambda: held.in_flight)
    engine.cache.copies[0].patience = 5
    for id in range(1, 5):
        pipelines[0].put(Item(older, worker_pb2.Step(id=id), 0))
    held.go.set()
    assert unpack(next(run.call).swap_out_acks).tolist() == [3]
    run.call.cancel()


def test_a_lost_device_ends_the_process(
    rpc: grpc.Channel, engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process it would stay lost, whatever comes."""
    said: list[str] = []
    monkeypatch.setattr(pipeline, "end_process", said.append)

    def lost(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    run = Client(rpc, epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(InFlightSteps, "settle", lost)
        run.send(1, **first_step(reference.prompts[0], 24))
        assert "illegal memory access" in next(run.call).error
    assert len(said) == 1 and "the worker ends itself" in said[0]
    run.call.cancel()

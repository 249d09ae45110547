"""The scheduler's call over a Unix socket beside the worker's server of it: results in order, ends as gRPC's."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest

from protos import worker_pb2
from services.scheduler.workers import run_call
from services.scheduler.workers.run_call import RunCall
from services.worker.serving.pipeline import Results, RunState
from services.worker.serving.run_server import RefusedError, RunServer
from shared.errors import ProtocolError
from shared.wire import run_socket
from tests.support.run_socket import SocketCall

STEPS = 300


class Worker:
    """Answers each step with its id at once; `run` is the current Run."""

    def __init__(self) -> None:
        self.run: RunState | None = None
        self.refuse: RefusedError | None = None
        self.error_bytes = 0
        self.all_read = threading.Event()

    def begin(self, first: worker_pb2.Step | None, results: Results) -> RunState:
        if self.refuse is not None:
            raise self.refuse
        if first is None:  # the scheduler hung up before its hello
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "no hello")
        self.run = RunState(first.epoch, results)
        return self.run

    def read(self, run: RunState, steps: Iterator[worker_pb2.Step]) -> None:
        for step in steps:
            run.results.put(worker_pb2.Result(epoch=run.epoch, id=step.id, error="x" * self.error_bytes))
        self.all_read.set()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def server(worker: Worker) -> Iterator[RunServer]:
    server = RunServer(worker.begin, worker.read)
    yield server
    server.stop(20)


def bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """End a test after a minute: a result that never comes would be awaited for longer."""

    @functools.wraps(test)
    async def run(**fixtures: object) -> None:
        async with asyncio.timeout(60):
            await test(**fixtures)

    return run


async def connected(server: RunServer) -> RunCall:
    call = await RunCall.connect(server.name)
    assert call is not None
    await call.write(worker_pb2.Step(epoch=3, hello=worker_pb2.Hello(shard="shard-0")))
    return call


@pytest.mark.parametrize("error_bytes", [0, 100_000])
@bounded
async def test_results_come_in_order_also_when_socket_is_full(
    server: RunServer, worker: Worker, error_bytes: int
) -> None:
    worker.error_bytes = error_bytes

    call = await connected(server)
    payload = worker_pb2.Enter(tokens=bytes(error_bytes))

    async def send() -> None:
        for number in range(STEPS):
            await call.write(worker_pb2.Step(epoch=3, id=number, enters=[payload]))

    sending = asyncio.create_task(send())
    assert [(await anext(call)).id for _ in range(STEPS)] == list(range(STEPS))
    await sending
    call.cancel()


@bounded
async def test_results_that_nothing_reads_are_held_back(
    server: RunServer, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.error_bytes = 100_000
    monkeypatch.setattr(run_call, "QUEUED_RESULTS", 2)
    most = 0

    class Watched(RunCall):
        def data_received(self, data: bytes) -> None:
            nonlocal most
            super().data_received(data)
            most = max(most, len(self._results))

    call = await Watched.connect(server.name)
    assert call is not None
    await call.write(worker_pb2.Step(epoch=3, hello=worker_pb2.Hello(shard="shard-0")))
    for number in range(STEPS):
        await call.write(worker_pb2.Step(epoch=3, id=number))
    for _ in range(20_000):  # turns of the loop, in which all results would come
        await asyncio.sleep(0)
    assert 0 < most < 10
    assert [(await anext(call)).id for _ in range(STEPS)] == list(range(STEPS))
    call.cancel()


@pytest.mark.parametrize(
    ("end", "code"), [(lambda run: setattr(run, "replaced_by", 4), grpc.StatusCode.ABORTED), (lambda _: None, None)]
)
@bounded
async def test_ended_run_says_its_status_behind_the_results(
    server: RunServer, worker: Worker, end: Callable[[RunState], None], code: grpc.StatusCode | None
) -> None:
    call = await connected(server)
    await call.write(worker_pb2.Step(epoch=3, id=1))
    assert (await anext(call)).id == 1
    assert worker.run is not None
    end(worker.run)
    worker.run.end()
    if code is None:
        assert [result async for result in call] == []
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(call)
        assert caught.value.code() == code and "epoch 4" in str(caught.value.details())
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(worker_pb2.Step(epoch=3, id=2))


@bounded
async def test_hanging_up_ends_the_run_at_once(server: RunServer, worker: Worker) -> None:
    call = await connected(server)
    await call.write(worker_pb2.Step(epoch=3, id=1))
    assert (await anext(call)).id == 1
    call.cancel()
    assert worker.run is not None and await asyncio.to_thread(worker.run.has_ended.wait, 60)


def test_half_closed_run_is_answered_to_its_end(server: RunServer, worker: Worker) -> None:
    call = SocketCall(server.name, iter([worker_pb2.Step(epoch=3), worker_pb2.Step(epoch=3, id=1)]), 20)
    assert worker.all_read.wait(60) and worker.run is not None
    assert not worker.run.has_ended.is_set()
    assert next(call).id == 1
    worker.run.results.put(worker_pb2.Result(epoch=3, id=2))
    worker.run.end()
    assert [result.id for result in call] == [2]


@bounded
async def test_refused_run_ends_with_the_status_of_the_refusal(server: RunServer, worker: Worker) -> None:
    worker.refuse = RefusedError(grpc.StatusCode.ABORTED, "epoch 3 is older than 4")

    call = await connected(server)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(call)
    assert caught.value.code() == grpc.StatusCode.ABORTED
    assert caught.value.details() == "epoch 3 is older than 4"


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (b"", grpc.aio.AioRpcError, "closed the connection"),
        (b"\xff" * 64, ProtocolError, "frame: kind 255"),
        (run_socket.message(b"\xff\xff\xff"), ProtocolError, "result: not readable"),
    ],
)
@bounded
async def test_broken_stream_is_an_error_of_the_link(sent: bytes, error: type[Exception], words: str) -> None:
    name = run_socket.new_name()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(run_socket.address(name))
        listener.listen()
        call = await RunCall.connect(name)
        assert call is not None
        connection, _ = listener.accept()
        connection.sendall(sent)
        connection.close()
        with pytest.raises(error, match=words):
            await anext(call)


@bounded
async def test_socket_elsewhere_or_of_another_user_gives_no_call(
    server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await RunCall.connect(run_socket.new_name()) is None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert await RunCall.connect(server.name) is None

"""The worker over real gRPC and its Unix socket: a Run at a time, steps in order, errors for steps, not the process."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import worker_pb2, worker_pb2_grpc
from services.worker.engine import Engine
from services.worker.serving import pipeline
from services.worker.serving.server import MESSAGE_BYTES, OPTIONS, WorkerServer
from shared.errors import ConfigurationError
from shared.wire import run_socket
from shared.wire.columns import pack, unpack
from shared.wire.run_socket import is_name
from tests.engine.driver import make_engine
from tests.support.checkpoints.models import Reference
from tests.support.run_socket import SocketCall
from tests.support.waiting import until

MODEL = {"seed": 9, "requests": 2}

DEADLINE_S = 60.0
Channel = grpc.Channel | str


class Client:
    """One Run: send steps, take results; iterating the call ends when the worker ends it. channel: or the name of the
    worker's Unix socket.
    """

    def __init__(self, channel: Channel, epoch: int, hello: bool = True) -> None:
        self.epoch = epoch
        self._steps: queue.Queue[worker_pb2.Step | None] = queue.Queue()
        steps = iter(self._steps.get, None)
        self.call: Any
        if isinstance(channel, str):
            self.call = SocketCall(channel, steps, DEADLINE_S)
        else:
            self.call = worker_pb2_grpc.WorkerStub(channel).Run(steps, timeout=DEADLINE_S)
        if hello:
            self._steps.put(worker_pb2.Step(epoch=epoch, hello=worker_pb2.Hello(shard="shard-0")))

    def begin(self, hello: worker_pb2.Hello) -> None:
        self._steps.put(worker_pb2.Step(epoch=self.epoch, hello=hello))

    def send(self, id: int, epoch: int | None = None, **fields: Any) -> None:
        self._steps.put(worker_pb2.Step(epoch=self.epoch if epoch is None else epoch, id=id, **fields))

    def close(self) -> None:
        self._steps.put(None)

    def ended_with(self) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            next(self.call)
        code: grpc.StatusCode = caught.value.code()
        return code


def first_step(prompt: list[int], count: int) -> dict[str, Any]:
    blocks = -(-(len(prompt) + count) // 4)
    entering = worker_pb2.Enter(
        slot=0, tokens=pack(prompt), prompt_tokens=len(prompt), blocks=pack(list(range(blocks)))
    )
    return {"enters": [entering], **chunk(0, len(prompt))}


def chunk(start: int, length: int) -> dict[str, bytes]:
    return {"chunk_slots": pack([0]), "chunk_starts": pack([start]), "chunk_lengths": pack([length])}


def begun(channel: Channel, epoch: int, reference: Reference, index: int = 0) -> Client:
    """Return a Run that has answered its first step with the first token of the reference."""
    run = Client(channel, epoch)
    run.send(1, **first_step(reference.prompts[index], 24))
    assert unpack(next(run.call).tokens).tolist() == reference.outputs[index][:1]
    return run


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Engine:
    return make_engine(reference.path)


@pytest.fixture(params=["grpc", "socket"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return what takes Runs: a TCP port or the Unix socket."""
    return str(request.param)


def any_run(*_: object) -> str:
    """Refuse no Run: here no Redis says which shard has the worker."""
    return ""


@pytest.fixture
def server(engine: Engine, kind: str) -> Iterator[WorkerServer]:
    server = WorkerServer("127.0.0.1:0", run_socket=kind == "socket")
    server.serve(engine, any_run)
    yield server
    server.stop()


@pytest.fixture
def rpc(server: WorkerServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address, options=OPTIONS) as channel:
        yield channel


@pytest.fixture
def channel(rpc: grpc.Channel) -> Channel:
    return described(rpc).run_socket or rpc


def described(channel: grpc.Channel) -> worker_pb2.WorkerInfo:
    info: worker_pb2.WorkerInfo = worker_pb2_grpc.WorkerStub(channel).Describe(
        worker_pb2.DescribeRequest(), timeout=DEADLINE_S
    )
    return info


def test_steps_sent_ahead_are_answered_in_order_with_references_tokens(
    channel: Channel, reference: Reference, server: WorkerServer
) -> None:
    prompt, output = reference.prompts[0], reference.outputs[0]
    run = Client(channel, epoch=3)
    run.send(1, **first_step(prompt, 24))
    for k in range(23):
        run.send(2 + k, **chunk(len(prompt) + k, 1))  # none of these waits for the token before
    run.close()
    results = list(run.call)
    assert [result.id for result in results] == list(range(1, 25))
    assert {result.epoch for result in results} == {3}
    assert [unpack(result.tokens).tolist() for result in results] == [[token] for token in output]
    assert results[-1].timings.total_ns > 0 and results[-1].timings.queued_ns > 0
    until("the last one is known", lambda: server.last_step_id == 24)  # it is noted after its answer


def test_a_newer_run_ends_the_older_and_starts_from_nothing(channel: Channel, reference: Reference) -> None:
    old = begun(channel, 1, reference)
    for epoch in (1, 2):  # an equal epoch is a scheduler that dialled again
        new = begun(channel, epoch, reference, 1)  # the same slot: it is free again
        assert old.ended_with() == grpc.StatusCode.ABORTED
        old.send(2, **chunk(len(reference.prompts[0]), 1))  # goes nowhere
        new.send(2, **chunk(len(reference.prompts[1]), 1))
        assert unpack(next(new.call).tokens).tolist() == reference.outputs[1][1:2]
        old = new
    old.call.cancel()


def test_smaller_epoch_is_aborted_and_leaves_the_current_run_alone(
    server: WorkerServer, channel: Channel, reference: Reference
) -> None:
    run = begun(channel, 5, reference)
    server.refusal = lambda *_: (
        "epoch: Redis has given this worker to no Run 4"
    )  # not asked: another shard has it since
    assert Client(channel, epoch=4).ended_with() == grpc.StatusCode.ABORTED
    run.send(2, **chunk(len(reference.prompts[0]), 1))
    assert unpack(next(run.call).tokens).tolist() == reference.outputs[0][1:2]
    run.call.cancel()
    assert Client(channel, epoch=1 << 62).ended_with() == grpc.StatusCode.INVALID_ARGUMENT
    # Also when no client is there any more: a paused scheduler may not come back to a worker that had another.
    assert Client(channel, epoch=4).ended_with() == grpc.StatusCode.ABORTED


def test_a_run_that_does_not_begin_with_hello_is_refused(channel: Channel) -> None:
    run = Client(channel, epoch=1, hello=False)
    run.send(1)
    assert run.ended_with() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"id": 3}, "step 3 of epoch 7 where 2 of 7 was expected"),
        ({"id": 2, "epoch": 6}, "step 2 of epoch 6 where 2 of 7"),
        ({"id": 2, "hello": worker_pb2.Hello(shard="x")}, "second hello"),
        ({"id": 2, "free_slots": pack([3])}, "slot 3 holds no sequence"),
    ],
)
def test_broken_step_breaks_the_run_until_a_new_hello(
    channel: Channel, reference: Reference, step: dict[str, Any], words: str
) -> None:
    run = begun(channel, 7, reference)
    run.send(**step)
    answer = next(run.call)
    assert words in answer.error and answer.id == step["id"] and not answer.tokens
    run.send(2, **chunk(len(reference.prompts[0]), 1))
    assert "begin a new Run" in next(run.call).error
    begun(channel, 7, reference).call.cancel()


def test_engine_failing_at_everything_ends_the_worker(
    channel: Channel, reference: Reference, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    said: list[str] = []
    monkeypatch.setattr(pipeline, "end_process", said.append)
    run = Client(channel, epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "compiled", broken)
        run.send(1, **first_step(reference.prompts[0], 24))
        assert "the device is gone" in next(run.call).error
        again = Client(channel, epoch=2)
        again.send(1, **first_step(reference.prompts[0], 24))
        assert list(again.call) == []
        until("it is said", lambda: said)
    assert "cannot run one token" in said[0] and "the device is gone" in said[0]


def test_draining_worker_answers_its_steps_and_says_so_to_latecomers(
    server: WorkerServer, channel: Channel, reference: Reference
) -> None:
    run = begun(channel, 1, reference)
    draining = threading.Thread(target=server.drain)
    draining.start()
    told = next(run.call)
    assert told.draining and not told.id
    run.send(2, **chunk(len(reference.prompts[0]), 1))  # sent before the scheduler knew
    assert unpack(next(run.call).tokens).tolist() == reference.outputs[0][1:2]
    run.call.cancel()
    draining.join(DEADLINE_S)
    assert not draining.is_alive()
    late = Client(channel, epoch=2)
    assert next(late.call).draining
    late.call.cancel()


def test_describe_and_health_answer_while_run_lasts_and_tell_limits(
    rpc: grpc.Channel, channel: Channel, kind: str, engine: Engine, reference: Reference
) -> None:
    run = begun(channel, 1, reference)
    info = described(rpc)
    assert info.highest_epoch == 1 and is_name(info.run_socket) == (kind == "socket")
    for name in ("highest_epoch", "run_socket"):
        info.ClearField(name)
    assert info == engine.info()
    assert (info.backend, info.dtype, info.device, info.block_size) == ("reference", "float32", "cpu", 4)
    assert info.max_model_len == 256 and info.vocab_size == reference.vocab
    assert info.block_bytes == 2 * 2 * 2 * 4 * 16 * 4  # K and V, layers, KV heads, tokens, numbers, bytes
    assert health(rpc) == health_pb2.HealthCheckResponse.SERVING
    run.call.cancel()


def health(channel: grpc.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service="orcinus.worker.v1.Worker"), timeout=DEADLINE_S).status)


def test_loading_worker_is_not_serving_and_says_why() -> None:
    server = WorkerServer("127.0.0.1:0")
    try:
        with grpc.insecure_channel(server.address) as channel:
            assert health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as caught:
                worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=DEADLINE_S)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "loading" in caught.value.details()
    finally:
        server.stop()


def test_a_port_in_use_is_an_error_that_names_it(server: WorkerServer) -> None:
    with pytest.raises(ConfigurationError, match=server.address):
        WorkerServer(server.address)


def test_a_prompt_of_many_megabytes_passes(channel: Channel) -> None:
    run = Client(channel, epoch=1)
    tokens = bytes(MESSAGE_BYTES - 4096)
    run.send(1, enters=[worker_pb2.Enter(slot=0, tokens=tokens, prompt_tokens=1)])
    assert "are served" in next(run.call).error  # it arrived; the engine says what is wrong with it
    run.call.cancel()


@pytest.mark.parametrize("is_local", [False, True])
def test_stopping_ends_the_run_and_the_engine_thread(engine: Engine, reference: Reference, is_local: bool) -> None:
    before = threading.enumerate()
    server = WorkerServer("127.0.0.1:0", run_socket=is_local)
    server.serve(engine, any_run)
    with grpc.insecure_channel(server.address) as rpc:
        run = begun(described(rpc).run_socket or rpc, 1, reference)
        server.stop()
        with pytest.raises((StopIteration, grpc.RpcError)):
            next(run.call)
    until(
        "the engine thread ends",
        lambda: not [t for t in threading.enumerate() if t.name.startswith(("engine", "run-")) and t not in before],
    )


def test_late_hello_of_a_replaced_run_resets_nothing() -> None:
    """Two Runs begin at once: the older one's hello may come into the queue behind the newer one's."""
    resets: list[int] = []

    class Counted:
        overlaps, max_in_flight, settings = False, 1, SimpleNamespace(step_timeout_s=0.0)
        grammars = SimpleNamespace(step_came=lambda: None)

        def serve(self, hello: worker_pb2.Hello) -> None:
            assert hello.shard == "a"

        def reset(self, epoch: int) -> None:
            resets.append(epoch)

    line, older, newer = pipeline.Pipeline(), pipeline.RunState(5), pipeline.RunState(6)
    older.end()
    for run in (newer, older):
        line.put(pipeline.Item(run, worker_pb2.Step(epoch=run.epoch, hello=worker_pb2.Hello(shard="a")), 0))
    line.start(Counted())
    line.stop()
    assert resets == [6]


def test_worker_says_that_a_run_has_begun_to_those_that_wait_for_it(server: WorkerServer, channel: Channel) -> None:
    run = Client(channel, epoch=7, hello=False)
    run.begin(worker_pb2.Hello(shard="shard-0", takes_begun=True))
    assert next(run.call) == worker_pb2.Result(epoch=7, begun=True)
    run.close()
    server.refusal = lambda *_: "token: why"
    run = Client(channel, epoch=8, hello=False)
    run.begin(worker_pb2.Hello(shard="shard-0", takes_begun=True))
    assert run.ended_with() is grpc.StatusCode.FAILED_PRECONDITION


def hello(epoch: int) -> bytes:
    return worker_pb2.Step(epoch=epoch, hello=worker_pb2.Hello(shard="shard-0")).SerializeToString()


@pytest.mark.parametrize("kind", ["socket"])
def test_socket_of_no_frames_is_closed_and_the_run_ends(server: WorkerServer, rpc: grpc.Channel) -> None:
    name = described(rpc).run_socket
    for sent in (b"\xff" * 64, run_socket.message(b"\xff\xff\xff"), b""):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(DEADLINE_S)
            connection.connect(run_socket.address(name))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(run_socket.address(name))
        connection.sendall(run_socket.message(hello(1)) + b"\xff" * 64)
        while connection.recv(4096):
            pass


@pytest.mark.parametrize("kind", ["socket"])
def test_run_over_tcp_is_off_beside_a_socket(rpc: grpc.Channel) -> None:
    run = Client(rpc, epoch=1, hello=False)  # it is told without a word of its own
    assert run.ended_with() == grpc.StatusCode.FAILED_PRECONDITION
    assert described(rpc).highest_epoch == 0


@pytest.mark.parametrize(
    ("minor", "major", "is_taken"), [(0, 1, True), (2, 1, True), (None, 0, True), (3, 1, False), (1, 2, False)]
)
def test_run_of_a_scheduler_is_refused_two_minor_versions_away(
    channel: Channel, minor: int | None, major: int, is_taken: bool
) -> None:
    hello = worker_pb2.Hello(shard="shard-0")
    if minor is not None:
        hello.version.major, hello.version.minor = major, minor
    run = Client(channel, epoch=1, hello=False)
    run.begin(hello)
    if is_taken:
        run.send(1)
        assert next(run.call).id == 1
        run.call.cancel()
        return
    with pytest.raises(grpc.RpcError, match=rf"{major}\.{minor} of worker.proto and this worker 1\.1"):
        next(run.call)


def test_refused_hello_leaves_epoch_and_current_run_alone(
    server: WorkerServer, channel: Channel, rpc: grpc.Channel, engine: Engine, reference: Reference, kind: str
) -> None:
    asked: list[tuple[int, str, bool]] = []

    def only_the_first(first: worker_pb2.Step, is_known: bool) -> str:
        asked.append((first.epoch, first.hello.token, is_known))
        return "" if len(asked) == 1 else "token: not that of the lease"

    server.refusal = only_the_first
    run = begun(channel, 5, reference)
    for epoch in (5, 6, (1 << 40) - 2, (1 << 40) - 1):
        other = Client(channel, epoch, hello=False)
        other.begin(worker_pb2.Hello(shard="x", token="guessed"))
        with pytest.raises(grpc.RpcError, match="not that of the lease"):
            next(other.call)
    assert described(rpc).highest_epoch == 5
    assert asked[1] == (5, "guessed", kind == "socket")
    run.send(2, **chunk(len(reference.prompts[0]), 1))
    assert unpack(next(run.call).tokens).tolist() == reference.outputs[0][1:2]
    run.call.cancel()


@pytest.mark.parametrize("kind", ["socket"])
def test_socket_of_another_user_is_refused(
    server: WorkerServer, rpc: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = described(rpc).run_socket
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(run_socket.address(name))
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(run_socket.message(hello(9)))
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert described(rpc).highest_epoch == 0

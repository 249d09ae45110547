"""What never ends must not keep the worker: a hung step, a client that is gone without a word, a stop in a long step.

The engine of the worker processes here is the real one, except that a step first waits for a line from a named pipe,
either when it is submitted or when it is finished.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from services.worker import watchdog
from services.worker.serving import server as server_module
from services.worker.serving.pipeline import QUEUED_STEPS
from services.worker.serving.server import WorkerServer
from services.worker.watchdog import StepWatchdog
from shared.keys import Keys
from shared.wire.columns import unpack
from tests.engine.driver import make_engine
from tests.engine.worker.processes import WorkerProcess, given_run
from tests.engine.worker.test_server import first_step
from tests.support.checkpoints.models import Reference
from tests.support.stack import RedisServer
from tests.support.waiting import free_port, until

MODEL = {"seed": 9, "requests": 2}

WAITING_ENGINE = """
import sys
from services.worker import main
from services.worker.serving import server
from services.worker.engine import Engine
from shared.settings import WorkerSettings

# A machine that stood still for some seconds must not look like a client that is gone.
server.OPTIONS = [(name, 60_000 if name.endswith("timeout_ms") else value) for name, value in server.OPTIONS]

class Waiting(Engine):
    warm = False

    def warm_up(self):
        super().warm_up()
        self.warm = True

    @property
    def overlaps(self):
        return sys.argv[2] == "finish"

    def wait(self, where):
        if self.warm and sys.argv[2] == where:
            print("the step waits", file=sys.stderr, flush=True)
            with open(sys.argv[1]) as pipe:
                pipe.read()

    def submit(self, step, received_ns=0):
        self.wait("submit")
        return super().submit(step, received_ns)

    def finish(self, flight, *more):
        self.wait("finish")
        return super().finish(flight, *more)

main.load_engine = Waiting
sys.exit(main.run(WorkerSettings()))
"""


def entering(prompt: list[int], id: int = 1) -> worker_pb2.Step:
    return worker_pb2.Step(epoch=1, id=id, **first_step(prompt, 4))


HELLO = worker_pb2.Step(epoch=1, hello=worker_pb2.Hello(shard="shard-0"))


def begin(channel: grpc.Channel, *steps: worker_pb2.Step, hello: worker_pb2.Step = HELLO) -> Any:
    """A Run with these steps; its requests stay open."""
    requests: queue.Queue[worker_pb2.Step | None] = queue.Queue()
    for step in (hello, *steps):
        requests.put(step)
    call = worker_pb2_grpc.WorkerStub(channel).Run(iter(requests.get, None), timeout=120)
    call.add_done_callback(lambda _: requests.put(None))
    return call


@contextlib.contextmanager
def waiting_worker(
    directory: Path, model: Path, where: str = "submit", **settings: Any
) -> Iterator[tuple[WorkerProcess, str, Path, RedisServer]]:
    """A worker with steps that wait for the named pipe; its address, the pipe, and its Redis."""
    gate, address = directory / "gate", f"127.0.0.1:{free_port()}"
    os.mkfifo(gate)
    sizes = {"KV_BLOCKS": 64, "MAX_SEQS": 4, "MAX_STEP_TOKENS": 256, "DTYPE": "float32"}
    with RedisServer(directory / "redis") as redis:
        given = {"MODEL": model, "REDIS_URL": redis.url, "LISTEN": address, "ADVERTISE": address, **sizes, **settings}
        with WorkerProcess(("-c", WAITING_ENGINE, str(gate), where), **given) as worker:
            until("it registers", lambda: redis.client.exists("orcinus:{tiny}:worker:worker-0"), 90)
            yield worker, address, gate, redis


@pytest.mark.parametrize(("where", "stopping"), [("submit", False), ("finish", True)])
def test_worker_with_a_hung_step_exits_even_while_stopping(
    reference: Reference, tmp_path: Path, where: str, stopping: bool
) -> None:
    with waiting_worker(tmp_path, reference.path, where, STEP_TIMEOUT_S=3) as (worker, address, _, redis):
        with grpc.insecure_channel(address) as channel:
            call = begin(channel, entering(reference.prompts[0][:8]), hello=given_run(redis.client, "tiny", 1))
            until("the step hangs", lambda: worker.says("the step waits"))
            if stopping:
                worker.process.send_signal(signal.SIGTERM)
            assert worker.ends() == 1
            with contextlib.suppress(grpc.RpcError):
                assert all(result.draining for result in call)
        said = [line for line in worker.lines if "step 1 of epoch 1 has run for" in line]
        assert len(said) == 1 and "3.0 s is the most" in said[0]
        assert any(f"in {where}" in line for line in worker.lines)  # where it hung


def test_stop_in_a_long_step_leaves_redis_at_once(reference: Reference, tmp_path: Path) -> None:
    with waiting_worker(tmp_path, reference.path) as (worker, address, gate, redis):
        hello = given_run(redis.client, "tiny", 1)
        with grpc.insecure_channel(address) as channel:
            # More steps than the queue holds: those that cannot be queued must not keep the process either.
            steps = [entering(reference.prompts[0][:8], id) for id in range(1, QUEUED_STEPS + 10)]
            call = begin(channel, *steps, hello=hello)
            until("the step runs", lambda: worker.says("the step waits"))
            worker.process.send_signal(signal.SIGTERM)
            assert next(call).draining
            call.cancel()  # a scheduler waits for the answers to what it sent; this one does not
            redis.client.delete(Keys("tiny").lease("shard-0"))
            until("it left Redis", lambda: not redis.client.keys("orcinus:*"))
            assert worker.process.poll() is None
            gate.write_text("go on\n")
            assert worker.ends() == 0
        assert sum("the step waits" in line for line in worker.lines) == 1


class Wire:
    """A TCP relay to the worker that can fall silent without closing anything: a half-open connection."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._cut.is_set():
                    sink.sendall(data)

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            one.close()


@pytest.mark.parametrize("how", ["cancelled", "silent"])
def test_run_without_its_client_ends_and_the_next_begins(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    # The same options, ten times as fast.
    hasty = [(name, value // 10 if name.endswith("_ms") else value) for name, value in server_module.OPTIONS]
    monkeypatch.setattr(server_module, "OPTIONS", hasty)
    server = WorkerServer("127.0.0.1:0")
    wire = Wire(server.address)

    def readers() -> int:
        return sum(thread.name == "run-reader" for thread in threading.enumerate())

    def first_tokens(channel: grpc.Channel) -> tuple[Any, list[int]] | None:
        """Return a Run and its first answer; None if the server took this client for gone, as the machine stood still
        for longer than its half second."""
        call = begin(channel, entering(reference.prompts[0]))
        try:
            return call, unpack(next(call).tokens).tolist()
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            return None

    before = readers()
    try:
        server.serve(make_engine(reference.path), lambda *_: "")
        with grpc.insecure_channel(wire.address) as channel:
            call, tokens = until("a Run is answered", lambda: first_tokens(channel))
            assert tokens == reference.outputs[0][:1]
            if how == "silent":
                wire.cut()
            else:
                call.cancel()
            until("its reader ends", lambda: readers() == before)
        with grpc.insecure_channel(server.address) as channel:
            again, tokens = until("the next Run is answered", lambda: first_tokens(channel))
            assert tokens == reference.outputs[0][:1]
            again.cancel()
    finally:
        server.stop()
        wire.close()


class Clock:
    """A watchdog's time: the test moves it, by less than what counts as a stop of the whole process, and each move is
    seen before the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.looks = 0
        monkeypatch.setattr(watchdog, "POLL_S", 0.01)
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=self._monotonic))

    def _monotonic(self) -> float:
        self.looks += 1
        return self.now_s

    def passes(self, moves: int) -> None:
        """Move on by a watchdog's pause, so many times."""
        for _ in range(moves):
            looks = self.looks
            until("the watchdog has looked", lambda looks=looks: self.looks > looks + 1)  # at all that was done
            self.now_s += watchdog.POLL_S
            looks = self.looks
            until("the watchdog has looked again", lambda looks=looks: self.looks > looks + 1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_only_a_single_too_long_step_counts_from_the_previous_end(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """ahead: steps that are submitted before the one before them has ended."""
    clock, said = Clock(monkeypatch), list[str]()
    dog = StepWatchdog(said.append)
    dog.start()
    steps = [dog.begin(f"step {number}", 0.05) for number in range(ahead)]
    for number in range(ahead, 10):
        steps.append(dog.begin(f"step {number}", 0.05))
        clock.passes(3)
        dog.end(steps.pop(0))
    assert not said
    dog.begin("step 10", 60.0 if ahead else 0.05)
    clock.passes(4)
    assert not said
    clock.now_s += 0.02
    until("it is seen", lambda: said)
    assert said[0].startswith(f"step {10 - ahead} has run for")
    dog.stop()


def test_time_in_which_whole_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[float] = []

    def monotonic() -> float:
        """An hour passes between any two looks at the clock after the second."""
        polls.append(time.monotonic() + 3600 * max(0, len(polls) - 1))
        return polls[-1]

    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=monotonic))
    said: list[str] = []
    dog = StepWatchdog(said.append)
    dog.begin("a step", 5.0)
    dog.start()
    until("it has looked often", lambda: len(polls) > 20)
    assert not said
    dog.stop()


def test_the_limit_follows_the_measured_step_unless_one_is_set(reference: Reference) -> None:
    engine = make_engine(reference.path, max_step_tokens=200)
    assert engine.info().largest_step_ms == 0
    assert engine.speed.predicted_s(200) == 0
    engine.warm_up()
    assert engine.info().largest_step_ms >= 1
    assert engine.speed.predicted_s(200) > 0
    assert engine.speed.predicted_s(400_000) == pytest.approx(2000 * engine.speed.prefill_s)
    assert engine.speed.predicted_s(1) == max(engine.speed.decode_s, engine.speed.prefill_s / 200)
    assert watchdog.limit_s(0.0, 0.0) == watchdog.limit_s(6.0, 0.0) == 60
    assert watchdog.limit_s(6.5, 0.0) == 65
    assert watchdog.limit_s(6.5, 2.0) == 2

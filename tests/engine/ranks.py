"""Replicas of several ranks for tests: this process is the leader, the others are processes that take its steps.

A process is used by one replica after another, and forked from a server that has imported torch once. Steps cross a
pipe here; behind gRPC they come in the same order, and like there one thread submits and another finishes.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.parallel.state import ParallelState
from tests.engine.driver import make_engine

TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"


MASKS = ("hold_masks", "give_masks", "few_masks")
_given = threading.Event()


def take_masks(engine: Engine, said: str) -> None:
    """Let rows be late, and no mask come until they are given; or let there be masks behind one draft at most."""
    if said == "give_masks":
        _given.set()
        return
    compute, most = engine.grammars.quick.process.masks, None
    if said == "few_masks":
        most = 2
    else:
        _given.clear()
        engine.takes_late = True

    def held(*question: Any) -> list[bytes]:
        assert most or _given.wait(TIMEOUT_S)
        return compute(*question)[:most]

    pytest.MonkeyPatch().setattr(engine.grammars.quick.process, "masks", held)


def serve(pipe: Connection) -> None:
    """A process: replicas one after another, until the pipe is closed."""
    pipe.send("")
    while True:
        try:
            size, *rest = pipe.recv()
        except EOFError:
            return
        try:
            _follow(pipe, size, *rest)
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send("")


def _follow(pipe: Connection, size: tuple[int, int], rank: int, port: int, model: Path, settings: Any) -> None:
    store = dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=TIMEOUT_S))
    parallel = ParallelState.join(*size, rank, store, TIMEOUT_S)
    engine = make_engine(model, parallel=parallel, **settings)
    in_flight: queue.Queue[InFlightStep | None] = queue.Queue()
    failed: list[BaseException] = []

    def finish() -> None:
        try:
            while (inflight := in_flight.get()) is not None:
                engine.finish(inflight)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    try:
        while (said := pipe.recv()) is not None:
            if said in MASKS:
                take_masks(engine, said)
            elif callable(getattr(engine, str(said), None)):
                getattr(engine, said)()
            else:
                in_flight.put(engine.submit(worker_pb2.Step.FromString(said)))
    finally:
        in_flight.put(None)
        thread.join()
        parallel.close()
    if failed:
        raise failed[0]


class Replica:
    """The leader, with what a driver asks of an engine."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self.engine: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, step: worker_pb2.Step) -> InFlightStep:
        self.tell(step.SerializeToString())
        return self.engine.submit(step)

    def execute(self, step: worker_pb2.Step) -> worker_pb2.Result:
        return self.finish(self.submit(step))

    def reset(self) -> None:
        self.tell("reset")
        self.engine.reset()

    def warm_up(self) -> None:
        self.tell("warm_up")
        self.engine.warm_up()

    def take_masks(self, said: str) -> None:
        self.tell(said)
        take_masks(self.engine, said)

    def tell(self, what: object) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # one that is gone shows in what is waited for
                pipe.send(what)


class Processes:
    """As many as the largest replica needs."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._running: list[tuple[Any, Connection]] = []

    @contextmanager
    def replica(self, tp: int, pp: int, model: Path, **settings: Any) -> Iterator[Replica]:
        """Its ranks, until the end of the block. An error of theirs is raised there."""
        new = [self._start() for _ in range(tp * pp - 1 - len(self._running))]
        assert not any(_answers(new))
        pipes = [pipe for _, pipe in self._running[: tp * pp - 1]]
        store = dist.TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
        for rank, pipe in enumerate(pipes, 1):
            pipe.send(((tp, pp), rank, store.port, model, settings))
        replica, parallel = Replica(pipes), ParallelState.join(tp, pp, 0, store, TIMEOUT_S)
        try:
            replica.engine = make_engine(model, parallel=parallel, **settings)
            yield replica
        finally:
            replica.tell(None)
            said = _answers(pipes)
            parallel.close()
        assert not any(said), said

    def kill(self, at: int) -> None:
        """Kills a process, which is rank at + 1."""
        self._running[at][0].kill()
        self._running[at][0].join()

    def stop(self) -> None:
        for process, pipe in self._running:
            pipe.close()
            process.kill()
            process.join()

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._running.append((process, ours))
        return ours


def _answers(pipes: list[Connection]) -> list[str]:
    """What went wrong at each. Of one that is gone the leader has heard."""
    said = []
    for pipe in pipes:
        try:
            said.append(pipe.recv() if pipe.poll(TIMEOUT_S) else "no answer")
        except EOFError:
            said.append("")
    return said

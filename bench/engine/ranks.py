"""Replicas of several ranks without a scheduler: this process is the leader, the others are processes that it starts.

`bench.gpu` and the tests of the engine use it. Steps cross a pipe here; behind gRPC they come in the same order
(services/worker/parallel/leader.py), and like there one thread submits and another finishes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import Any

import torch.distributed as dist

from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.parallel.state import ParallelState
from shared.errors import RankError

TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"

Make = Callable[..., Engine]
"""Makes an engine of the argument `parallel`. What other processes call, this too, has to be pickled."""


def serve(pipe: Connection, environment: dict[str, str]) -> None:
    """Be a rank of one replica after another, until the pipe is closed."""
    os.environ.update(environment)
    pipe.send("")
    while True:
        try:
            tp, pp, rank, port, make = pipe.recv()
        except EOFError:
            return
        try:
            _follow(pipe, join(tp, pp, rank, port), make)
        except BaseException as error:
            traceback.print_exc()
            with suppress(EOFError):
                while pipe.recv() is not None:
                    pass
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send("")
        gc.collect()  # an engine is in circles of references, and the next one needs its memory


def join(tp: int, pp: int, rank: int, port: int) -> ParallelState:
    """Return a rank that is not the leader, when all are there."""
    store = dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=TIMEOUT_S))
    return ParallelState.join(tp, pp, rank, store, TIMEOUT_S)


def _follow(pipe: Connection, parallel: ParallelState, make: Make) -> None:
    in_flight: queue.Queue[InFlightStep | None] = queue.Queue()
    failed: list[BaseException] = []
    try:
        engine = make(parallel=parallel)

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
                if isinstance(said, bytes):
                    in_flight.put(engine.submit(worker_pb2.Step.FromString(said)))
                else:
                    said(engine)
        finally:
            in_flight.put(None)
            thread.join()
    finally:
        parallel.close()
    if failed:
        raise failed[0]


class Replica:
    """The leader's engine, with what a driver asks of one; the other ranks do the same."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self.engine: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, step: worker_pb2.Step) -> InFlightStep:
        self.tell(step.SerializeToString())
        inflight: InFlightStep = self.engine.submit(step)
        return inflight

    def execute(self, step: worker_pb2.Step) -> worker_pb2.Result:
        result: worker_pb2.Result = self.engine.finish(self.submit(step))
        return result

    def reset(self) -> None:
        self.everywhere(methodcaller("reset"))

    def warm_up(self) -> None:
        self.everywhere(methodcaller("warm_up"))

    def everywhere(self, call: Callable[[Engine], Any]) -> Any:
        """Call it with the engine of every rank; return what it returned here."""
        self.tell(call)
        return call(self.engine)

    def tell(self, what: object) -> None:
        """Send to the other ranks: a step, what they call with their engine, or None at the end."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # one that is gone shows in what is waited for
                pipe.send(what)


class Processes:
    """The ranks but the leader: as many as the largest replica needs, each used by one replica after another."""

    def __init__(self, context: Any = None, environments: Sequence[dict[str, str]] = ()) -> None:
        """context: of multiprocessing; environments: what the first, second, ... process has beside this one's."""
        self._context = context or multiprocessing.get_context("spawn")
        self._environments = environments
        self._running: list[tuple[Any, Connection]] = []

    @contextmanager
    def replica_of(self, tp: int, pp: int, make: Make) -> Iterator[Replica]:
        """Start the ranks of a replica, yield it, and end them with the block.

        Raise RankError, with what all ranks say, where one of them failed.
        """
        new = [self._start(at) for at in range(len(self._running), tp * pp - 1)]
        if wrong := _wrong(new):
            raise RankError(wrong)
        pipes = [pipe for _, pipe in self._running[: tp * pp - 1]]
        store = dist.TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
        for rank, pipe in enumerate(pipes, 1):
            pipe.send((tp, pp, rank, store.port, make))
        replica, parallel = Replica(pipes), ParallelState.join(tp, pp, 0, store, TIMEOUT_S)
        missed, is_done = None, False
        try:
            replica.engine = make(parallel=parallel)
            yield replica
            is_done = True
        except RankError as error:
            missed = error
        finally:
            if not is_done:
                parallel.close()  # what another rank waits for would come after its time
            replica.tell(None)
            wrong = _wrong(pipes)
            parallel.close()
            replica.engine = None
            gc.collect()
        if missed:
            raise RankError("; ".join(filter(None, [f"rank 0: {missed}", wrong]))) from missed
        if wrong:
            raise RankError(wrong)

    def kill(self, at: int) -> None:
        """Kill a process, which is rank at + 1."""
        self._running[at][0].kill()
        self._running[at][0].join()

    def stop(self) -> None:
        """End all processes; the next replica has new ones."""
        for process, pipe in self._running:
            pipe.close()
            process.kill()
            process.join()
        self._running.clear()

    def _start(self, at: int) -> Connection:
        ours, theirs = self._context.Pipe()
        environment = self._environments[at] if self._environments else {}
        process = self._context.Process(target=serve, args=(theirs, environment), daemon=True)
        process.start()
        theirs.close()
        self._running.append((process, ours))
        return ours


def _wrong(pipes: Sequence[Connection]) -> str:
    """Return what went wrong at each rank, once it has said how it ended. Of one that is gone the leader has heard."""
    wrong = []
    for rank, pipe in enumerate(pipes, 1):
        with suppress(EOFError):
            if said := pipe.recv() if pipe.poll(TIMEOUT_S) else "no answer":
                wrong.append(f"rank {rank}: {said}")
    return "; ".join(wrong)

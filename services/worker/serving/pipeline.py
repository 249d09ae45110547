"""The threads that hold the engine: one submits steps, in order; where the engine overlaps, another finishes them.

So step k+1 is given to the device while step k runs. At most `Engine.max_in_flight` steps are out, more wait in a
bounded queue. Steps of a Run that was replaced or cancelled are dropped, except steps that other ranks of the replica
already have.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.cuda.loader import CudaError
from protos import worker_pb2
from services.worker.engine import Engine
from services.worker.in_flight import InFlightStep
from services.worker.parallel.leader import Ranks
from services.worker.slots import Chunks
from services.worker.watchdog import StepWatchdog, Watched, end_process, limit_s
from shared.errors import ProtocolError
from shared.wire.columns import unpack

log = logging.getLogger("orcinus.worker")

QUEUED_STEPS = 64
ENDED_S = 0.2
"""What the end of a Run gets to reach the scheduler before the process ends."""
NEVER = 1 << 64
OVER = worker_pb2.Step()
"""Tells the other ranks of a replica that the Run is over: a Step with neither hello nor id."""
Observer = Callable[[worker_pb2.Result, Chunks], None]

DEVICE_LOST = (torch.AcceleratorError, CudaError)
"""After one of these every later call fails as well: only a new process has a device that works."""


class Results(Protocol):
    """Takes the results of a Run, in order; None behind the last one. Its `put` never blocks."""

    def put(self, result: worker_pb2.Result | None, /) -> object: ...


@dataclass(eq=False)
class RunState:
    """One Run call. `has_ended` is set when its results are of no use any more."""

    epoch: int
    results: Results = field(default_factory=lambda: queue.SimpleQueue[worker_pb2.Result | None]())
    has_ended: threading.Event = field(default_factory=threading.Event)
    replaced_by: int | None = None
    step_count: int = 0  # received
    result_count: int = 0  # sent
    last_id: int = 0  # the latest step that was submitted
    failure: str = ""  # why no further step of this Run can be executed
    broken_at: int = NEVER  # the step with which that began

    def end(self) -> None:
        self.has_ended.set()
        self.results.put(None)

    def tell_begun(self) -> None:
        """Send that the hello is accepted, before all results."""
        self.results.put(worker_pb2.Result(epoch=self.epoch, begun=True))

    def tell_draining(self) -> None:
        """Send it between the results of steps, which go on."""
        self.results.put(worker_pb2.Result(epoch=self.epoch, draining=True))

    def more(self) -> bool:
        """Return whether another result will follow the next one: a later step has come."""
        return self.step_count > self.result_count + 1

    def fail(self, step: int, error: Exception) -> None:
        """Record the first failure; ignore later ones."""
        if not self.failure:
            level = logging.WARNING if isinstance(error, ProtocolError) else logging.ERROR
            log.log(level, "step %d of epoch %d failed: %s", step, self.epoch, error, exc_info=level > 30)
            self.failure = f"step {step} failed ({error}) and the state of this Run is lost"
            self.broken_at = step


@dataclass(frozen=True)
class Item:
    """A message from the wire: a step, or None at the end of the Run's requests. `over` marks the last message of a
    Run, however the Run ended."""

    run: RunState
    step: worker_pb2.Step | None
    received_ns: int
    over: bool = False


@dataclass(frozen=True)
class _Answer:
    """One entry of the queue of answers: a step in flight, an error, or neither at the end of the Run."""

    run: RunState
    epoch: int = 0  # the step's
    id: int = 0
    inflight: InFlightStep | None = None
    error: Exception | None = None
    watched: Watched | None = None


class Pipeline:
    """`start` with a warm engine, `put` items in order, `stop` when no Run is current."""

    def __init__(self) -> None:
        self.last_step_id = 0  # answered
        self._work: queue.Queue[Item | None] = queue.Queue(QUEUED_STEPS)
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._places = threading.Semaphore(0)  # for steps that are out
        self._watchdog = StepWatchdog()
        self._threads: list[threading.Thread] = []
        self._observe: Observer | None = None
        self._ranks: Ranks | None = None
        self._together = False
        self._run: RunState | None = None  # the Run of the last hello
        self._came: Callable[[], object] = lambda: None
        self._is_suspect = False  # a step failed, and the engine has not shown since that it still can run one

    def start(
        self, engine: Engine, observe: Observer | None = None, ranks: Ranks | None = None, together: bool = False
    ) -> None:
        """Start the threads.

        observe: is called with each result and its step's chunks. ranks: the other ranks, if this one leads; together:
        true on every rank of several.
        """
        self._observe = observe
        self._ranks, self._together = ranks, together
        engine.grammars.others_wait, self._came = self._others_wait, engine.grammars.step_came
        self._places.release(engine.max_in_flight)
        self._watchdog.start()
        loops = {"engine": self._submit_all, "engine-results": self._finish_all}
        for name, loop in loops.items():
            if engine.overlaps or name == "engine":
                self._threads.append(threading.Thread(target=loop, args=(engine,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def put(self, item: Item) -> None:
        """Block while the queue is full."""
        if item.step is not None and not item.step.HasField("hello"):
            item.run.step_count += 1
        self._work.put(item)
        self._came()

    def over(self, run: RunState) -> None:
        """Announce that nothing of this Run follows. Block like `put`."""
        self._work.put(Item(run, None, 0, over=True))

    def _others_wait(self, slots: Collection[int]) -> bool:
        """Return whether what waits is more than chunks of these slots."""
        with self._work.mutex:
            items = list(self._work.queue)
        return any(item is None or item.step is None or _has_others(item.step, slots) for item in items)

    def stop(self) -> None:
        """Return when the steps that run are done, which are still watched."""
        if self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._watchdog.stop()

    def _submit_all(self, engine: Engine) -> None:
        """Give steps to the device: a thread."""
        while (item := self._work.get()) is not None:
            if item.over:
                if item.run is self._run:  # else the next Run's hello came before this one
                    self._end_run(engine, item.run)
                continue
            if item.step is not None and item.step.HasField("hello") and not (item.run.last_id or item.step.id):
                if (
                    not item.run.has_ended.is_set()
                ):  # else a newer Run may have begun: its hello can come before this one
                    self._reset(engine, item.run, item.step)
                continue
            if engine.overlaps:
                self._places.acquire()
            answer = self._submit(engine, item)
            if engine.overlaps:
                self._answers.put(answer)
            else:
                self._answer(engine, answer)
        self._answers.put(None)

    def _finish_all(self, engine: Engine) -> None:
        """Wait for the device: a thread."""
        while (answer := self._answers.get()) is not None:
            self._answer(engine, answer)
            self._places.release()

    def _reset(self, engine: Engine, run: RunState, hello: worker_pb2.Step) -> None:
        watched = self._watchdog.begin(f"the begin of epoch {run.epoch}", limit_s(0.0, engine.settings.step_timeout_s))
        self._run = run
        try:
            if self._ranks is not None:
                self._ranks.forward(hello)
            engine.serve(hello.hello)
            engine.reset(run.epoch)
            if self._is_suspect:
                self._prove(engine, run)
        except Exception as error:  # the thread must stay alive for the next Run
            self._look_at(error)
            run.fail(0, error)
        finally:
            self._watchdog.end(watched)

    def _end_run(self, engine: Engine, run: RunState) -> None:
        """Release what other workers have in memory, on every rank: no scheduler may come for long."""
        watched = self._watchdog.begin(f"the end of epoch {run.epoch}", limit_s(0.0, engine.settings.step_timeout_s))
        try:
            if self._ranks is not None:
                self._ranks.forward(OVER)
            engine.end_run()
        except Exception as error:  # the thread must stay alive for the next Run
            self._look_at(error)
            run.fail(run.last_id, error)
        finally:
            self._watchdog.end(watched)

    def _prove(self, engine: Engine, run: RunState) -> None:
        """End the worker if its engine fails at every step, else it would fail one request after the other.

        The Run just ends, so that no request is blamed for that.
        """
        for _ in range(engine.max_in_flight):  # those of the Run before are finished first
            self._places.acquire()
        try:
            engine.prove()
            self._is_suspect = False
        except Exception as error:
            run.end()
            time.sleep(ENDED_S)
            end_process(f"after a step that failed the engine cannot run one token, so the worker ends itself: {error}")
        finally:
            self._places.release(engine.max_in_flight)

    def _submit(self, engine: Engine, item: Item) -> _Answer:
        """Submit a step; after a failure the slots are not to be trusted until a hello."""
        run, step = item.run, item.step
        if run.has_ended.is_set() or step is None:
            return _Answer(run)
        watched = None
        try:
            if run.failure:
                raise ProtocolError(f"{run.failure}; begin a new Run")
            if step.HasField("hello"):
                raise ProtocolError(f"step {step.id} carries a second hello")
            if step.epoch != run.epoch or step.id != run.last_id + 1:
                raise ProtocolError(
                    f"step {step.id} of epoch {step.epoch} where {run.last_id + 1} of {run.epoch} was expected"
                )
            predicted_s = engine.speed.predicted_s(int(unpack(step.chunk_lengths).sum()))
            limit = limit_s(predicted_s, engine.settings.step_timeout_s)
            watched = self._watchdog.begin(f"step {step.id} of epoch {step.epoch}", limit)
            if self._ranks is not None:
                self._ranks.forward(step)
            inflight = engine.submit(step, item.received_ns)
        except Exception as error:  # whatever a step did
            self._look_at(error)
            run.fail(step.id, error)
            return _Answer(run, step.epoch, step.id, None, error, watched)
        run.last_id = step.id
        return _Answer(run, step.epoch, step.id, inflight, None, watched)

    def _answer(self, engine: Engine, answer: _Answer) -> None:
        """Send a result for every step, whatever happens."""
        run, error = answer.run, answer.error
        try:
            if answer.inflight is not None:
                result = engine.finish(answer.inflight, run.more)
                if answer.id > run.broken_at:
                    raise ProtocolError(f"{run.failure}; begin a new Run")
                run.results.put(result)
                self.last_step_id = answer.id
                if self._observe is not None:
                    self._observe(result, answer.inflight.chunks)
        except Exception as raised:
            self._look_at(raised)
            run.fail(answer.id, raised)
            error = raised
        finally:
            if answer.watched is not None:
                self._watchdog.end(answer.watched)
        run.result_count += 1
        if error is not None:
            said = f"{type(error).__name__}: {error}" if str(error) else repr(error)
            run.results.put(worker_pb2.Result(epoch=answer.epoch, id=answer.id, error=said))
        elif answer.inflight is None:
            run.end()

    def _look_at(self, error: Exception) -> None:
        if self._together and not isinstance(error, ProtocolError):
            # The other ranks may be inside the step, waiting for this one.
            end_process(f"a step failed on this rank, so the replica ends itself: {type(error).__name__}: {error}")
        self._is_suspect = self._is_suspect or not isinstance(error, ProtocolError)
        if isinstance(error, DEVICE_LOST):
            end_process(f"the device is lost, so the worker ends itself: {error}")


def _has_others(step: worker_pb2.Step, slots: Collection[int]) -> bool:
    """Return whether a step has chunks of other slots than these, or breaks the contract."""
    try:
        return not set(unpack(step.chunk_slots).tolist()) <= set(slots)
    except ValueError:
        return True

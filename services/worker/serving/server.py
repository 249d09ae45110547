"""The worker behind gRPC: Describe, Run and grpc.health.v1, in front of the engine's pipeline; Run also over a socket.

One Run is current. Its handler thread yields results, a reader thread takes steps off the wire into the pipeline, so
step k+1 is there while step k runs. A Run that was replaced or cancelled stays what it is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import worker_pb2, worker_pb2_grpc
from services.worker.engine import Engine
from services.worker.parallel.leader import Ranks
from services.worker.serving.pipeline import Item, Observer, Pipeline, Results, RunState
from services.worker.serving.run_server import RefusedError, RunServer
from shared.errors import ConfigurationError
from shared.keys import EPOCHS
from shared.wire.handshake import wrong_version

log = logging.getLogger("orcinus.worker")

MESSAGE_BYTES = 64 << 20
HANDLERS = 16  # Run holds one for as long as it lasts; Describe and health checks need others
TCP_IS_OFF = (
    "run over TCP: off where the worker has a Unix socket; start scheduler and worker as one user, or set "
    "ORCINUS_ADVERTISE of the worker to its address"
)
DRAIN_S = 5.0
HURRY_S = 0.1
SERVICE = "orcinus.worker.v1.Worker"
Refusal = Callable[[worker_pb2.Step, bool], str]
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # without it a silent client stayed for 70 s, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
]


class WorkerServer(worker_pb2_grpc.WorkerServicer):
    """It listens at once (a port in use shows then); `serve` with a loaded engine, at the end `drain` and `stop`."""

    def __init__(
        self, listen: str, credentials: grpc.ServerCredentials | None = None, run_socket: bool = False
    ) -> None:
        """run_socket: whether to take Runs over a Unix socket and not over TCP, where there are abstract addresses."""
        self._engine: Engine | None = None
        self.refusal: Refusal = lambda *_: "the worker is still loading its model"  # as of `serve`
        self._lock = threading.Lock()
        self._current: RunState | None = None
        self._draining = False
        self._highest_epoch = 0
        self._pipeline = Pipeline()
        self._health = health.HealthServicer()
        for service in ("", SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._server = grpc.server(ThreadPoolExecutor(HANDLERS, "grpc"), options=OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._is_mutual = credentials is not None
        self.address = bind(self._server, "--listen", listen, credentials)
        self._local = self._local_server() if run_socket else None
        self._server.start()

    @property
    def last_step_id(self) -> int:
        """Return the latest step that was answered."""
        return self._pipeline.last_step_id

    def serve(
        self, engine: Engine, refusal: Refusal, observe: Observer | None = None, ranks: Ranks | None = None
    ) -> None:
        """Answer with this engine, which is loaded and warm.

        refusal: returns why the first message of a Run may not begin it, or an empty text; it learns whether the peer
        is known without a token, by its user or its certificate. observe: gets each result and its step's chunks.
        ranks: the other ranks of this replica, connected.
        """
        self.refusal = refusal
        self._engine = engine
        self._pipeline.start(engine, observe, ranks, together=ranks is not None)
        for service in ("", SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def drain(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask the scheduler to send no more steps, and wait until it has ended its Run: it does so when all its steps
        are answered. Wait for DRAIN_S at most, and not after `hurry` returns True."""
        self._health.enter_graceful_shutdown()
        with self._lock:
            self._draining, run = True, self._current
        if run is None:
            return
        run.tell_draining()
        by = time.monotonic() + DRAIN_S
        while not run.has_ended.wait(HURRY_S) and time.monotonic() < by and not hurry():
            pass

    def stop(self, grace_s: float = 2.0) -> None:
        """End the current Run and the server; the steps that run are finished first, and still watched."""
        self._health.enter_graceful_shutdown()
        with self._lock:
            run, self._current = self._current, None
        if run:
            run.end()
        stopped = self._server.stop(grace_s)
        self._pipeline.stop()
        if self._local is not None:
            self._local.stop(grace_s)
        stopped.wait(grace_s)

    def Describe(  # noqa: N802 - the name in worker.proto
        self, request: worker_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        try:
            info = self._ready_engine().info()
        except RefusedError as error:
            context.abort(error.code, error.details)
            raise  # not reached: abort raises
        with self._lock:
            info.highest_epoch = self._highest_epoch
        info.run_socket = self._local.name if self._local is not None else ""
        return info

    def Run(  # noqa: N802 - the name in worker.proto
        self, request_iterator: Iterator[worker_pb2.Step], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.Result]:
        results: queue.SimpleQueue[worker_pb2.Result | None] = queue.SimpleQueue()
        try:
            if self._local is not None:
                raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, TCP_IS_OFF)
            run = self._begin(next(request_iterator, None), results, self._is_mutual)
        except RefusedError as error:
            context.abort(error.code, error.details)
            return  # not reached: abort raises
        context.add_callback(run.end)
        context.send_initial_metadata(())
        threading.Thread(target=self._read, args=(run, request_iterator), name="run-reader", daemon=True).start()
        while True:
            result = results.get()
            if result is None:
                break
            yield result
        if run.replaced_by is not None:
            context.abort(grpc.StatusCode.ABORTED, f"replaced by a Run of epoch {run.replaced_by}")

    def _local_server(self) -> RunServer | None:
        try:
            return RunServer(partial(self._begin, is_known=True), self._read)
        except (AttributeError, OSError) as error:  # another system than Linux
            log.info("no Unix socket for Runs: %s", error)
            return None

    def _ready_engine(self) -> Engine:
        if self._engine is None:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "the worker is still loading its model")
        return self._engine

    def _begin(self, first: worker_pb2.Step | None, results: Results, is_known: bool) -> RunState:
        """Make a Run the current one by its first message; the older one ends. Raise RefusedError."""
        self._ready_engine()
        if first is None or not first.HasField("hello"):
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a Run must carry hello")
        if first.epoch >= EPOCHS:
            details = f"epoch: {first.epoch} is not below {EPOCHS}; take it from Redis"
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, details)
        theirs = first.hello.version if first.hello.HasField("version") else None
        shard = f"the scheduler of shard {first.hello.shard[:100]}"
        if wrong := wrong_version(theirs, shard, "this worker"):
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, wrong)
        # An older epoch is refused below: Redis could only say that it has given the worker away since.
        if first.epoch >= self._highest_epoch and (wrong := self.refusal(first, is_known)):
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, wrong)
        with self._lock:
            highest = self._highest_epoch
            if first.epoch >= highest:
                self._highest_epoch = first.epoch
                old, run = self._current, RunState(first.epoch, results)
                self._current = run
                if first.hello.takes_begun:
                    run.tell_begun()
                if self._draining:  # the scheduler took us a moment before we said so
                    run.tell_draining()
        if first.epoch < highest:
            raise RefusedError(grpc.StatusCode.ABORTED, f"epoch {first.epoch} is older than {highest}, which was here")
        if old is not None:
            old.replaced_by = first.epoch
            old.end()
        log.info("run of epoch %d from shard %s begins", first.epoch, first.hello.shard)
        self._pipeline.put(Item(run, first, time.monotonic_ns()))
        return run

    def _read(self, run: RunState, steps: Iterator[worker_pb2.Step]) -> None:
        """Move steps from the wire to the queue; a full queue blocks, which holds the sender back."""
        try:
            for step in steps:
                if run.has_ended.is_set():
                    return
                self._pipeline.put(Item(run, step, time.monotonic_ns()))
            self._pipeline.put(Item(run, None, 0))
        except Exception:  # grpc raises a bare Exception when the call ended; the callback has ended the run
            log.debug("the requests of epoch %d broke off", run.epoch, exc_info=True)
        finally:
            self._pipeline.over(run)


def bind(server: grpc.Server, option: str, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    """Let a server listen; return host:port as it can be dialled. Raise ConfigurationError that names the option."""
    try:
        insecure = server.add_insecure_port
        port = server.add_secure_port(listen, credentials) if credentials else insecure(listen)
    except RuntimeError as error:
        raise ConfigurationError(
            f"cannot listen on {listen} ({option}): the port is in use or the address is not this "
            "machine's; give another"
        ) from error
    return f"{listen.rpartition(':')[0]}:{port}"

"""A rank that is not the leader: it follows the leader's steps, in order, through the same pipeline.

Nothing is dropped here: what the leader forwarded it executes, and so must every rank, or the others would wait for it
in a collective. The leader shows the token that all ranks of the replica have; other callers are refused. A stream that
ends before the leader has said so ends this process at once, also while its threads are inside a collective. The leader
says it in a message: a half-close looks like a call that broke off, as grpcio may end the iterator of requests in the
same way for both.
"""

from __future__ import annotations

import hmac
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from protos import worker_pb2, worker_pb2_grpc
from services.worker.engine import Engine
from services.worker.parallel.launch import UNKNOWN_LEADER
from services.worker.parallel.leader import METADATA_KEY
from services.worker.serving.pipeline import OVER, Item, Pipeline, RunState
from services.worker.serving.server import OPTIONS, bind
from services.worker.watchdog import end_process
from shared.errors import ConfigurationError

log = logging.getLogger("orcinus.worker")

CONNECT_S = 600.0
"""What the leader gets to load after this rank has, before this rank gives up."""
NOT_LEADER = "token: not that of this rank; set one ORCINUS_RANK_TOKEN for all ranks of the replica"


class RankServer(worker_pb2_grpc.RankServicer):
    """It listens at once; `serve` with a loaded engine returns when the leader has ended the stream."""

    def __init__(
        self,
        listen: str,
        token: str,
        credentials: grpc.ServerCredentials | None = None,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """Open the port. Raise ConfigurationError where neither a token nor a certificate would tell the leader.

        token: of the replica; empty where the certificate alone tells the leader. on_lost: gets the line for the log
        when the leader is lost.
        """
        if not token and credentials is None:
            raise ConfigurationError(UNKNOWN_LEADER)
        self._token = token.encode()
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._has_loaded = threading.Event()
        self._begun = threading.Event()
        self._has_ended = threading.Event()
        self._clean = False
        self._on_lost = on_lost
        self._pipeline = Pipeline()
        self._results: queue.SimpleQueue[worker_pb2.Result | None] = queue.SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(4, "grpc"), options=OPTIONS)
        worker_pb2_grpc.add_RankServicer_to_server(self, self._server)
        self.address = bind(self._server, "--rank-listen", listen, credentials)
        self._server.start()

    def serve(self, engine: Engine, begun: Callable[[], None] = lambda: None) -> None:
        """Follow until the leader says that no step comes any more. `begun`: when it is there."""
        self._engine = engine
        self._pipeline.start(engine, together=True)
        self._has_loaded.set()
        if not self._begun.wait(CONNECT_S):
            self._on_lost(f"rank 0 did not come within {CONNECT_S:.0f} s: this rank ends itself")
        begun()
        self._has_ended.wait()
        self._pipeline.stop()
        self._server.stop(1.0).wait(1.0)

    def Follow(  # noqa: N802 - the name in worker.proto
        self, request_iterator: Iterator[worker_pb2.Step], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.Followed]:
        shown = dict(context.invocation_metadata()).get(METADATA_KEY, b"")
        if self._token and not hmac.compare_digest(shown, self._token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, NOT_LEADER)
        with self._lock:
            if self._begun.is_set():
                context.abort(grpc.StatusCode.ALREADY_EXISTS, "this rank follows its leader already")
            self._begun.set()
        context.add_callback(self._stream_ended)  # not before: the end of a refused call is not that of the leader
        self._has_loaded.wait()
        if self._engine is None:
            raise RuntimeError("loaded without an engine")
        threading.Thread(target=self._read, args=(request_iterator,), name="steps", daemon=True).start()
        yield worker_pb2.Followed(ready=self._engine.info())
        while (result := self._results.get()) is not None:
            yield worker_pb2.Followed(
                epoch=result.epoch,
                id=result.id,
                busy_ns=result.timings.forward_ns + result.timings.sample_ns,
                error=result.error,
            )

    def _read(self, steps: Iterator[worker_pb2.Step]) -> None:
        run = RunState(0, results=self._results)
        try:
            for step in steps:
                if step.end:
                    self._clean = True
                    self._pipeline.put(Item(run, None, 0))
                    return
                if step == OVER:
                    self._pipeline.over(run)
                    continue
                if step.HasField("hello"):  # the Run before is not ended: its steps are on every rank
                    run = RunState(step.epoch, results=self._results)
                self._pipeline.put(Item(run, step, time.monotonic_ns()))
            self._results.put(None)  # without a word: the call ends, and its callback says so
        except Exception:  # grpc raises a bare Exception when the call ended; the callback says so
            log.debug("the leader's steps broke off", exc_info=True)

    def _stream_ended(self) -> None:
        if not self._clean:
            self._on_lost("rank 0 is lost: this rank ends itself")
        self._results.put(None)  # no reader is left: the call's thread ends too
        self._has_ended.set()

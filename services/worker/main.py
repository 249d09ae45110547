"""The worker process: bind, load, warm up, register, serve, stop. Of a replica of several ranks this is the leader; the
others follow it (`follow`)."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import psutil

from services.worker.encoder_engine import load_engine
from services.worker.engine import Engine
from services.worker.metrics import Metrics
from services.worker.parallel.launch import MEET_S, Place, join_group
from services.worker.parallel.leader import Ranks
from services.worker.parallel.state import ParallelState
from services.worker.registration import Registration
from services.worker.serving.rank_server import RankServer
from services.worker.serving.server import WorkerServer
from shared.errors import RankError
from shared.messages import quantity
from shared.processes.heap import settle
from shared.security.channels import channel_credentials, server_credentials
from shared.settings import WorkerSettings, is_loopback
from shared.telemetry.logs import setup
from shared.telemetry.metrics import serve as serve_metrics

log = logging.getLogger("orcinus.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_WORDS_S = 1.0  # to write the last line of the log: a full pipe must not keep the process alive
PROGRESS_S = 2.0  # a line of loading progress at most this often
LEADER_S = 1.0  # a rank that gets SIGTERM while it loads lets rank 0 go first: it would miss this one


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM, SIGINT or `orcinus drain`, then drains and returns 0; a second signal hurries. While it
    loads, the first ends the process. 1 where another rank is lost while the ranks load.

    Raise ConfigurationError for what the operator has to change.
    """
    setup("worker", settings.log_level, settings.log_json)
    stopping = SignalHandler()
    with join_group(settings) as place:
        if place is None:
            return lead(settings, None, stopping)
        logging.getLogger().handlers[0].addFilter(_of_rank(place.rank))
        try:
            return (follow if place.rank else lead)(settings, place, stopping)
        except RankError as error:
            log.critical("the replica ends itself: %s", error)
            return 1


def lead(settings: WorkerSettings, place: Place | None, stopping: SignalHandler) -> int:
    """Run the whole replica or, with a place, its rank 0."""
    stop, hurry = threading.Event(), threading.Event()
    credentials = server_credentials(settings)
    # Elsewhere a proxy may stand between, or TLS is wanted.
    is_local = credentials is None and not settings.advertise and is_loopback(settings.listen.rpartition(":")[0])
    server = WorkerServer(settings.listen, credentials, is_local)
    registration: Registration | None = None
    ranks: Ranks | None = None
    try:
        metrics = Metrics()
        metrics.answering(lambda: server.last_step_id)
        serve_metrics(metrics.registry, settings.metrics_host, settings.worker_metrics_port, "--worker-metrics-port")
        parallel = None if place is None else meet(settings, place)
        engine = load(settings, parallel)
        if place is not None:
            ranks = Ranks(place.addresses(), place.token, channel_credentials(settings), metrics.rank_busy)
            ranks.connect(engine.info(), MEET_S)
        engine.grammars.when_ended(metrics.grammars_ended.inc)
        stopping.serving(lambda: (hurry if stop.is_set() else stop).set())
        address = settings.advertise or server.address
        log.info("ready: %s listens on %s", settings.worker_id, address)
        registration = Registration(
            settings, record(engine, address), lambda: server.last_step_id, stop.set, engine.grammars.figures
        )
        server.serve(engine, registration.refusal, metrics.step, ranks)
        registration.start()
        stop.wait()
        log.info("draining: the steps under way are answered, then the scheduler goes elsewhere")
        registration.leave()
        server.drain(hurry.is_set)
        log.info("stopping")
    finally:
        if registration:
            registration.stop()
        server.stop()
        if ranks:
            ranks.stop()
    return 0


def follow(settings: WorkerSettings, place: Place, stopping: SignalHandler) -> int:
    """Run any other rank; it ends when the leader ends it or has ended."""
    stopping.grace_s = LEADER_S
    server = RankServer(settings.rank_listen, place.token, server_credentials(settings))
    place.announce(server.address)
    parallel = meet(settings, place)
    # A signal may go to the whole group: the leader drains, and then says so.
    server.serve(load(settings, parallel), lambda: stopping.serving(lambda: None))
    parallel.close()
    log.info("stopping")
    return 0


def meet(settings: WorkerSettings, place: Place) -> ParallelState:
    """Return when all ranks have come."""
    log.info("waiting for %s", quantity(place.size - 1, "other rank"))
    return ParallelState.join(settings.tp, settings.pp, place.rank, place.store, MEET_S, place.host)


def load(settings: WorkerSettings, parallel: ParallelState | None = None) -> Engine:
    """Read the model, or this rank's part of it, take the memory and run the largest batch."""
    started = time.monotonic()
    process = psutil.Process()
    engine = load_engine(settings, Progress(settings.served_model_name), parallel)
    info = engine.info()
    loaded = process.memory_info().rss
    log.info(
        "%s: %d layers, %s on %s (%s kernels), %d KV blocks of %d tokens (%.0f MiB) and %d on the host, "
        "context %d (input %d, output %d)",
        info.model,
        info.layers,
        info.dtype,
        info.device,
        info.backend,
        info.gpu_blocks,
        info.block_size,
        info.gpu_blocks * info.block_bytes / 2**20,
        info.host_blocks,
        info.max_model_len,
        info.max_input_tokens,
        info.max_output_tokens,
    )
    log.info("warming up: %d tokens in one step, %d sequences", info.max_step_tokens, info.max_seqs)
    engine.warm_up()
    log.info(
        "loaded in %.1f s; resident %.0f MiB, of which %.0f MiB for the largest batch",
        time.monotonic() - started,
        process.memory_info().rss / 2**20,
        (process.memory_info().rss - loaded) / 2**20,
    )
    settle()
    return engine


def record(engine: Engine, address: str) -> dict[str, str]:
    """Return the fields of worker:{id} that the worker owns."""
    info = engine.info()
    return {
        "address": address,
        "identity": info.identity,
        "model": info.model,
        "model_hash": info.model_hash,
        "pid": str(os.getpid()),
        "dtype": info.dtype,
        "device": info.device,
        "backend": info.backend,
        "role": engine.settings.worker_role,
        "slots": str(info.max_seqs),
        "ready": "1",
    }


def _of_rank(rank: int) -> Callable[[logging.LogRecord], bool]:
    """Say in each line of the log which rank it is: they may share a file."""

    def name(record: logging.LogRecord) -> bool:
        record.msg = f"rank {rank}: {record.msg}"
        return True

    return name


class Progress:
    """Loading progress on the log, which goes to stderr."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started_at = self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._started_at:
            self._started_at, self._next = now, now + PROGRESS_S
            log.info("loading %s: %.0f MiB of weights", self._name, total / 2**20)
        if now < self._next:
            return
        self._next = now + PROGRESS_S
        left_s = (now - self._started_at) * max(0, total - done) / max(done, 1)
        percent = 100 * done // max(total, 1)
        log.info(
            "loading %s: %.0f of %.0f MiB, %d %%, %.0f s left", self._name, done / 2**20, total / 2**20, percent, left_s
        )


class SignalHandler:
    """SIGTERM and SIGINT: a worker that loads ends at once, one that serves is asked to drain.

    Made in the main thread before anything else; `serving` is called when there is something to drain. Python runs the
    handler of a signal when its main thread comes back from C, and while a worker loads that may take minutes: a read,
    a large batch, a wait for other ranks. So a thread reads the signal as well, from a socket to which the interpreter
    writes at once.
    """

    def __init__(self) -> None:
        self.grace_s = 0.0
        """Pause before a rank that loads ends, so that rank 0, which gets the same signal, ends first."""
        self._on_signal: Callable[[], None] | None = None
        self._early = False  # a signal came while loading: the thread ends the process
        self._lock = threading.Lock()
        self._hears, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, self._heard)
        signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._loop, name="stopping", daemon=True).start()

    def serving(self, on_signal: Callable[[], None]) -> None:
        """Call `on_signal` for each signal from now on, in the main thread, from which this is called too."""
        with self._lock:
            self._on_signal = on_signal
            if self._early:
                self._on_signal = None
        while self._early:
            time.sleep(LAST_WORDS_S)
        signal.set_wakeup_fd(-1)

    def _heard(self, *_: object) -> None:
        if self._on_signal is not None:
            self._on_signal()
        else:
            self._early = True

    def _loop(self) -> None:
        while heard := self._hears.recv(1):
            if heard[0] in SIGNALS:
                with self._lock:
                    if self._on_signal is None:
                        self._end(heard[0])

    def _end(self, number: int) -> None:
        """End the process: no scheduler knows this worker yet. The kernel ends the ranks that it started."""
        time.sleep(self.grace_s)
        name = signal.Signals(number).name
        # A full pipe must not keep the process alive.
        speaker = threading.Thread(target=log.info, args=("%s while loading: stopping", name), daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        os._exit(0)

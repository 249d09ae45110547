"""The worker process: bind, load, warm up, register, serve, stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import psutil

from services.worker.engine import Engine
from services.worker.metrics import Metrics
from services.worker.registration import Registration
from services.worker.server import WorkerServer
from shared.channels import server_credentials
from shared.logs import setup
from shared.metrics import serve as serve_metrics
from shared.settings import WorkerSettings

log = logging.getLogger("orcinus.worker")

PROGRESS_S = 2.0  # a line of loading progress at most this often


def run(settings: WorkerSettings) -> int:
    """Serves until SIGTERM, SIGINT or `orcinus drain`, then drains and returns 0; a second signal hurries.

    Raises ConfigurationError for what the operator has to change.
    """
    setup("worker", settings.log_level, settings.log_json)
    stop, hurry = threading.Event(), threading.Event()

    def told(*_: object) -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    server = WorkerServer(settings.listen, server_credentials(settings))
    registration: Registration | None = None
    try:
        metrics = Metrics()
        metrics.answering(lambda: server.last_step_id)
        serve_metrics(metrics.registry, settings.metrics_host, settings.worker_metrics_port, "--worker-metrics-port")
        engine = load(settings)
        if not stop.is_set():
            server.serve(engine, metrics.step)
            address = settings.advertise or server.address
            log.info("ready: %s listens on %s", settings.worker_id, address)
            registration = Registration(settings, record(engine, address), lambda: server.last_step_id, stop.set)
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
    return 0


def load(settings: WorkerSettings) -> Engine:
    """Reads the model, takes the memory and runs the largest batch."""
    started = time.monotonic()
    process = psutil.Process()
    engine = Engine(settings, progress=_Progress(settings.served_model_name))
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
    return engine


def record(engine: Engine, address: str) -> dict[str, str]:
    """The fields of worker:{id} that the worker owns."""
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
        "ready": "1",
    }


class _Progress:
    """Loading progress on the log, which goes to stderr."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_S
        log.info("loading %s: %d %% of %.0f MiB", self._name, 100 * done // max(total, 1), total / 2**20)

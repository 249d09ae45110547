"""A scheduler's fleet over the core for tests of workers: real gRPC; Redis and the publisher are lists."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import FinishedRequest, NewRequest, Outcome
from services.scheduler.quarantine import Quarantine
from services.scheduler.telemetry import Stats
from services.scheduler.workers.fleet import Fleet
from services.scheduler.workers.loop import WorkerContext
from services.scheduler.workers.registry import Registration
from shared.settings import SchedulerSettings


class Described(worker_pb2_grpc.WorkerServicer):
    """A worker without an engine, that says what it is."""

    def __init__(self, info: worker_pb2.WorkerInfo) -> None:
        self.info = info

    async def Describe(  # noqa: N802 - the name in worker.proto
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        return self.info


class Shard:
    """What a scheduler has of its workers. events: kind, text and worker; linked: slots, each time they are counted;
    ended: by request; given_up: by request, why it ends as one that kills workers.
    """

    def __init__(self, settings: SchedulerSettings, policy: str = "orcinus") -> None:
        self.core = Scheduler(policy, lookahead=settings.lookahead)
        self.events: list[tuple[str, str, str]] = []
        self.linked: list[int] = []
        self.ended: dict[str, FinishedRequest] = {}
        self.given_up: dict[str, str] = {}
        self.quarantine = Quarantine(self.core, self._give_up, lambda name, finish, text: None)
        reports: Any = SimpleNamespace(last_step=0, answered=0, event=self._event)
        context = WorkerContext(
            self.core, self.quarantine, Stats(time.monotonic_ns()), reports, self._put, lambda: False, lambda: None,
            lambda: self.fleet.wake_idle(),
        )  # fmt: skip
        registry: Any = SimpleNamespace(ready=[], least_epochs={}, token="")
        self.registry = registry
        claims: Any = SimpleNamespace(set_slots=self.linked.append, on_loss=lambda: None)
        self.fleet = Fleet(settings, registry, context, claims)

    def add(self, requests: Iterable[NewRequest]) -> None:
        for request in requests:
            self.core.add(request, 1)
        self.fleet.wake()

    def _give_up(self, request: str, text: str) -> None:
        self.given_up[request] = text

    def _event(self, kind: str, text: str, **ids: str) -> None:
        self.events.append((kind, text, ids.get("worker", "")))

    def _put(self, outcome: Outcome | None, step: int) -> None:
        for one in outcome.ended_requests if outcome is not None else ():
            self.ended[one.request.id] = one
            self.quarantine.remove(one.request.id, time.monotonic_ns())


@asynccontextmanager
async def serving(*workers: Described) -> AsyncIterator[list[Registration]]:
    """Serve each on a port of loopback; return how a shard finds them."""
    servers, records = [], []
    for worker in workers:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        records.append(Registration(worker.info.id[:20], address, worker.info.id[:20], epoch=1))
    try:
        yield records
    finally:
        for server in servers:
            await server.stop(None)

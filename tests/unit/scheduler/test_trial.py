"""The service and its core while a request is on trial: what waits, what runs again, and what a drain hands back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import queue_pb2
from services.scheduler.core.types import Limits, NewRequest
from services.scheduler.requests.intake import Claimed, Entry
from services.scheduler.service import Service
from services.scheduler.workers.link import StepFailedError
from services.scheduler.workers.loop import InFlight
from services.scheduler.workers.registry import Registration
from shared.settings import SchedulerSettings
from tests.support.waiting import free_port


def claimed(name: str) -> Claimed:
    wire = queue_pb2.Request(id=name)
    request = NewRequest(name, [np.arange(5, dtype=np.int32)], 20, payload=wire)
    return Claimed(Entry("orcinus:{m}:requests:normal", "0-1", wire), request, cancelled=False)


class OneWorker:
    """A service without Redis; the test plays its worker."""

    def __init__(self) -> None:
        self.service = Service(SchedulerSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0"))
        self.core = self.service.core
        self.now = 0
        self.in_flight = InFlight()
        self.join()

    def join(self) -> None:
        self.replica = self.core.join(Limits(slots=4, blocks=64, block_size=16, max_model_len=128, max_step_tokens=64))

    def send(self) -> set[str]:
        """Plans a step; the requests in it."""
        self.now += 1
        plan, _ = self.core.plan(self.now, self.replica)
        if plan is None:
            return set()
        self.in_flight.sent(plan)
        return self.in_flight.all()

    def dies(self) -> None:
        worker = Registration("worker-0", "", "its identity")
        self.service.fleet.lose(worker, self.replica, self.in_flight, StepFailedError("it raised"))
        self.in_flight = InFlight()
        self.join()

    def parked(self) -> int:
        return int(self.core.stats()["parked"])

    def ends(self, name: str) -> None:
        """Cancelled, and its end is written."""
        self.core.cancel(name, self.now)
        self.service.forget(name)


@pytest.fixture
async def worker() -> OneWorker:
    return OneWorker()


async def test_drain_hands_back_waiting_requests_and_keeps_started_ones(
    worker: OneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []

    async def fenced(script: Any, keys: list[str], args: list[Any]) -> int:
        handed.extend(args)
        return 1

    monkeypatch.setattr(worker.service.lease, "fenced", fenced)
    worker.service.take_all([claimed(name) for name in "ab"])
    worker.send()
    worker.dies()
    worker.service.take_all([claimed("c")])
    await worker.service.handover.hand_back()
    keys = worker.service.keys
    assert keys.req("c") in handed
    assert keys.req("a") not in handed
    assert set(worker.service.held.entries) == {"a", "b"}
    worker.ends("a")
    assert worker.send() == {"b"}
    assert worker.parked() == 0


async def test_the_group_on_trial_runs_alone_and_newcomers_wait(worker: OneWorker) -> None:
    worker.service.take_all([claimed(name) for name in "abcd"])
    assert worker.send() == set("abcd")
    worker.service.take_all([claimed("e")])
    worker.dies()
    worker.service.take_all([claimed("f"), claimed("f")])
    assert worker.parked() == 3, "f came when a worker was there: it waits, but not there"
    assert worker.send() == {"a", "b"}
    worker.dies()
    assert worker.send() == {"a"}
    worker.core.check()

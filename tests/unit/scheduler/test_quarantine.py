"""Requests that may have killed a worker: how they are found, the trial on a replica, and the one to blame."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from protos import queue_pb2
from services.scheduler.core.types import Limits, NewRequest
from services.scheduler.quarantine import Actions, Bisection
from services.scheduler.requests.intake import Claimed, Entry
from services.scheduler.service import Service
from services.scheduler.workers.link import StepFailedError, WorkerLostError, may_be_caused_by_step
from services.scheduler.workers.loop import InFlight
from services.scheduler.workers.registry import Registration
from shared.settings import SchedulerSettings
from tests.support.waiting import free_port


@dataclass
class Simulated:
    """One request. With `kills_at`, no step survives that would give it this token."""

    tokens: int
    kills_at: int | None = None
    comes: int = 0
    leaves: int | None = None
    got: int = 0

    @property
    def deadly(self) -> bool:
        return self.got == self.kills_at


@dataclass
class Simulation:
    requests: dict[str, Simulated]
    rng: random.Random
    slots: int
    troubled: bool = False  # requests leave at a bad moment, the worker is lost otherwise
    suspects: Bisection = field(default_factory=Bisection)
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    parked: set[str] = field(default_factory=set)
    untold: list[str] = field(default_factory=list)  # ended, and not written yet
    given_up: list[str] = field(default_factory=list)
    deaths: int = 0

    def run(self) -> None:
        """Until all have ended. Raises AssertionError when that never happens."""
        for now in range(20_000):
            for name, request in self.requests.items():
                if request.comes == now:
                    self.waiting.append(name)
                    self.obey(self.suspects.on_arrival(name))
                if request.leaves == now and self.held(name):
                    self.end(name)
            while self.untold and self.rng.random() < 0.5:
                self.obey(self.suspects.forget(self.untold.pop(0)))
            while self.waiting and len(self.running) < self.slots:
                self.running.append(self.waiting.pop(0))
            if not self.running:
                if all(request.comes <= now for request in self.requests.values()) and not self.untold:
                    break
                continue
            self.step()
        assert not (self.waiting or self.running or self.parked), "a request waits for ever"
        assert not self.suspects

    def step(self) -> None:
        in_step = set(self.rng.sample(self.running, self.rng.randint(1, len(self.running))))
        if any(self.requests[name].deadly for name in in_step):
            self.deaths += 1
            others = set(self.rng.sample(self.running, self.rng.randint(0, len(self.running))))
            self.lose(in_step, in_step | others)
        elif self.troubled and self.rng.random() < 0.05:
            self.lose(set(), in_step)
        else:
            got = {name for name in in_step if self.rng.random() < 0.8}  # the others had a part of their prompt
            for name in sorted(got):
                self.requests[name].got += 1
            if self.suspects:
                self.obey(self.suspects.on_progress(got))
            for name in sorted(got):
                if self.requests[name].got == self.requests[name].tokens:
                    self.end(name)

    def lose(self, in_step: set[str], at_worker: set[str]) -> None:
        self.waiting = self.running + self.waiting
        self.running = []
        if self.troubled and self.rng.random() < 0.1:
            self.end(self.rng.choice(sorted(at_worker)))  # a cancel just before
        self.obey(self.suspects.on_death(in_step, at_worker, self.parked.union(self.waiting)))

    def held(self, name: str) -> bool:
        return name in self.parked or name in self.waiting or name in self.running

    def end(self, name: str) -> None:
        self.parked.discard(name)
        for names in (self.waiting, self.running):
            if name in names:
                names.remove(name)
        self.untold.append(name)

    def obey(self, actions: Actions) -> None:
        for name in actions.park:
            if name in self.waiting:
                self.waiting.remove(name)
                self.parked.add(name)
        for name in actions.resume:
            if name in self.parked:
                self.parked.remove(name)
                self.waiting.append(name)
        for name in actions.dead:
            assert self.held(name), "it had ended"
            self.given_up.append(name)
            self.end(name)


def simulated(seed: int, poisons: int, cancels: bool) -> dict[str, Simulated]:
    rng = random.Random(seed)
    requests = {
        f"r{i:02d}": Simulated(rng.randint(1, 12), comes=rng.choice([0, 0, rng.randint(0, 60)]))
        for i in range(rng.randint(max(poisons, 1), 24))
    }
    for name in rng.sample(sorted(requests), poisons):
        requests[name].kills_at = rng.choice([0, rng.randrange(requests[name].tokens)])
    if cancels:
        for name in rng.sample(sorted(requests), len(requests) // 4):
            requests[name].leaves = requests[name].comes + rng.randint(0, 80)
    return requests


@pytest.mark.parametrize("poisons", [0, 1, 2, 3, 6])
def test_every_poison_is_given_up_in_few_deaths_alone(poisons: int) -> None:
    for seed in range(60):
        requests = simulated(seed, poisons, cancels=False)
        simulation = Simulation(requests, random.Random(seed), slots=1 + seed % 24)
        simulation.run()
        assert sorted(simulation.given_up) == sorted(n for n, r in requests.items() if r.kills_at is not None)
        assert all(request.got == request.tokens for request in requests.values() if request.kills_at is None)
        # For each poison a halving, each step of it perhaps repeated in isolation, and the two that count.
        assert simulation.deaths <= poisons * (2 * len(requests).bit_length() + 4), seed


@pytest.mark.parametrize("poisons", [1, 2, 6])
def test_cancels_and_lost_workers_cost_no_innocent_request(poisons: int) -> None:
    for seed in range(60):
        requests = simulated(seed, poisons, cancels=True)
        simulation = Simulation(requests, random.Random(seed), slots=1 + seed % 24, troubled=True)
        simulation.run()
        assert all(requests[name].kills_at is not None for name in simulation.given_up), seed


def test_suspect_on_trial_is_not_blamed_for_a_newcomer() -> None:
    suspects = Bisection()
    suspects.on_death({"innocent"}, {"innocent"}, {"innocent"})
    assert suspects.on_arrival("poison").park == ["poison"]
    both = {"innocent", "poison"}
    assert suspects.on_death(both, both, both).dead == []  # had it run for some reason
    assert suspects.on_progress({"innocent"}).resume == ["poison"]


def test_cleared_request_that_still_runs_takes_the_blame() -> None:
    suspects = Bisection()
    at_risk = {"a", "b"}
    assert suspects.on_death(at_risk, at_risk, at_risk).park == ["b"]
    assert suspects.on_progress({"a"}).resume == ["b"]
    for _ in range(3):  # a is with the worker: in the step, or in the next one
        assert suspects.on_death({"b"}, at_risk, at_risk) == Actions(park=["a"])
    assert suspects.on_death({"b"}, {"b"}, at_risk).dead == []
    assert suspects.on_death({"b"}, {"b"}, at_risk) == Actions(resume=["a"], dead=["b"])


def claimed(name: str) -> Claimed:
    wire = queue_pb2.Request(id=name)
    request = NewRequest(name, [np.arange(5, dtype=np.int32)], 20, payload=wire)
    return Claimed(Entry("orcinus:{m}:requests:normal", "0-1", wire), request, is_cancelled=False)


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
        self.in_flight.add(plan)
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

    monkeypatch.setattr(worker.service.lease, "run_fenced", fenced)
    worker.service.take_all([claimed(name) for name in "ab"])
    worker.send()
    worker.dies()
    worker.service.take_all([claimed("c")])
    await worker.service.handover.hand_back()
    keys = worker.service.keys
    assert keys.req("c") in handed
    assert keys.req("a") not in handed
    assert set(worker.service.holdings.entries) == {"a", "b"}
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


def rpc(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("details", "blamed"),
    [
        ("Socket closed", True),
        ("recvmsg:Connection reset by peer", True),
        ("Stream removed (ping timeout)", False),  # SIGSTOP, or nothing comes through any more
    ],
)
def test_a_worker_that_is_silent_as_a_whole_blames_no_request(details: str, blamed: bool) -> None:
    assert may_be_caused_by_step(rpc(grpc.StatusCode.UNAVAILABLE, details)) is blamed


def test_a_worker_that_takes_another_run_blames_no_request() -> None:
    assert not may_be_caused_by_step(rpc(grpc.StatusCode.ABORTED, "another Run took its place"))
    assert not may_be_caused_by_step(rpc(grpc.StatusCode.FAILED_PRECONDITION, "token: not that of the lease"))
    assert not may_be_caused_by_step(WorkerLostError("its stream ended"))

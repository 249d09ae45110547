"""Finding the request that kills the worker, against a simulated core and a worker that dies of poison.

The simulation keeps what makes it hard: only what waits can be parked; a step holds some of those that run; other steps
are with the worker when one dies; the cleared run on beside the trial; ends are told late; requests come and go.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from services.scheduler.quarantine import Actions, Bisection


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
                    self.obey(self.suspects.arrived(name))
                if request.leaves == now and self.held(name):
                    self.end(name)
            while self.untold and self.rng.random() < 0.5:
                self.obey(self.suspects.ended(self.untold.pop(0)))
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
                self.obey(self.suspects.progressed(got))
            for name in sorted(got):
                if self.requests[name].got == self.requests[name].tokens:
                    self.end(name)

    def lose(self, in_step: set[str], at_worker: set[str]) -> None:
        self.waiting = self.running + self.waiting
        self.running = []
        if self.troubled and self.rng.random() < 0.1:
            self.end(self.rng.choice(sorted(at_worker)))  # a cancel just before
        self.obey(self.suspects.died(in_step, at_worker, self.parked.union(self.waiting)))

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
    suspects.died({"innocent"}, {"innocent"}, {"innocent"})
    assert suspects.arrived("poison").park == ["poison"]
    both = {"innocent", "poison"}
    assert suspects.died(both, both, both).dead == []  # had it run for some reason
    assert suspects.progressed({"innocent"}).resume == ["poison"]


def test_cleared_request_that_still_runs_takes_the_blame() -> None:
    suspects = Bisection()
    at_risk = {"a", "b"}
    assert suspects.died(at_risk, at_risk, at_risk).park == ["b"]
    assert suspects.progressed({"a"}).resume == ["b"]
    for _ in range(3):  # a is with the worker: in the step, or in the next one
        assert suspects.died({"b"}, at_risk, at_risk) == Actions(park=["a"])
    assert suspects.died({"b"}, {"b"}, at_risk).dead == []
    assert suspects.died({"b"}, {"b"}, at_risk) == Actions(resume=["a"], dead=["b"])

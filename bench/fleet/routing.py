"""Choose a replica of a fleet at each arrival; a choice costs microseconds at 1,000 replicas.

A router knows what a scheduler knows: which replicas are there, how fast each is, the tokens each has outstanding, and
which prefixes lie where.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from bench.fleet.replica import Replica

# As services/scheduler/core/placement/router.py: prefixes count up to so much above the mean.
GUARD, SLACK_TOKENS = 1.3, 8192


class Router(ABC):
    """The replicas, their loads in an array, and the choice."""

    late = False  # True: requests wait in one queue, and a replica takes the next when it has room

    def __init__(self, replicas: list[Replica], seed: int) -> None:
        self.replicas = replicas
        self.random = random.Random(seed)
        self.alive: list[int] = []
        self.loads = np.zeros(0)  # of the alive: tokens outstanding over speed
        self.place: dict[int, int] = {}
        self.total = 0.0

    def changed(self) -> None:
        """Note that replicas came or left."""
        self.alive = [replica.number for replica in self.replicas if replica.up]
        self.place = {number: at for at, number in enumerate(self.alive)}
        self.loads = np.array([self.replicas[number].load / self.replicas[number].speed for number in self.alive])
        self.total = float(self.loads.sum())

    def moved(self, number: int) -> None:
        """Note that the load of a replica has changed."""
        at = self.place.get(number)
        if at is not None:
            replica = self.replicas[number]
            load = replica.load / replica.speed
            self.total += load - self.loads[at]
            self.loads[at] = load

    @abstractmethod
    def choose(self, index: int, group: int) -> int:
        """Return the number of a replica. At least one must be alive."""

    def remember(self, group: int, number: int) -> None:
        """Send the prefix of `group` to this replica from now on."""
        return  # most routers keep nothing of it


class RoundRobin(Router):
    """Each in its turn."""

    turn = -1

    def choose(self, index: int, group: int) -> int:
        self.turn += 1
        return self.alive[self.turn % len(self.alive)]


class Random(Router):
    """Any, evenly."""

    def choose(self, index: int, group: int) -> int:
        return self.alive[self.random.randrange(len(self.alive))]


class LeastTokens(Router):
    """The one with the least outstanding for its speed."""

    def choose(self, index: int, group: int) -> int:
        return self.alive[int(self.loads.argmin())]


class TwoChoices(Router):
    """The less loaded of two drawn at random (power of two choices, Mitzenmacher 2001)."""

    def choose(self, index: int, group: int) -> int:
        count = len(self.alive)
        one, other = self.random.randrange(count), self.random.randrange(count)
        return self.alive[one if self.loads[one] <= self.loads[other] else other]


class Prefix(TwoChoices):
    """Choose the replica with the prefix, unless its load is beyond the guard; then the less loaded of two."""

    def __init__(self, replicas: list[Replica], seed: int) -> None:
        super().__init__(replicas, seed)
        self.homes: dict[int, set[int]] = {}

    def choose(self, index: int, group: int) -> int:
        if group >= 0:
            homes = self.homes.get(group, set())
            homes -= {
                number for number in homes if group not in self.replicas[number].cached_groups and self._idle(number)
            }
            known = [self.place[number] for number in homes if number in self.place]
            if known:
                best = min(known, key=self.loads.__getitem__)
                if self.loads[best] <= GUARD * self.total / len(self.alive) + SLACK_TOKENS:
                    return self.alive[best]
        return super().choose(index, group)

    def _idle(self, number: int) -> bool:
        """Return whether the replica computes nothing, so the prefix is not being computed there either."""
        replica = self.replicas[number]
        return replica.head < 0 and not replica.queue

    def remember(self, group: int, number: int) -> None:
        if group >= 0:
            self.homes.setdefault(group, set()).add(number)


class OneQueue(Router):
    """Late: requests wait in one queue in front of all; the least loaded replica that has room takes the next."""

    late = True
    open = np.zeros(0)  # of the alive: 0 where the next would begin soon, else infinity

    def changed(self) -> None:
        super().changed()
        self.open = np.array([0.0 if self.replicas[number].open else np.inf for number in self.alive])

    def moved(self, number: int) -> None:
        super().moved(number)
        if (at := self.place.get(number)) is not None:
            self.open[at] = 0.0 if self.replicas[number].open else np.inf

    def choose(self, index: int, group: int) -> int:
        return self.alive[int((self.loads + self.open).argmin())]


ROUTERS: dict[str, Callable[[list[Replica], int], Router]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-tokens": LeastTokens,
    "two-choices": TwoChoices,
    "prefix": Prefix,
    "one-queue": OneQueue,
}

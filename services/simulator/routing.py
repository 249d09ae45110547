"""Choose a replica for each request: the front routers of several cores.

engine.py calls a router at each arrival. A router knows as much as a gateway does: the requests that it sent to each
replica.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol


class Router(Protocol):
    """Chooses a replica.

    `load[r]` counts the prompt and output tokens of the unfinished requests of replica r; `head` is the hash of the
    prompt's prefix.
    """

    def choose(self, load: list[int], head: int) -> int: ...


class RoundRobin:
    """Take the replicas in turn."""

    def __init__(self, seed: int) -> None:
        self._next = -1

    def choose(self, load: list[int], head: int) -> int:
        self._next = (self._next + 1) % len(load)
        return self._next


class Random:
    """Draw a replica, all with equal probability."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, load: list[int], head: int) -> int:
        return self._random.randrange(len(load))


class LeastTokens:
    """Take the replica with the smallest load; among equals the first."""

    def __init__(self, seed: int) -> None:
        pass

    def choose(self, load: list[int], head: int) -> int:
        return load.index(min(load))


class TwoChoices:
    """Draw two replicas and take the less loaded one (power of two choices, Mitzenmacher 2001)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, load: list[int], head: int) -> int:
        if len(load) == 1:
            return 0
        one, other = self._random.sample(range(len(load)), 2)
        return one if load[one] <= load[other] else other


class Prefix:
    """Route by the hash of the prompt's first block, so that equal prefixes reach the same cache; ignore the load."""

    def __init__(self, seed: int) -> None:
        pass

    def choose(self, load: list[int], head: int) -> int:
        return head % len(load)


SCHEDULER = "scheduler"
"""One core drives all replicas and routes as a shard of the shipped scheduler does, without a front router."""

ROUTERS: dict[str, Callable[[int], Router]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-tokens": LeastTokens,
    "two-choices": TwoChoices,
    "prefix": Prefix,
}

"""Which replica takes a request: the routers in front of several cores.

engine.py asks at each arrival and tells what finished. A router knows what a gateway would: what it has sent where.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol


class Router(Protocol):
    """`load[r]`: prompt and output tokens asked for by what replica r has not finished; `head`: the prefix's hash."""

    def choose(self, load: list[int], head: int) -> int: ...


class RoundRobin:
    """Each in its turn."""

    def __init__(self, seed: int) -> None:
        self._next = -1

    def choose(self, load: list[int], head: int) -> int:
        self._next = (self._next + 1) % len(load)
        return self._next


class Random:
    """Any, evenly."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, load: list[int], head: int) -> int:
        return self._random.randrange(len(load))


class LeastTokens:
    """The one with the fewest tokens outstanding; of equals the first."""

    def __init__(self, seed: int) -> None:
        pass

    def choose(self, load: list[int], head: int) -> int:
        return load.index(min(load))


class TwoChoices:
    """The less loaded of two drawn at random (power of two choices, Mitzenmacher 2001)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, load: list[int], head: int) -> int:
        if len(load) == 1:
            return 0
        one, other = self._random.sample(range(len(load)), 2)
        return one if load[one] <= load[other] else other


class Prefix:
    """By the hash of the prompt's first block, so that equal prefixes meet their cache; load is not looked at."""

    def __init__(self, seed: int) -> None:
        pass

    def choose(self, load: list[int], head: int) -> int:
        return head % len(load)


SCHEDULER = "scheduler"
"""One core drives all replicas and routes as a shard of the shipped scheduler does: no router is in front."""

ROUTERS: dict[str, Callable[[int], Router]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-tokens": LeastTokens,
    "two-choices": TwoChoices,
    "prefix": Prefix,
}

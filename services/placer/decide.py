"""Decide which models are awake, and how long a request for one that is not would wait. Pure: times are arguments.

A switch costs a load, in which no model of that place serves. So it has to pay: what waits is as old as several loads,
and the model that goes has served for as long. The time in which it recomputes KV that it lost does not count. One
without work goes at once. Two models that always have work then spend at most 1 / (1 + patience) of the time on loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.keys import CLASSES

PATIENCE = {"realtime": 1, "high": 2, "normal": 4, "low": 8}
"""Loads that a request waits, and that a model with work serves, before that model has to go for the request."""
IDLE_MS = 1000
"""A model that has had no request for so long is without work: a client in a loop sends its next one sooner."""
UNKNOWN_LOAD_MS = 10_000
"""The load of a model that was not loaded yet."""
GIVE_UP_LOADS, LEAST_GIVE_UP_MS, UNKNOWN_GIVE_UP_MS = 10, 60_000, 120_000
"""Time for a load, after which a model may go that does not get ready; a first load has twice as long at the next try,
three times as long at those that follow.
"""


@dataclass(frozen=True, slots=True)
class Demand:
    """One model: is_awake, whether it is to have workers. All times in ms; waiting_ms: the age of the oldest request of
    each class that has not ended, for a model that sleeps not more than it has slept.
    """

    name: str
    is_awake: bool
    ready_ms: int = 0  # it has served without a break; 0 while no worker serves
    resuming_ms: int = 0  # the first part of ready_ms, in which it recomputed lost KV
    loading_ms: int = 0  # it is awake, and no worker serves
    idle_ms: int = 0  # it has had no request
    load_ms: int = 0  # what a load takes, as measured; 0 before
    failed_loads: int = 0  # loads that were given up, one after another
    waiting_ms: Mapping[str, int] = field(default_factory=dict)

    @property
    def cost_ms(self) -> int:
        return self.load_ms or UNKNOWN_LOAD_MS

    @property
    def patience_ms(self) -> dict[str, int]:
        """Return how long a request of each class waits while the model in its place has work; twice as long for each
        load that failed.
        """
        return {priority: loads * self.cost_ms << self.failed_loads for priority, loads in PATIENCE.items()}

    @property
    def give_up_ms(self) -> int:
        if self.load_ms:
            return max(LEAST_GIVE_UP_MS, GIVE_UP_LOADS * self.load_ms)
        return UNKNOWN_GIVE_UP_MS * min(1 + self.failed_loads, 3)

    @property
    def served_ms(self) -> int:
        """Return how much of its turn has passed.

        The turn begins when the KV that its sleep lost is recomputed, or after `give_up_ms`. If it began at once, a
        request that takes longer than a turn to recompute would never end.
        """
        return self.ready_ms - min(self.resuming_ms, self.give_up_ms)

    @property
    def urgency(self) -> float:
        """Return how long its requests wait, as a share of what they may."""
        return max((age / self.patience_ms[priority] for priority, age in self.waiting_ms.items()), default=0.0)


def choose(models: Sequence[Demand], most: int) -> frozenset[str]:
    """Return the models to be awake, at most so many: those that are, but for switches that pay."""
    awake_models = [model for model in models if model.is_awake][:most]
    awake = {model.name for model in awake_models}
    callers = [model for model in models if not model.is_awake and model.waiting_ms]
    callers.sort(key=lambda model: model.urgency, reverse=True)
    for at, caller in enumerate(callers):
        if len(awake) >= most:
            # A caller that has waited its time comes before those behind it, which may wait for less time served.
            entitled = callers[at:] if caller.urgency >= 1 else [caller]
            candidates = [model for model in awake_models if any(_turn_ms(model, each) <= 0 for each in entitled)]
            if not candidates:
                continue
            evicted = max(candidates, key=lambda model: (model.idle_ms, model.ready_ms))
            awake_models.remove(evicted)
            awake.remove(evicted.name)
        awake.add(caller.name)
    return frozenset(awake)


def wake_ms(model: Demand, models: Iterable[Demand], most: int) -> tuple[int, ...]:
    """Return in which time the model would serve a request that comes now, of each class; 0 while it serves.

    Other models that wait for the same place are not counted.
    """
    if model.is_awake:
        return (0 if model.ready_ms else max(model.cost_ms - model.loading_ms, model.cost_ms // 10),) * len(CLASSES)
    awake = [each for each in models if each.is_awake]
    waits = []
    for priority in CLASSES:
        asking = replace(model, waiting_ms={priority: 0, **model.waiting_ms})
        turn_ms = 0 if len(awake) < most else min((_turn_ms(each, asking) for each in awake), default=0)
        waits.append(max(0, turn_ms) + model.cost_ms)
    return tuple(waits)


def _turn_ms(model: Demand, caller: Demand) -> int:
    """Return in which time a model that is awake goes for a caller's requests; 0 or less means now."""
    if not model.ready_ms:
        return model.give_up_ms - model.loading_ms
    if model.idle_ms and not caller.failed_loads:  # one that may fail again is not worth a model that serves
        return IDLE_MS - model.idle_ms
    patience_ms = caller.patience_ms
    return min(
        (patience_ms[priority] - min(age, model.served_ms) for priority, age in caller.waiting_ms.items()), default=0
    )

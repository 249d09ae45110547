"""A shard without Redis and processes: twin workers of one core, and the quarantine in front of it."""

from __future__ import annotations

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish, Limits
from services.scheduler.quarantine import Quarantine
from tests.unit.scheduler.core.twin import House, request

LIMITS = Limits(slots=8, blocks=256, block_size=4, max_model_len=128, max_step_tokens=64)
SECOND = 1_000_000_000


class Shard:
    def __init__(self, workers: int = 1, lookahead: int = 0) -> None:
        self.house = House(Scheduler("orcinus", lookahead=lookahead), LIMITS)
        for _ in range(workers - 1):
            self.house.join(LIMITS)
        self.core = self.house.core
        self.quarantine = Quarantine(self.core, self.give_up, self.abandon)
        self.given_up: list[str] = []
        self.abandoned: list[str] = []

    def give_up(self, name: str, text: str) -> None:
        self.given_up.append(name)
        self._cancel(name, Finish.ERROR, text)

    def abandon(self, name: str, finish: Finish, text: str) -> None:
        self.abandoned.append(name)
        self._cancel(name, finish, text if finish is Finish.ERROR else "")

    def _cancel(self, name: str, finish: Finish, text: str) -> None:
        self.house.take(self.core.cancel(name, self.house.now, finish, text))
        self.quarantine.remove(name, self.house.now)

    def arrive(
        self, name: str, gateway: str = "g", delivered: bool = True, background: bool = False, seed: int = 0
    ) -> None:
        self.house.add(request(name, 6, 60, seed=seed, gateway=gateway))
        self.quarantine.add(name, gateway, self.house.now, delivered, background)

"""When the faults of a chaos run come: a random schedule by a seed, every kind once before any comes again.

Several may be under way, but one a target. What they do is in kinds.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

from tests.chaos.harness.history import Injected
from tests.chaos.harness.kinds import KINDS
from tests.chaos.harness.stack import ChaosStack

AT_ONCE = 2


class Faults:
    """Injects faults into one stack."""

    def __init__(self, stack: ChaosStack, seed: int, kinds: Sequence[str], at_once: int = AT_ONCE) -> None:
        """kinds: of KINDS; at_once: how many may be under way."""
        self._stack, self._kinds = stack, kinds
        self._rng = random.Random(seed)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places = asyncio.Semaphore(at_once)
        self.injected: list[Injected] = []

    async def run(self, gap_s: float, most: int, until_s: float) -> None:
        """A fault about every gap_s, until there were so many or the time (of time.monotonic()) has come.

        Raises NotReadyError when the stack does not come back.
        """
        if not self._kinds:
            await asyncio.sleep(max(0.0, until_s - time.monotonic()))
            return
        kinds = self._in_turn()
        async with asyncio.TaskGroup() as group:
            for _ in range(most):
                await asyncio.sleep(self._rng.uniform(0.2, 1.8) * gap_s)
                await self._places.acquire()
                if time.monotonic() > until_s:
                    self._places.release()
                    return
                group.create_task(self._one(next(kinds), random.Random(self._rng.randrange(1 << 31))))

    def _in_turn(self) -> Iterator[str]:
        while True:
            yield from self._rng.sample(list(self._kinds), len(self._kinds))

    async def _one(self, kind: str, rng: random.Random) -> None:
        targets = KINDS[kind].targets(self._stack, rng)
        try:
            async with AsyncExitStack() as locks:
                for target in sorted(targets):
                    await locks.enter_async_context(self._locks[target])
                fault = Injected(kind, "+".join(targets), time.monotonic())
                self.injected.append(fault)
                await KINDS[kind].do(self._stack, fault, rng)
                fault.over_s = time.monotonic()
        finally:
            self._places.release()

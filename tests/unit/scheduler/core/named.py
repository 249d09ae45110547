"""A house for schedules computed by hand: what was planned, by the requests' names."""

from __future__ import annotations

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, StepPlan
from tests.unit.scheduler.core.twin import MS, House


class Named(House):
    """A house that tells a step's chunks by request: {"a": (start, length)}."""

    def chunks(self, step: StepPlan | None) -> dict[str, tuple[int, int]]:
        assert step is not None, "nothing was planned"
        for slot in step.free_slots.tolist():
            self.names.pop(slot)
        for enter in step.enters:
            self.names[enter.slot] = enter.request.id
        columns = (step.chunk_slots.tolist(), step.chunk_starts.tolist(), step.chunk_lengths.tolist())
        return {self.names[slot]: (start, length) for slot, start, length in zip(*columns, strict=True)}

    def plan_named(self) -> dict[str, tuple[int, int]]:
        return self.chunks(self.plan())

    def step(self) -> dict[str, tuple[int, int]]:
        """Plans one step, runs it, answers it."""
        named = self.plan_named()
        self.answer()
        self.core.check()
        self.now += 10 * MS
        return named

    @property
    def names(self) -> dict[int, str]:
        if not hasattr(self, "_names"):
            self._names: dict[int, str] = {}
        return self._names


def house(
    policy: str,
    slots: int = 8,
    blocks: int = 1000,
    block_size: int = 4,
    context: int = 400,
    step_max: int = 2048,
    **more: int,
) -> Named:
    return Named(Scheduler(policy, **{"lookahead": 0, **more}), Limits(slots, blocks, block_size, context, step_max))

"""Steps that were sent and not answered, and whose they are. Pure; one per link to a worker."""

from __future__ import annotations

from collections import deque

from services.scheduler.core.types import StepPlan

OCCUPANTS = 4
"""Entries remembered of a slot: a step that died may be older than its slot's latest sequence."""


class InFlight:
    """Plans by step id, in order; and which request entered which slot with which step."""

    def __init__(self) -> None:
        self._plans: dict[int, StepPlan] = {}
        self._occupants: dict[int, deque[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def sent(self, plan: StepPlan) -> None:
        for enter in plan.enters:
            self._occupants.setdefault(enter.slot, deque(maxlen=OCCUPANTS)).append((plan.id, enter.request.id))
        self._plans[plan.id] = plan

    def answered(self, step: int) -> StepPlan:
        return self._plans.pop(step)

    def oldest(self) -> set[str]:
        """The requests of the oldest unanswered step; empty when every step was answered."""
        if not self._plans:
            return set()
        step = min(self._plans)
        found = set()
        for slot in self._plans[step].chunk_slots.tolist():
            names = [name for since, name in self._occupants.get(slot, ()) if since <= step]
            found |= set(names[-1:])
        return found

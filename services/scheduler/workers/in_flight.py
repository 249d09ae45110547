"""Steps that were sent and not answered, and whose they are. Pure; one per link to a worker."""

from __future__ import annotations

from collections import deque

from services.scheduler.core.types import StepPlan


class InFlight:
    """Plans by step id, in order; and which request entered which slot with which step."""

    def __init__(self) -> None:
        self._plans: dict[int, StepPlan] = {}
        self._occupants: dict[int, deque[tuple[int, str]]] = {}  # by slot, as far back as unanswered steps reach

    def __len__(self) -> int:
        return len(self._plans)

    def sent(self, plan: StepPlan) -> None:
        oldest = next(iter(self._plans), plan.id)
        for enter in plan.enters:
            entered = self._occupants.setdefault(enter.slot, deque())
            while len(entered) > 1 and entered[1][0] <= oldest:
                entered.popleft()
            entered.append((plan.id, enter.request.id))
        self._plans[plan.id] = plan

    def answered(self, step: int) -> StepPlan:
        return self._plans.pop(step)

    def oldest(self) -> set[str]:
        """The requests of the oldest unanswered step; empty when every step was answered."""
        return self._requests(next(iter(self._plans.values()))) if self._plans else set()

    def all(self) -> set[str]:
        """The requests of every unanswered step."""
        return set().union(*(self._requests(plan) for plan in self._plans.values()))

    def _requests(self, plan: StepPlan) -> set[str]:
        found = set()
        for slot in plan.chunk_slots.tolist():
            names = [name for since, name in self._occupants.get(slot, ()) if since <= plan.id]
            found |= set(names[-1:])
        return found

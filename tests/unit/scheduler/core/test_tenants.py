"""What a flood of one tenant leaves to the others, with the whole core: slots, at every moment, on every replica."""

from __future__ import annotations

import pytest

from services.scheduler.core.policy.fairness import SPARE
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits
from tests.unit.scheduler.core.twin import House, request

SLOTS = 2 * SPARE


@pytest.mark.parametrize("replicas", [1, 2])
def test_beside_a_flood_a_newcomer_has_a_slot_at_once_and_the_flood_goes_on(replicas: int) -> None:
    limits = Limits(SLOTS, 2_000, 4, 200, 2_048)
    house = House(Scheduler("orcinus", lookahead=0), limits)
    for _ in range(1, replicas):
        house.join(limits)
    for number in range(4 * SLOTS):
        house.add(request(f"flood-{number}", 4, 20 + number % 17, seed=number, tenant="flood"))
    house.add(request("first", 4, 3, tenant="other"))
    house.step_once()
    fullest = 0
    for round_ in range(40):
        house.step_once()
        if round_ % 2:
            name = f"other-{round_}"
            house.add(request(name, 4, 6, seed=round_, tenant="other"))
            house.step_once()
            assert house.published[name, 0], "it runs in the very next step"
        running = [replica.table.count for replica in house.core.replicas]
        fullest = max(fullest, *running)
        assert max(running) <= SLOTS
    assert fullest > SLOTS - SPARE // 8, "no more slots are kept than there are to be"
    house.finish()


def test_a_tenant_alone_has_every_slot() -> None:
    house = House(Scheduler("orcinus", lookahead=0), Limits(SLOTS, 2_000, 4, 200, 2_048))
    for number in range(2 * SLOTS):
        house.add(request(f"{number}", 4, 20, seed=number, tenant="alone"))
    house.step_once()
    house.step_once()
    assert house.core.replicas[0].table.count == SLOTS
    house.finish()

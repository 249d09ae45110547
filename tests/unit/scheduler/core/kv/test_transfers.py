"""Copies between the tiers: no block is used before the worker has acknowledged the copy that reads or writes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits
from tests.unit.scheduler.core.placement.test_roles import D, P
from tests.unit.scheduler.core.placement.test_roles import house as house_of_roles
from tests.unit.scheduler.core.twin import House, request

ENDS: dict[str, Callable[[House], None]] = {
    "cancel": lambda h: h.take(h.core.cancel("low", h.now)),
    "stop": lambda h: h.stop("low", 0, 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_blocks_that_a_copy_writes_are_free_when_it_is_complete(end: str) -> None:
    """The sequence ends while its KV is copied in; the next request needs those blocks."""
    h = House(Scheduler("orcinus:relief=least-lost-swap+takes", lookahead=0), Limits(1, 12, 4, 60, 64, host_blocks=30))
    h.add(request("low", 20, 20, priority=3))
    h.steps(2)
    h.add(request("urgent", 4, 1, seed=2, priority=0))
    h.steps(2)
    step = h.plan()
    assert step is not None and "urgent" in h.ended and step.swap_in_gpu.size == 6
    ENDS[end](h)
    h.add(request("next", 40, 2, seed=4))
    assert h.plan() is None
    h.answer()
    assert h.step() == {"next": (0, 40)}
    h.finish()


def test_kv_is_read_by_another_replica_when_its_copy_is_complete() -> None:
    """The second step carries the copies; the only step of the sequence is answered before it."""
    h = house_of_roles(P, D, lookahead=0, microbatches=2)
    h.add(request("first", 8, 6, seed=1))
    h.plan(0)
    h.add(request("second", 8, 6, seed=2))
    step = h.plan(0)
    assert step is not None and step.swap_out_gpu.size == 2
    h.answer(0)
    assert h.plan(1) is None
    h.answer(0)
    step = h.plan(1)
    assert step is not None and step.swap_in_peers.tolist() == [0, 0]
    h.finish()

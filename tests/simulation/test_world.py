"""Draws of a simulated stack, and copies of its Redis."""

from __future__ import annotations

import random

from tests.simulation.clock import Loop
from tests.simulation.network import Network
from tests.simulation.redis_server import Node
from tests.simulation.world import World


def test_lost_leases_leave_all_other_draws_of_a_seed() -> None:
    for world in map(World, range(20)):
        expected = random.Random(world.seed)
        if world.takes:
            expected.choice([0, 1, 2])
            assert world.apart.getstate() == expected.getstate()


def test_copy_of_redis_is_void_after_another_restore() -> None:
    loop = Loop(0)
    node = Node(loop, Network(loop))
    call = node.local()
    call("SET", "a", "1")
    first = node.keep()
    call("SET", "a", "2")
    second = node.keep()
    call("SET", "a", "3")
    assert first() and call("GET", "a") == b"1"
    assert not second() and call("GET", "a") == b"1", "2 was lost"

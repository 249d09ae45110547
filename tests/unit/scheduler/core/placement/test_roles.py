"""Roles: what a prefill replica has computed goes to a decode replica through the host tier, and nothing waits for a
role that is not there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protos import queue_pb2, worker_pb2
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import DECODE, PREFILL, Finish, Limits
from services.scheduler.workers.wire import limits_from_wire, result_from_wire, step_to_wire
from shared.wire.columns import pack, unpack
from tests.unit.scheduler.core.twin import House, answer, request

BOTH = Limits(slots=8, blocks=40, block_size=4, max_model_len=80, max_step_tokens=64, host_blocks=60, kv_format="f")
BOTH.host_tier = "folder/"
P, D = replace(BOTH, role=PREFILL), replace(BOTH, role=DECODE)


def house(*limits: Limits, policy: str = "orcinus", lookahead: int = 1, lag: int = 0, **more: Any) -> House:
    h = House(Scheduler(policy, lookahead=lookahead, checkpoint_tokens=4, **more), limits[0], lag)
    for each in limits[1:]:
        h.join(each)
    h.step_once()  # in which they are told of each other
    return h


def handed(h: House) -> int:
    return int(h.core.stats()["handed_over"])


def not_handed(h: House) -> int:
    return int(h.core.stats()["not_handed_over"])


def until(h: House, done: Callable[[], object], step: Callable[[], object]) -> None:
    """Steps until then."""
    for _ in range(1000):
        if done():
            return
        step()
        h.core.check()
    raise AssertionError("it never came")


@pytest.mark.parametrize(("lookahead", "lag"), [(0, 2), (1, 0), (2, 2)])
def test_prompt_is_computed_on_one_replica_and_decoded_on_other(lookahead: int, lag: int) -> None:
    h = house(P, D, lookahead=lookahead, lag=lag)
    prompts: list[int] = []
    for i in range(12):
        h.add(request(f"r{i}", 6 + i, 9, seed=i))
    for replica, step in h.run_out():
        if replica == 0:
            prompts += step.chunk_lengths.tolist()
        else:
            assert (step.chunk_lengths == 1).all(), "a prompt was computed where only is decoded"
    assert sum(prompts) == sum(6 + i for i in range(12)), "nothing but prompts, each once"
    assert handed(h) == 12 and len(h.ended) == 12


def test_request_of_one_token_ends_where_its_prompt_was_computed() -> None:
    h = house(P, D)
    h.add(request("r", 9, 1))
    h.finish()
    assert handed(h) == 0 and h.core.stats()["swapped_blocks"] == 0


def test_peers_learn_of_joined_and_lost_replicas() -> None:
    h = House(Scheduler("orcinus"), P)
    assert h.plan(0) is None
    h.join(D)
    first = h.plan(0)
    assert first is not None and [(p.number, p.host_tier, p.host_blocks) for p in first.peers] == [(1, "folder/1", 60)]
    assert first.chunk_slots.size == 0 and first.swap_in_peers.size == 0
    h.answer(0)
    assert h.plan(0) is None
    h.lose(1)
    gone = h.plan(0)
    assert gone is not None and [(p.number, p.host_tier) for p in gone.peers] == [(1, "")]
    h.join(D)
    again = h.plan(0)
    assert again is not None and [(p.number, p.host_tier) for p in again.peers] == [(1, "folder/2")]


def test_acknowledgement_of_a_tier_that_was_replaced_counts_for_nothing() -> None:
    h = House(Scheduler("orcinus"), P)
    h.join(D)
    h.plan(1)
    h.lose(0)
    h.join(P)  # under the number that the decode replica is about to acknowledge for the old one
    h.answer(1)
    assert not h.core.replicas[1].peers.readable
    h.plan(1)
    h.answer(1)
    assert h.core.replicas[1].peers.readable == {0: h.core.replicas[0]}


def test_entering_sequence_crosses_the_wire_with_its_tenant() -> None:
    """A number for each tenant, equal for its sequences and given again when it has none."""
    h = House(Scheduler("orcinus"), BOTH)

    def entering(**tenants: str) -> list[int]:
        for name, tenant in tenants.items():
            new = request(name, 4, 2)
            new.tenant, new.payload = tenant, queue_pb2.Request()
            h.core.add(new, h.now)
        plan = h.plan(0)
        assert plan is not None
        step = worker_pb2.Step.FromString(step_to_wire(plan, 7).SerializeToString())
        return [enter.tenant for enter in step.enters]

    first, second, third = entering(a="shop", b="bank", c="shop")
    assert first == third != second


def test_peers_and_their_blocks_cross_the_wire() -> None:
    info = worker_pb2.WorkerInfo(max_seqs=4, gpu_blocks=8, block_size=4, role="decode", host_tier="f/1", kv_format="x")
    limits = limits_from_wire(info)
    assert (limits.role, limits.host_tier, limits.kv_format) == (DECODE, "f/1", "x")
    h = House(Scheduler("orcinus"), P)
    h.join(D)
    plan = h.plan(1)
    assert plan is not None
    plan.swap_in_host, plan.swap_in_gpu = np.array([5, 6], np.int32), np.array([1, 2], np.int32)
    plan.swap_in_peers = np.array([0, -1], np.int32)
    step = worker_pb2.Step.FromString(step_to_wire(plan, 7).SerializeToString())
    assert [(p.number, p.host_tier, p.host_blocks) for p in step.peers] == [(0, "folder/0", 60)]
    assert unpack(step.swap_in_peers).tolist() == [0, -1]
    result = worker_pb2.Result(id=1, peer_acks=pack(np.array([0], np.int32)))
    assert result_from_wire(result, 1).peer_acks.tolist() == [0]


def test_lost_decode_replica_leaves_the_loaded_kv_for_another() -> None:
    h = house(P, D, D, lookahead=0, lag=3)
    h.add(request("r", 9, 12))
    until(
        h,
        lambda: any(h.core.replicas[d].transfers.slots() for d in (1, 2)),
        lambda: h.plan(1) or h.plan(2) or h.step_once(),
    )
    loads = next(d for d in (1, 2) if h.core.replicas[d].transfers.slots())
    before = h.core.stats()["recomputed_tokens"]
    h.lose(loads)
    h.core.check()
    assert h.core.stats()["swapped"] == 1
    h.finish()
    assert h.core.stats()["recomputed_tokens"] == before, "loaded from the same host blocks"


@pytest.mark.parametrize("at_token", [0, 4, 9])
def test_sequence_stopped_before_its_chunk_is_answered_does_no_harm(at_token: int) -> None:
    h = house(P, D)
    again = request("r", 9, 30, seed=3)
    again.outputs = [np.array(answer(again, 0, 80)[0][:13], np.int32)]
    h.add(again)
    h.plan(0)
    h.plan(0)
    assert handed(h) == 1
    h.stop("r", 0, at_token)
    h.answer(0)
    h.finish()


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_late_masks_are_handed_over(seed: int) -> None:
    """A prefill replica has planned the first token of what it hands over; late, it is drawn where it goes on."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    limits = replace(BOTH, slots=5, block_size=size, blocks=40 // size, max_step_tokens=16)
    roles = [replace(limits, role=role) for role in (PREFILL, DECODE, rng.choice([PREFILL, DECODE, ""]))]
    h = house(*roles, lookahead=rng.randint(0, 2), lag=rng.randint(0, 2), prefix_cache=rng.choice([None, True]))
    for i in range(20):
        h.add(request(f"r{i}", rng.randint(1, 12), rng.randint(1, 16), seed=i % 6, stop_ids=(0,), priority=i % 4))
    for _ in range(3000):
        if h.core.idle:
            break
        for worker in h.workers.values():
            worker.late_next = {at for at in range(6) if rng.random() < 0.3}
        h.step_once()
        h.core.check()
    stats = h.core.stats()
    assert len(h.ended) == 20 and all(finish[0] in (Finish.STOP, Finish.LENGTH) for finish in h.ended.values())
    assert stats["handed_over"] and stats["host_blocks_free"] == stats["host_blocks_total"]

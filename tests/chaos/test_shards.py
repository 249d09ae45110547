"""Two shards of one model, each with a worker: one goes on with what the other leaves without a scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.streams import Load, Stream, load
from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

STREAMS = 6
SLOTS = 4
"""Of a worker: beside another shard one claims a quarter more requests, so never all streams."""
LONG = 600
SHARDS = ("shard-0", "shard-1")
SECOND = {"shard": "shard-1", "worker_id": "worker-1"}
OTHER, OTHERS_WORKER = "scheduler-1", "worker-1"
MODEL = {"requests": STREAMS, "output_tokens": 64, "max_position_embeddings": 4096, "seed": 20261203}


@pytest.fixture(scope="module")
def whole(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(directory, reference.path, dtype="float32", max_seqs=SLOTS, threads=1) as running:
        for service, name in (("worker", OTHERS_WORKER), ("scheduler", OTHER)):
            running.start(service, name, **SECOND)
        yield running


@pytest.fixture
def stack(whole: Stack) -> Stack:
    """Both shards lead a worker, and each knows of the other."""
    until("both shards have a worker", lambda: all(led(whole, shard) for shard in SHARDS), 90)
    redis, names = whole.redis.client, whole.keys.shards
    # A shard writes its name at the begin of each look, and the second look begins when the first is done.
    for _ in range(2):
        redis.hdel(names, *SHARDS)
        until("each looks at the others", lambda: redis.hlen(names) == len(SHARDS))
    return whole


def led(stack: Stack, shard: str) -> bool:
    """Has it a lease and a worker?"""
    lease: Any = stack.redis.client.get(stack.keys.lease(shard))  # bytes
    stats = stack.stats(shard)
    return lease is not None and stats.get("epoch") == lease.decode().partition(":")[0] and stats.get("workers") == "1"


def of_shard(stack: Stack, streams: list[Stream], shard: str) -> list[int]:
    """Numbers of the streams with requests that it has."""
    found = [stack.redis.client.hget(stack.keys.req(stream.request), "shard") for stream in streams]
    return [number for number, name in enumerate(found) if name == shard.encode()]


def assert_both_have_some(stack: Stack, under_way: Load) -> None:
    assert all(of_shard(stack, under_way.streams, shard) for shard in SHARDS)


def assert_nothing_is_left(stack: Stack, *shards: str) -> None:
    """Of those shards, all with the same workers as before: all blocks are free, and no request is pending."""
    after = stack.settled()
    assert after["pending"] == [0, 0, 0, 0]
    for shard in shards:
        until(f"{shard} is quiet", lambda shard=shard: stack.stats(shard).get("running") == "0")
        stats = stack.stats(shard)
        assert int(stats["blocks_free"]) + int(stats["blocks_cached"]) == int(stats["blocks_total"])


def test_requests_of_shard_without_a_leader_go_on_at_another(stack: Stack, reference: Reference) -> None:
    with load(stack, reference, LONG) as under_way:
        assert_both_have_some(stack, under_way)
        orphans = of_shard(stack, under_way.streams, "shard-1")
        stack.kill(OTHER)
        leaver = orphans[0]
        under_way.streams[leaver].leave.set()  # its cancel goes to a shard that does not read it any more
        under_way.check(LONG, but=[leaver])
        assert not of_shard(stack, under_way.streams, "shard-1")
    assert_nothing_is_left(stack, "shard-0")
    assert "shard shard-1 has no scheduler" in stack.log("scheduler")
    stack.start("scheduler", OTHER, **SECOND)

"""One shard with several workers: all work, one that dies or drains loses nothing, and one that comes is used."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.chaos.streams import load
from tests.support.checkpoints.models import Reference
from tests.support.stack import Stack, running_stack
from tests.support.waiting import until

STREAMS = 6
LONG = 600
SLOTS = 4
MODEL = {"requests": STREAMS, "output_tokens": 64, "max_position_embeddings": 4096, "seed": 20261203}


@pytest.fixture(scope="module")
def stack(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    settings = {"dtype": "float32", "max_seqs": SLOTS, "threads": 1, "stats_ms": 100, "microbatches": 3, "lookahead": 2}
    with running_stack(directory, reference.path, **settings) as running:
        running.start("worker", "worker-1", worker_id="worker-1")
        running.wait_workers(2)
        yield running


def answered(stack: Stack, worker: str) -> int:
    """The last step that it answered, by its heartbeat."""
    return int(stack.redis.client.get(stack.keys.alive("worker", worker)) or 0)


def tells(stack: Stack, worker: str, running: bool) -> bool:
    """Are there figures of this worker's replica, of some that run and get tokens if that is asked?"""
    raw = stack.redis.client.hget(stack.keys.replicas("shard-0"), worker)
    figures = json.loads(raw) if raw else {}
    return bool(figures) and (not running or (figures["running"] > 0 and figures["tok_s"] > 0))


def test_one_of_two_workers_is_killed_and_a_third_comes(stack: Stack, reference: Reference) -> None:
    """Six streams on workers of four slots need both; those of the killed one go on at the others."""
    with load(stack, reference, LONG) as under_way:
        for name in ("worker-0", "worker-1"):  # six streams do not fit one
            until(f"{name} has streams", lambda name=name: tells(stack, name, running=True))
        stack.kill("worker")
        until("the figures of the killed one are gone", lambda: not tells(stack, "worker-0", running=False))
        stack.start("worker", "worker-2", worker_id="worker-2")
        under_way.check(LONG)
    stack.wait_workers(2)
    with load(stack, reference, LONG) as under_way:
        under_way.check(LONG)
    for name in ("worker-1", "worker-2"):
        until(f"{name} has stepped", lambda name=name: answered(stack, name) > 0)
    stack.settled_empty()
    assert stack.stats()["failed"] == "0"

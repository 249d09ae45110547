"""Today's scheduler with a worker of an older build, as that build answered when it was recorded."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from services.scheduler.core.types import Finish
from services.scheduler.workers.contract import check_info
from services.scheduler.workers.registry import decode_worker
from services.scheduler.workers.wire import limits_from_wire
from shared.tasks import end
from tests.support.older_worker import POLICY, SETTINGS, WORKER, Player, Recording, requests
from tests.support.shard import Shard, serving
from tests.support.waiting import wait_until

AGAIN = "\nif the change is meant, run python -m tests.support.older_worker.record a35d3f4"


def test_fields_that_an_older_worker_leaves_out_have_defaults() -> None:
    recording = Recording.read()
    record = {name.encode(): value.encode() for name, value in recording.record.items()}
    worker = decode_worker("older", record)
    assert worker is not None
    assert (worker.address, worker.slots) == (recording.record["address"], WORKER["max_seqs"])
    check_info(recording.info, SETTINGS.served_model_name)
    limits = limits_from_wire(recording.info, run=7)
    assert (limits.slots, limits.blocks, limits.host_blocks) == (4, WORKER["kv_blocks"], WORKER["host_blocks"])
    assert (limits.max_drafts, limits.max_loras, limits.experts, limits.whole_prompts) == (0, 0, 0, False)


async def test_tokens_of_an_older_worker_arrive() -> None:
    """Each step is the recorded one, so it has no field of a later contract that the worker would misread."""
    recording = Recording.read()
    player, shard = Player(recording), Shard(SETTINGS, POLICY)
    shard.add(requests())
    wanted = {request.id for request in requests()}
    async with serving(player) as (worker,):
        run = asyncio.create_task(shard.fleet.serve(replace(worker, epoch=9)))
        await wait_until(lambda: shard.ended.keys() == wanted or run.done() or bool(player.unexpected))
        assert not player.unexpected, f"{player.unexpected}{AGAIN}"
        await wait_until(lambda: len(player.played) == len(recording.steps) or run.done())
        assert not run.done() and not shard.events, shard.events
        shard.core.check()
        await end(run)
    outputs = {name: [tokens.tolist() for tokens in one.outputs] for name, one in shard.ended.items()}
    assert outputs == recording.outputs
    assert {name: one.error for name, one in shard.ended.items() if one.error} == recording.errors
    assert all(one.finish == [Finish.LENGTH] * one.request.n for one in shard.ended.values() if not one.error)


def test_recording_has_copies_preemptions_logprobs_and_an_error() -> None:
    recording = Recording.read()
    entered = sum(len(step.enters) for step in recording.steps)
    assert entered > sum(request.n for request in requests())
    for name in ("swap_out_acks", "swap_in_acks", "logprobs", "errors"):
        assert any(getattr(result, name) for result in recording.results), name

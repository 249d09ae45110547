"""A worker that drains gets a last step where it keeps KV; the next one loads that instead of computing it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import numpy as np
import pytest

from protos import queue_pb2, worker_pb2
from services.scheduler.core.types import NewRequest
from shared.settings import SchedulerSettings
from shared.tasks import end
from shared.wire.columns import pack, unpack
from tests.support.shard import Described, Shard, serving
from tests.support.waiting import wait_until

SETTINGS = SchedulerSettings(lookahead=1, served_model_name="m")
PROMPT, TOKENS = 40, 100
FOLDER = "f" * 32


def info(name: str, keeps: bool) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        id=name, identity=name, model="m", model_hash="h", dtype="float32", block_size=16, block_bytes=64,
        gpu_blocks=64, host_blocks=64, max_seqs=4, max_model_len=512, max_step_tokens=64, vocab_size=9,
        host_tier=f"{FOLDER}/{name}", kv_format="k", numerics="n", keeps=keeps,
    )  # fmt: skip


class Leaver(Described):
    """A worker that samples the same token again and again, and says that it drains when it is told to."""

    def __init__(self, name: str, keeps: bool = True) -> None:
        super().__init__(info(name, keeps))
        self.hello = worker_pb2.Hello()
        self.steps: list[worker_pb2.Step] = []
        self.drains = asyncio.Event()
        self.was_asked = asyncio.Event()
        self.may_describe = asyncio.Event()
        self.may_describe.set()
        self._known: dict[int, int] = {}

    async def Describe(  # noqa: N802 - the name in worker.proto
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        self.was_asked.set()
        await self.may_describe.wait()
        return self.info

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        results: asyncio.Queue[worker_pb2.Result] = asyncio.Queue()

        async def read() -> None:
            async for step in requests:
                if step.HasField("hello"):
                    self.hello = step.hello
                else:
                    self.steps.append(step)
                    results.put_nowait(self._answer(step))

        async def drain(epoch: int) -> None:
            await self.drains.wait()
            results.put_nowait(worker_pb2.Result(epoch=epoch, draining=True))

        tasks = [asyncio.create_task(read()), asyncio.create_task(drain(1))]
        try:
            while True:
                yield await results.get()
        finally:
            for task in tasks:
                task.cancel()

    def _answer(self, step: worker_pb2.Step) -> worker_pb2.Result:
        self._known |= {enter.slot: len(unpack(enter.tokens)) for enter in step.enters}
        columns = (unpack(column).tolist() for column in (step.chunk_slots, step.chunk_starts, step.chunk_lengths))
        slots = [slot for slot, start, length in zip(*columns, strict=True) if start + length >= self._known[slot]]
        for slot in slots:
            self._known[slot] += 1
        peers = [peer.number for peer in step.peers if peer.host_tier]
        return worker_pb2.Result(
            epoch=step.epoch, id=step.id, slots=pack(slots), tokens=pack([7] * len(slots)),
            swap_out_acks=step.swap_out_gpu, swap_in_acks=step.swap_in_host,
            peer_acks=pack(peers), kept=len(unpack(step.keep)),
        )  # fmt: skip

    @property
    def computed(self) -> int:
        return sum(int(unpack(step.chunk_lengths).sum()) for step in self.steps)


def request(name: str) -> NewRequest:
    prompt = np.arange(PROMPT, dtype=np.int32) % 9
    return NewRequest(name, [prompt], TOKENS, gateway="g", payload=queue_pb2.Request(n=1))


@pytest.mark.parametrize("needed", [True, False])
async def test_hello_names_what_was_kept_since_the_worker_was_dialed(needed: bool) -> None:
    first, second, shard = Leaver("first"), Leaver("second"), Shard(SETTINGS)
    second.may_describe.clear()
    async with serving(first, second) as (one, other):
        shard.add([request("a")])
        run = asyncio.create_task(shard.fleet.serve(one))
        await wait_until(lambda: len(first.steps) > 10)
        next_run = asyncio.create_task(shard.fleet.serve(replace(other, epoch=2)))
        await wait_until(second.was_asked.is_set)
        first.drains.set()
        await run
        assert shard.core.kept_tiers == [f"{FOLDER}/first"]
        if not needed:
            shard.core.cancel("a", 1)
            shard.add([request("b")])
        second.may_describe.set()
        await wait_until(lambda: len(second.steps) > 3 or next_run.done())
        await end(next_run)
    assert list(second.hello.kept) == ([f"{FOLDER}/first"] if needed else [])
    announced = [peer.number for step in second.steps for peer in step.peers if peer.host_tier]
    assert announced == ([0] if needed else []), "what no request needs is forgotten before"


@pytest.mark.parametrize("ends", ["before", "while it waits"])
async def test_worker_without_work_leaves_at_once(ends: str) -> None:
    worker, shard = Leaver("first"), Shard(SETTINGS)
    async with serving(worker) as (one,):
        run = asyncio.create_task(shard.fleet.serve(one))
        if ends != "before":
            shard.add([request("a")])
            await wait_until(lambda: len(worker.steps) > 10)
        worker.drains.set()
        if ends != "before":
            shard.core.cancel("a", 1)
        async with asyncio.timeout(60):
            await run
    assert not any(step.keep for step in worker.steps)

"""A sleep worker: a real gRPC worker server without a model. Steps take a synthetic time and tokens mean
nothing. It exists to measure the scheduler: `python -m bench.studies.replicas.worker COUNT STEP_MS` serves COUNT of
them from one process and prints their addresses, one a line.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import numpy as np

from protos import worker_pb2, worker_pb2_grpc
from services.scheduler.core.types import Limits
from shared.settings import SchedulerSettings
from shared.wire.columns import pack, unpack

LIMITS = Limits(slots=64, blocks=8192, block_size=16, max_model_len=4096, max_step_tokens=2048)


class SleepWorker(worker_pb2_grpc.WorkerServicer):
    """Runs one step after another; each takes `step_s`, whatever is in it."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def Describe(  # noqa: N802 - the name in worker.proto
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            id="sleep", identity="sleep", model=SchedulerSettings().served_model_name, dtype="float32", vocab_size=512,
            backend="sleep", stages=1, max_seqs=LIMITS.slots, gpu_blocks=LIMITS.blocks,
            block_size=LIMITS.block_size, max_model_len=LIMITS.max_model_len, max_step_tokens=LIMITS.max_step_tokens,
        )  # fmt: skip

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        known = np.zeros(LIMITS.slots, np.int64)
        loop = asyncio.get_running_loop()
        free_s = 0.0  # when the device has done what was given to it
        async for step in requests:
            if step.HasField("hello"):
                continue
            for enter in step.enters:
                known[enter.slot] = len(enter.tokens) // 4
            begin = max(free_s, loop.time())
            free_s = begin + self._step_s
            await asyncio.sleep(max(free_s - loop.time(), 0.0))
            yield self._answer(step, known)

    def _answer(self, step: worker_pb2.Step, known: np.ndarray[tuple[int], np.dtype[np.int64]]) -> worker_pb2.Result:
        slots = unpack(step.chunk_slots)
        ends = unpack(step.chunk_starts) + unpack(step.chunk_lengths)
        sampled = slots[ends == known[slots]]
        known[sampled] += 1
        result = worker_pb2.Result(epoch=step.epoch, id=step.id, slots=pack(sampled), tokens=pack(sampled * 0 + 7))
        result.timings.total_ns = int(self._step_s * 1e9)
        return result


async def serve(count: int, step_ms: float) -> None:
    """Serve until cancelled."""
    servers = []
    for _ in range(count):
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(SleepWorker(step_ms / 1000), server)
        print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
        await server.start()
        servers.append(server)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))

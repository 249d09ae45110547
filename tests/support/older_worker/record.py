"""Record a worker of an older build: `python -m tests.support.older_worker.record COMMIT` writes `recorded.json`.

Runs the worker of that commit from a checkout of its own, with today's packages, and the fleet of this tree, with a
servicer between them that writes down what passes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc

from protos import worker_pb2, worker_pb2_grpc
from shared.keys import Keys
from tests.support.launcher import settings_env
from tests.support.older_worker import POLICY, SETTINGS, WORKER, Recording, requests
from tests.support.shard import Described, Shard, serving
from tests.support.stack import ROOT, RedisServer
from tests.support.waiting import until, wait_until


class Recorder(Described):
    """Passes on what the scheduler says to the older worker, and what that answers."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, info: worker_pb2.WorkerInfo) -> None:
        super().__init__(info)
        self.steps, self.results = list[worker_pb2.Step](), list[worker_pb2.Result]()
        self._stub = stub

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        async def steps() -> AsyncIterator[worker_pb2.Step]:
            async for step in requests:
                if not step.HasField("hello"):
                    self.steps.append(step)
                yield step

        async for result in self._stub.Run(steps()):
            self.results.append(result)
            yield result


async def record(commit: str, fields: dict[str, str]) -> Recording:
    """Return what the worker of this record in Redis says."""
    async with grpc.aio.insecure_channel(fields["address"]) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        recorder = Recorder(stub, await stub.Describe(worker_pb2.DescribeRequest()))
        shard = Shard(SETTINGS, POLICY)
        shard.add(requests())
        async with serving(recorder) as (registration,):
            run = asyncio.create_task(shard.fleet.serve(replace(registration, epoch=1)))
            await wait_until(lambda: len(shard.ended) == len(list(requests())) or run.done())
            await wait_until(lambda: len(recorder.results) == len(recorder.steps))
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
    outputs = {name: [tokens.tolist() for tokens in one.outputs] for name, one in shard.ended.items()}
    errors = {name: one.error for name, one in shard.ended.items() if one.error}
    return Recording(commit, fields, recorder.info, recorder.steps, recorder.results, outputs, errors)


def main(commit: str) -> None:
    """Check out the commit, run its worker and write the recording."""
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory) / "redis") as redis:
        checkout = Path(directory) / "checkout"
        subprocess.run(["git", "worktree", "add", "--detach", str(checkout), commit], cwd=ROOT, check=True)
        try:
            protos = [str(path.relative_to(checkout)) for path in checkout.glob("protos/*.proto")]
            makes = ["grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=.", *protos]
            subprocess.run([sys.executable, "-m", *makes], cwd=checkout, check=True)
            model = {"redis_url": redis.url, "model": ROOT / "assets/demo-model"}
            env = settings_env(**WORKER, **model) | {"PYTHONPATH": str(checkout)}
            worker = subprocess.Popen([sys.executable, "-m", "services.cli", "worker"], cwd=checkout, env=env)
            try:
                key = Keys(SETTINGS.served_model_name).worker(str(WORKER["worker_id"]))
                found = until("the worker is ready", lambda: redis.client.hgetall(key))
                recording = asyncio.run(record(commit, {name.decode(): each.decode() for name, each in found.items()}))
            finally:
                worker.terminate()
                worker.wait(60)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(checkout)], cwd=ROOT, check=True)
    recording.write()
    print(f"recorded {len(recording.steps)} steps; {recording.errors}")


if __name__ == "__main__":
    main(sys.argv[1])

"""Utilisation of pipeline stages: a worker of pp ranks over Gloo, driven by the scheduler's core over gRPC.

    python -m bench.studies.pipeline [--stages 2,4] [--stage-ms 25] [--seconds 10] [--out FILE]

The ranks are real processes with the real engine, parallel and control stream; only the time of a stage is synthetic
(bench/studies/pipeline/rank.py). Measured is steady decode: all sequences run, none ends. Busy time is the worker's own
metric orcinus_worker_rank_busy_seconds_total, and utilisation what it grows by in a second of wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench.local import free_ports
from bench.result import provenance, write
from protos import queue_pb2, worker_pb2, worker_pb2_grpc
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import NewRequest
from services.scheduler.workers.wire import limits_from_wire, result_from_wire, step_to_wire
from shared.settings import DEMO_MODEL, ROOT

BUSY = "orcinus_worker_rank_busy_seconds_total"
SEQUENCES = 8  # of a microbatch
PROMPT = 16
CONTEXT = 1024
START_S = 300.0
WARM_STEPS = 12  # of each microbatch, before the time is taken


@contextlib.contextmanager
def worker(stages: int, stage_ms: float) -> Iterator[tuple[str, str]]:
    """Start the ranks of one replica; yield the leader's address and that of its metrics."""
    port, metrics, store = free_ports(3)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORCINUS_")}
    settings = {
        "MODEL": DEMO_MODEL, "DEVICE": "cpu", "DTYPE": "float32", "PP": stages, "THREADS": 1, "MAX_SEQS": 64,
        "KV_BLOCKS": 64 * CONTEXT // 16, "HOST_BLOCKS": 0, "MAX_STEP_TOKENS": 512, "LISTEN": f"127.0.0.1:{port}",
        "ADVERTISE": f"127.0.0.1:{port}",  # else it takes Runs over a Unix socket
        "WORKER_METRICS_PORT": metrics, "REDIS_URL": "redis://127.0.0.1:1/0",  # it never registers
        "RANK_TOKEN": secrets.token_hex(16),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / f"rank-{rank}.log" for rank in range(stages)]
        ranks = []
        for rank, log in enumerate(logs):
            place = {"RANK": rank, "WORLD_SIZE": stages, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store}
            values = {**{f"ORCINUS_{name}": value for name, value in settings.items()}, **place}
            with log.open("wb") as out:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "bench.studies.pipeline.rank", str(stage_ms)],
                        env={**clean, **{name: str(value) for name, value in values.items()}},
                        cwd=ROOT,
                        stderr=out,
                    )
                )
        try:
            yield f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics"
        except BaseException:
            for log in logs:
                print(f"---- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
            raise
        finally:
            ranks[0].terminate()
            for process in ranks:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


class Pipe:
    """The scheduler's core on one Run."""

    def __init__(self, channel: grpc.Channel, microbatches: int, lookahead: int, epoch: int) -> None:
        stub = worker_pb2_grpc.WorkerStub(channel)
        limits = limits_from_wire(stub.Describe(worker_pb2.DescribeRequest(), timeout=10))
        self.core = Scheduler("orcinus", microbatches=microbatches, lookahead=lookahead)
        self.replica = self.core.join(limits)
        self.steps: queue.SimpleQueue[worker_pb2.Step | None] = queue.SimpleQueue()
        self.epoch = epoch
        self.steps.put(worker_pb2.Step(epoch=epoch, hello=worker_pb2.Hello(shard="bench")))
        self.call = stub.Run(iter(self.steps.get, None))
        random = np.random.default_rng(7)
        for number in range(SEQUENCES * microbatches):
            wire = queue_pb2.Request(
                id=f"r{number}", n=1, max_tokens=CONTEXT - PROMPT, sampling=queue_pb2.Sampling(top_p=1.0)
            )
            prompt = random.integers(100, 4000, PROMPT).astype(np.int32)
            self.core.add(
                NewRequest(id=wire.id, prompts=[prompt], max_tokens=wire.max_tokens, gateway="bench", payload=wire),
                time.monotonic_ns(),
            )

    def steps_until(self, enough: Any) -> int:
        """Plan and apply until `enough(steps)`; return the number of results."""
        count = 0
        while not enough(count):
            while (plan := self.core.plan(time.monotonic_ns(), self.replica)[0]) is not None:
                self.steps.put(step_to_wire(plan, epoch=self.epoch))
            result = next(self.call)
            if result.error:
                raise RuntimeError(result.error)
            self.core.apply(result_from_wire(result, self.replica), time.monotonic_ns())
            count += 1
        return count

    def close(self) -> None:
        self.steps.put(None)
        self.call.cancel()


def busy_s(metrics: str) -> dict[int, float]:
    """Return the seconds that each rank has computed since its start."""
    with urllib.request.urlopen(metrics, timeout=5) as answer:  # noqa: S310 - our own loopback port
        families = text_string_to_metric_families(answer.read().decode())
    return {
        int(sample.labels["rank"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == BUSY
    }


def measure(
    channel: grpc.Channel, metrics: str, microbatches: int, lookahead: int, seconds: float, epoch: int
) -> dict[str, Any]:
    """Measure steady decode for this number of seconds."""
    pipe = Pipe(channel, microbatches, lookahead, epoch)
    pipe.steps_until(lambda steps: steps >= WARM_STEPS * microbatches)
    before, begun = busy_s(metrics), time.monotonic()
    steps = pipe.steps_until(lambda steps: time.monotonic() - begun >= seconds)
    after, wall = busy_s(metrics), time.monotonic() - begun
    pipe.close()
    return {
        "microbatches": microbatches,
        "lookahead": lookahead,
        "steps": steps,
        "wall_s": round(wall, 3),
        "tokens_s": round(steps * SEQUENCES / wall, 1),
        "busy_pct_of_stage": [round(100 * (after[rank] - before[rank]) / wall, 1) for rank in sorted(after)],
    }


def run(stages: int, stage_ms: float, seconds: float) -> dict[str, Any]:
    """Run all cases with one number of stages."""
    with worker(stages, stage_ms) as (address, metrics), grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(START_S)
        stub, by = worker_pb2_grpc.WorkerStub(channel), time.monotonic() + START_S
        while True:
            try:
                stub.Describe(worker_pb2.DescribeRequest(), timeout=5)
                break
            except grpc.RpcError:
                if time.monotonic() > by:
                    raise
                time.sleep(0.2)
        cases = []
        for epoch, (microbatches, lookahead) in enumerate(((stages, 1), (stages + 1, 1), (stages, 0), (1, 1)), 1):
            cases.append(measure(channel, metrics, microbatches, lookahead, seconds, epoch))
            print(f"pp {stages}: {json.dumps(cases[-1])}", file=sys.stderr)
    return {"stages": stages, "cases": cases}


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m bench.studies.pipeline", description=__doc__)
    parser.add_argument("--stages", default="2,4", help="numbers of stages, with commas between")
    parser.add_argument("--stage-ms", type=float, default=25.0, help="what a stage takes for a step; synthetic")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each measurement")
    parser.add_argument("--out", type=Path, help="file for the result as JSON; without it, stdout")
    given = parser.parse_args(arguments)
    command = f"--stages {given.stages} --stage-ms {given.stage_ms:g} --seconds {given.seconds:g}"
    result = {
        "what": "busy time of each pipeline stage in steady decode; the stages' time is synthetic (a sleep)",
        **provenance(["python", "-m", "bench.studies.pipeline", *command.split()], "torch", "grpcio"),
        "stage_ms": given.stage_ms,
        "sequences_of_a_microbatch": SEQUENCES,
        "pipelines": [run(int(stages), given.stage_ms, given.seconds) for stages in given.stages.split(",")],
    }
    if given.out:
        write(given.out, result)
    else:
        print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

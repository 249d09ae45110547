"""What a worker of an older build said to a scheduler: `recorded.json`, written by `record.py` from a checkout of that
build.

Both play the same requests (`requests`) by the same rules (`SETTINGS`, `POLICY`): one step at a time and a policy
without a clock, so today's scheduler sends the steps that were recorded, until it plans otherwise. Then record anew.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from protos import queue_pb2, worker_pb2
from services.scheduler.core.types import NewRequest
from shared.settings import SchedulerSettings
from tests.support.shard import Described

FILE = Path(__file__).parent / "recorded.json"
SETTINGS = SchedulerSettings(lookahead=0, served_model_name="demo-model")
POLICY = "vllm:relief=newest-swap"
"""Victims go to the host tier, so that copies are acknowledged in both directions."""
WORKER = {
    "served_model_name": SETTINGS.served_model_name, "worker_id": "older", "kernels": "reference", "dtype": "float32",
    "block_size": 16, "kv_blocks": 16, "host_blocks": 8, "max_seqs": 4, "max_step_tokens": 64, "max_input_tokens": 144,
    "max_output_tokens": 64, "worker_metrics_port": 0,
}  # fmt: skip
"""Settings of the worker, which both builds know."""
GRAMMAR = '{"grammars":[{"name":"regex","lark_grammar":"start: /[a-m]{20,30}/"}]}'


def requests() -> Iterator[NewRequest]:
    """Yield more than the blocks hold: prompts in chunks, sampling, log-probabilities, a grammar, and a wrong one."""
    samplings = (
        queue_pb2.Sampling(),
        queue_pb2.Sampling(temperature=0.8, top_p=0.9, seed=3, logprobs=3),
        queue_pb2.Sampling(grammar=GRAMMAR),
        queue_pb2.Sampling(grammar="none at all"),
        queue_pb2.Sampling(temperature=1.0, seed=5, presence_penalty=0.5),
        queue_pb2.Sampling(logprobs=1),
    )
    for number, sampling in enumerate(samplings):
        payload = queue_pb2.Request(sampling=sampling, n=2 if number == 1 else 1)
        prompt = np.arange(20, 100 + 7 * number, dtype=np.int32)
        yield NewRequest(
            f"r{number}", [prompt], 60, n=payload.n, gateway="g", payload=payload, grammar=sampling.grammar
        )


@dataclass(frozen=True)
class Recording:
    """commit: the worker's; record: `worker:{id}` in Redis; steps, results: in order; outputs: tokens by request and
    choice, errors: by request, as the scheduler of the recording made them of the results.
    """

    commit: str
    record: dict[str, str]
    info: worker_pb2.WorkerInfo
    steps: list[worker_pb2.Step]
    results: list[worker_pb2.Result]
    outputs: dict[str, list[list[int]]]
    errors: dict[str, str]

    def write(self) -> None:
        pairs = zip(self.steps, self.results, strict=True)
        found = {
            "commit": self.commit,
            "record": self.record,
            "outputs": self.outputs,
            "errors": self.errors,
            "info": _text(self.info),
            "steps": [[_text(step), _text(result)] for step, result in pairs],
        }
        FILE.write_text(json.dumps(found, indent=0) + "\n")

    @classmethod
    def read(cls) -> Recording:
        found = json.loads(FILE.read_text())
        steps = [worker_pb2.Step.FromString(base64.b64decode(step)) for step, _ in found["steps"]]
        results = [worker_pb2.Result.FromString(base64.b64decode(result)) for _, result in found["steps"]]
        info = worker_pb2.WorkerInfo.FromString(base64.b64decode(found["info"]))
        return cls(found["commit"], found["record"], info, steps, results, found["outputs"], found["errors"])


class Player(Described):
    """Answers as recorded. unexpected: the first step that is not, in every field, the recorded one."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.info)
        self.played: list[worker_pb2.Step] = []
        self.unexpected = ""
        self._recording = recording

    async def Run(  # noqa: N802 - the name in worker.proto
        self, requests: AsyncIterator[worker_pb2.Step], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.Result]:
        async for step in requests:
            if step.HasField("hello"):
                continue
            number = len(self.played)
            if number == len(self._recording.steps):
                self.unexpected = f"step {step.id}, one more than recorded: {step}"
                return
            recorded, result = self._recording.steps[number], self._recording.results[number]
            recorded.epoch = result.epoch = step.epoch
            if step != recorded:
                self.unexpected = f"step {step.id}, recorded as: {recorded}\nsent: {step}"
                return
            self.played.append(step)
            yield result


def _text(message: worker_pb2.WorkerInfo | worker_pb2.Step | worker_pb2.Result) -> str:
    return base64.b64encode(message.SerializeToString()).decode()

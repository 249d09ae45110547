"""A scheduler that a test drives: real lease, claim and publish scripts, tokens from the test.

So duplicates, gaps, silence and restarts happen on purpose. `answering` serves every request by itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from protos import queue_pb2
from shared.keys import GROUP, Keys
from shared.redis_client import KEPT_TTL_MS, LIVE_TTL_MS, STREAM_KEEP_MS, source
from shared.wire.columns import pack, unpack
from tests.support.waiting import until

LEASE_MS = 600_000
RENEW_S = 1.0
RUNNING, STOP, LENGTH, CANCELLED, DEADLINE, ERROR = range(6)


@dataclass
class Claimed:
    """One request and where it lies."""

    request: queue_pb2.Request
    stream: str
    entry: str
    prompts: list[list[int]]
    cancelled: bool = False

    @property
    def id(self) -> str:
        return self.request.id


@dataclass
class Line:
    """One row of a TokenBatch."""

    request: str
    first: int
    tokens: Sequence[int] = ()
    choice: int = 0
    finish: int = RUNNING
    error: str = ""
    logprobs: Sequence[bytes] = ()  # a record for each token
    drafts: int = 0  # guesses of the step
    cached: int = 0  # prompt tokens that the prefix cache had


@dataclass
class ScriptedScheduler:
    """Holds the lease of a shard with one worker and publishes what a test gives it."""

    client: Any  # redis.Redis, of which replies are typed as bytes or text
    keys: Keys
    shard: str = "shard-0"
    worker: str = "worker-0"
    epoch: int = 0
    step: int = 0
    controls_from: str = "0-0"
    _claimed: dict[str, Claimed] = field(default_factory=dict)

    def lead(self, **stats: Any) -> ScriptedScheduler:
        """Take the lease, register a worker and write stats, so that gateways are ready."""
        self.client.delete(self.keys.lease(self.shard))
        keys = [self.keys.lease(self.shard), self.keys.epoch, self.keys.shard_epoch(self.shard)]
        self.epoch = self._run("lease", keys, ["acquire", LEASE_MS, 0, LIVE_TTL_MS])
        for stream in self.keys.request_streams():
            with contextlib.suppress(redis.ResponseError):
                self.client.xgroup_create(stream, GROUP, id="0", mkstream=True)
        self.register()
        self.stats(**stats)
        return self

    def register(self) -> None:
        """Write the record of the worker and its place among those of the model."""
        record = {"address": "127.0.0.1:1", "identity": "x", "ready": "1", "shard": self.shard}
        self.client.hset(self.keys.worker(self.worker), mapping=record)
        self.client.zadd(self.keys.workers, {self.worker: int(time.time() * 1000)})

    def stats(self, **fields: Any) -> None:
        values = {
            "workers": 1, "running": 0, "waiting": 0, "queued_tokens": 0, "in_flight": 0,
            "time_ms": int(time.time() * 1000), "iteration": self.step, "last_step": self.step, **fields,
        }  # fmt: skip
        self.client.hset(self.keys.stats(self.shard), mapping=values)

    def renew(self) -> None:
        """Write a new time into the stats. A gateway takes a scheduler for dead five seconds after the last one."""
        self.client.hset(self.keys.stats(self.shard), "time_ms", int(time.time() * 1000))

    def resign(self) -> None:
        self.client.delete(self.keys.lease(self.shard))

    def claim(self, seconds: float = 20.0) -> Claimed:
        """Wait for the next request and return it."""
        return until("a request is in a stream", self.claim_one, seconds)

    def claim_one(self) -> Claimed | None:
        streams = dict.fromkeys(self.keys.request_streams(), ">")
        found: Any = self.client.xreadgroup(GROUP, self.shard, streams, count=1)
        for stream, rows in found:
            for entry, fields in rows:
                request = queue_pb2.Request.FromString(fields[b"r"])
                prompts = request.prompts
                if request.prompts_apart:
                    prompts = queue_pb2.Prompts.FromString(self.client.get(self.keys.prompt(request.id)))
                row = [self.epoch, self.shard, self.keys.req(request.id)]
                verdicts = self._run("claim", [self.keys.lease(self.shard)], row)
                tokens = [unpack(column).tolist() for column in prompts.tokens]
                claimed = Claimed(request, stream.decode(), entry.decode(), tokens, verdicts[0] == 1)
                self._claimed[request.id] = claimed
                return claimed
        return None

    def claimed(self, request_id: str) -> Claimed:
        """Return what was claimed under that id."""
        return self._claimed[request_id]

    def publish(
        self,
        *lines: Line,
        checkpoints: Sequence[tuple[str, int, int, Sequence[int]]] = (),
        started: Sequence[str] = (),
        ended: Sequence[tuple[str, Sequence[int], Sequence[int]]] = (),
        to_stream: bool = True,
        gateway: str = "",
    ) -> None:
        """Call the publish script once. `ended`: id, finish of each choice, tokens of each choice.

        Without to_stream the lines are not sent, as if the gateway had slept while the stream was trimmed.
        """
        self.step += 1
        arguments: list[Any] = [self.epoch, self.keys.prefix, GROUP, LIVE_TTL_MS, KEPT_TTL_MS, STREAM_KEEP_MS, 0]
        if lines and to_stream:
            name = gateway or self._claimed[lines[0].request].request.gateway
            arguments += [1, name, self.batch(lines).SerializeToString()]
        else:
            arguments.append(0)
        arguments.append(len(checkpoints))
        for request_id, choice, first, tokens in checkpoints:
            arguments += [request_id, choice, 4 * first, pack(tokens), RUNNING, 0]
        arguments += [len(started), *started, len(ended)]
        for request_id, finishes, lengths in ended:
            claimed = self._claimed[request_id]
            prompt = sum(map(len, claimed.prompts))
            arguments += [
                request_id, claimed.stream, claimed.entry, ",".join(map(str, finishes)), prompt,
                ",".join(map(str, lengths)), "",
            ]  # fmt: skip
        scored = [line for line in lines if line.logprobs]
        arguments.append(len(scored))
        for line in scored:
            place = line.first * len(line.logprobs[0])
            arguments += [line.request, line.choice, place, b"".join(line.logprobs)]
        self._run("publish", [self.keys.lease(self.shard), self.keys.queue], arguments)

    def batch(self, lines: Sequence[Line]) -> queue_pb2.TokenBatch:
        return queue_pb2.TokenBatch(
            epoch=self.epoch,
            step=self.step,
            requests=[line.request for line in lines],
            choices=pack([line.choice for line in lines]),
            first=pack([line.first for line in lines]),
            counts=pack([len(line.tokens) for line in lines]),
            tokens=pack([token for line in lines for token in line.tokens]),
            finish=bytes(line.finish for line in lines),
            errors={row: line.error for row, line in enumerate(lines) if line.error},
            logprobs=b"".join(record for line in lines for record in line.logprobs),
            logprob_sizes=pack([sum(map(len, line.logprobs)) for line in lines]),
            cached={row: line.cached for row, line in enumerate(lines) if line.cached},
            drafts=pack([line.drafts for line in lines]) if any(line.drafts for line in lines) else b"",
        )

    def serve(self, claimed: Claimed, tokens: Sequence[int], finish: int = LENGTH, piece: int = 1) -> None:
        """Publish all of a request with one choice, `piece` tokens an iteration, then its end."""
        self.publish(started=[claimed.id])
        for first in range(0, len(tokens), piece):
            part = tokens[first : first + piece]
            last = first + piece >= len(tokens)
            self.publish(Line(claimed.id, first, part, finish=finish if last else RUNNING))
        self.end(claimed, [tokens], [finish])

    def end(self, claimed: Claimed, outputs: Sequence[Sequence[int]], finishes: Sequence[int]) -> None:
        """Write the record of the end of a request."""
        self.publish(
            checkpoints=[(claimed.id, choice, 0, tokens) for choice, tokens in enumerate(outputs)],
            ended=[(claimed.id, finishes, [len(tokens) for tokens in outputs])],
        )

    def controls(self) -> list[queue_pb2.Control]:
        """Return the commands that came since the last call."""
        found: Any = self.client.xread({self.keys.control(self.shard): self.controls_from})
        commands = []
        for _, rows in found:
            for entry, fields in rows:
                self.controls_from = entry.decode()
                commands.append(queue_pb2.Control.FromString(fields[b"c"]))
        return commands

    def wait_control(self, kind: str, request_id: str) -> queue_pb2.Control:
        """Wait for the first command of a kind about a request and return it."""

        def look() -> queue_pb2.Control | None:
            for command in self.controls():
                if command.WhichOneof("command") == kind and getattr(command, kind).id == request_id:
                    return command
            return None

        return until(f"{kind} of {request_id}", look)

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return self.client.eval(source(script).decode(), len(keys), *keys, *arguments)


@contextlib.contextmanager
def answering(
    scheduler: ScriptedScheduler, tokens_of: Callable[[Claimed], list[int]], finish: int = LENGTH
) -> Iterator[None]:
    """Serve every request with tokens_of(it), up to its max_tokens, all choices alike, until the block ends."""
    ending = threading.Event()

    def work() -> None:
        renewed_at = 0.0
        while not ending.is_set():
            if time.monotonic() - renewed_at >= RENEW_S:
                renewed_at = time.monotonic()
                scheduler.renew()
            claimed = scheduler.claim_one()
            if claimed is None:
                ending.wait(0.005)
                continue
            choices = len(claimed.prompts) * claimed.request.n
            tokens = tokens_of(claimed)[: claimed.request.max_tokens]
            for first in range(0, len(tokens), 3):
                part = tokens[first : first + 3]
                last = finish if first + 3 >= len(tokens) else RUNNING
                scheduler.publish(*(Line(claimed.id, first, part, choice, last) for choice in range(choices)))
            scheduler.end(claimed, [tokens] * choices, [finish] * choices)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(60)

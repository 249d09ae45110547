"""The scheduler of the gateway bench: takes every request, then publishes iterations with a token for each.

Lease, claim and publish are the scheduler's own scripts and its own encoding; only what a token is, is written down
beforehand. Synchronous: it shares a thread with the clients (gateway_streams.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import redis

from protos import queue_pb2
from services.scheduler.core.types import Finish, FinishedRequest, NewRequest, Outcome
from services.scheduler.requests.intake import Entry
from services.scheduler.requests.publisher import arguments
from shared.keys import GROUP, Keys
from shared.redis_client import LIVE_TTL_MS, source
from shared.wire.columns import unpack

SHARD = "shard-0"
LEASE_MS = 600_000
CLAIM_S = 60.0


class Publisher:
    """Leads the only shard. Token i of request r is text[(START_STEP * r + i) % len(text)]."""

    START_STEP = 37

    def __init__(self, client: redis.Redis, keys: Keys, text: list[int]) -> None:
        """text: token ids from which every answer is cut."""
        self._client, self._keys = client, keys
        self._text = np.asarray(text, np.int32)
        self._scripts = {name: client.register_script(source(name)) for name in _SCRIPTS}
        self.requests: list[NewRequest] = []  # claimed
        self._entries: dict[str, Entry] = {}
        self._starts = np.zeros(0, np.int64)
        self.published_s: list[float] = []  # by iteration: when its script was called
        keys_of_lease = [keys.lease(SHARD), keys.epoch, keys.shard_epoch(SHARD)]
        self._epoch = int(self._run("lease", keys_of_lease, ["acquire", LEASE_MS, 0, LIVE_TTL_MS]))
        for stream in keys.request_streams():
            client.xgroup_create(stream, GROUP, id="0", mkstream=True)
        client.hset(keys.worker("worker-0"), mapping={"address": "127.0.0.1:1", "identity": "bench"})
        self.beat()

    def beat(self) -> None:
        """Write statistics as a scheduler does; without them the gateway is not ready."""
        fields: dict[Any, Any] = dict.fromkeys(("running", "waiting", "queued_tokens", "in_flight"), 0)
        step = len(self.published_s) if self._epoch else 0
        fields |= {"workers": 1, "time_ms": int(time.time() * 1000), "iteration": step, "last_step": step}
        self._client.hset(self._keys.stats(SHARD), mapping=fields)

    def claim(self, count: int, meanwhile: Callable[[], None]) -> None:
        """Take this number of requests. meanwhile: called repeatedly during the wait. Raises TimeoutError."""
        end = time.monotonic() + CLAIM_S
        self.requests, self._entries, self.published_s = [], {}, []
        streams: dict[Any, Any] = dict.fromkeys(self._keys.request_streams(), ">")
        while len(self.requests) < count:
            meanwhile()
            found: Any = self._client.xreadgroup(GROUP, SHARD, streams, count=count, block=20)
            for stream, rows in found:
                for entry, fields in rows:
                    self._take(stream.decode(), entry.decode(), queue_pb2.Request.FromString(fields[b"r"]))
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.requests)} of {count} requests came within {CLAIM_S:.0f} s")
        self._starts = self.START_STEP * np.arange(count)
        self.publish(Outcome(started_ids=[request.id for request in self.requests]))

    def _take(self, stream: str, entry: str, request: queue_pb2.Request) -> None:
        self._run("claim", [self._keys.lease(SHARD)], [self._epoch, SHARD, self._keys.req(request.id)])
        prompts = [unpack(column) for column in request.prompts.tokens]
        self.requests.append(NewRequest(request.id, prompts, request.max_tokens, gateway=request.gateway))
        self._entries[request.id] = Entry(stream, entry, request)

    def step(self, finish: Finish = Finish.RUNNING) -> None:
        """Publish an iteration with a token for each request. A finish ends the requests and writes the records."""
        index, count = len(self.published_s), len(self.requests)
        outcome = Outcome(
            requests=self.requests,
            gateways=[request.gateway for request in self.requests],
            choices=np.zeros(count, np.int32),
            first_indices=np.full(count, index, np.int32),
            counts=np.ones(count, np.int32),
            tokens=self._text[(self._starts + index) % self._text.size],
            finish=np.full(count, finish, np.uint8),
        )
        if finish:
            for row, request in enumerate(self.requests):
                tokens = np.asarray(self.tokens_of(row, index + 1), np.int32)
                outcome.checkpoints.append((request.id, 0, 0, tokens))
                outcome.ended_requests.append(FinishedRequest(request, [tokens], [finish]))
        self.published_s.append(time.monotonic())
        self.publish(outcome)

    def tokens_of(self, row: int, count: int) -> list[int]:
        """Return the first tokens of the answer to the request in row `row`."""
        found: list[int] = self._text[(self.START_STEP * row + np.arange(count)) % self._text.size].tolist()
        return found

    def row_of(self, request_id: str) -> int:
        """Return the row of a claimed request."""
        return next(row for row, request in enumerate(self.requests) if request.id == request_id)

    def publish(self, outcome: Outcome) -> None:
        """Write what an iteration brought."""
        step = len(self.published_s)
        given = arguments([(step, outcome)], self._epoch, self._keys.prefix, self._entries)
        self._run("publish", [self._keys.lease(SHARD), self._keys.queue], given)

    def _run(self, script: str, keys: list[str], given: list[Any]) -> Any:
        return self._scripts[script](keys=keys, args=given)


_SCRIPTS = ("lease", "claim", "publish")

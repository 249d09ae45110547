"""Write the outcomes of the core into Redis: one fenced script per iteration.

`Publisher.put` never waits; the loops ask `full` before they plan on. A call that failed is repeated: tokens carry
their indices, checkpoints and ends are idempotent, so a repetition changes nothing. Log-probabilities travel beside
their tokens and are written with them, so a reader of `out` finds them before and after a restart.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import numpy as np
from redis.exceptions import ResponseError

from protos import queue_pb2
from services.scheduler.core.types import FinishedRequest, Int32, Outcome, Records
from services.scheduler.requests.intake import Entry
from shared.keys import GROUP, Keys
from shared.lease import Lease
from shared.redis_client import KEPT_TTL_MS, LIVE_TTL_MS, STREAM_KEEP_MS, WRONG_TYPE, Scripts, Value, persist
from shared.wire.columns import pack

log = logging.getLogger("orcinus.scheduler")


def columns(records: Records, counts: Int32) -> dict[str, bytes]:
    """Return the fields of a TokenBatch for records [tokens] and counts [rows]; none if all records are empty."""
    sizes = _sizes(records)
    if not sizes.any():
        return {}
    by_row = np.bincount(np.repeat(np.arange(counts.size), counts), sizes, counts.size)
    return {"logprobs": b"".join(records), "logprob_sizes": pack(by_row)}


def records(outcome: Outcome) -> list[Value]:
    """Return id, choice, byte offset and record of each token with a record, for publish.lua."""
    rows: list[Value] = []
    if outcome.logprobs is None:
        return rows
    sizes = _sizes(outcome.logprobs)
    row_of = np.repeat(np.arange(outcome.counts.size), outcome.counts)
    place = (outcome.first_indices - np.cumsum(outcome.counts) + outcome.counts)[row_of] + np.arange(sizes.size)
    for token in np.flatnonzero(sizes).tolist():
        row = row_of[token]
        choice, offset = int(outcome.choices[row]), int(place[token] * sizes[token])
        rows += [outcome.requests[row].id, choice, offset, outcome.logprobs[token]]
    return rows


def _sizes(records: Records) -> Int32:
    """Return [n] sizes in bytes."""
    return np.fromiter(map(len, records), np.int32, records.size)


MAX_PENDING = 64
"""Outcomes that wait for Redis before planning pauses."""

MAX_PER_CALL = 16
"""Outcomes in one script call when Redis is slow."""

FLUSH_S = 3.0
"""Time that a clean stop waits for Redis."""


def batches(outcome: Outcome, epoch: int, step: int) -> list[tuple[str, bytes]]:
    """Return (gateway, serialized TokenBatch) for each gateway of one outcome; its rows are sorted by gateway."""
    rows = len(outcome.requests)
    if rows == 0:
        return []
    names = outcome.gateways
    if names[0] == names[-1]:
        cuts, ends = [0, rows], {0: 0, rows: outcome.tokens.size}
    else:
        cuts = [0, *(row for row in range(1, rows) if names[row] != names[row - 1]), rows]
        ends = dict(enumerate([0, *np.cumsum(outcome.counts).tolist()]))
    result = []
    for begin, end in itertools.pairwise(cuts):
        span = slice(ends[begin], ends[end])
        logprobs = {} if outcome.logprobs is None else columns(outcome.logprobs[span], outcome.counts[begin:end])
        batch = queue_pb2.TokenBatch(
            epoch=epoch,
            step=step,
            requests=[request.id for request in outcome.requests[begin:end]],
            choices=pack(outcome.choices[begin:end]),
            first=pack(outcome.first_indices[begin:end]),
            counts=pack(outcome.counts[begin:end]),
            tokens=pack(outcome.tokens[span]),
            finish=np.ascontiguousarray(outcome.finish[begin:end], dtype=np.uint8).tobytes(),
            errors={row - begin: text for row, text in outcome.errors.items() if begin <= row < end},
            drafts=pack(outcome.drafts[begin:end]),
            cached={row - begin: tokens for row, tokens in outcome.cached_tokens.items() if begin <= row < end},
            **logprobs,
        )
        result.append((names[begin], batch.SerializeToString()))
    return result


def _finishes(outcome: Outcome) -> dict[tuple[str, int], tuple[int, int]]:
    """Return (request, choice) -> (finish, tokens) of the choices that ended."""
    ended = np.flatnonzero(outcome.finish).tolist()
    if not ended:
        return {}
    lengths = (outcome.first_indices + outcome.counts).tolist()
    return {
        (outcome.requests[row].id, int(outcome.choices[row])): (int(outcome.finish[row]), lengths[row]) for row in ended
    }


Output = tuple[str, int, Int32]
"""Request, choice and all tokens of its output."""


def arguments(
    outcomes: list[tuple[int, Outcome]],
    epoch: int,
    prefix: str,
    where: Mapping[str, Entry],
    again: list[Output] | None = None,
    held: Value = "",
) -> list[Value]:
    """Return the ARGV of publish.lua for some outcomes, in order. where: the stream entries of the requests. held: the
    text of the lease; empty where it is the epoch.

    again: for the second call with these outcomes, after records were found too short: whole outputs that are written
    first. What is too short even then ends as an error.
    """
    entries: list[Value] = []
    checkpoints: list[Value] = []
    started: list[Value] = []
    ended: list[Value] = []
    logprobs: list[Value] = []
    of_prompts: list[Value] = []
    identities: list[Value] = []
    counts = [0, 0, 0, 0]
    for request_id, choice, tokens in again or []:
        checkpoints += [request_id, choice, 0, pack(tokens), 0, 0]
        counts[1] += 1
    for step, outcome in outcomes:
        for gateway, payload in batches(outcome, epoch, step) if again is None else []:
            entries += [gateway, payload]
            counts[0] += 1
        finishes = _finishes(outcome)
        for request_id, choice, first, tokens in outcome.checkpoints:
            checkpoints += [request_id, choice, 4 * first, pack(tokens), *finishes.pop((request_id, choice), (0, 0))]
            counts[1] += 1
        for (request_id, choice), end in finishes.items():
            checkpoints += [request_id, choice, 0, b"", *end]
            counts[1] += 1
        if outcome.logprobs is not None:
            logprobs += records(outcome)
        for request_id, prompt, first, count, told in outcome.prompt_logprobs:
            of_prompts += [request_id, prompt, (first - 1) * (len(told) // count), told]
        started += outcome.started_ids
        counts[2] += len(outcome.started_ids)
        for request_id, identity in outcome.identities.items():
            identities += [request_id, identity]
        for finished in outcome.ended_requests:
            entry = where.get(finished.request.id)
            if entry is not None:
                ended += _end(finished, entry)
                counts[3] += 1
    head: list[Value] = [held or epoch, prefix, GROUP, LIVE_TTL_MS, KEPT_TTL_MS, STREAM_KEEP_MS, int(again is not None)]
    # fmt: off
    return [
        *head, counts[0], *entries, counts[1], *checkpoints, counts[2], *started, counts[3], *ended,
        len(logprobs) // 4, *logprobs,
        *([len(of_prompts) // 4, *of_prompts] if of_prompts or identities else []),
        *([len(identities) // 2, *identities] if identities else []),
    ]
    # fmt: on


def _end(finished: FinishedRequest, entry: Entry) -> list[Value]:
    request = finished.request
    return [
        request.id,
        entry.stream,
        entry.id,
        ",".join(str(int(finish)) for finish in finished.finish),
        sum(prompt.size for prompt in request.prompts),
        ",".join(str(output.size) for output in finished.outputs),
        finished.error,
    ]


def written_keys(keys: Keys, outcomes: list[Outcome]) -> dict[str, str]:
    """Return the type of each key that publish.lua writes for some outcomes."""
    types = {keys.queue: "hash", keys.queue_tenants: "hash", keys.queue_bytes: "hash"}
    types |= {keys.queue_grammars: "hash", keys.queue_kept: "stream"}
    for outcome in outcomes:
        types |= dict.fromkeys(map(keys.tokens, outcome.gateways), "stream")
        names = {request.id for request in outcome.requests} | {each[0] for each in outcome.checkpoints}
        ended = [finished.request for finished in outcome.ended_requests]
        choices = {(each[0], each[1]) for each in outcome.checkpoints}
        choices |= {(each.id, choice) for each in ended for choice in range(len(each.prompts) * each.n)}
        types |= dict.fromkeys(
            map(keys.req, {*names, *outcome.started_ids, *outcome.identities, *(each.id for each in ended)}), "hash"
        )
        for name, choice in choices:
            types |= {keys.out(name, choice): "string", keys.logprobs(name, choice): "string"}
        types |= {keys.prompt_logprobs(each[0], each[1]): "string" for each in outcome.prompt_logprobs}
    return types


class Publisher:
    """Writes outcomes in order. `run` raises LeaseLostError when another scheduler has the shard."""

    def __init__(
        self,
        scripts: Scripts,
        keys: Keys,
        lease: Lease,
        entries: Mapping[str, Entry],
        ended: Callable[[str], None],
        outputs: Callable[[str, int], Int32 | None],
        remove_foreign: Callable[[Mapping[str, str]], Awaitable[None]] | None = None,
    ) -> None:
        """entries: of unfinished requests; ended: called once the end of a request is written. outputs: returns the
        tokens that a choice of an unfinished request has. remove_foreign: deletes keys of another type than that given.
        """
        self._outputs = outputs
        self._remove_foreign = remove_foreign
        self._script = scripts.publish
        self._keys = keys
        self._lease = lease
        self._entries = entries
        self._ended = ended
        self._queue: deque[tuple[int, Outcome]] = deque()
        self._has_more = asyncio.Event()
        self._has_written = asyncio.Event()
        self._is_stopping = False
        self.put_count = 0  # outcomes with something to write
        self.written_count = 0  # of these, those that Redis has

    @property
    def full(self) -> bool:
        """Return whether planning has to pause."""
        return len(self._queue) >= MAX_PENDING

    def put(self, outcome: Outcome | None, step: int = 0) -> None:
        """Queue an outcome that has something to write."""
        if outcome is None:
            return
        has_rows = outcome.requests or outcome.checkpoints or outcome.prompt_logprobs
        if has_rows or outcome.started_ids or outcome.identities or outcome.ended_requests:
            self._queue.append((step, outcome))
            self.put_count += 1
            self._has_more.set()

    async def run(self, room: Callable[[], None]) -> None:
        """Write until cancelled. room: called after each script call, so that paused loops continue."""
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            while self._queue:
                taken = [self._queue.popleft() for _ in range(min(MAX_PER_CALL, len(self._queue)))]
                await persist("publish tokens", partial(self._write, taken), log, lambda: self._is_stopping)
                self.written_count += len(taken)
                for _, outcome in taken:
                    for finished in outcome.ended_requests:
                        self._ended(finished.request.id)
                room()
                self._has_written.set()

    async def _write(self, outcomes: list[tuple[int, Outcome]]) -> None:
        again: list[Output] | None = None
        try:
            while True:
                lease = self._lease
                args = arguments(outcomes, lease.epoch, self._keys.prefix, self._entries, again, lease.text)
                short = await self._lease.run_fenced(self._script, [self._keys.queue], args)
                if not short or again is not None:
                    return
                again = self._whole_outputs([outcome for _, outcome in outcomes], short)
        except ResponseError as error:
            if WRONG_TYPE in str(error) and self._remove_foreign is not None:
                await self._remove_foreign(written_keys(self._keys, [outcome for _, outcome in outcomes]))
            raise

    def _whole_outputs(self, outcomes: list[Outcome], short: list[bytes]) -> list[Output]:
        """Return the whole outputs of the choices `short` (id, choice, id, ...), as far as they are known."""
        ended = {finished.request.id: finished.outputs for outcome in outcomes for finished in outcome.ended_requests}
        names = dict.fromkeys((short[i].decode(), int(short[i + 1])) for i in range(0, len(short), 2))
        found: list[Output] = []
        for name, choice in names:
            tokens = ended[name][choice] if name in ended else self._outputs(name, choice)
            if tokens is not None:
                found.append((name, choice, tokens))
        log.warning(
            "output records: %d lack tokens that were written before: Redis has lost writes; writing %d of them whole",
            len(names),
            len(found),
        )
        return found

    async def caught_up(self) -> None:
        """Wait until Redis has everything that was put before."""
        put = self.put_count
        while self.written_count < put:
            self._has_written.clear()
            await self._has_written.wait()

    async def flush(self, running: asyncio.Task[None]) -> None:
        """Wait until everything that was put is written, or until `running` (the task of run) has ended."""
        self._is_stopping = True
        self._has_more.set()
        written = asyncio.create_task(self.caught_up())
        await asyncio.wait({written, running}, timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
        if not written.done():
            written.cancel()
            log.warning("%d outcomes not written; the next scheduler computes them again", len(self._queue))

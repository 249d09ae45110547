"""From the request streams into the core: claim, decode, and rebuild after a restart.

A claimed request stays pending in its stream until it ends. The consumer is named after the shard, so the next
scheduler of the shard reads the same pending list and continues from the records.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from protos import queue_pb2
from services.scheduler.core.types import EMPTY, MAX_STOP_IDS, Finish, Int32, NewRequest
from shared.dead_letters import DeadLetters, integer, remove_foreign, text
from shared.keys import CLASSES, GROUP, Keys, grammar_name, is_grammar_name
from shared.lease import Lease
from shared.models.adapters import DIGEST_BYTES
from shared.redis_client import BLOCK_MS, GONE, HIGHEST_ID, WRONG_TYPE, Scripts, Value
from shared.text.logprobs import prompt_record_bytes
from shared.text.logprobs import wrong_number as wrong_logprobs
from shared.wire.columns import MAX_PREDICTION, unpack
from shared.wire.token_batches import MAX_VOCABULARY, check_tokens, decode_batch

log = logging.getLogger("orcinus.scheduler")


@dataclass(frozen=True, slots=True)
class Entry:
    """The stream entry of a claimed request, acknowledged and deleted at its end."""

    stream: str
    id: str
    request: queue_pb2.Request

    @property
    def class_number(self) -> int:
        """Return the class of the stream, which is valid even if that of the request is not."""
        return CLASSES.index(self.stream.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that this shard holds from now on."""

    entry: Entry
    request: NewRequest
    is_cancelled: bool
    error: str = ""
    is_delivered: bool = True  # its gateway has a heartbeat
    stops: dict[int, int] = field(default_factory=dict)
    """By choice, the number of tokens to keep: the gateway matched a stop string after them."""

    @property
    def choices(self) -> int:
        """Return the number of sequences."""
        return len(self.request.prompts) * self.request.n


FULL_MS = 50
"""Time that a read waits when a class has no room: room may come at any moment."""
READ_COUNT = 16
"""Requests read from a stream at a time: running sequences get their steps between two reads."""

CANCELLED, UNKNOWN = 1, 2
"""Answers of claim.lua; a higher one is an end that is already written."""
RETURNED, STRANDED = 1, 2
"""Answers of drop.lua about a request with the highest id."""

RECOUNT_S = 30.0
RECOUNT_ENTRIES = 4_096
"""The counts of the queue are compared with the entries every so often, while there are at most so many of them."""

MAX_SEQUENCES = 65_536
"""Sequences of one request: more than any gateway allows (--max-choices)."""
MAX_TOKENS = 1 << 30
"""Output tokens of a sequence: more than any context, and with any prompt an int32."""
MAX_POOLING = 2
"""The kinds of worker.proto, Enter.pooling."""
MAX_MS = 1 << 43
"""A time of Redis's clock beyond this is none."""

MAX_GRAMMARS = 256
"""Texts that are kept here beside those of held requests; 64 KiB each at most."""

_NO_PROMPT = np.zeros(1, np.int32)
"""The prompt of a request that ends with an error before it runs."""


class Clock:
    """Redis's wall clock in terms of the monotonic clock, so that arrivals of all gateways are comparable."""

    def __init__(self) -> None:
        self._offset_ms = 0.0

    async def sync(self, redis: Redis) -> None:
        """Read Redis's clock."""
        seconds, micros = await redis.time()
        self._offset_ms = seconds * 1e3 + micros / 1e3 - time.monotonic_ns() / 1e6

    def monotonic_ns(self, redis_ms: float) -> int:
        """Return the monotonic time of a moment of Redis's clock."""
        return int((redis_ms - self._offset_ms) * 1e6)


def decode(
    wire: queue_pb2.Request, prompts: queue_pb2.Prompts, grammar: str, enqueued_ms: int, gateway: str, clock: Clock
) -> NewRequest:
    """Return the core's form of a request. enqueued_ms: of Redis's clock; gateway: the one that delivers it now.

    Raises ValueError for a request that a gateway must not send.
    """
    arrays = [unpack(tokens) for tokens in prompts.tokens]
    stop_ids = unpack(wire.stop_token_ids)
    if not arrays or any(array.size == 0 for array in arrays):
        raise ValueError("prompt: no tokens; at least 1 is needed")
    if wire.n < 1 or wire.max_tokens < 1:
        raise ValueError(f"n={wire.n}, max_tokens={wire.max_tokens}: both must be at least 1")
    if max(wire.max_tokens, wire.min_tokens) > MAX_TOKENS:
        raise ValueError(f"max_tokens={wire.max_tokens}, min_tokens={wire.min_tokens}: at most {MAX_TOKENS}")
    if len(arrays) * wire.n > MAX_SEQUENCES:
        raise ValueError(f"{len(arrays)} prompts, n={wire.n}: more than {MAX_SEQUENCES} sequences")
    if any(int(array.min()) < 0 for array in arrays):
        raise ValueError("prompt: a negative token id")
    priority = getattr(wire, "class")
    if not 0 <= priority < len(CLASSES):
        raise ValueError(f"class {priority}: unknown; it must be the number of one of {', '.join(CLASSES)}")
    if stop_ids.size > MAX_STOP_IDS:
        raise ValueError(f"stop token ids: {stop_ids.size} given, at most {MAX_STOP_IDS}")
    prediction = unpack(wire.prediction)
    if prediction.size > MAX_PREDICTION:
        raise ValueError(f"prediction: {prediction.size} tokens; send at most {MAX_PREDICTION}")
    if prediction.size and (least := int(prediction.min())) < 0:
        raise ValueError(f"prediction: token id {least} is negative; send ids from 0")
    asks_logprobs = wire.sampling.logprobs or wire.sampling.prompt_logprobs
    if wire.pooling > MAX_POOLING or (wire.pooling and (wire.max_tokens > 1 or asks_logprobs)):
        raise ValueError(
            f"pooling {wire.pooling}, max_tokens={wire.max_tokens}: at most {MAX_POOLING}, with one token, no logprobs"
        )
    segments = unpack(wire.segments)
    if segments.size and (segments.size != len(arrays) or int(segments.min()) < 0):
        raise ValueError(f"segments: {segments.size} for {len(arrays)} prompts, or one below 0; one each is needed")
    if unpack(wire.label_ids).size not in (0, 2):
        raise ValueError(f"label ids: {len(wire.label_ids)} bytes; two ids are needed, or none")
    if len(wire.adapter) not in (0, DIGEST_BYTES):
        raise ValueError(f"adapter: a digest of {len(wire.adapter)} bytes; {DIGEST_BYTES} are needed, or none")
    sampling = wire.sampling
    wrong = wrong_logprobs(sampling.logprobs) or wrong_logprobs(sampling.prompt_logprobs, "prompt_logprobs")
    if wrong:
        raise ValueError(wrong)
    return NewRequest(
        id=wire.id,
        prompts=arrays,
        n=wire.n,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        stop_ids=stop_ids,
        priority=priority,
        tenant=wire.tenant,
        gateway=gateway,
        arrived_ns=clock.monotonic_ns(enqueued_ms) if 0 < enqueued_ms < MAX_MS else 0,
        ttft_slo_ns=wire.ttft_slo_ms * 1_000_000,
        tbt_slo_ns=wire.tbt_slo_ms * 1_000_000,
        deadline_ns=clock.monotonic_ns(enqueued_ms + wire.deadline_ms)
        if wire.deadline_ms and 0 < enqueued_ms < MAX_MS
        else 0,
        salt=wire.cache_salt + wire.adapter,
        adapter=wire.adapter,
        speculate=wire.speculate,
        grammar=grammar,
        prediction=prediction,
        scored_tokens=[1] * len(arrays) if sampling.prompt_logprobs else None,
        payload=wire,
    )


def room_by_class(window: int, held: list[int]) -> list[int]:
    """Return how many requests of each class may be claimed when `held` of each are held.

    An eighth of the window is reserved for each other class, so that a flood of one class leaves room for the urgent.
    """
    reserved = [max(0, window // 8 - count) for count in held]
    return [window - sum(held) - sum(reserved) + of_class for of_class in reserved]


class Intake:
    """Claims requests for one shard. `read` blocks, on a separate connection; the other calls return quickly."""

    def __init__(
        self,
        reader: Redis,
        redis: Redis,
        scripts: Scripts,
        keys: Keys,
        shard: str,
        lease: Lease,
        clock: Clock,
        letters: DeadLetters | None = None,
    ) -> None:
        self._letters = letters or DeadLetters()
        self._reader = reader
        self._redis = redis
        self._scripts = scripts
        self._keys = keys
        self._shard = shard
        self._lease = lease
        self._clock = clock
        self._streams = keys.request_streams()
        self._grammars: OrderedDict[str, str] = OrderedDict()  # texts by name, the one used last at the end
        self._recount_at = 0.0  # when the queue is counted anew

    async def prepare(self) -> None:
        """Create the consumer group on the stream of each class, once for all shards."""
        for stream in self._streams:
            try:
                await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def read(self, room: list[int], one: bool = False) -> list[Claimed]:
        """Claim new requests, at most `room` of each class; wait up to BLOCK_MS for the first.

        one: at most one of each class. Redis serves waiting readers in turn, so all shards get the same share.
        """
        open_ = [(self._keys.requests(name), left) for name, left in zip(CLASSES, room, strict=True) if left > 0]
        try:
            reply = await self._reader.xreadgroup(
                GROUP,
                self._shard,
                {stream: ">" for stream, _ in open_},
                count=1 if one else min(READ_COUNT, max(1, min(left for _, left in open_) // len(open_))),
                block=BLOCK_MS if len(open_) == len(CLASSES) else FULL_MS,
            )
        except ResponseError as error:
            if not any(word in str(error) for word in GONE):
                raise
            await self.prepare()  # Redis restarted empty, or was emptied
            return []
        return await self._claim(await self._parse(reply, self._lease))

    async def read_pending(self, held: Container[str], add: Callable[[list[Claimed]], None]) -> int:
        """Add everything that this shard has claimed and does not hold, oldest first, with the tokens of the records.

        Called after a restart, and after a claim with a lost answer. Returns the number of requests.
        """
        await self.prepare()  # Redis may have been emptied since the start
        total = 0
        async for page in self._pages(self._shard):
            claimed = await self._claim(await self._parse(page, self._lease, held))
            readable = [item for item in claimed if not item.error]  # the others end, whatever they had
            gateways = await self._restore(readable)
            await self._read_tails([item.request for item in readable], gateways)
            add(claimed)
            total += len(claimed)
        return total

    async def recount(self, now_s: float) -> None:
        """Count the queue anew by its entries, every RECOUNT_S."""
        if now_s < self._recount_at:
            return
        self._recount_at = now_s + RECOUNT_S
        arguments: list[Value] = [self._lease.text, RECOUNT_ENTRIES]
        if await self._lease.run_fenced(self._scripts.recount, [self._keys.queue], arguments):
            log.warning("queue: the counts were not those of its entries; they were counted anew")

    async def left_by(self, shard: str, lease: Lease) -> list[Entry]:
        """Return the pending list of another shard. lease: that shard's, which the caller holds."""
        return [entry async for page in self._pages(shard) for entry in await self._parse(page, lease)]

    async def _pages(self, consumer: str) -> AsyncIterator[Any]:
        """Yield the pending list of a shard, oldest first, as XREADGROUP answers."""
        for stream in self._streams:
            last = "0"
            while True:
                reply: Any = await self._redis.xreadgroup(GROUP, consumer, {stream: last}, count=64)
                if not reply or not reply[0][1]:
                    break
                last = reply[0][1][-1][0].decode()
                yield reply

    async def has_stranded(self, held: int) -> bool:
        """Return whether more than `held` requests are pending: a claim with a lost answer leaves such requests."""
        counts = [await self._redis.xpending_range(s, GROUP, "-", "+", held + 1, self._shard) for s in self._streams]
        return sum(len(rows) for rows in counts) > held

    async def _parse(self, reply: Any, lease: Lease, held: Container[str] = ()) -> list[Entry]:
        """Return the requests of an XREADGROUP answer that are not held; drop invalid entries under `lease`."""
        entries: list[Entry] = []
        for stream, rows in reply:
            for entry_id, fields in rows:
                if not fields:  # deleted while pending
                    await lease.write(["XACK", stream.decode(), GROUP, entry_id])
                    continue
                wire = self._letters.read(stream.decode(), fields, _request)
                if entry_id == HIGHEST_ID:  # the script lets the stream go on behind the entry before
                    record = self._keys.req(wire.id) if wire is not None else ""
                    dropped = await self._drop(lease, stream.decode(), entry_id.decode(), record)
                    if dropped == STRANDED and wire is not None and wire.id not in held:
                        entries.append(Entry(stream.decode(), entry_id.decode(), wire))
                    elif dropped != RETURNED:
                        self._letters.add(stream.decode(), entry_id, "an entry with the highest id")
                elif wire is None:
                    await self._drop(lease, stream.decode(), entry_id.decode())
                elif wire.id not in held:
                    entries.append(Entry(stream.decode(), entry_id.decode(), wire))
        return entries

    async def _claim(self, entries: list[Entry]) -> list[Claimed]:
        if not entries:
            return []
        args: list[Value] = [self._lease.text, self._shard, *(self._keys.req(entry.request.id) for entry in entries)]
        try:
            verdicts = await self._lease.run_fenced(self._scripts.claim, [], args)
        except ResponseError as error:
            if WRONG_TYPE in str(error):
                types = {self._keys.req(entry.request.id): "hash" for entry in entries}
                await remove_foreign(self._redis, self._letters, types)
            raise
        claimed = []
        rows = zip(entries, *(verdicts[column::4] for column in range(4)), strict=True)
        for entry, verdict, enqueued_ms, gateway, delivered in rows:
            if verdict >= UNKNOWN:
                await self._drop(self._lease, entry.stream, entry.id)
            else:
                name = self._letters.read(self._keys.req(entry.request.id), gateway, text)
                item = await self._open(entry, enqueued_ms, name or entry.request.gateway, verdict == CANCELLED)
                claimed.append(item if delivered else replace(item, is_delivered=False))
        return claimed

    async def _drop(self, lease: Lease, stream: str, entry_id: str, record: str = "") -> int:
        """Delete an entry. record: of a request with the highest id. Return RETURNED, STRANDED, or 0."""
        arguments: list[Value] = [lease.text, GROUP, stream, entry_id, record]
        return int(await lease.run_fenced(self._scripts.drop, [self._keys.queue], arguments))

    async def _open(self, entry: Entry, enqueued_ms: int, gateway: str, cancelled: bool) -> Claimed:
        prompts = entry.request.prompts
        error = ""
        stored: Any = None
        if entry.request.prompts_apart:
            stored = await self._reply(self._keys.prompt(entry.request.id), "get")
        try:
            if entry.id.encode() == HIGHEST_ID:
                raise ValueError("its stream has no id for it while others run; send the request again")
            if entry.request.prompts_apart:
                prompts = queue_pb2.Prompts.FromString(stored or b"")
            grammar = await self._grammar(entry.request)
            return Claimed(entry, decode(entry.request, prompts, grammar, enqueued_ms, gateway, self._clock), cancelled)
        except (ValueError, DecodeError) as bad:
            error = f"request cannot be served: {bad}"
            count, n = len(prompts.tokens) or await self._prompt_count(entry.request.id), max(1, entry.request.n)
            if count * n > MAX_SEQUENCES:
                count, n = 1, 1
            placeholder = NewRequest(  # with the choices of the request: the record says how each of them ended
                id=entry.request.id,
                prompts=[_NO_PROMPT] * count,
                n=n,
                max_tokens=1,
                gateway=gateway,
                payload=entry.request,
            )
            return Claimed(entry, placeholder, cancelled, error)

    async def _prompt_count(self, request_id: str) -> int:
        """Return the number of prompts of a request by its record; 1 where that does not say it."""
        key = self._keys.req(request_id)
        stored = await self._reply(key, "hget", "delivery")
        delivery = self._letters.read(key, stored or b"", queue_pb2.Delivery.FromString)
        return max(1, len(delivery.prompt_tails)) if delivery else 1

    async def _grammar(self, request: queue_pb2.Request) -> str:
        """Return the text of a request's grammar, one object for all requests of the tenant with it. Raise ValueError
        where Redis lacks the text.
        """
        name = request.sampling.grammar
        if not is_grammar_name(name):
            return name
        if name not in self._grammars:
            key = self._keys.queue_grammars
            stored = await self._reply(key, "hget", f"text:{name}")
            found = None if stored is None else self._letters.read(key, stored, partial(_grammar, request.tenant, name))
            if found is None:  # the next request that brings the text writes it again
                raise ValueError("grammar: Redis has lost its text; send the request again")
            self._grammars[name] = found
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(name)
        return self._grammars[name]

    async def _read_tails(self, requests: list[NewRequest], gateways: set[str]) -> None:
        for gateway in sorted(gateways):
            key = self._keys.tokens(gateway)
            rows = await self._reply(key, "xrange") or []
            extend(requests, self._letters.read_all(key, (fields for _, fields in rows), decode_batch))

    async def _reply(self, key: str, command: str, *words: Value) -> Any:
        """Return the answer of a command on one key; None where the key has another type."""
        pipe: Any = self._redis.pipeline(transaction=False)
        getattr(pipe, command)(key, *words)
        (reply,) = await pipe.execute(raise_on_error=False)
        return self._letters.read(key, reply, lambda found: found)

    async def _restore(self, claimed: list[Claimed]) -> set[str]:
        """Restore outputs and ended choices of requests that ran before.

        Returns the gateways with streams that may hold further tokens of them.
        """
        pipe = self._redis.pipeline(transaction=False)
        for item in claimed:
            choices = range(item.choices)
            pipe.mget([self._keys.out(item.request.id, choice) for choice in choices])
            names = [f"{field}:{choice}" for field in ("finish", "stop") for choice in choices]
            pipe.hmget(self._keys.req(item.request.id), ["started_ms", "former", "numerics", *names])
        replies = await pipe.execute(raise_on_error=False)
        gateways: set[str] = set()
        read = self._letters.read
        for item, stored, reply in zip(claimed, replies[::2], replies[1::2], strict=True):
            request, count, key = item.request, item.choices, self._keys.req(item.request.id)
            outputs = read(self._keys.out(request.id, 0), stored, list) or [None] * count
            found = [read(self._keys.out(request.id, choice), value, _tokens) for choice, value in enumerate(outputs)]
            request.outputs = [EMPTY if each is None else each[: request.max_tokens] for each in found]
            request.checkpointed_tokens = [output.size for output in request.outputs]
            started, former, identity, *fields = read(key, reply, list) or [None] * (3 + 2 * count)
            request.identity = read(key, identity or b"", text) or ""
            request.finishes = [read(key, value, _finish) or Finish.RUNNING for value in fields[:count]]
            stops = (read(key, at, integer) if at else None for at in fields[count:])
            item.stops.update({choice: at for choice, at in enumerate(stops) if at is not None})
            request.has_begun = bool(started)
            if started:  # written with its first tokens at the latest
                gateways |= {request.gateway, *(read(key, former or b"", _names) or [])}
        await self._restore_scored([item.request for item in claimed if item.request.scored_tokens is not None])
        return gateways

    async def _restore_scored(self, requests: list[NewRequest]) -> None:
        """Restore how many tokens of each prompt have log-probabilities in their records."""
        pipe = self._redis.pipeline(transaction=False)
        keys = [
            self._keys.prompt_logprobs(request.id, prompt)
            for request in requests
            for prompt in range(len(request.prompts))
        ]
        for key in keys:
            pipe.strlen(key)
        sizes = zip(keys, await pipe.execute(raise_on_error=False) if keys else [], strict=True)
        for request in requests:
            record = prompt_record_bytes(request.payload.sampling.prompt_logprobs)
            request.scored_tokens = [
                min(prompt.size, 1 + (self._letters.read(*next(sizes), int) or 0) // record)
                for prompt in request.prompts
            ]


def _request(fields: dict[bytes, bytes]) -> queue_pb2.Request:
    """Return the message of a stream entry."""
    return queue_pb2.Request.FromString(fields[b"r"])


def _grammar(tenant: str, name: str, stored: bytes) -> str:
    """Return the text of a grammar. Raises ValueError for another text than that of the name."""
    grammar = stored.decode()
    if grammar_name(tenant, grammar) != name:
        raise ValueError(f"{len(stored)} bytes, which are not the text of {name}")
    return grammar


def _finish(value: bytes | None) -> Finish:
    """Return how a choice ended by its record."""
    return Finish(integer(value))


def _names(value: bytes) -> list[str]:
    """Return the names in a text, separated by spaces."""
    return text(value, 1 << 16).split()


def extend(requests: list[NewRequest], batches: Iterable[queue_pb2.TokenBatch]) -> None:
    """Append the tokens that were published after the last checkpoint, in order: published tokens never change.

    Rows that leave a gap and rows of a choice that has ended are skipped.
    """
    by_id = {request.id: request for request in requests}
    for batch in batches:
        choices, first, counts = unpack(batch.choices), unpack(batch.first), unpack(batch.counts)
        ends = np.cumsum(counts)
        for row, request_id in enumerate(batch.requests):
            request = by_id.get(request_id)
            if request is None or request.outputs is None or request.finishes is None:
                continue
            choice = int(choices[row])
            if choice >= len(request.outputs) or request.finishes[choice] is not Finish.RUNNING:
                continue
            held = request.outputs[choice].size
            begin, end = int(first[row]), int(first[row] + counts[row])
            if begin <= held < end:
                fresh = unpack(batch.tokens)[int(ends[row]) - (end - held) : int(ends[row])]
                request.outputs[choice] = np.concatenate([request.outputs[choice], fresh])[: request.max_tokens]


def _tokens(stored: bytes | None) -> Int32:
    """Return [n] int32 of an `out` record, without a last token that a crash cut. Raises ValueError for other bytes."""
    if not stored:
        return EMPTY
    tokens = np.frombuffer(stored[: len(stored) // 4 * 4], dtype="<i4")
    check_tokens(tokens, MAX_VOCABULARY)
    return tokens

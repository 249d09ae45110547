"""Talk to Redis for all requests: one task writes and asks, one task reads tokens. No handler awaits Redis.

A handler that is cancelled (its client left) leaves its work to the dispatcher, so no reply is read by the wrong
request and no cancel is lost. Jobs run in the order in which they were handed over. Commands about requests (cancel,
stop) outlive a Redis that is away; questions and new requests fail at once with 503. A job that fails ends alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from protos import queue_pb2
from services.gateway.auth import Caller
from services.gateway.cluster import EVERY_S, MEMORY_MOST, Cluster
from services.gateway.delivery.stream import Offer, RequestStream, Row, ends, fill, lacks_tokens, rows_of
from services.gateway.errors import ApiError, broken_record, slow_client, taken_over, unavailable
from services.gateway.metrics import Metrics
from services.gateway.request import GenerationSpec
from shared.columns import unpack
from shared.dead_letters import DeadLetters
from shared.keys import Keys
from shared.redis_client import BLOCK_MS, LIVE_TTL_MS, Scripts, Unreachable, Value, backoff_s, connect
from shared.settings import GatewaySettings
from shared.tasks import end
from shared.token_batches import decode_batch

log = logging.getLogger("orcinus.gateway")

MOST_KEPT = 65_536
"""About 1 KiB each."""
MOST_REFUSALS = 60
"""Once a second, so about a minute in which Redis has no memory or is a replica."""


@dataclass(slots=True)
class Command:
    """A command about one request, kept until Redis has taken it."""

    key: tuple[str, str]  # request id, kind
    send: Callable[[], Awaitable[Any]]
    refusals: int = 0

    async def try_send(self) -> None:
        """Send the command, twice at most: a connection that Redis closed shows only at its first use, and a repeated
        command does no harm. A process that dies before the next round loses the command.
        """
        try:
            await self.send()
        except RedisConnectionError:
            await self.send()


class Retries:
    """Commands for the next try, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], Command] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, command: Command) -> None:
        """Keep a command for the next round, in place of an earlier one of the same key."""
        earlier = self._waiting.pop(command.key, None)
        if earlier is not None:
            command.refusals = max(command.refusals, earlier.refusals)
        elif len(self._waiting) >= MOST_KEPT:
            request_id, kind = oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            log.error("dropping %s of %s: %d commands are waiting for Redis", kind, request_id, MOST_KEPT)
        self._waiting[command.key] = command

    def refused(self, command: Command, error: Exception) -> None:
        """Keep a command that Redis refused, until MOST_REFUSALS."""
        request_id, kind = command.key
        command.refusals += 1
        if command.refusals >= MOST_REFUSALS:
            log.error("giving up %s of %s: refused by Redis %d times: %s", kind, request_id, MOST_REFUSALS, error)
            return
        if command.refusals == 1:
            log.warning("retrying %s of %s: refused by Redis: %s", kind, request_id, error)
        self.keep(command)

    def take(self) -> list[Command]:
        """Return all waiting commands and forget them; the caller tries them now."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())


MOST_JOBS = 4096
SILENT_S = 5.0
"""A request unheard of for so long has its record read: its tokens may have left the stream unread."""
READ_ENTRIES = 64
FLUSH_S = 2.0
"""Time for the last commands at a clean stop."""

T = TypeVar("T")


class QueueBounds(Protocol):
    """The limits of the queue that enqueue.lua checks for one request."""

    @property
    def class_tokens(self) -> int:
        """Prompt tokens that may wait, of all classes together, when a request of this class enters."""
        ...

    @property
    def tenant_tokens(self) -> int:
        """Prompt tokens of its tenant that may wait."""
        ...

    @property
    def class_bytes(self) -> int:
        """Bytes in Redis of requests that have not ended, of all classes together; 0 means no limit."""
        ...

    @property
    def tenant_bytes(self) -> int:
        """Bytes in Redis of its tenant's requests that have not ended; 0 means no limit."""
        ...

    @property
    def is_late(self) -> bool:
        """Whether its class waits too long for a tenant that has at least an even share of the queue."""
        ...


class Dispatcher:
    """Use every Redis connection that serves requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: str,
        cluster: Cluster,
        metrics: Metrics,
        letters: DeadLetters | None = None,
    ) -> None:
        self._letters = letters or DeadLetters()
        self._settings = settings
        self._keys: Keys = settings.keys
        self._cluster = cluster
        self._metrics = metrics
        self._redis: Redis = connect(settings, connections=1)
        self._reader: Redis = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self.scripts = Scripts(self._redis, metrics.call)
        self._jobs: deque[Callable[[], Awaitable[None]]] = deque()
        self._more = asyncio.Event()
        self._retries = Retries()
        self._streams: dict[str, RequestStream] = {}
        self._outlived = False  # by a request: its last tokens may be nowhere but in this gateway's stream
        self._tasks: list[asyncio.Task[None]] = []
        self.gateway_id = gateway_id

    # Life

    def start(self) -> None:
        self._tasks = [asyncio.create_task(work()) for work in (self._work, self._read, self._watch)]

    async def stop(self) -> None:
        """End the tasks after the queued jobs, and delete this gateway's stream unless a request continues."""
        if self._tasks and not self._cluster.redis_error:
            flushed = asyncio.Event()

            async def last() -> None:
                flushed.set()

            self.submit(last)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await flushed.wait()
        tasks, self._tasks = self._tasks, []
        await end(*tasks)
        if not self._cluster.redis_error and not self._outlived:
            try:
                await self._redis.delete(self._keys.tokens(self.gateway_id))
            except (*Unreachable, RedisError) as error:
                log.warning("token stream not deleted: %s", error)
        await self._redis.aclose()
        await self._reader.aclose()

    @property
    def streams(self) -> dict[str, RequestStream]:
        """Return the streams of the requests that run now, by id."""
        return self._streams

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that run between start and stop; none of them ends by itself."""
        return list(self._tasks)

    # What handlers call

    async def enqueue(
        self, spec: GenerationSpec, stream: RequestStream, caller: Caller, delivery: bytes, bounds: QueueBounds
    ) -> list[Any]:
        """Put the request into its class's stream, unless its id is there. Return the answer of enqueue.lua: `ok`,
        `duplicate` or a refusal, after which the stream gets nothing.

        Raise ApiError(503). `close` has to follow, except after a refusal. A connection that reads the request already
        keeps it: only `adopt` takes it over.
        """
        if spec.id not in self._streams:
            self._register(stream)
        request, prompts = spec.to_request(self.gateway_id, caller.tenant, caller.salt)
        keys = self._keys
        # fmt: off
        redis_keys = [
            keys.req(spec.id), keys.requests(spec.priority), keys.queue, keys.bucket(caller.bucket),
            keys.prompt(spec.id), keys.background, keys.background_of(self.gateway_id),
        ]
        arguments: list[Value] = [
            request.SerializeToString(), prompts, spec.prompt_tokens, bounds.class_tokens, spec.cost_tokens,
            *caller.rates.arguments, LIVE_TTL_MS, caller.tenant, self.gateway_id, spec.priority, delivery,
            spec.id if spec.background else "", MEMORY_MOST, bounds.tenant_tokens, int(bounds.is_late),
            bounds.class_bytes, bounds.tenant_bytes,
        ]
        # fmt: on
        answer: list[Any] = await self.ask(lambda: self._enqueue(spec, redis_keys, arguments))
        match answer[0]:
            case b"ok":
                stream.left = (answer[2], answer[3])
                if self._streams.get(spec.id) is not stream:  # the one before it was refused
                    self._register(stream)
            case b"duplicate":
                pass
            case _:
                self._forget(stream)
        return answer

    async def adopt(self, stream: RequestStream, tenant: str, former: str = "") -> bool:
        """Deliver a request that was enqueued before, here or by another gateway. Return False if the tenant has no
        such request or `former`, if named, no longer delivers it. Raise ApiError(503). `close` has to follow.
        """
        self._register(stream)
        adopt = queue_pb2.Control.Adopt(id=stream.request_id, gateway=self.gateway_id)
        control = queue_pb2.Control(adopt=adopt)
        verdict = await self.ask(
            lambda: self._control(stream.request_id, "adopt", control, former, tenant=tenant, gateway=self.gateway_id)
        )
        self._refill(stream)
        return verdict not in ("unknown", "forbidden", "elsewhere")

    def close(self, stream: RequestStream, cancel_reason: str = "") -> None:
        """End the delivery of a request. With a reason the request is cancelled, unless another stream delivers it by
        now.
        """
        self._outlived |= not (cancel_reason or stream.done)
        if self._forget(stream) and cancel_reason:
            self.cancel(stream.request_id, cancel_reason)

    def cancel(self, request_id: str, reason: str) -> None:
        """Cancel a request that this gateway delivers, without waiting."""
        control = queue_pb2.Control(cancel=queue_pb2.Control.Cancel(id=request_id, reason=reason))
        self._command(
            (request_id, "cancel"), lambda: self._control(request_id, "cancel", control, gateway=self.gateway_id)
        )

    def stop_choice(self, request_id: str, choice: int, at_token: int, written: Callable[[], None]) -> None:
        """End a choice at a stop string: tokens 0 .. at_token - 1 stay. written: called once Redis has the command."""
        stop = queue_pb2.Control.Stop(id=request_id, choice=choice, at_token=at_token)
        control = queue_pb2.Control(stop=stop)

        async def send() -> None:
            if (
                await self._control(request_id, "stop", control, choice, at_token, gateway=self.gateway_id)
                != "elsewhere"
            ):
                written()
            elif stream := self._streams.get(request_id):
                stream.fail(taken_over(), cut=True)

        self._command((request_id, f"stop {choice}"), send)

    async def cancel_for(self, request_id: str, tenant: str) -> str:
        """Cancel for a client: sent | flagged | finished | unknown | forbidden. Raise ApiError(503)."""
        control = queue_pb2.Control(cancel=queue_pb2.Control.Cancel(id=request_id, reason="cancelled by its owner"))
        return str(await self.ask(lambda: self._control(request_id, "cancel", control, tenant=tenant)))

    async def record(self, request_id: str) -> dict[str, str]:
        """Return `req:{id}` as text; empty when there is none. Raise ApiError(503)."""
        found = await self.raw_record(request_id)
        return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in found.items()}

    async def raw_record(self, request_id: str) -> dict[bytes, bytes]:
        """Return `req:{id}` as Redis has it, since `delivery` is not text. Raise ApiError(503)."""

        async def read() -> dict[bytes, bytes]:
            return await self._redis.hgetall(self._keys.req(request_id))  # type: ignore[return-value]

        return await self.ask(read)

    def decoded(self, request_id: str, record: dict[bytes, bytes], decode: Callable[[dict[bytes, bytes]], T]) -> T:
        """Return decode(record) of `req:{id}`. Raise ApiError(500) for a record that cannot be read."""
        found = self._letters.read(self._keys.req(request_id), record, decode)
        if found is None:
            raise broken_record()
        return found

    async def read(self, stream: RequestStream) -> None:
        """Fill a stream that gets nothing else from the record of its request. Raise ApiError(503)."""
        record, rows = await self.ask(lambda: _missing(self._redis, self._keys, stream))
        self.decoded(stream.request_id, record, lambda found: fill(stream, found, rows))

    # The working task

    async def _work(self) -> None:
        while True:
            if not self._jobs:
                self._more.clear()
                await self._more.wait()
            job = self._jobs.popleft()
            try:
                await job()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                log.error("a job for Redis was cancelled from within")
            except Exception:
                log.exception("a job for Redis failed")

    def submit(self, job: Callable[[], Awaitable[None]]) -> None:
        self._jobs.append(job)
        self._more.set()

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Queue a question for the working task and wait for the answer. A cancelled caller leaves the question to the
        task.
        """
        if self._cluster.redis_error:
            raise unavailable(f"Redis does not answer: {self._cluster.redis_error}", "redis_unavailable", 2)
        if len(self._jobs) >= MOST_JOBS:
            raise unavailable("too many requests are waiting for Redis; retry later", "redis_unavailable", 2)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def job() -> None:
            if silent := self._cluster.redis_error:  # since it was queued: those behind must not wait as long
                if not answer.done():
                    answer.set_exception(unavailable(f"Redis does not answer: {silent}", "redis_unavailable", 2))
                return
            try:
                result = await question()
            except asyncio.CancelledError:
                if not answer.done():
                    answer.set_exception(unavailable("Redis call interrupted; retry later", "redis_unavailable", 2))
                raise
            except Exception as error:
                if isinstance(error, Unreachable):
                    self._cluster.note_unreachable(str(error) or type(error).__name__)
                if not answer.done():
                    answer.set_exception(failed(error))
            else:
                if not answer.done():
                    answer.set_result(result)

        self.submit(job)
        return await answer

    async def _enqueue(self, spec: GenerationSpec, keys: list[str], arguments: list[Value]) -> Any:
        """Run enqueue.lua, twice at most: a connection that Redis closed shows only at the first use, and an id is
        queued once.
        """
        try:
            return await self.scripts.enqueue(keys, arguments)
        except Unreachable:
            try:
                return await self.scripts.enqueue(keys, arguments)
            except Unreachable:
                # It may be in the queue all the same; its client gets a 503, and asks for it again if it named it.
                if not spec.is_named:
                    self.cancel(spec.id, "its enqueueing got no answer")
                raise

    def _command(self, key: tuple[str, str], send: Callable[[], Awaitable[Any]]) -> None:
        self._put_command(Command(key, send))

    def _put_command(self, command: Command) -> None:
        async def job() -> None:
            try:
                await command.try_send()
            except Unreachable as error:
                self._cluster.note_unreachable(str(error) or type(error).__name__)
                self._retries.keep(command)
            except RedisError as error:
                self._retries.refused(command, error)

        self.submit(job)

    async def _control(
        self, request_id: str, kind: str, control: queue_pb2.Control, *more: Value, tenant: str = "", gateway: str = ""
    ) -> str:
        arguments: list[Value] = [self._keys.prefix, kind, control.SerializeToString(), gateway, tenant, *more]
        reply: bytes = await self.scripts.control([self._keys.req(request_id)], arguments)
        return reply.decode()

    def _register(self, stream: RequestStream) -> None:
        """Route the rows of a request to `stream` from now on, and end the stream that had them before."""
        if before := self._streams.get(stream.request_id):
            before.fail(taken_over(), cut=True)
        self._streams[stream.request_id] = stream
        self._cluster.active = len(self._streams)

    def _forget(self, stream: RequestStream) -> bool:
        """Drop a stream. Return False if another one has taken its place."""
        mine = self._streams.get(stream.request_id, stream) is stream
        if mine:
            self._streams.pop(stream.request_id, None)
            self._cluster.active = len(self._streams)
        return mine

    # The reading task

    async def _read(self) -> None:
        key = self._keys.tokens(self.gateway_id)
        last = b"0-0"  # this id is new, so this is the beginning
        attempt = 0
        while True:
            try:
                reply = await self._reader.xread({key: last}, count=READ_ENTRIES, block=BLOCK_MS)
            except (*Unreachable, RedisError) as error:
                if attempt == 0:
                    log.warning("waiting for Redis to read tokens: %s", error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            if attempt:
                log.info("Redis answers; reading token stream %s from id %s", key, last.decode())
                attempt = 0
            for entry_id, fields in entries_of(reply):
                last = entry_id
                self._metrics.read(entry_id)
                self._letters.read(key, fields, self._deliver)
                await asyncio.sleep(0)  # handlers take what came before the next entry is put in

    def _deliver(self, fields: dict[bytes, bytes]) -> None:
        self._route(decode_batch(fields))

    def _route(self, batch: queue_pb2.TokenBatch) -> None:
        for request_id, first, row in rows_of(batch):
            stream = self._streams.get(request_id)
            if stream is not None:
                self._settle(stream, row, first, stream.offer(row, first))

    def _settle(self, stream: RequestStream, row: Row, first: int, outcome: Offer) -> None:
        if outcome is Offer.DUPLICATE:
            self._metrics.duplicates.inc()
        elif outcome is Offer.GAP:
            stream.put_aside(row, first)
            self._refill(stream)
        elif outcome is Offer.OVERFLOW:
            self._metrics.slow_clients.inc()
            error = slow_client(stream.bound)
            stream.fail(error, cut=True)
            self.close(stream, "" if stream.survives else error.message)

    # Records: gaps and silence

    async def _watch(self) -> None:
        """Retry commands, open gaps and silent requests once a second."""
        while True:
            await asyncio.sleep(EVERY_S)
            self._cluster.unfinished = sum(not stream.done for stream in self._streams.values())
            if self._cluster.redis_error:
                continue
            for command in self._retries.take():
                self._put_command(command)
            now = time.monotonic()
            for stream in self._streams.values():
                if stream.ahead or now - max(stream.heard_at, stream.asked_at) > SILENT_S:
                    self._refill(stream)

    def _refill(self, stream: RequestStream) -> None:
        if stream.refilling or stream.failure is not None:
            return
        stream.refilling = True
        stream.asked_at = time.monotonic()

        async def job() -> None:
            try:
                await self._read_record(stream)
            except (*Unreachable, RedisError) as error:
                log.warning("record of %s not read: %s", stream.request_id, error)
            finally:
                stream.refilling = False

        self.submit(job)

    async def _read_record(self, stream: RequestStream) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return
        record, rows = await _missing(self._redis, self._keys, stream)
        if not record:
            stream.fail(ApiError(500, "request record missing from Redis; send the request again", code="record_lost"))
            return
        # A request that has ended is delivered by any gateway, also by several at once.
        if record.get(b"state") != b"finished" and record.get(b"gateway", b"") != self.gateway_id.encode():
            stream.fail(taken_over(), cut=True)
            return
        try:
            ended = self.decoded(stream.request_id, record, lambda found: ends(found, stream.choices))
            self.decoded(stream.request_id, record, lambda found: (lacks_tokens(stream, found),))
        except ApiError as error:
            stream.fail(error)
            return
        for first, row in rows:
            self._metrics.refilled.inc()
            self._settle(stream, row, first, stream.offer(row, first))
        for item in stream.take_ahead():
            # Still a gap: the missing tokens are not checkpointed yet; the watch reads the record again.
            self._settle(stream, item.row, item.first, stream.offer(item.row, item.first))
        if lacks_tokens(stream, record):
            stream.fail(broken_record())
            return
        for row in ended:
            # Rows of these that the stream still has are late now.
            at = stream.received[row.choice]
            self._settle(stream, row, at, stream.offer(row, at))


async def _missing(redis: Redis, keys: Keys, stream: RequestStream) -> tuple[dict[bytes, bytes], list[tuple[int, Row]]]:
    """Read `req:{id}` (empty when it has expired) and the tokens in `out` that the stream lacks, as (index of the
    first token, row).
    """
    pipe: Any = redis.pipeline(transaction=True)
    pipe.hgetall(keys.req(stream.request_id))
    before, size = list(stream.received), stream.record_bytes
    for choice, have in enumerate(before):
        pipe.getrange(keys.out(stream.request_id, choice), 4 * have, -1)
        if size:
            pipe.getrange(keys.logprobs(stream.request_id, choice), size * have, -1)
    record, *found = await pipe.execute()
    outputs, logprobs = (found[::2], found[1::2]) if size else (found, [b""] * len(found))
    rows = []
    for choice, output in enumerate(outputs):
        if tokens := unpack(output[: len(output) // 4 * 4]).tolist():
            rows.append((before[choice], Row(choice, tokens, logprobs=logprobs[choice][: size * len(tokens)])))
    return record, rows


def failed(error: Exception) -> Exception:
    """Return the error that the client gets when a Redis call failed; any other exception is returned as it is."""
    if isinstance(error, Unreachable):
        return unavailable(f"Redis does not answer: {error}", "redis_unavailable", 2)
    if isinstance(error, RedisError) and "OOM" in str(error):
        return unavailable("Redis has no memory left for new requests; retry later", "redis_memory", 5)
    if isinstance(error, RedisError):
        log.error("Redis refused a request: %s", error)
        return unavailable(f"Redis refuses: {error}", "redis_refused", 5)
    log.error("a Redis call failed", exc_info=error)
    return error


def entries_of(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of an XREAD of one stream, in either of redis-py's two forms."""
    if not reply:
        return []
    streams = list(reply.values()) if isinstance(reply, dict) else [entries for _, entries in reply]
    found = streams[0]
    # RESP3 wraps each stream's entries in one more list.
    return found[0] if isinstance(reply, dict) and found and isinstance(found[0], list) else found

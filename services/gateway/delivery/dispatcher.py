"""Talk to Redis for all requests: one task writes and asks, one task reads tokens. No handler awaits Redis.

A handler that is cancelled (its client left) leaves its work to the dispatcher, so no reply is read by the wrong
request and no cancel is lost. The working task goes round: the most urgent new requests of the backlog in one call,
records of silent requests in another, then jobs in the order in which they were handed over, for as long as those calls
took and with one question at most, so that no kind waits for much of another. Commands about requests (cancel, stop)
outlive a Redis that is away; questions and new requests fail at once with 503. A job that fails ends alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from protos import queue_pb2
from services.gateway.auth import Caller
from services.gateway.cluster import EVERY_S, MAX_MEMORY_SHARE, Cluster
from services.gateway.delivery.stream import (
    Offer,
    RequestStream,
    Row,
    check_logprobs,
    ends,
    fill,
    lacks_tokens,
    rows_of,
    take_cached,
)
from services.gateway.errors import (
    RETRY,
    ApiError,
    broken_record,
    interruption_error,
    other_tokens,
    redis_silent,
    slow_client,
    taken_over,
    unavailable,
)
from services.gateway.metrics import Metrics
from services.gateway.request import Backlog, GenerationSpec, WaitingRequest
from shared.dead_letters import DeadLetters
from shared.keys import CLASSES, Keys
from shared.redis_client import (
    BLOCK_MS,
    KEPT_TTL_MS,
    LIVE_TTL_MS,
    Line,
    Scripts,
    Unreachable,
    Value,
    backoff_s,
    connect,
    place_of,
)
from shared.settings import GatewaySettings
from shared.tasks import end
from shared.wire.columns import unpack
from shared.wire.token_batches import MAX_VOCABULARY, check_tokens, decode_batch

log = logging.getLogger("orcinus.gateway")

MAX_KEPT = 65_536
"""About 1 KiB each."""
MAX_REFUSALS = 60
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
        self._commands: dict[tuple[str, str], Command] = {}

    def __len__(self) -> int:
        return len(self._commands)

    def keep(self, command: Command) -> None:
        """Keep a command for the next round, in place of an earlier one of the same key."""
        earlier = self._commands.pop(command.key, None)
        if earlier is not None:
            command.refusals = max(command.refusals, earlier.refusals)
        elif len(self._commands) >= MAX_KEPT:
            request_id, kind = oldest = next(iter(self._commands))
            del self._commands[oldest]
            log.error("dropping %s of %s: %d commands are waiting for Redis", kind, request_id, MAX_KEPT)
        self._commands[command.key] = command

    def on_refusal(self, command: Command, error: Exception) -> None:
        """Keep a command that Redis refused, until MAX_REFUSALS."""
        request_id, kind = command.key
        command.refusals += 1
        if command.refusals >= MAX_REFUSALS:
            log.error("giving up %s of %s: refused by Redis %d times: %s", kind, request_id, MAX_REFUSALS, error)
            return
        if command.refusals == 1:
            log.warning("retrying %s of %s: refused by Redis: %s", kind, request_id, error)
        self.keep(command)

    def take(self) -> list[Command]:
        """Return all waiting commands and forget them; the caller tries them now."""
        waiting, self._commands = self._commands, {}
        return list(waiting.values())


MAX_QUESTIONS = 4096
ROUND = 64
"""Records read in one round of the working task."""
SILENT_S = 5.0
"""A request unheard of for so long has its record read: its tokens may have left the stream unread. Then again when it
was silent for twice as long, until MAX_SILENT_S: those that wait in a long queue are many."""
MAX_SILENT_S = 30.0
READ_ENTRIES = 64
DELIVER_S = 0.01
"""Time in which entries are delivered before the event loop does other work."""
FLUSH_S = 2.0
"""Time for the last commands at a clean stop."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A call, or a few, that the working task makes."""

    run: Callable[[], Awaitable[None]]
    is_question: bool = False  # a client waits for its answer


@dataclass(slots=True, eq=False)
class Entry(WaitingRequest):
    """One that waits for Redis. arguments: maps the milliseconds left until its deadline to those of enqueue.lua."""

    request_id: str
    is_named: bool  # its client can ask for it again
    keys: list[str]
    arguments: Callable[[int], list[Value]]

    def left_ms(self, now: float) -> int:
        """Return the milliseconds until the deadline, at least 1; 0 without a deadline."""
        return 0 if math.isinf(self.expires_at) else max(1, int(1000 * (self.expires_at - now)))


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
        """Bytes in Redis of requests that have not ended, and log-probabilities of prompts, of all classes together; 0
        means no limit.
        """
        ...

    @property
    def tenant_bytes(self) -> int:
        """The same of its tenant; 0 means no limit."""
        ...

    @property
    def share(self) -> float:
        """Share of a backlog that all requests together may fill when one of this class enters."""
        ...

    @property
    def tenant_share(self) -> float:
        """Share of that for its tenant."""
        ...

    @property
    def is_late(self) -> bool:
        """Whether its class waits too long for a tenant that has at least an even share of the queue."""
        ...


def entry_of(
    keys: Keys,
    gateway_id: str,
    spec: GenerationSpec,
    caller: Caller,
    delivery: bytes,
    bounds: QueueBounds,
    arrived_at: float,
) -> Entry:
    """Return what the backlog keeps of a request. arrived_at: time.monotonic() at its arrival."""
    request, prompts, grammar = spec.to_request(gateway_id, caller.tenant, caller.salt)

    def arguments(left_ms: int) -> list[Value]:
        request.deadline_ms = left_ms  # the client's deadline counts from the arrival here
        return [
            request.SerializeToString(), prompts, spec.prompt_tokens, bounds.class_tokens, spec.cost_tokens,
            *caller.rates.arguments, caller.tenant, spec.priority, delivery, spec.id if spec.background else "",
            bounds.tenant_tokens, int(bounds.is_late), bounds.class_bytes, bounds.tenant_bytes,
            spec.kept_bytes, spec.conversation_bytes, request.sampling.grammar if grammar else "", grammar,
        ]  # fmt: skip

    return Entry(
        tenant=caller.tenant,
        priority=CLASSES.index(spec.priority),
        size_bytes=request.ByteSize() + len(prompts) + len(grammar) + len(delivery) + spec.conversation_bytes,
        survives=spec.survives_client,
        expires_at=arrived_at + spec.deadline_ms / 1000 if spec.deadline_ms else math.inf,
        answer=asyncio.get_running_loop().create_future(),
        request_id=spec.id,
        is_named=spec.is_named,
        keys=[keys.req(spec.id), keys.requests(spec.priority), keys.bucket(caller.bucket), keys.prompt(spec.id)],
        arguments=arguments,
    )


def enqueue_arguments(
    keys: Keys, gateway_id: str, entries: Sequence[Entry], now: float
) -> tuple[list[str], list[Value]]:
    """Return the keys and arguments of enqueue.lua for these entries. now: time.monotonic()."""
    redis_keys = [keys.queue, keys.background, keys.background_of(gateway_id)]
    arguments: list[Value] = [LIVE_TTL_MS, gateway_id, MAX_MEMORY_SHARE]
    for entry in entries:
        redis_keys += entry.keys
        arguments += entry.arguments(entry.left_ms(now))
    return redis_keys, arguments


class Dispatcher:
    """Use every Redis connection that serves requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: str,
        cluster: Cluster,
        metrics: Metrics,
        letters: DeadLetters | None = None,
        clients: Counter[str] | None = None,
        vocab_size: int = MAX_VOCABULARY,
    ) -> None:
        """clients: counts the streams that a client of a tenant waits for, by tenant. vocab_size: of the model."""
        self._vocab_size = vocab_size
        self._letters = letters or DeadLetters()
        self._clients = Counter() if clients is None else clients
        self._settings = settings
        self._keys: Keys = settings.keys
        self._cluster = cluster
        self._metrics = metrics
        self._redis: Redis = connect(settings, connections=1)
        self._reader: Redis = connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
        self._line = Line(self._reader)
        self.scripts = Scripts(self._redis, metrics.call)
        self._jobs: deque[Job] = deque()
        self._questions = 0  # among the jobs
        self._answers: set[asyncio.Future[Any]] = set()  # of questions among the jobs
        self._is_stopping = False
        self._cached_tokens: list[tuple[str, int, int]] = []  # request, choice, prompt tokens that the prefix cache had
        self._backlog: Backlog[Entry] = Backlog()
        self._unread: dict[str, RequestStream] = {}  # their records are to be read
        self._skipped_entry = False  # since the last look of the watch: any request may lack rows of it
        self._has_more = asyncio.Event()
        self._retries = Retries()
        self._streams: dict[str, RequestStream] = {}
        self._keeps_stream = False  # at a stop: the last tokens of a request that goes on may be nowhere else
        self._tasks: list[asyncio.Task[None]] = []
        self.gateway_id = gateway_id

    # Life

    def start(self) -> None:
        self._tasks = [asyncio.create_task(work()) for work in (self._work, self._read, self._watch)]

    async def stop(self) -> None:
        """End the tasks after the queued jobs, and delete this gateway's stream unless a request continues. From now on
        no question and no new request is taken.
        """
        self._is_stopping = True
        if self._tasks and not self._cluster.redis_error:
            on_flush = asyncio.Event()

            async def last() -> None:
                if self._jobs or self._backlog or self._unread:
                    self.submit(last)
                else:
                    on_flush.set()

            self.submit(last)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await on_flush.wait()
        tasks, self._tasks = self._tasks, []
        await end(*tasks)
        while self._backlog:
            batch, late = self._backlog.take(time.monotonic())
            _fail([*batch, *late], stopping_error())
        for answer in list(self._answers):
            if not answer.done():
                answer.set_exception(stopping_error())
        if not self._cluster.redis_error and not self._keeps_stream:
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
        self,
        spec: GenerationSpec,
        stream: RequestStream,
        caller: Caller,
        delivery: bytes,
        bounds: QueueBounds,
        arrived_at: float | None = None,
    ) -> list[Any]:
        """Put the request into its class's stream, unless its id is there. Return the answer of enqueue.lua: `ok`,
        `duplicate` or a refusal, after which the stream gets nothing. Refusals of the backlog have the same form:
        {backlog, *FullBacklog} and {expired}, for a deadline that passed.

        arrived_at: time.monotonic() at its arrival, from which its deadline counts; None means now. Raise
        ApiError(503). `close` has to follow, except after a refusal. A connection that reads the request already keeps
        it: only `adopt` takes it over.
        """
        self._refuse_new()
        stream.is_enqueued = False
        if spec.id not in self._streams:
            self._register(stream)
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        entry = entry_of(self._keys, self.gateway_id, spec, caller, delivery, bounds, arrived_at)
        full = self._backlog.full(entry.tenant, bounds.share, bounds.tenant_share, entry.size_bytes)
        if full is None:
            self._backlog.put(entry)
            self._has_more.set()
            answer = await self._wait_answer(entry)
        else:
            answer = [b"backlog", *full]
        match answer[0]:
            case b"ok":
                stream.is_enqueued, stream.allowance = True, (answer[2], answer[3])
                if self._streams.get(spec.id) is not stream:  # the one before it was refused
                    self._register(stream)
            case b"duplicate":
                stream.is_enqueued = True
            case _:
                self._forget(stream)
        return answer

    async def _wait_answer(self, entry: Entry) -> list[Any]:
        """Wait for the answer to an entry of the backlog, until its deadline. Raise ApiError(503)."""
        left_s = None if math.isinf(entry.expires_at) else entry.expires_at - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                answer: list[Any] = await entry.answer
                return answer
        except asyncio.CancelledError:
            if not entry.survives:
                self._backlog.drop(entry)
            raise
        except TimeoutError:
            self._backlog.drop(entry)
            if not entry.is_named:  # it may be in the call that runs now
                self.cancel(entry.request_id, "its deadline passed before it was enqueued")
            return [b"expired"]

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
        self._keeps_stream |= not (cancel_reason or stream.is_done)
        if self._forget(stream) and cancel_reason:
            self.cancel(stream.request_id, cancel_reason)

    def cancel(self, request_id: str, reason: str) -> None:
        """Cancel a request that this gateway delivers, without waiting."""
        control = queue_pb2.Control(cancel=queue_pb2.Control.Cancel(id=request_id, reason=reason))
        self._command(
            (request_id, "cancel"), lambda: self._control(request_id, "cancel", control, gateway=self.gateway_id)
        )

    def stop_choice(self, request_id: str, choice: int, at_token: int, on_written: Callable[[], None]) -> None:
        """End a choice at a stop string: tokens 0 .. at_token - 1 stay.

        on_written: called once Redis has the command.
        """
        stop = queue_pb2.Control.Stop(id=request_id, choice=choice, at_token=at_token)
        control = queue_pb2.Control(stop=stop)

        async def send() -> None:
            if (
                await self._control(request_id, "stop", control, choice, at_token, gateway=self.gateway_id)
                != "elsewhere"
            ):
                on_written()
            elif stream := self._streams.get(request_id):
                stream.fail(taken_over(), is_cut=True)

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

    def decode(self, request_id: str, record: dict[bytes, bytes], decode: Callable[[dict[bytes, bytes]], T]) -> T:
        """Return decode(record) of `req:{id}`. Raise ApiError(500) for a record that cannot be read."""
        value = self._letters.read(self._keys.req(request_id), record, decode)
        if value is None:
            raise broken_record()
        return value

    async def read(self, stream: RequestStream) -> None:
        """Fill a stream that gets nothing else from the record of its request. Raise ApiError(503)."""

        async def question() -> Missing:
            (found,) = await _read_missing(self._redis, self._keys, [stream])
            if isinstance(found, RedisError):
                raise found
            return found

        record, rows = await self.ask(question)
        self._check_outputs(stream, rows)
        self.decode(stream.request_id, record, lambda found: fill(stream, found, rows))

    def _check_outputs(self, stream: RequestStream, rows: list[tuple[int, Row]]) -> None:
        """Raise ApiError(500) for tokens of `out`, or log-probabilities, that no scheduler wrote."""

        def check(row: Row) -> Row:
            check_tokens(row.tokens, self._vocab_size)
            check_logprobs([(stream, row)], self._vocab_size)
            return row

        for _, row in rows:
            if self._letters.read(self._keys.out(stream.request_id, row.choice), row, check) is None:
                raise broken_record()

    async def prompt_logprobs(self, request_id: str, prompts: int) -> list[bytes]:
        """Return the records of the log-probabilities of each prompt; empty without any. Raise ApiError(503)."""
        keys = [self._keys.prompt_logprobs(request_id, prompt) for prompt in range(prompts)]

        async def question() -> list[Any]:
            pipe: Any = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.get(key)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            return replies

        replies = await self.ask(question)
        return [self._letters.read(key, reply or b"", bytes) or b"" for key, reply in zip(keys, replies, strict=True)]

    # The working task

    async def _work(self) -> None:
        while True:
            if not (self._jobs or self._backlog or self._unread):
                self._has_more.clear()
                await self._has_more.wait()
            begin = time.monotonic()
            if self._backlog:
                await self._attempt(self._enqueue_batch)
            if self._unread:
                await self._attempt(self._read_batch)
            await self._run_jobs(time.monotonic() - begin)

    async def _run_jobs(self, share_s: float) -> None:
        """Run jobs for about so long: at least one if there is any, at most one question, and none that comes now."""
        end, may_ask = time.monotonic() + share_s, True
        for _ in range(len(self._jobs)):
            if self._jobs[0].is_question and not may_ask:
                return
            job = self._jobs.popleft()
            if job.is_question:
                self._questions, may_ask = self._questions - 1, False
            await self._attempt(job.run)
            if time.monotonic() >= end:
                return

    async def _attempt(self, job: Callable[[], Awaitable[None]]) -> None:
        """Run a job; log its failure."""
        try:
            await job()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            log.error("a job for Redis was cancelled from within")
        except Exception:
            log.exception("a job for Redis failed")

    def submit(self, action: Callable[[], Awaitable[None]]) -> None:
        self._put(Job(action))

    def _put(self, job: Job) -> None:
        self._jobs.append(job)
        self._has_more.set()

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Queue a question for the working task and wait for the answer. A cancelled caller leaves the question to the
        task.
        """
        self._refuse_new()
        if self._questions >= MAX_QUESTIONS:
            text = f"too many questions: {MAX_QUESTIONS} are waiting for Redis; retry after the time in Retry-After"
            raise ApiError(429, text, code="overloaded", retry_after_s=2)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

        async def job() -> None:
            if silent := self._cluster.redis_error:  # since it was queued: those behind must not wait as long
                if not answer.done():
                    answer.set_exception(redis_silent(silent))
                return
            try:
                result = await question()
            except asyncio.CancelledError:
                if not answer.done():
                    answer.set_exception(interruption_error())
                raise
            except Exception as error:
                if isinstance(error, Unreachable):
                    self._cluster.note_unreachable(str(error) or type(error).__name__)
                if not answer.done():
                    answer.set_exception(client_error(error))
            else:
                if not answer.done():
                    answer.set_result(result)

        self._questions += 1
        self._put(Job(job, is_question=True))
        return await answer

    def _refuse_new(self) -> None:
        """Raise ApiError(503) once the stop has begun, and while Redis does not answer."""
        if self._is_stopping:
            raise stopping_error()
        self._refuse_without_redis()

    def _refuse_without_redis(self) -> None:
        """Raise ApiError(503) while Redis does not answer."""
        if silent := self._cluster.redis_error:
            raise redis_silent(silent)

    async def _enqueue_batch(self) -> None:
        """Put the next requests of the backlog into Redis by one call, and answer each."""
        begin = time.monotonic()
        batch, late = self._backlog.take(begin)
        for entry in late:
            _set_result(entry.answer, [b"expired"])
        if not batch:
            return
        try:
            self._refuse_without_redis()
            answers = await self._enqueue(*enqueue_arguments(self._keys, self.gateway_id, batch, begin))
        except asyncio.CancelledError:
            _fail(batch, interruption_error())
            raise
        except Exception as error:
            if isinstance(error, Unreachable):
                self._cluster.note_unreachable(str(error) or type(error).__name__)
                # They may be in the queue all the same; a client gets a 503, and asks again if it named its request.
                for entry in batch:
                    if not entry.is_named:
                        self.cancel(entry.request_id, "its enqueueing got no answer")
            _fail(batch, error if isinstance(error, ApiError) else client_error(error))
            return
        self._backlog.note_departures(len(batch), time.monotonic() - begin)
        for entry, answer in zip(batch, answers, strict=True):
            if answer[0] == b"error":
                _fail([entry], client_error(ResponseError(answer[1].decode("utf-8", "replace"))))
            else:
                _set_result(entry.answer, answer)

    async def _enqueue(self, keys: list[str], arguments: list[Value]) -> list[list[Any]]:
        """Run enqueue.lua, twice at most: a connection that Redis closed shows only at the first use, and an id is
        queued once.
        """
        try:
            return list(await self.scripts.enqueue(keys, arguments))
        except Unreachable:
            return list(await self.scripts.enqueue(keys, arguments))

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
                self._retries.on_refusal(command, error)

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
            before.fail(taken_over(), is_cut=True)
            self._forget(before)
        self._streams[stream.request_id] = stream
        if stream.client:
            self._clients[stream.client] += 1
        self._cluster.active = len(self._streams)

    def _forget(self, stream: RequestStream) -> bool:
        """Drop a stream. Return False if another one has taken its place."""
        is_current = self._streams.get(stream.request_id, stream) is stream
        if is_current:
            if self._streams.pop(stream.request_id, None) and stream.client:
                self._clients[stream.client] -= 1
                if not self._clients[stream.client]:
                    del self._clients[stream.client]
            self._cluster.active = len(self._streams)
        return is_current

    # The reading task

    async def _read(self) -> None:
        key = self._keys.tokens(self.gateway_id)
        last = b"0-0"  # this id is new, so this is the beginning
        attempt = 0
        while True:
            try:
                reply = await self._line("XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", key, last)
                newest = [] if reply else await self._line("XREVRANGE", key, "+", "-", "COUNT", 1)
            except (*Unreachable, RedisError) as error:
                if attempt == 0:
                    log.warning("waiting for Redis to read tokens: %s", error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            if attempt:
                log.info("Redis answers; reading token stream %s from id %s", key, last.decode())
                attempt = 0
            if newest and place_of(newest[0][0]) < place_of(last):
                # A script set the stream back, or Redis lost it with its clock behind. What was read before is dropped.
                log.warning("token stream %s ends before id %s; reading it from its beginning", key, last.decode())
                last = b"0-0"
            begin = time.monotonic()
            for entry_id, fields in entries_of(reply):
                last = entry_id
                self._metrics.read(entry_id)
                is_crowded = self._letters.read(key, fields, self._deliver)
                self._skipped_entry |= is_crowded is None
                # One entry a turn would fall behind the steps while new requests make the turns long.
                if is_crowded or time.monotonic() - begin > DELIVER_S:
                    await asyncio.sleep(0)
                    begin = time.monotonic()

    def _deliver(self, fields: dict[bytes, bytes]) -> bool:
        """Route an entry. Return whether a handler has to take rows before more come."""
        batch = decode_batch(fields, self._vocab_size)
        rows = list(rows_of(batch))
        streams = ((self._streams.get(request_id), row) for request_id, _, row in rows)
        check_logprobs(((stream, row) for stream, row in streams if stream is not None), self._vocab_size)
        return self._route(rows)

    def _route(self, rows: list[tuple[str, int, Row]]) -> bool:
        is_crowded = False
        for request_id, first, row in rows:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._settle(stream, row, first, stream.offer(row, first))
                is_crowded |= stream.is_crowded
                if row.cached_tokens:
                    self._keep_cached(request_id, row)
        return is_crowded

    def _keep_cached(self, request_id: str, row: Row) -> None:
        """Have the record say what the prefix cache had, for an answer that is read again or elsewhere."""
        if not self._cached_tokens:
            self.submit(self._write_cached)
        self._cached_tokens.append((request_id, row.choice, row.cached_tokens))

    async def _write_cached(self) -> None:
        batch, self._cached_tokens = self._cached_tokens, []
        pipe: Any = self._redis.pipeline(transaction=False)
        for request_id, choice, cached_tokens in batch:
            key = self._keys.req(request_id)
            pipe.hset(key, f"cached:{choice}", cached_tokens)
            pipe.pexpire(key, KEPT_TTL_MS, nx=True)  # of no effect but on a record that had expired
        try:
            await pipe.execute(raise_on_error=False)
        except (*Unreachable, RedisError) as error:
            log.warning("cached tokens of %d requests not written: %s", len(batch), error)

    def _settle(self, stream: RequestStream, row: Row, first: int, outcome: Offer) -> None:
        if outcome is Offer.DUPLICATE:
            self._metrics.duplicates.inc()
        elif outcome is Offer.GAP:
            stream.put_aside(row, first)
            self._refill(stream)
        elif outcome is Offer.OTHER_TOKENS:
            stream.fail(error := other_tokens(), is_cut=True)
            self.close(stream, error.message)
        elif outcome is Offer.OVERFLOW:
            self._metrics.slow_clients.inc()
            error = slow_client(stream.max_rows)
            stream.fail(error, is_cut=True)
            self.close(stream, "" if stream.survives else error.message)

    # Records: gaps, skipped entries and silence

    async def _watch(self) -> None:
        """Once a second, retry commands and read the records of requests with gaps, of silent ones, and of all behind
        an entry that was skipped.
        """
        while True:
            await asyncio.sleep(EVERY_S)
            self._cluster.unfinished_count = sum(not stream.is_done for stream in self._streams.values())
            if self._cluster.redis_error:
                continue
            for command in self._retries.take():
                self._put_command(command)
            now = time.monotonic()
            skipped_entry, self._skipped_entry = self._skipped_entry, False
            for stream in self._streams.values():
                is_silent = now - max(stream.last_row_at, stream.last_read_at) > _patience_s(stream)
                if skipped_entry or stream.ahead or is_silent:
                    self._refill(stream)

    def _refill(self, stream: RequestStream) -> None:
        """Have the record of a request read, together with others."""
        if stream.is_refilling or stream.failure is not None or not stream.is_enqueued:
            return
        stream.is_refilling = True
        stream.last_read_at = time.monotonic()
        if (before := self._unread.get(stream.request_id)) is not None:
            before.is_refilling = False
        self._unread[stream.request_id] = stream
        self._has_more.set()

    async def _read_batch(self) -> None:
        """Read the next records by one call, and give each request what it lacks."""
        batch = [self._unread.pop(name) for name in list(self._unread)[:ROUND]]
        streams = [one for one in batch if self._streams.get(one.request_id) is one]
        try:
            for stream, missing in zip(streams, await _read_missing(self._redis, self._keys, streams), strict=True):
                if isinstance(missing, Exception):
                    log.warning("record of %s not read: %s", stream.request_id, missing)
                else:
                    self._take_record(stream, *missing)
        except (*Unreachable, RedisError) as error:
            log.warning("records of %d requests not read: %s", len(streams), error)
        finally:
            for stream in batch:
                stream.is_refilling = False

    def _take_record(self, stream: RequestStream, record: dict[bytes, bytes], rows: list[tuple[int, Row]]) -> None:
        if b"state" not in record:
            stream.fail(ApiError(500, "request record missing from Redis; send the request again", code="record_lost"))
            return
        # A request that has ended is delivered by any gateway, also by several at once.
        if record.get(b"state") != b"finished" and record.get(b"gateway", b"") != self.gateway_id.encode():
            stream.fail(taken_over(), is_cut=True)
            return
        try:
            self._check_outputs(stream, rows)
            end_rows = self.decode(stream.request_id, record, lambda found: ends(found, stream.choices, rows))
            self.decode(stream.request_id, record, lambda found: (lacks_tokens(stream, found),))
            self.decode(stream.request_id, record, lambda found: take_cached(stream, found))
        except ApiError as error:
            stream.fail(error)
            return
        for first, row in rows:
            self._metrics.refills.inc()
            self._settle(stream, row, first, stream.offer(row, first))
        for item in stream.take_ahead():
            # Still a gap: the missing tokens are not checkpointed yet; the watch reads the record again.
            self._settle(stream, item.row, item.first_index, stream.offer(item.row, item.first_index))
        if lacks_tokens(stream, record):
            stream.fail(broken_record())
            return
        for row in end_rows:
            # Rows of these that the stream still has are late now.
            at = stream.received_tokens[row.choice]
            self._settle(stream, row, at, stream.offer(row, at))


def _patience_s(stream: RequestStream) -> float:
    """Return how long a request may be silent before its record is read, and read again."""
    return min(MAX_SILENT_S, max(SILENT_S, stream.last_read_at - stream.last_row_at))


def _set_result(answer: asyncio.Future[T], value: T) -> None:
    """Answer a handler that may have gone."""
    if not answer.done():
        answer.set_result(value)


def _fail(entries: Sequence[WaitingRequest], error: Exception) -> None:
    """Answer the handlers of these, which may have gone, with an error."""
    for entry in entries:
        if not entry.answer.done():
            entry.answer.set_exception(error)


Missing = tuple[dict[bytes, bytes], list[tuple[int, Row]]]


async def _read_missing(redis: Redis, keys: Keys, streams: Sequence[RequestStream]) -> list[Missing | RedisError]:
    """Read of each stream `req:{id}` (empty when it has expired) and the tokens in `out` that it lacks, as (index of
    the first token, row); where Redis refused that, the error.
    """
    if not streams:
        return []
    pipe: Any = redis.pipeline(transaction=True)
    before = [list(stream.received_tokens) for stream in streams]
    for stream, token_counts in zip(streams, before, strict=True):
        pipe.hgetall(keys.req(stream.request_id))
        for choice, have in enumerate(token_counts):
            pipe.getrange(keys.out(stream.request_id, choice), 4 * have, -1)
            if size := stream.record_bytes:
                pipe.getrange(keys.logprobs(stream.request_id, choice), size * have, -1)
    replies = iter(await pipe.execute(raise_on_error=False))
    records: list[Missing | RedisError] = []
    for stream, token_counts in zip(streams, before, strict=True):
        parts = 2 if stream.record_bytes else 1
        record, *stored = (next(replies) for _ in range(1 + parts * len(token_counts)))
        error = next((reply for reply in (record, *stored) if isinstance(reply, RedisError)), None)
        records.append(error or (record, _rows(stream, token_counts, stored)))
    return records


def _rows(stream: RequestStream, before: list[int], values: list[bytes]) -> list[tuple[int, Row]]:
    """Return the tokens of each choice behind those it had `before`. values: of each its tokens, and records if any."""
    size = stream.record_bytes
    outputs, logprobs = (values[::2], values[1::2]) if size else (values, [b""] * len(values))
    rows = []
    for choice, output in enumerate(outputs):
        if tokens := unpack(output[: len(output) // 4 * 4]).tolist():
            rows.append((before[choice], Row(choice, tokens, logprobs=logprobs[choice][: size * len(tokens)])))
    return rows


def stopping_error() -> ApiError:
    """Return the 503 for a request that came as its gateway ended, or let go of its model."""
    return unavailable("gateway: it stops, or lets go of the model; send the request again", "redis_unavailable", 2)


def client_error(error: Exception) -> Exception:
    """Return the error that the client gets when a Redis call failed; any other exception is returned as it is."""
    if isinstance(error, Unreachable):
        return redis_silent(error)
    if isinstance(error, RedisError) and "OOM" in str(error):
        return unavailable("Redis has no memory left for new requests; " + RETRY, "redis_memory", 5)
    if isinstance(error, RedisError):
        log.error("Redis refused a request: %s", error)
        return unavailable(f"Redis refuses: {error}; {RETRY}", "redis_refused", 5)
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

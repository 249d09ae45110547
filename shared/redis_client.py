"""Connections to Redis and the scripts that services run there.

Every service connects through `connect`: explicit time-outs, a small pool, and no hidden retries, because a repeated
XADD adds a second entry. Scripts run by EVALSHA. If Redis does not know a script, it is loaded and the call is repeated
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import hiredis
from redis._parsers import BaseParser
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    DataError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import LeaseLostError
from shared.settings import CommonSettings

BLOCK_MS = 1000
"""Time that a blocking read waits, well under the socket time-out."""

LIVE_TTL_MS = 24 * 3600 * 1000
"""Lifetime of the records of queued and running requests."""

KEPT_TTL_MS = 300 * 1000
"""Lifetime of the records of finished requests, for clients that reconnect."""

STREAM_KEEP_MS = 30 * 1000
"""Time span of the token streams; older tokens are in `out`."""

PROMPT_APART_BYTES = 64 * 1024
"""Larger prompts are written to a separate key."""

GRAMMAR_APART_BYTES = 1024
"""Longer grammars are written to `queue:grammars`, once for all requests of a tenant."""

Unreachable = (RedisConnectionError, RedisTimeoutError, OSError)
"""Redis did not answer."""

Unavailable = (*Unreachable, ResponseError)
"""Redis did not answer, or refused the call; `temporary` tells whether a later call may succeed."""

REFUSALS = ("OOM", "MISCONF", "READONLY", "LOADING", "NOPERM", "NOREPLICAS", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN")
HIGHEST_ID = b"18446744073709551615-18446744073709551615"
"""XADD adds nothing behind an entry with it. Scripts that add one set the stream back (`set_back` of lib.lua)."""
WRONG_TYPE = "WRONGTYPE"
"""A key of another type than its writers give it; `remove_foreign` of dead_letters.py deletes it."""
GONE = ("NOGROUP", "UNBLOCKED")
"""Said where a stream and its consumer group were deleted, before the call or while it waited."""
Value = bytes | str | int | float
T = TypeVar("T")


class _Client(Redis):
    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections; a Redis that hangs must not keep a service from the rest of its end."""
        with contextlib.suppress(*Unreachable):  # TLS waits for the server's answer
            await super().aclose(close_connection_pool)


def connect(settings: CommonSettings, connections: int = 4, socket_timeout_s: float = 5.0) -> Redis:
    """Return a client with a bounded pool. It connects at the first call. Replies are bytes.

    Its `aclose` closes the connections of the pool, those of lines as well.
    """
    extra: dict[str, Any] = settings.redis_options()
    pool = BlockingConnectionPool.from_url(
        settings.redis_url,
        max_connections=connections,
        timeout=socket_timeout_s,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        **extra,
    )
    return _Client.from_pool(pool)


def temporary(error: BaseException) -> bool:
    """Return whether the same call may succeed later: full memory or disk, a replica, a start in progress, a key of
    another type, which the scheduler deletes, a deleted stream, which the scheduler makes again.
    """
    if isinstance(error, (*Unreachable, OutOfMemoryError, ReadOnlyError, NoPermissionError)):
        return True
    return isinstance(error, ResponseError) and any(word in str(error) for word in (*REFUSALS, *GONE, WRONG_TYPE))


def backoff_s(attempt: int, max_s: float = 0.5) -> float:
    """Return the pause before a further attempt: 0.05 s, 0.1 s, ... times a random number in [0.5, 1].

    The pauses of services that wait for each other add up. Streams continue within 2 s after Redis is back only if each
    pause is far below that.
    """
    return float(min(max_s, 0.05 * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret


def place_of(entry_id: bytes) -> tuple[int, int]:
    """Return the id of a stream's entry as numbers: they are in the order of the stream.

    >>> place_of(b"9-10") < place_of(b"10-9")
    True
    """
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


async def persist(
    purpose: str,
    action: Callable[[], Awaitable[T]],
    log: logging.Logger,
    is_stopping: Callable[[], bool] = lambda: False,
) -> T:
    """Repeat an idempotent action until Redis answers; log the first failure and the recovery.

    purpose: completes the log line "waiting for Redis to ...". Raises asyncio.CancelledError if `is_stopping`
    becomes true between two attempts.
    """
    attempt = 0
    while True:
        try:
            result = await action()
        except Unavailable as error:
            if not temporary(error):
                raise
            if attempt == 0:
                log.warning("waiting for Redis to %s: %s", purpose, error)
            if is_stopping():
                raise asyncio.CancelledError from error
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1
            continue
        if attempt:
            log.info("Redis is back: %s", purpose)
        return result


_INCOMPLETE = object()


class Wire(asyncio.Protocol):
    """The socket of a connection that redis-py has made, for one call at a time, past redis-py's streams.

    It takes the socket from the private `_writer` of redis-py's connection; the end of the socket is passed on to the
    protocol before, for which that writer waits as it closes. Errors of Redis come from redis-py's own parser.
    """

    def __init__(self, connection: Connection) -> None:
        """Take the socket. The connection closes it."""
        self._transport: Any = cast(Any, connection)._writer.transport
        self._protocol_before: Any = self._transport.get_protocol()
        self._reader = hiredis.Reader(replyError=BaseParser.parse_error, notEnoughData=_INCOMPLETE)
        self._future: asyncio.Future[Any] | None = None  # of the call without an answer
        self._error: Exception | None = None  # the end of the connection
        self._transport.set_protocol(self)

    async def call(self, words: Sequence[Value], deadline_at: float | None) -> Any:
        """Send a command and return the answer, which may be an error. No other call may be waiting.

        deadline_at: by the loop's clock; None means never. Raises DataError for words that Redis cannot take,
        TimeoutError at the deadline, and RedisConnectionError for a broken connection. After an error and after a
        cancellation the connection is of no use.
        """
        if self._error is not None:
            raise self._error
        try:
            command = hiredis.pack_command(cast(Any, tuple(words)))
        except TypeError as error:
            raise DataError(f"{words[0]!s}: {error}") from error
        loop = asyncio.get_running_loop()
        future = self._future = loop.create_future()
        timer = None if deadline_at is None else loop.call_at(deadline_at, _fail, future, TimeoutError())
        try:
            self._transport.write(command)
            return await future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()

    # Of asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """Give an answer to its call. What is raised here ends the connection, as the event loop does it."""
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not _INCOMPLETE:
            if isinstance(answer, hiredis.PushNotification):
                continue
            future, self._future = self._future, None
            if future is None:
                raise RedisConnectionError("Redis sent an answer without a call")
            if not future.done():  # else the call was cancelled or is too late
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = RedisConnectionError(f"the connection to Redis was closed{f': {exc}' if exc else ''}")
        if self._future is not None:
            _fail(self._future, self._error)
        self._protocol_before.connection_lost(exc)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class Line:
    """A connection for one task that makes one call after another.

    A call of a client brings the pool's lock, a task, two time-outs, streams, metrics and retries with it. It takes
    120 us of CPU time, and that of a line 29: medians of ten times 1,000 XADD of 200 bytes to a Redis of the same
    machine, two shared cores of a Xeon with AMX, 2026-11-29.
    """

    def __init__(self, client: Redis) -> None:
        """Take a place in the client's pool with the first call; the client's `aclose` closes it."""
        self._client = client
        self._timeout_s: float | None = client.connection_pool.connection_kwargs["socket_timeout"]
        self._connection: Connection | None = None
        self._wire: Wire | None = None
        self._is_busy = False

    async def __call__(self, *words: Value) -> Any:
        """Send a command and return the answer. Raises what redis-py raises, and RuntimeError while a call waits.

        The time-out is that of the connection and the answer together.
        """
        if self._is_busy:
            raise RuntimeError(f"{words[0]!s}: a line takes one call at a time; use one line for each task")
        self._is_busy = True
        deadline_at = None if self._timeout_s is None else asyncio.get_running_loop().time() + self._timeout_s
        try:
            wire = self._wire or await self._connect(deadline_at)
            answer = await wire.call(words, deadline_at)
        except BaseException as error:  # an answer may still come, and would be taken for that to the next call
            missing = "connection for" if self._wire is None else "answer to"
            await self._disconnect()
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError(f"no {missing} {words[0]!s} within {self._timeout_s} s") from error
            raise
        finally:
            self._is_busy = False
        if isinstance(answer, Exception):
            raise answer
        callback = self._client.response_callbacks.get(str(words[0]))
        return answer if callback is None else callback(answer)

    async def _connect(self, deadline_at: float | None) -> Wire:
        async with asyncio.timeout_at(deadline_at):
            if self._connection is None:
                pool = self._client.connection_pool
                self._connection = await pool.get_connection()  # type: ignore[no-untyped-call]  # redis-py has no type
            await self._connection.connect()
        self._wire = Wire(self._connection)
        return self._wire

    async def _disconnect(self) -> None:
        self._wire = None
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)


def _ignore(_name: str, _seconds: float) -> None:
    """Ignore the time of a script's call."""


def source(name: str) -> bytes:
    """Return the text of a script: what the scripts share, then its own file."""
    folder = Path(__file__).parent / "lua"
    return (folder / "lib.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()


class Script:
    """One Lua file. A call runs it by EVALSHA, over a line where there is one."""

    def __init__(
        self, client: Redis, name: str, observe: Callable[[str, float], None] = _ignore, line: Line | None = None
    ) -> None:
        self.name = name
        self._line = line
        self._observe = observe
        self._client = client
        self._source = source(name)
        self._sha = hashlib.sha1(self._source).hexdigest()  # noqa: S324 - Redis names scripts so

    async def __call__(self, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """Run the script and return its answer. Raises LeaseLostError if the script refused an old epoch."""
        begin = time.perf_counter()
        try:
            try:
                answer = await self._run(keys, args)
            except NoScriptError:
                await self._client.script_load(cast(Any, self._source))
                answer = await self._run(keys, args)
            self._observe(self.name, time.perf_counter() - begin)
            return answer
        except ResponseError as error:
            if "FENCED" in str(error):
                raise LeaseLostError(str(error)) from error
            raise

    def _run(self, keys: Sequence[str], args: Sequence[Value]) -> Awaitable[Any]:
        if self._line is not None:
            return self._line("EVALSHA", self._sha, len(keys), *keys, *args)
        return self._client.evalsha(self._sha, len(keys), *keys, *args)


class Scripts:
    """All scripts over one client. `shared/lua/NAME.lua` documents the arguments and the answer of each."""

    def __init__(
        self, client: Redis, observe: Callable[[str, float], None] = _ignore, publish_line: Line | None = None
    ) -> None:
        """observe: called with the name and the seconds of each answered call. publish_line: for `publish`, which runs
        once an iteration and never twice at a time.
        """
        self.enqueue = Script(client, "enqueue", observe)
        self.claim = Script(client, "claim", observe)
        self.publish = Script(client, "publish", observe, publish_line)
        self.release = Script(client, "release", observe)
        self.control = Script(client, "control", observe)
        self.lease = Script(client, "lease", observe)
        self.take_worker = Script(client, "take_worker", observe)
        self.give_worker = Script(client, "give_worker", observe)
        self.fenced = Script(client, "fenced", observe)
        self.give = Script(client, "give", observe)
        self.drop = Script(client, "drop", observe)
        self.recount = Script(client, "recount", observe)
        self.keep = Script(client, "keep", observe)
        self.forget = Script(client, "forget", observe)

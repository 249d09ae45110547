"""A task's own connection to Redis: answers belong to their calls, whatever happened to the calls before."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import hiredis
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from deploy import certs
from shared.redis_client import Line, Scripts, connect
from shared.settings import SchedulerSettings
from tests.support.stack import RedisServer


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    connected = connect(SchedulerSettings(redis_url=redis_server.url), connections=2, socket_timeout_s=20.0)
    yield connected
    await connected.aclose()


async def test_line_answers_as_the_client_does_for_all_types(client: Redis) -> None:
    line = Line(client)
    for words in (("SET", "a", b"\xff\x00"), ("SET", "b", 7), ("SET", "c", 1.5), ("SET", "d", "ü")):
        assert await line(*words)
    assert [await line("GET", name) for name in "abcd"] == [b"\xff\x00", b"7", b"1.5", "ü".encode()]
    await client.xadd("stream", {"f": b"v"})
    assert await line("XREAD", "COUNT", 5, "STREAMS", "stream", "0-0") == await client.xread({"stream": "0-0"}, 5)
    assert await line("XREAD", "COUNT", 5, "STREAMS", "none", "0-0") == await client.xread({"none": "0-0"}, 5)


async def test_refused_call_leaves_the_line_as_it_was(client: Redis) -> None:
    line = Line(client)
    name = await line("CLIENT", "ID")
    with pytest.raises(NoScriptError):
        await line("EVALSHA", "0" * 40, 0)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await client.set("text", "x")
        await line("LPUSH", "text", 1)
    assert await line("CLIENT", "ID") == name


async def blocked(client: Redis, line: Line) -> asyncio.Task[object]:
    """Return the task of a call that waits in Redis."""
    await client.delete("list")
    assert await line("PING")
    task: asyncio.Task[object] = asyncio.create_task(line("BLPOP", "list", 0))
    async with asyncio.timeout(60):
        while not (await client.info("clients"))["blocked_clients"]:
            await asyncio.sleep(0.01)
    return task


async def test_cancelled_call_keeps_its_answer_from_the_next(client: Redis) -> None:
    line = Line(client)
    call = await blocked(client, line)
    call.cancel()
    await asyncio.wait({call})
    await client.rpush("list", "late")
    assert await line("ECHO", "mine") == b"mine"


async def test_second_call_at_a_time_is_refused(client: Redis) -> None:
    line = Line(client)
    call = await blocked(client, line)
    with pytest.raises(RuntimeError, match="one call at a time"):
        async with asyncio.timeout(10):
            await line("ECHO", "second")
    await client.rpush("list", "first")
    assert await call == (b"list", b"first")
    assert await line("ECHO", "mine") == b"mine"


async def test_close_of_the_client_ends_a_waiting_call(redis_server: RedisServer, client: Redis) -> None:
    other = connect(SchedulerSettings(redis_url=redis_server.url), connections=1, socket_timeout_s=60.0)
    call = await blocked(client, Line(other))
    await other.aclose()
    with pytest.raises(RedisConnectionError):
        async with asyncio.timeout(20):
            await call


async def test_words_that_redis_cannot_take_are_refused(client: Redis) -> None:
    line = Line(client)
    with pytest.raises(DataError, match="SET"):
        await line("SET", "a", None)  # type: ignore[arg-type]  # the refused type
    assert await line("ECHO", "mine") == b"mine"


async def test_missing_connection_is_named_at_the_deadline(redis_server: RedisServer) -> None:
    client = connect(SchedulerSettings(redis_url=redis_server.url), connections=1, socket_timeout_s=0.5)
    held = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]  # redis-py has no type there
    with pytest.raises(RedisTimeoutError, match=r"no connection for PING within 0\.5 s"):
        await Line(client)("PING")
    await client.connection_pool.release(held)
    await client.aclose()


async def test_silent_server_is_a_timeout_and_then_forgotten(redis_server: RedisServer) -> None:
    client = connect(SchedulerSettings(redis_url=redis_server.url), connections=1, socket_timeout_s=1.0)
    line = Line(client)
    with pytest.raises(RedisTimeoutError, match=r"no answer to BLPOP within 1\.0 s"):
        await line("BLPOP", "none", 0)
    redis_server.client.rpush("none", "late")
    assert await line("ECHO", "mine") == b"mine"
    await client.aclose()


async def test_broken_connection_is_an_error_once(client: Redis) -> None:
    line = Line(client)
    await client.client_kill_filter(_id=await line("CLIENT", "ID"))
    with pytest.raises((RedisConnectionError, OSError)):
        await line("ECHO", "lost")
    assert await line("ECHO", "mine") == b"mine"


async def test_script_over_a_line_is_loaded_where_redis_forgot_it(client: Redis) -> None:
    scripts = Scripts(client, publish_line=Line(client))
    await client.script_flush()
    with pytest.raises(Exception, match="FENCED"):
        await scripts.publish(["lease", "queue"], [1, "p:"])


class ScriptedServer:
    """Answers ECHO and what redis-py asks at a connect, and WAIT before it reads no more.

    To GET it writes the pieces of `answer`, one after another.
    """

    def __init__(self, answer: Sequence[bytes], ends: bool = False) -> None:
        """ends: whether the server closes the connection behind `answer`."""
        self._answer = answer
        self._ends = ends
        self.tasks: set[asyncio.Task[None] | None] = set()
        self.over = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())
        commands = hiredis.Reader()
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(4096):
                commands.feed(data)
                while words := commands.gets():
                    match words[0]:
                        case b"GET":
                            for piece in self._answer:
                                writer.write(piece)
                                await asyncio.sleep(0)  # the client may read between two pieces
                            if self._ends:
                                return
                        case b"WAIT":  # and then hang
                            writer.write(b":0\r\n")
                            await writer.drain()
                            cast(asyncio.Transport, writer.transport).pause_reading()
                            await self.over.wait()
                            return
                        case b"ECHO":
                            writer.write(b"$%d\r\n%s\r\n" % (len(words[1]), words[1]))
                        case _:
                            writer.write(b"+OK\r\n")


@pytest.fixture(params=["redis", "rediss"])
async def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def scripted(scheme: str, folder: Path, answer: Sequence[bytes], ends: bool = False) -> AsyncIterator[Line]:
    context, authority = None, None
    if scheme == "rediss":
        certs.make(folder, [])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "redis.pem", folder / "redis-key.pem")
        authority = folder / "ca.pem"
    script = ScriptedServer(answer, ends)
    server = await asyncio.start_server(script.serve, "127.0.0.1", ssl=context)
    url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/0?protocol=2"
    client = connect(SchedulerSettings(redis_url=url, redis_ca=authority), connections=1, socket_timeout_s=20.0)
    try:
        yield Line(client)
    finally:
        await client.aclose()
        script.over.set()
        server.close()
        await asyncio.gather(*filter(None, script.tasks))


async def test_answer_in_single_bytes_is_whole(scheme: str, tmp_path: Path) -> None:
    answer = b"*3\r\n$3\r\na\r\n\r\n:12\r\n*-1\r\n"
    async with scripted(scheme, tmp_path, [bytes([byte]) for byte in answer]) as line:
        assert await line("GET", "a") == [b"a\r\n", 12, None]
        assert await line("ECHO", "mine") == b"mine"


async def test_client_of_a_server_that_hangs_ends_without_an_error(scheme: str, tmp_path: Path) -> None:
    async with scripted(scheme, tmp_path, []) as line:  # it closes the client
        assert await line("WAIT", 0, 0) == 0


ENDS: dict[str, tuple[bytes, bool, list[int], str]] = {
    "an answer too many": (b":1\r\n:2\r\n", False, [1], "without a call"),
    "garbage": (b"no protocol\r\n", False, [], "."),
    "cut": (b"$5\r\nhe", True, [], "."),
    "the end between calls": (b":1\r\n", True, [1], "."),
}


@pytest.mark.parametrize(("answer", "ends", "read", "said"), ENDS.values(), ids=ENDS)
async def test_broken_answer_is_an_error_once(
    scheme: str, tmp_path: Path, answer: bytes, ends: bool, read: list[int], said: str
) -> None:
    async with scripted(scheme, tmp_path, [answer], ends=ends) as line:
        assert [await line("GET", "a") for _ in read] == read
        with pytest.raises(RedisConnectionError, match=said):
            await line("ECHO" if read else "GET", "lost")
        assert await line("ECHO", "mine") == b"mine"

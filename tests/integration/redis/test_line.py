"""A task's own connection to Redis: answers belong to their calls, whatever happened to the calls before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

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


async def test_cancelled_call_keeps_its_answer_from_the_next(client: Redis) -> None:
    line = Line(client)
    assert await line("PING")
    waiting = asyncio.create_task(line("BLPOP", "list", 0))
    async with asyncio.timeout(60):
        while not (await client.info("clients"))["blocked_clients"]:
            await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    await client.rpush("list", "late")
    assert await line("ECHO", "mine") == b"mine"


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
    scripts = Scripts(client, publishing=Line(client))
    await client.script_flush()
    with pytest.raises(Exception, match="FENCED"):
        await scripts.publish(["lease", "queue"], [1, "p:"])

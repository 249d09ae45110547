"""The queue's bounds in enqueue.lua, and the counts that they go by in all the scripts that touch them."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from shared.redis_client import Scripts
from tests.integration.redis.script_calls import KEYS, claim, enqueue, lease, publication, publish
from tests.integration.redis.script_calls import client as client  # the fixtures
from tests.integration.redis.script_calls import scripts as scripts
from tests.integration.redis.script_calls import server as server


async def test_queue_is_bounded_in_tokens_beyond_one_long_request(client: Redis, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "a", tokens=500))[0] == b"ok"
    assert await enqueue(scripts, "b", tokens=1) == [b"full", 500]
    assert await client.exists(KEYS.req("b")) == 0


async def test_tenant_with_its_share_of_the_queue_is_refused_alone(client: Redis, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "a", tokens=60, of_tenant=50))[0] == b"ok", "its first, however long it is"
    assert await enqueue(scripts, "b", tokens=1, of_tenant=50) == [b"tenant", 60, 1]
    assert (await enqueue(scripts, "c", tokens=40, of_tenant=50, tenant="bob"))[0] == b"ok"
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"60", b"bob": b"40"}
    assert await enqueue(scripts, "d", tokens=1, tenant="carol") == [b"full", 100]


async def test_long_wait_refuses_tenants_with_an_even_share_only(client: Redis, scripts: Scripts) -> None:
    assert (await enqueue(scripts, "a", tokens=60, late=1))[0] == b"ok", "nothing waits"
    assert await enqueue(scripts, "b", late=1) == [b"late"]
    assert (await enqueue(scripts, "c", late=1, tenant="bob"))[0] == b"ok"
    assert (await enqueue(scripts, "d", tokens=9, late=1, tenant="bob"))[0] == b"ok"
    assert await enqueue(scripts, "e", late=1) == [b"late"]
    assert (await enqueue(scripts, "f", most=200, tokens=41, tenant="bob"))[0] == b"ok"
    assert await enqueue(scripts, "g", most=200, late=1, tenant="bob") == [b"late"], "60 each by now"


@pytest.mark.parametrize("way", ["started", "ended", "gone"])
async def test_count_of_a_tenant_ends_with_its_last_waiting_request(client: Redis, scripts: Scripts, way: str) -> None:
    epoch = await lease(scripts, "acquire")
    await enqueue(scripts, "r")
    await enqueue(scripts, "other")
    await enqueue(scripts, "bobs", tokens=7, tenant="bob")
    if way == "gone":
        await client.delete(KEYS.req("r"))
    ((_, entry), *_) = await claim(client, scripts, epoch)
    end = ["r", KEYS.requests("normal"), entry, "3", 10, "0", ""]
    for _ in range(2):  # a call that is repeated counts once
        await publish(scripts, publication(epoch, [], [], ["r"] * (way == "started"), end * (way == "ended")))
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"10", b"bob": b"7"}
    await publish(scripts, publication(epoch, [], [], ["other", "bobs"], []))
    assert await client.exists(KEYS.queue_tenants) == 0


async def test_stale_count_of_a_tenant_ends_with_the_queue(client: Redis, scripts: Scripts) -> None:
    await client.hset(KEYS.queue_tenants, mapping={"alice": 5000, "bob": 3})
    assert (await enqueue(scripts, "a", of_tenant=50))[0] == b"ok"
    assert await client.hgetall(KEYS.queue_tenants) == {b"alice": b"10"}

"""Adopters of orphans on a real Redis: which of two adopts those of a gateway that is gone, what is tried again, and
what a gateway takes back where Redis has lost its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.gateway.delivery import background
from services.gateway.delivery.background import BackgroundTasks, OrphanAdopter
from services.gateway.errors import taken_over, unavailable
from shared.settings import GatewaySettings
from shared.tasks import end
from tests.support.stack import RedisServer
from tests.support.waiting import wait_until

IDS = [f"request-{number}" for number in range(20)]


def adopter(server: RedisServer, name: str, take_up: Callable[[str, str], Awaitable[None]]) -> OrphanAdopter:
    server.client.flushall()
    settings = GatewaySettings(redis_url=server.url, api_keys=["k"])
    server.client.sadd(settings.keys.background, "gone")
    server.client.sadd(settings.keys.background_of("gone"), *IDS)
    return OrphanAdopter(settings, name, BackgroundTasks(), take_up)


def left(server: RedisServer) -> set[str]:
    keys = GatewaySettings(redis_url=server.url, api_keys=["k"]).keys
    return {name.decode() for name in server.client.smembers(keys.background_of("gone"))}


async def test_each_orphan_is_adopted_once_when_two_gateways_look(redis_server: RedisServer) -> None:
    adopted: list[str] = []
    both = asyncio.Barrier(2)

    async def take_up(request_id: str, _gateway: str) -> None:
        adopted.append(request_id)
        await asyncio.sleep(0)

    async def look(one: OrphanAdopter) -> None:
        await both.wait()
        await one.adopt_from("gone")

    adopters = [adopter(redis_server, name, take_up) for name in ("one", "other")]
    await asyncio.gather(*map(look, adopters))
    assert sorted(adopted) == sorted(IDS)
    assert left(redis_server) == set()
    for each in adopters:
        await each.close()


@pytest.mark.parametrize(
    "error", [unavailable("Redis does not answer", "redis_unavailable"), taken_over(), ValueError("unreadable")]
)
async def test_orphan_that_cannot_be_adopted_stays_for_the_next_try(
    redis_server: RedisServer, error: Exception
) -> None:
    async def take_up(request_id: str, _gateway: str) -> None:
        if request_id == IDS[7]:
            raise error

    one = adopter(redis_server, "one", take_up)
    await one.adopt_from("gone")
    assert left(redis_server) == {IDS[7]}
    await one.close()


def with_ends(server: RedisServer, take_up: Callable[[str, str], Awaitable[None]]) -> OrphanAdopter:
    """Return the adopter of a gateway that has seen the ends of requests; Redis has lost that of the first."""
    server.client.flushall()
    settings = GatewaySettings(redis_url=server.url, api_keys=["k"])
    keys, tasks = settings.keys, BackgroundTasks()
    server.client.sadd(keys.background, "one")
    server.client.sadd(keys.background_of("one"), *IDS[:4])
    server.client.hset(keys.req(IDS[0]), mapping={"state": "running", "gateway": "one"})
    server.client.hset(keys.req(IDS[1]), mapping={"state": "finished", "gateway": "one"})
    server.client.hset(keys.req(IDS[2]), mapping={"state": "running", "gateway": "other"})
    tasks.ended |= set(IDS[:4])  # the record of the last has expired
    return OrphanAdopter(settings, "one", tasks, take_up)


async def test_request_with_a_lost_end_is_read_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "EVERY_S", 0.01)
    adopted: list[tuple[str, str]] = []

    async def take_up(request_id: str, gateway: str) -> None:
        adopted.append((request_id, gateway))

    one = with_ends(redis_server, take_up)
    running = asyncio.create_task(one.run())
    await wait_until(lambda: bool(adopted))
    await end(running)
    assert adopted == [(IDS[0], "one")]
    await one.close()


async def test_request_with_a_lost_end_is_left_to_others_when_its_gateway_ends(redis_server: RedisServer) -> None:
    async def take_up(_request_id: str, _gateway: str) -> None:
        raise AssertionError

    await with_ends(redis_server, take_up).close()
    keys = GatewaySettings(redis_url=redis_server.url, api_keys=["k"]).keys
    assert redis_server.client.smembers(keys.background_of("one")) == {IDS[0].encode()}
    assert redis_server.client.smembers(keys.background) == {b"one"}

"""Two adopters of orphans and one gateway that is gone, on a real Redis: which adopts, and what is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.gateway.delivery.background import BackgroundTasks, OrphanAdopter
from services.gateway.errors import taken_over, unavailable
from shared.settings import GatewaySettings
from tests.support.stack import RedisServer

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

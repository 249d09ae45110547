"""Two reapers and one gateway that is gone, on a real Redis: who adopts, and what is tried again."""

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


async def test_of_two_gateways_that_look_at_once_one_adopts_each_request(redis_server: RedisServer) -> None:
    adopted: list[tuple[str, str]] = []
    both = asyncio.Barrier(2)

    def taking(name: str) -> Callable[[str, str], Awaitable[None]]:
        async def take_up(request_id: str, _gateway: str) -> None:
            adopted.append((request_id, name))
            await asyncio.sleep(0)

        return take_up

    async def look(one: OrphanAdopter) -> None:
        await both.wait()
        await one.adopt_from("gone")

    one, other = (adopter(redis_server, name, taking(name)) for name in ("one", "other"))
    await asyncio.gather(look(one), look(other))
    assert sorted(request_id for request_id, _ in adopted) == sorted(IDS)
    assert left(redis_server) == set()
    for each in (one, other):
        await each.close()


@pytest.mark.parametrize(
    "error", [unavailable("Redis does not answer", "redis_unavailable"), taken_over(), ValueError("unreadable")]
)
async def test_what_could_not_be_adopted_is_left_for_the_next_try_and_the_others_are_adopted(
    redis_server: RedisServer, error: Exception
) -> None:
    async def take_up(request_id: str, _gateway: str) -> None:
        if request_id == IDS[7]:
            raise error

    one = adopter(redis_server, "one", take_up)
    await one.adopt_from("gone")
    assert left(redis_server) == {IDS[7]}
    await one.close()

"""keep.lua on real servers: what is stored equals what is counted, and the oldest go where there is no room."""

from __future__ import annotations

import random

import pytest
from redis.asyncio import Redis

from shared.redis_client import Scripts
from tests.integration.redis.script_calls import KEYS, client, scripts, server

__all__ = ["client", "scripts", "server"]

OVERHEAD = 256  # bytes that a response counts beside its value
HOUR_MS = 3_600_000


async def keep(
    scripts: Scripts,
    name: str,
    value: bytes,
    tenant: str = "a",
    bounds: tuple[int, int] = (10_000, 5_000),
    ms: int = HOUR_MS,
    only_new: bool = False,
) -> int:
    keys = [KEYS.response(name), KEYS.responses]
    return int(await scripts.keep(keys, [KEYS.response(""), tenant, name, value, ms, *bounds, int(only_new)]))


async def stored(client: Redis) -> dict[str, int]:
    """Return the bytes of each stored response; fail unless the counters say the same."""
    names = [key.decode().rpartition(":")[2] for key in await client.keys(KEYS.response("*"))]
    sizes = {name: await client.strlen(KEYS.response(name)) for name in names}
    sizes = {name: size + OVERHEAD for name, size in sizes.items() if size}
    index = [name.decode() for name in await client.zrange(KEYS.responses, 0, -1)]
    counted = {key.decode(): value.decode() for key, value in (await client.hgetall(KEYS.responses + ":sizes")).items()}
    held = {key.decode(): int(value) for key, value in (await client.hgetall(KEYS.responses + ":bytes")).items()}
    assert sorted(index) == sorted(sizes)
    assert {name: int(text.partition(" ")[0]) for name, text in counted.items()} == sizes
    assert held.pop("", 0) == sum(sizes.values())
    of = {tenant: 0 for tenant in held}
    for name, text in counted.items():
        of["t" + text.partition(" ")[2]] += sizes[name]
    assert held == of
    return sizes


async def test_oldest_responses_of_a_tenant_beyond_its_bound_go_first(client: Redis, scripts: Scripts) -> None:
    for number in range(6):
        assert await keep(scripts, f"resp_{number}", b"x" * 1000)
        assert await keep(scripts, f"resp_other{number}", b"x" * 100, tenant="b")
    assert {name for name in await stored(client) if "other" not in name} == {"resp_3", "resp_4", "resp_5"}
    assert sum("other" in name for name in await stored(client)) == 6


async def test_oldest_responses_of_all_go_beyond_the_bound_of_all(client: Redis, scripts: Scripts) -> None:
    for number in range(6):
        assert await keep(scripts, f"resp_{number}", b"x" * 744, tenant=str(number), bounds=(3_500, 2_000))
    assert set(await stored(client)) == {"resp_3", "resp_4", "resp_5"}


async def test_too_large_response_is_refused_and_drops_none(client: Redis, scripts: Scripts) -> None:
    assert await keep(scripts, "resp_1", b"x")
    assert not await keep(scripts, "resp_2", b"x" * 5_000)
    assert set(await stored(client)) == {"resp_1"}


async def test_state_that_is_too_large_removes_the_one_before(client: Redis, scripts: Scripts) -> None:
    assert await keep(scripts, "resp_1", b"queued")
    assert not await keep(scripts, "resp_1", b"x" * 5_000)
    assert await stored(client) == {}


async def test_response_that_is_there_is_left_where_only_a_new_one_is_wanted(client: Redis, scripts: Scripts) -> None:
    assert await keep(scripts, "resp_1", b"first", only_new=True) == 1
    assert await keep(scripts, "resp_1", b"second", only_new=True) == 2
    assert await client.get(KEYS.response("resp_1")) == b"first"
    assert await keep(scripts, "resp_1", b"third") == 1


async def test_forgotten_response_does_not_come_back(client: Redis, scripts: Scripts) -> None:
    assert await keep(scripts, "resp_1", b"queued")
    assert await keep(scripts, "resp_1", b"")
    assert not await keep(scripts, "resp_1", b"completed")
    assert await client.get(KEYS.response("resp_1")) == b""
    assert await stored(client) == {}


async def test_expired_responses_are_counted_back(client: Redis, scripts: Scripts) -> None:
    for number in range(3):
        assert await keep(scripts, f"resp_{number}", b"x", ms=1)
    while await client.exists(*(KEYS.response(f"resp_{number}") for number in range(3))):
        pass
    assert await keep(scripts, "resp_new", b"x")
    assert set(await stored(client)) == {"resp_new"}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_counters_hold_through_random_calls(client: Redis, scripts: Scripts, seed: int) -> None:
    drawn = random.Random(seed)
    forgotten = set()
    for _ in range(300):
        name, tenant = f"resp_{drawn.randrange(30)}", drawn.choice("abc")
        if drawn.random() < 0.1:
            await keep(scripts, name, b"", tenant)
            forgotten.add(name)
        else:
            value = b"x" * drawn.randrange(1, 1_500)
            assert await keep(scripts, name, value, tenant) == (name not in forgotten)
    found = await stored(client)
    assert found and sum(found.values()) <= 10_000 and not forgotten & found.keys()

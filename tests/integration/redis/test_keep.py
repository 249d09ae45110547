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
BOUND, TENANT_BOUND = 10_000, 5_000


async def keep(
    scripts: Scripts, name: str, value: bytes, tenant: str = "a", ms: int = HOUR_MS, only_new: bool = False
) -> int:
    keys = [KEYS.response(name), KEYS.responses]
    arguments = [KEYS.response(""), tenant, name, value, ms, BOUND, TENANT_BOUND, int(only_new)]
    return int(await scripts.keep(keys, arguments))


class Twin:
    """Sizes by name, the oldest first, as keep.lua has to hold them."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.tenants: dict[str, str] = {}
        self.forgotten: set[str] = set()

    def keep(self, name: str, length: int, tenant: str, only_new: bool) -> int:
        if name in self.forgotten and length:
            return 0
        if only_new and (name in self.sizes or name in self.forgotten):
            return 2
        self.sizes.pop(name, None)
        if not length:
            self.forgotten.add(name)
            return 1
        if length + OVERHEAD > TENANT_BOUND:
            return 0
        self.sizes[name], self.tenants[name] = length + OVERHEAD, tenant
        self._trim([other for other in self.sizes if self.tenants[other] == tenant], TENANT_BOUND)
        self._trim([*self.sizes], BOUND)
        return 1

    def _trim(self, names: list[str], bound: int) -> None:
        while sum(self.sizes[name] for name in names) > bound:
            del self.sizes[names.pop(0)]


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


async def test_expired_responses_are_counted_back(client: Redis, scripts: Scripts) -> None:
    for number in range(3):
        assert await keep(scripts, f"resp_{number}", b"x", ms=1)
    while await client.exists(*(KEYS.response(f"resp_{number}") for number in range(3))):
        pass
    assert await keep(scripts, "resp_new", b"x")
    assert set(await stored(client)) == {"resp_new"}


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_calls_keep_what_their_twin_keeps(client: Redis, scripts: Scripts, seed: int) -> None:
    drawn, twin, lengths = random.Random(seed), Twin(), [0, 6_000, *range(1, 1_500, 80)]
    answers = set()
    for call in range(200):
        name, length, tenant = f"resp_{drawn.randrange(60)}", drawn.choice(lengths), drawn.choice("abc")
        only_new = drawn.random() < 0.2
        answer = await keep(scripts, name, b"x" * length, tenant, HOUR_MS + 1000 * call, only_new)  # in this order
        assert answer == twin.keep(name, length, tenant, only_new)
        assert await stored(client) == twin.sizes
        answers.add((answer, length == 0, length + OVERHEAD > TENANT_BOUND))
    assert len(answers) == 5 and all([await client.get(KEYS.response(name)) == b"" for name in twin.forgotten])

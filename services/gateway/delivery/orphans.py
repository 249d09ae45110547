"""Finds requests in the background whose gateway is gone, and goes on with them here.

Every gateway looks every two seconds; a key with SET NX lets one of them adopt a request. The sets
`background` (gateways) and `background:{gateway}` (requests) are written with the requests; what is in them too long,
as when a gateway died before it took an ended request out, does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from services.gateway.delivery.background import Keeper
from services.gateway.openai.errors import TAKEN_OVER, ApiError
from shared.keys import Keys
from shared.redis_client import Unreachable, connect
from shared.settings import GatewaySettings

log = logging.getLogger("orcinus.gateway")

EVERY_S = 2.0
GONE_S = 1.5
"""How long a heartbeat must be missing, after it ran out: a Redis that was away has none of anybody."""
ADOPTING_MS = 10_000
"""What one gateway gets to adopt a request, before another one tries."""
BATCH = 256


class Reaper:
    """The task and its connection."""

    def __init__(
        self, settings: GatewaySettings, gateway_id: str, keeper: Keeper, take_up: Callable[[str, str], Awaitable[None]]
    ) -> None:
        """take_up(request, gateway): delivers a request here that `gateway` delivered. Raises ApiError."""
        self._keys: Keys = settings.keys
        self._gateway_id = gateway_id
        self._keeper = keeper
        self._take_up = take_up
        self._redis: Any = connect(settings, connections=1)
        self._missing: dict[str, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, no secret
            try:
                await self._forget_ended()
                for request_id in list(self._keeper.left):
                    await self._bring_back(request_id)
                for gateway in await self._gone():
                    await self._inherit(gateway)
            except (*Unreachable, RedisError) as error:
                log.debug("requests in the background were not looked after: %s", error)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _forget_ended(self) -> None:
        if ended := list(self._keeper.ended):
            await self._redis.srem(self._keys.background_of(self._gateway_id), *ended)
            self._keeper.ended -= set(ended)

    async def _bring_back(self, request_id: str) -> None:
        """One that is this gateway's own, and that a client has read for a while."""
        if await self._tried(request_id, self._gateway_id):
            self._keeper.left.discard(request_id)

    async def _gone(self) -> list[str]:
        """Gateways without a heartbeat that may leave requests behind."""
        members = await self._redis.smembers(self._keys.background)
        names = [name.decode() for name in members if name.decode() != self._gateway_id]
        beats = await self._redis.mget([self._keys.alive("gateway", name) for name in names]) if names else []
        now = time.monotonic()
        silent = [name for name, beat in zip(names, beats, strict=True) if beat is None]
        self._missing = {name: self._missing.get(name, now) for name in silent}
        return [name for name, since in self._missing.items() if now - since >= GONE_S]

    async def _inherit(self, gateway: str) -> None:
        key = self._keys.background_of(gateway)
        found = await self._redis.srandmember(key, BATCH)
        if not found:
            await self._redis.srem(self._keys.background, gateway)
            return
        adopted = 0
        for request_id in map(bytes.decode, found):
            claim = self._keys.adopting(request_id)
            if not await self._redis.set(claim, self._gateway_id, nx=True, px=ADOPTING_MS):
                continue
            if await self._tried(request_id, gateway):
                await self._redis.srem(key, request_id)
                adopted += 1
        if adopted:
            log.info("took up %d requests in the background of %s, which is gone", adopted, gateway)

    async def _tried(self, request_id: str, gateway: str) -> bool:
        """False when it is to be tried again."""
        try:
            await self._take_up(request_id, gateway)
        except ApiError as error:
            if error.status == 503 or error.code == TAKEN_OVER:
                return False
            log.info("%s in the background is gone: %s", request_id, error.message)
        except (*Unreachable, RedisError):
            raise
        except Exception:  # a record that this version cannot read must not end the gateway, and each one after it
            log.exception("%s in the background was not taken up", request_id)
            return False
        return True

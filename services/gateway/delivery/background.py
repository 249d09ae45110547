"""Read requests that run in the background without a client, and adopt those of dead gateways.

Stop strings are matched by a gateway, so each background request needs one that reads it. `BackgroundTasks` reads the
requests of this gateway and keeps nothing; the answer is made from the record (openai/requests.py). `OrphanAdopter`
looks every two seconds for gateways without a heartbeat; a key with SET NX lets one gateway adopt a request. The sets
`background` (gateways) and `background:{gateway}` (requests) are written with the requests; entries that stay too
long, as when a gateway died before it removed an ended request, do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from services.gateway.delivery.stream import Generation
from services.gateway.errors import HANDED_OVER, TAKEN_OVER, ApiError
from shared.dead_letters import DeadLetters, text
from shared.keys import Keys
from shared.redis_client import Scripts, Unreachable, connect
from shared.settings import GatewaySettings
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")


class BackgroundTasks:
    """Read the generations of background requests."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.left: set[str] = set()
        """Requests to take back: a client streamed them and has disconnected, or Redis has lost their ends."""
        self.ended: set[str] = set()
        """Requests that have ended, until the adopter has removed them in Redis."""
        self.on_end: Callable[[str], Awaitable[None]] | None = None
        """Called with the id of each request that has ended, well or not."""

    @property
    def kept(self) -> list[str]:
        """Return the ids of the requests that are read now."""
        return list(self._tasks)

    def keep(self, generation: Generation) -> None:
        """Read a generation to its end, and close it."""
        request_id = generation.spec.id
        task = asyncio.create_task(self._read(generation))
        self._tasks[request_id] = task
        task.add_done_callback(lambda task: self._gone(request_id, task))

    async def stop(self) -> None:
        """End all tasks; their requests continue."""
        await end(*self._tasks.values())

    async def _read(self, generation: Generation) -> None:
        request_id, handed_on = generation.spec.id, False
        try:
            while not generation.done:
                await generation.next()
        except ApiError as error:  # a cancel, its end with an error, or another gateway reads it
            handed_on = error.code in (TAKEN_OVER, HANDED_OVER)
        finally:
            generation.close()
        if handed_on:
            return
        if self.on_end is not None:
            await self.on_end(request_id)  # when this process ends meanwhile, another gateway adopts the request
        self.ended.add(request_id)

    def _gone(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background request %s is no longer read: %r", request_id, error)


EVERY_S = 2.0
GONE_S = 1.5
"""Time for which a heartbeat must be missing, after it expired: a Redis that was away has no heartbeat at all."""
ADOPTING_MS = 10_000
LEFT_S = 60.0
"""A gateway leaves a request of another build to the other gateways for so long."""
"""Time for one gateway to adopt a request, before another one tries."""
BATCH = 256


class OrphanAdopter:
    """Adopt background requests of gateways that have died: a task and its connection."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: str,
        background: BackgroundTasks,
        adopt: Callable[[str, str], Awaitable[None]],
        letters: DeadLetters | None = None,
    ) -> None:
        """adopt(request, gateway): deliver a request here that `gateway` delivered. Raise ApiError."""
        self._keys: Keys = settings.keys
        self._gateway_id = gateway_id
        self._background = background
        self._adopt = adopt
        self._redis: Any = connect(settings, connections=1)
        self._scripts = Scripts(self._redis)
        self._missing: dict[str, float] = {}
        self._unreadable: dict[str, float] = {}  # requests of another build, and until when they are left to others
        self._letters = letters or DeadLetters()

    async def run(self) -> None:
        """Look every two seconds, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, no secret
            try:
                await self._forget_ended()
                for request_id in list(self._background.left):
                    await self._bring_back(request_id)
                for gateway in await self._gone():
                    await self.adopt_from(gateway)
            except (*Unreachable, RedisError) as error:
                log.debug("background requests were not checked: %s", error)

    async def close(self, redis_answers: bool = True) -> None:
        """Take this gateway off those with background requests where it has none, and close the connection."""
        if redis_answers:
            try:
                await self._forget_ended()
                if not await self._redis.exists(self._keys.background_of(self._gateway_id)):
                    await self._redis.srem(self._keys.background, self._gateway_id)
            except (*Unreachable, RedisError) as error:
                log.warning("background requests of this gateway not checked: %s", error)
        await self._redis.aclose()

    async def _forget_ended(self) -> None:
        """Take requests that have ended out of this gateway's set, and take back those with ends that Redis lost."""
        if ended := list(self._background.ended):
            keys = [self._keys.background_of(self._gateway_id), *map(self._keys.req, ended)]
            unfinished = await self._scripts.forget(keys, [self._gateway_id, *ended])
            self._background.left |= {name.decode() for name in unfinished}
            self._background.ended -= set(ended)

    async def _bring_back(self, request_id: str) -> None:
        """Read a request of this gateway again that a client has read for a while."""
        if await self._tried(request_id, self._gateway_id):
            self._background.left.discard(request_id)

    async def _gone(self) -> list[str]:
        """Gateways without a heartbeat that may leave requests behind."""
        members = await self._redis.smembers(self._keys.background)
        found = self._letters.read_all(self._keys.background, members, text)
        names = [name for name in found if name != self._gateway_id]
        beats = await self._redis.mget([self._keys.alive("gateway", name) for name in names]) if names else []
        now = time.monotonic()
        silent = [name for name, beat in zip(names, beats, strict=True) if beat is None]
        self._missing = {name: self._missing.get(name, now) for name in silent}
        return [name for name, since in self._missing.items() if now - since >= GONE_S]

    async def adopt_from(self, gateway: str) -> None:
        """Adopt background requests of a gateway that has died, BATCH at most."""
        key = self._keys.background_of(gateway)
        found = await self._redis.srandmember(key, BATCH)
        if not found:
            await self._redis.srem(self._keys.background, gateway)
            return
        adopted, now = 0, time.monotonic()
        self._unreadable = {name: until for name, until in self._unreadable.items() if until > now}
        for request_id in self._letters.read_all(key, found, text):
            if request_id in self._unreadable:
                continue
            claim = self._keys.adopting(request_id)
            if not await self._redis.set(claim, self._gateway_id, nx=True, px=ADOPTING_MS):
                continue
            if await self._tried(request_id, gateway):
                await self._redis.srem(key, request_id)
                adopted += 1
            elif request_id in self._unreadable:
                await self._redis.delete(claim)
        if adopted:
            log.info("adopted %d background requests of gateway %s, which has died", adopted, gateway)

    async def _tried(self, request_id: str, gateway: str) -> bool:
        """Adopt one request. Return False when it is to be tried again."""
        try:
            await self._adopt(request_id, gateway)
        except ApiError as error:
            if error.code == "record_version":
                self._unreadable[request_id] = time.monotonic() + LEFT_S
            if error.status == 503 or error.code == TAKEN_OVER:
                return False
            log.info("background request %s not adopted: %s", request_id, error.message)
        except (*Unreachable, RedisError):
            raise
        except Exception:  # a record that this version cannot read must not end the gateway, and each one after it
            log.exception("background request %s cannot be adopted", request_id)
            return False
        return True

"""Read requests that run in the background without a client, and adopt those of dead gateways.

Stop strings are matched by a gateway, so each background request needs one that reads it. `BackgroundTasks` reads the
requests of this gateway and keeps nothing; the answer is made from the record (openai/requests.py). `OrphanAdopter`
looks every two seconds for gateways without a heartbeat; a key with SET NX lets one gateway adopt a request. The sets
`background` (gateways) and `background:{gateway}` (requests) are written with the requests; entries that stay too
long, as when a gateway died before it removed an ended request, do no harm. Each look also compares the gateway's own
set with what it reads: ended requests leave the set, and a request there without a reader is read again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
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
        self.readerless: set[str] = set()
        """Requests to take back: a client streamed them and has disconnected, or nothing reads them."""
        self.end_counts: dict[str, int] = {}
        """Choices of requests that were read to their ends, until they are removed in Redis; 0 of a failure."""
        self.unreadable: dict[str, float] = {}
        """Requests that cannot be read here, and until when they are left to other gateways."""
        self.on_end: Callable[[str], Awaitable[None]] | None = None
        """Called with the id of each request that has ended, well or not."""

    @property
    def request_ids(self) -> list[str]:
        """Return the ids of the requests that are read now."""
        return list(self._tasks)

    def keep(self, generation: Generation) -> None:
        """Read a generation to its end, and close it."""
        request_id = generation.spec.id
        task = asyncio.create_task(self._read(generation))
        self._tasks[request_id] = task
        task.add_done_callback(lambda task: self._on_end(request_id, task))

    def leave(self, request_id: str) -> None:
        """Leave a request that cannot be read here to the other gateways for LEFT_S."""
        self.unreadable[request_id] = time.monotonic() + LEFT_S

    async def stop(self) -> None:
        """End all tasks; their requests continue."""
        await end(*self._tasks.values())

    async def _read(self, generation: Generation) -> None:
        request_id, is_over = generation.spec.id, True
        try:
            while not generation.is_done:
                await generation.next()
        except ApiError as error:
            is_over = generation.has_failed
            if not is_over and error.code not in (TAKEN_OVER, HANDED_OVER):  # it goes on, but cannot be read here
                self.leave(request_id)
        finally:
            generation.close()
        if not is_over:
            return
        if self.on_end is not None:
            await self.on_end(request_id)  # when this process ends meanwhile, another gateway adopts the request
        self.end_counts[request_id] = generation.spec.choices if generation.is_done else 0

    def _on_end(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background request %s is no longer read: %r", request_id, error)
            self.leave(request_id)


EVERY_S = 2.0
GONE_S = 1.5
"""Time for which a heartbeat must be missing, after it expired: a Redis that was away has no heartbeat at all."""
ADOPTING_MS = 10_000
"""Time for one gateway to adopt a request, before another one tries."""
LEFT_S = 60.0
"""A gateway leaves a request that it cannot read, as of another build, to the other gateways for so long."""
BATCH = 256
"""Requests of one look."""


class OrphanAdopter:
    """Adopt background requests of gateways that have died, and take back those of this gateway without a reader: a
    task and its connection.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: str,
        background: BackgroundTasks,
        adopt: Callable[[str, str], Awaitable[None]],
        streams: Iterable[str],
        letters: DeadLetters | None = None,
    ) -> None:
        """adopt(request, gateway): deliver a request here that `gateway` delivered. Raise ApiError. streams: the
        requests that are delivered here, with or without a client.
        """
        self._keys: Keys = settings.keys
        self._gateway_id = gateway_id
        self._background = background
        self._adopt = adopt
        self._streams = streams
        self._redis: Any = connect(settings, connections=1)
        self._scripts = Scripts(self._redis)
        self._missing_since: dict[str, float] = {}
        self._unread: set[str] = set()  # requests that had no reader at the last look
        self._letters = letters or DeadLetters()

    async def run(self) -> None:
        """Look every two seconds, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, no secret
            now = time.monotonic()
            unreadable = self._background.unreadable
            self._background.unreadable = {name: until for name, until in unreadable.items() if until > now}
            for look in (self._look_after_own, self._look_for_orphans):  # a fault of one must not keep the other
                try:
                    await look()
                except (*Unreachable, RedisError) as error:
                    log.debug("background requests were not checked: %s", error)

    async def close(self, redis_answers: bool = True) -> None:
        """Take this gateway off those with background requests where it has none, and close the connection."""
        if redis_answers:
            try:
                await self._compare_own()
                if not await self._redis.exists(self._keys.background_of(self._gateway_id)):
                    await self._redis.srem(self._keys.background, self._gateway_id)
            except (*Unreachable, RedisError) as error:
                log.warning("background requests of this gateway not checked: %s", error)
        await self._redis.aclose()

    async def _look_after_own(self) -> None:
        """Compare this gateway's set with what it reads, and read requests again that are left."""
        await self._compare_own()
        for request_id in list(self._background.readerless):
            if await self._try_adopt(request_id, self._gateway_id) or request_id in self._background.unreadable:
                self._background.readerless.discard(request_id)

    async def _compare_own(self) -> None:
        """Take requests that were read to their ends out of this gateway's set; find those without a reader there, as
        where Redis has lost their ends. A scheduler may write an end after its tokens: only the second look counts.
        """
        key, background = self._keys.background_of(self._gateway_id), self._background
        sample = await self._redis.srandmember(key, BATCH)  # all of a large set would hold Redis and the event loop
        members = self._letters.read_all(key, sample, text)
        attended = {*background.request_ids, *background.readerless, *self._streams}
        names = {*members, *background.end_counts, *self._unread} - attended
        waiting_ids, unread = set[str](), set[str]()
        if names:
            rows = {name: background.end_counts.get(name, -1) for name in names}
            waiting_ids, unread = await self._forget(self._gateway_id, rows)
        repeats = unread & self._unread
        background.readerless |= repeats - background.unreadable.keys()
        self._unread = unread - repeats
        for name in repeats | (names - waiting_ids - unread):
            background.end_counts.pop(name, None)

    async def _look_for_orphans(self) -> None:
        for gateway in await self._lost_gateways():
            await self.adopt_from(gateway)

    async def _lost_gateways(self) -> list[str]:
        """Gateways without a heartbeat that may leave requests behind."""
        members = await self._redis.smembers(self._keys.background)
        gateways = self._letters.read_all(self._keys.background, members, text)
        names = [name for name in gateways if name != self._gateway_id]
        beats = await self._redis.mget([self._keys.alive("gateway", name) for name in names]) if names else []
        now = time.monotonic()
        silent = [name for name, beat in zip(names, beats, strict=True) if beat is None]
        self._missing_since = {name: self._missing_since.get(name, now) for name in silent}
        return [name for name, since in self._missing_since.items() if now - since >= GONE_S]

    async def adopt_from(self, gateway: str) -> None:
        """Adopt background requests of a gateway that has died, BATCH at most."""
        key = self._keys.background_of(gateway)
        sample = await self._redis.srandmember(key, BATCH)
        if not sample:
            await self._redis.srem(self._keys.background, gateway)
            return
        names, adopted_ids = self._letters.read_all(key, sample, text), set[str]()
        for request_id in names:
            if request_id in self._background.unreadable:
                continue
            claim = self._keys.adopter(request_id)
            if not await self._redis.set(claim, self._gateway_id, nx=True, px=ADOPTING_MS):
                continue
            if await self._try_adopt(request_id, gateway):
                adopted_ids.add(request_id)
            elif request_id in self._background.unreadable:
                await self._redis.delete(claim)
        if names:
            await self._forget(gateway, {name: 0 if name in adopted_ids else -1 for name in names})
        if adopted_ids:
            log.info("adopted %d background requests of gateway %s, which has died", len(adopted_ids), gateway)

    async def _forget(self, gateway: str, names: dict[str, int]) -> tuple[set[str], set[str]]:
        """Take requests out of a gateway's set, with what forget.lua has to know of each. Return those that stay."""
        keys = [self._keys.background_of(gateway), *map(self._keys.req, names)]
        answer = await self._scripts.forget(keys, [gateway, *(word for row in names.items() for word in row)])
        waiting, unread = ({name.decode() for name in part} for part in answer)
        return waiting, unread

    async def _try_adopt(self, request_id: str, gateway: str) -> bool:
        """Adopt one request. Return False when it is to be tried again, after a while if it is in `unreadable`."""
        try:
            await self._adopt(request_id, gateway)
        except ApiError as error:
            is_temporary = error.status in (429, 503) or error.code == TAKEN_OVER
            if error.code == "record_version" or not is_temporary:
                self._background.leave(request_id)
            if not is_temporary:
                log.info("background request %s not adopted: %s", request_id, error.message)
            return False
        except (*Unreachable, RedisError):
            raise
        except Exception:  # a record that this version cannot read must not end the gateway, and each one after it
            log.exception("background request %s cannot be adopted", request_id)
            self._background.leave(request_id)
            return False
        return True

"""Records that commands or other gateways write to Redis, of which every gateway keeps a copy: keys, names of adapters.

A silent Redis leaves the copy as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.dead_letters import DeadLetters, text
from shared.redis_client import Unreachable

log = logging.getLogger("orcinus.gateway")

Record = TypeVar("Record")

EVERY_S = 1.0


class PublishedRecords(Generic[Record]):
    """Hashes of Redis that map names to records."""

    def __init__(
        self, kind: str, redis: Redis, decode: Callable[[bytes], Record], letters: DeadLetters | None = None
    ) -> None:
        """kind: the records, as the log calls them. decode: raises for a record that no service writes."""
        self._kind = kind
        self._redis = redis
        self._decode = decode
        self._letters = letters or DeadLetters()
        self.has_looked = asyncio.Event()
        """Set behind the first look of `follow`, also one that failed."""

    async def read(self, key: str, redis: Redis | None = None) -> dict[str, Record | None]:
        """Return the records of a hash by name, None for one that cannot be read; it is set aside, as a name is.

        redis: a connection that watches the hash.
        """
        raw_records: Any = await (redis or self._redis).hgetall(key)  # bytes to bytes
        return {
            name: self._letters.read(f"{key}:{name}", value, self._decode)
            for raw, value in raw_records.items()
            if (name := self._letters.read(key, raw, text))
        }

    async def follow(self, look: Callable[[], Awaitable[None]]) -> None:
        """Call `look`, which reads them, once a second until cancelled. Log the first of several failures of Redis."""
        is_heard = True
        while True:
            try:
                await look()
                is_heard = True
            except (*Unreachable, RedisError) as error:
                if is_heard:
                    log.warning("%s not read from Redis: %s", self._kind, error)
                is_heard = False
            self.has_looked.set()
            await asyncio.sleep(EVERY_S)

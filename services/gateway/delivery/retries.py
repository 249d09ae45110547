"""Commands that Redis has not taken yet: kept while it is away, given up when it refuses them again and again.

One command of each kind a request: a second cancel of the same request says nothing new. What is dropped is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

log = logging.getLogger("orcinus.gateway")

MOST_KEPT = 65_536
"""About 1 KiB each."""
MOST_REFUSALS = 60
"""Once a second, so about a minute in which Redis has no memory or is a replica."""


@dataclass(slots=True)
class Command:
    """What Redis has to be told about one request, until it was told."""

    key: tuple[str, str]  # request id, kind
    send: Callable[[], Awaitable[Any]]
    refusals: int = 0

    async def say(self) -> None:
        """Twice at most: a connection that Redis closed shows only at its first use, and a command that is said twice
        does no harm. Until the next round this process could be gone, and the command with it."""
        try:
            await self.send()
        except RedisConnectionError:
            await self.send()


class Retries:
    """Commands for the next try, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], Command] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, command: Command) -> None:
        """In place of an earlier one of the same key."""
        known = self._waiting.pop(command.key, None)
        if known is not None:
            command.refusals = max(command.refusals, known.refusals)
        elif len(self._waiting) >= MOST_KEPT:
            request_id, kind = oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            log.error("%s of %s is dropped: %d commands wait for Redis", kind, request_id, MOST_KEPT)
        self._waiting[command.key] = command

    def refused(self, command: Command, error: Exception) -> None:
        """Redis answered, but not as hoped: kept until MOST_REFUSALS."""
        request_id, kind = command.key
        command.refusals += 1
        if command.refusals >= MOST_REFUSALS:
            log.error("%s of %s is given up, Redis refused it %d times: %s", kind, request_id, MOST_REFUSALS, error)
            return
        if command.refusals == 1:
            log.warning("%s of %s was refused by Redis and is tried again: %s", kind, request_id, error)
        self.keep(command)

    def take(self) -> list[Command]:
        """All of them; they are to be tried now."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

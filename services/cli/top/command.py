"""`orcinus top`: what the live page shows, in a terminal. Reads Redis alone, so it needs no gateway.

Without a Redis address it looks for the stack that `orcinus up` runs on this machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.cli.options import without_password
from services.cli.policy import redis_address
from shared.settings import CommonSettings, LauncherSettings
from shared.stack_view import HISTORY_S, StackReader, View

TIMEOUT_S = 2.0


class Source:
    """Looks at one stack; a Redis that does not answer is part of what is seen (`error`)."""

    def __init__(self, settings: CommonSettings, launcher: LauncherSettings) -> None:
        url, access = redis_address(settings, launcher)
        options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, **access}
        self._redis = Redis.from_url(url, **options)
        self._address = without_password(url)
        self._reader = StackReader(self._redis, settings.keys)
        self.model = settings.served_model_name

    async def look(self) -> View:
        """The view of now, or `error`."""
        try:
            return await self._reader.look()
        except (RedisError, OSError) as error:
            return {"error": f"Redis at {self._address} does not answer: {str(error) or type(error).__name__}"}

    async def past(self, shard: str, now_ms: int) -> dict[str, list[float]]:
        """The last minutes of a shard; empty columns where they cannot be had."""
        try:
            return await self._reader.history(shard, now_ms - 1000 * HISTORY_S)
        except (RedisError, OSError):
            return {}

    async def close(self) -> None:
        await self._redis.aclose()


def run(settings: CommonSettings, launcher: LauncherSettings, once: bool, as_json: bool) -> int:
    """Shows until q is pressed; with `once` prints one view. 1 when Redis does not answer then."""
    source = Source(settings, launcher)
    if not once:
        from services.cli.top.screen import Top  # a terminal interface: not for programs that ask for one view

        Top(source).run()
        return 0
    view = asyncio.run(_once(source))
    if as_json:
        print(json.dumps(view))
    elif "error" in view:
        print(f"error: {view['error']}", file=sys.stderr)
    else:
        from rich.console import Console

        from services.cli.top.words import whole

        console = Console(highlight=False)
        console.print(whole(view, console.width))
    return 1 if "error" in view else 0


async def _once(source: Source) -> View:
    try:
        return await source.look()
    finally:
        await source.close()

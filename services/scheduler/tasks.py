"""Tasks that stand and fall together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Waits for the first to end, cancels the others, raises what the first raised."""
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also when the caller is cancelled: asyncio.wait leaves its tasks alone
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if not task.cancelled():  # one that gave up because of the stop
            task.result()

"""Tasks that stand and fall together, and work that may not take long.

A cancellation can get lost: `asyncio.wait_for` of Python 3.11, through which redis-py sends every command, returns the
result instead when the send is complete at that moment (cpython issue 86296). So `end` asks again until it is obeyed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

AGAIN_S = 0.1


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and waits until they have ended; also when the caller is cancelled meanwhile, which it learns
    afterwards. What they raise is not told."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio complains that nobody asked
    if cancelled is not None:
        raise cancelled


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Waits for the first to end, cancels the others, raises what the first raised."""
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also when the caller is cancelled: asyncio.wait leaves its tasks alone
        await end(*tasks)
    for task in done:
        if not task.cancelled():  # one that gave up because of the stop
            task.result()


async def within(seconds: float, work: Awaitable[Any]) -> bool:
    """Gives the work so long and then ends it; did it end by itself? Raises what it raised."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(seconds, 0.0))
    finally:
        await end(task)
    if done and not task.cancelled():
        task.result()
    return bool(done)

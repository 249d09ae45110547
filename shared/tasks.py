"""Groups of asyncio tasks that end together, and work with a time limit.

A cancellation can get lost: `asyncio.wait_for` of Python 3.11, through which redis-py sends every command, returns the
result instead when the send is complete at that moment (cpython issue 86296). So `end` repeats it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

AGAIN_S = 0.1


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have ended; drop what they raise.

    A cancellation of the caller meanwhile is raised afterwards.
    """
    cancellation: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=AGAIN_S)
        except asyncio.CancelledError as error:
            cancellation = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never retrieved
    if cancellation is not None:
        raise cancellation


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait for the first to end, cancel the others, and raise what the first raised."""
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also if the caller is cancelled: asyncio.wait does not cancel its tasks
        await end(*tasks)
    for task in done:
        if not task.cancelled():  # a task that ended because of the stop has no result
            task.result()


async def within(seconds: float, work: Awaitable[Any]) -> bool:
    """Return whether the work ended within `seconds`; cancel it otherwise. Raises what the work raises."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(seconds, 0.0))
    finally:
        await end(task)
    if done and not task.cancelled():
        task.result()
    return bool(done)

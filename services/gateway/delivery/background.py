"""Requests of this gateway that run without a client: somebody has to match their stop strings.

Each has a task that reads its Generation and keeps nothing of it; the answer is made from the record (results.py). When
this gateway dies the reaper of another one goes on (reaper.py).
"""

from __future__ import annotations

import asyncio
import logging

from services.gateway.delivery.generation import Generation
from services.gateway.openai.errors import HANDED_OVER, TAKEN_OVER, ApiError
from services.gateway.tasks import end

log = logging.getLogger("orcinus.gateway")


class Keeper:
    """Reads generations that nobody else does."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.left: set[str] = set()
        """Requests whose client, who had taken them over from here, has gone: the reaper brings them back."""
        self.ended: set[str] = set()
        """Requests that need nobody any more, until the reaper has said so in Redis."""

    @property
    def kept(self) -> list[str]:
        """Ids of those that run now."""
        return list(self._tasks)

    def keep(self, generation: Generation) -> None:
        """Reads a generation to its end, and closes it."""
        request_id = generation.spec.id
        task = asyncio.create_task(self._read(generation))
        self._tasks[request_id] = task
        task.add_done_callback(lambda task: self._gone(request_id, task))

    async def stop(self) -> None:
        """Ends all tasks; their requests go on."""
        await end(*self._tasks.values())

    async def _read(self, generation: Generation) -> None:
        request_id = generation.spec.id
        try:
            while not generation.done:
                await generation.next()
            self.ended.add(request_id)
        except ApiError as error:
            if error.code not in (TAKEN_OVER, HANDED_OVER):  # a cancel, or its end with an error
                self.ended.add(request_id)
        finally:
            generation.close()

    def _gone(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the request %s in the background is kept no more: %r", request_id, error)

"""Run long work on the texts of requests beside the event loop, and leave threads to other tenants.

Encoding a conversation of 4 MB takes seconds. Where a tenant has all of its threads at work, more of its work waits,
and that of another tenant begins at once. `TENANT` is set where a caller is known: by RequireKey, by the gRPC front, by
lines of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

THREADS = min(32, (os.cpu_count() or 1) + 4)
TENANT_THREADS = THREADS // 2

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Of the request that the current task answers."""

P = ParamSpec("P")
T = TypeVar("T")


class TenantThreads:
    """The threads of one model."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "texts")
        self._free: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # threads left of each tenant

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function that blocks returns. Work of a cancelled caller keeps its thread to its end."""
        loop, tenant = asyncio.get_running_loop(), TENANT.get()
        free = self._free.setdefault(tenant, asyncio.Semaphore(TENANT_THREADS))
        await free.acquire()

        def release(_work: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the process ends
                loop.call_soon_threadsafe(free.release)

        work = self._pool.submit(function, *args, **kwargs)
        work.add_done_callback(release)
        return await asyncio.wrap_future(work)

"""Find batches that have not ended and drive some of them, each at one gateway at a time.

A lease in Redis says which gateway drives a batch. Its epoch is part of the names of all that the gateway writes about
the batch (records.py), so one that lost the lease without noticing changes nothing that counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from redis.exceptions import RedisError
from starlette.types import ASGIApp

from services.gateway.auth import Keyring
from services.gateway.batches.files import FileStore
from services.gateway.batches.records import BatchOrder, BatchStore, OpenBatch, Outdated
from services.gateway.batches.run import Means, Run
from services.gateway.metrics import Metrics
from shared.keys import EPOCHS
from shared.redis_client import LIVE_TTL_MS, Scripts, Unreachable, Value, connect
from shared.settings import GatewaySettings
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")

EVERY_S = 2.0
SWEEP_S = 600.0
LEASE_MS = 10_000
RENEWALS = 4
"""In the time of a lease."""
MAX_DRIVEN = 8
"""Batches that a gateway drives at a time."""
PAUSE_S = 30.0
"""After a batch could not be driven, as when the disk is full."""


class BatchDriver:
    """Drive batches: a task of the gateway and one for each batch."""

    def __init__(
        self,
        settings: GatewaySettings,
        keyring: Keyring,
        metrics: Metrics,
        cancel: Callable[[str, str], Awaitable[Any]],
    ) -> None:
        """cancel: cancels a request of a tenant."""
        self.files = FileStore(settings)
        self.batches = BatchStore(self.files)
        self.app: ASGIApp | None = None
        """Answers the requests of lines; set before `run` is called."""
        self._settings = settings
        self._keys = settings.keys
        self._keyring = keyring
        self._metrics = metrics
        self._cancel = cancel
        self._redis: Any = connect(settings, connections=2)
        scripts = Scripts(self._redis)
        self._lease = scripts.lease
        self._slots = asyncio.Semaphore(settings.batch_requests)
        self._tasks: dict[OpenBatch, asyncio.Task[None]] = {}
        self._pauses: dict[OpenBatch, float] = {}
        self._least_epoch = 0  # of the next lease: above what lies on disk
        self._has_more = asyncio.Event()
        self._swept_at = time.monotonic()
        self._is_stopping = False
        metrics.batches.set_function(lambda: len(self._tasks))

    def wake(self) -> None:
        """Look for a batch that is new."""
        self._has_more.set()

    async def run(self) -> None:
        """Look for batches, until cancelled."""
        while True:
            if self.files.is_enabled and self._keyring.has_read:
                try:
                    await self._look()
                    await self._sweep()
                except (*Unreachable, RedisError) as error:  # OSError, too: the disk
                    log.warning("batches were not looked for: %s", error)
            self._has_more.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S * random.uniform(0.8, 1.2)):  # noqa: S311 - jitter, no secret
                    await self._has_more.wait()

    async def stop(self) -> None:
        """Leave all batches to other gateways; their requests continue."""
        self._is_stopping = True
        await end(*self._tasks.values())

    async def close(self) -> None:
        self.files.close()
        await self._redis.aclose()

    async def _look(self) -> None:
        """Begin to drive batches that no gateway drives, those of each tenant in turn. Where there are MAX_DRIVEN, one
        of a tenant with at least two more than another is left for a batch of that one: batches may run for days.
        """
        app = self.app
        open_batches = await self.files.in_thread(self.batches.find_unfinished)
        now = time.monotonic()
        self._pauses = {batch: until for batch, until in self._pauses.items() if until > now}
        turns: Counter[str] = Counter(batch.owner for batch in self._tasks)
        candidates = []
        for batch in open_batches:
            if batch not in self._tasks:
                candidates.append((turns[batch.owner], batch))
                turns[batch.owner] += 1
        for turn, batch in sorted(candidates):
            if app is None or self._is_stopping or (self._is_full and self._removable(turn) is None):
                return
            if batch in self._pauses or not (epoch := int(await self._run(batch, "acquire", self._least_epoch))):
                continue
            order = await self.files.in_thread(self.batches.order, batch)
            if order is not None and self._is_full and (left := self._removable(turn)) is not None:
                await end(self._tasks.pop(left))
            if order is None or self._is_stopping:
                await self._run(batch, "release", epoch)
                continue
            task = asyncio.create_task(self._drive(app, batch, order, epoch))
            self._tasks[batch] = task
            task.add_done_callback(partial(self._forget, batch))

    @property
    def _is_full(self) -> bool:
        return len(self._tasks) >= MAX_DRIVEN

    def _removable(self, turn: int) -> OpenBatch | None:
        """Return the youngest batch of the tenant with the most that are driven, where that is at least two more than
        `turn`, those of another tenant; else None.
        """
        counts = Counter(batch.owner for batch in self._tasks)
        owner, most = max(counts.items(), key=lambda count: count[1])
        return max(batch for batch in self._tasks if batch.owner == owner) if most > turn + 1 else None

    def _forget(self, batch: OpenBatch, _task: asyncio.Task[None]) -> None:
        self._tasks.pop(batch, None)
        self.wake()

    async def _drive(self, app: ASGIApp, batch: OpenBatch, order: BatchOrder, epoch: int) -> None:
        """Run a batch while the lease is held."""
        settings = self._settings
        means = Means(
            app, self.files, self.batches, self._keyring.caller, self._cancel, self._slots, settings.batch_requests,
            settings.max_body_bytes, self._metrics,
        )  # fmt: skip
        keep_task = asyncio.create_task(self._keep(batch, epoch))
        run_task = asyncio.create_task(Run(means, batch, order, epoch).run())
        try:
            await asyncio.wait({keep_task, run_task}, return_when=asyncio.FIRST_COMPLETED)
            if run_task.done():
                run_task.result()
        except Outdated:
            log.info("batch %s: another gateway goes on with it", batch.id)
            last = await self.files.in_thread(self.batches.epoch, batch)
            if self._least_epoch <= last < EPOCHS - 1:  # also where it is gone, and Redis has lost its epoch
                self._least_epoch = last + 1
            else:
                self._pause(batch)
        except Exception:
            log.exception("batch %s was left for %.0f s", batch.id, PAUSE_S)
            self._pause(batch)
        finally:
            await end(keep_task, run_task)
            try:
                await self._run(batch, "release", epoch)
            except (*Unreachable, RedisError) as error:
                log.info("lease of batch %s not released: %s; it expires", batch.id, error)

    def _pause(self, batch: OpenBatch) -> None:
        self._pauses[batch] = time.monotonic() + PAUSE_S

    async def _keep(self, batch: OpenBatch, epoch: int) -> None:
        """Renew the lease until another gateway has it. While Redis is away the epoch alone protects the batch."""
        while True:
            await asyncio.sleep(LEASE_MS / 1000 / RENEWALS)
            try:
                if int(await self._run(batch, "renew", epoch)) != 1:
                    log.warning("lease of batch %s lost", batch.id)
                    return
            except (*Unreachable, RedisError) as error:
                log.info("lease of batch %s not renewed: %s; retrying", batch.id, error)

    async def _run(self, batch: OpenBatch, verb: str, epoch: int = 0) -> Any:
        keys = [
            self._keys.batch_lease(batch.id),
            self._keys.batch_epoch,
            self._keys.last_batch_epoch(batch.id),
        ]
        arguments: list[Value] = [verb, LEASE_MS, epoch, LIVE_TTL_MS]
        return await self._lease(keys, arguments)

    async def _sweep(self) -> None:
        """Remove what has expired, now and then."""
        if time.monotonic() - self._swept_at < SWEEP_S:
            return
        self._swept_at = time.monotonic()
        for owner in await self.files.in_thread(self.files.owners):
            await self.files.in_thread(self.files.sweep, owner)
            await self.files.in_thread(self.batches.sweep, owner, self._settings.file_retention_s)

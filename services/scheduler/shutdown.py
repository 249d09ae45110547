"""The last seconds of the scheduler's process: what may still be written, and how long all of it may take.

Redis may be gone, or silent, when the process is told to end. Nothing here is needed by whoever follows: leases and
heartbeats run out by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time

from redis.asyncio import Redis

from services.scheduler.shard.lease import Lease
from services.scheduler.tasks import within
from services.scheduler.telemetry.reports import Reports

log = logging.getLogger("orcinus.scheduler")

LEAVE_S = 3.5
LEAST_S = 0.3
"""What each gets when the others have taken it all."""


class Leaving:
    """LEAVE_S for everything, from the first call on."""

    def __init__(self, lease: Lease, reports: Reports, *clients: Redis) -> None:
        self._lease = lease
        self._reports = reports
        self._clients = clients
        self._by = 0.0  # monotonic s

    def left_s(self) -> float:
        now = time.monotonic()
        self._by = self._by or now + LEAVE_S
        return max(self._by - now, LEAST_S)

    async def give_up(self) -> None:
        """Gives up the lease, once: a standby goes on from now."""
        if self._lease.epoch and not await within(self.left_s(), self._lease.release()):
            log.warning("the lease was not released: Redis does not answer")

    async def goodbye(self) -> None:
        """Gives up the lease, takes the heartbeat back, and closes the connections."""
        await self.give_up()
        await within(self.left_s(), self._reports.forget())
        closed = asyncio.gather(*(client.aclose() for client in self._clients), return_exceptions=True)
        await within(self.left_s(), closed)

"""The output lengths from which memory is forecast, kept in `lengths:{shard}` over a restart of the scheduler.

A hash with one field for each group of max_tokens (services/scheduler/core/policy/memory.py). The service calls
`restore` once it holds the lease, `write` with its statistics and `close` at its end. What cannot be read is set aside
field by field; the forecast begins anew for these groups. Lengths that no longer hold are dropped by the core.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from redis.asyncio import Redis

from services.scheduler.core.policy.memory import KEPT, Lengths
from services.scheduler.core.scheduler import Scheduler
from shared.dead_letters import DeadLetters
from shared.errors import LeaseLostError
from shared.lease import Lease
from shared.redis_client import LIVE_TTL_MS, Unavailable, Value
from shared.wire.columns import pack, unpack

log = logging.getLogger("orcinus.scheduler")

GROUPS = range(Lengths.POOLED + 1)
WRITE_S = 10.0
"""Least time between two writes: what a killed scheduler may lose."""


def decode_group(group: int, column: bytes) -> list[int]:
    """Return the lengths of a group, oldest first. Raises ValueError."""
    if len(column) > 4 * KEPT:
        raise ValueError(f"{len(column)} bytes, at most {4 * KEPT}")
    lengths: list[int] = unpack(column).tolist()
    Lengths.check(group, lengths)
    return lengths


class LengthRecord:
    """Reads and writes `lengths:{shard}`. All writes are fenced by the lease."""

    def __init__(self, core: Scheduler, redis: Redis, lease: Lease, key: str, letters: DeadLetters) -> None:
        self._core = core
        self._redis = redis
        self._lease = lease
        self._key = key
        self._letters = letters
        self._written_counts: Mapping[int, list[int]] = {}
        self._due_at = 0.0

    async def restore(self) -> None:
        """Let the core forecast from what the last scheduler of the shard had learned."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.hmget(self._key, [*map(str, GROUPS)])
        (stored,) = await pipe.execute(raise_on_error=False)
        groups = self._letters.read(self._key, stored, self._decode) or {}
        self._core.restore_lengths(groups)
        self._written_counts = groups
        if groups:
            log.info("output lengths of %d groups of max_tokens restored", len(groups))

    def _decode(self, columns: list[bytes | None]) -> dict[int, list[int]]:
        """Return the groups that can be read."""
        read, key = self._letters.read, self._key
        decoded = {
            group: read(key, column, partial(decode_group, group))
            for group, column in zip(GROUPS, columns, strict=True)
            if column is not None
        }
        return {group: lengths for group, lengths in decoded.items() if lengths is not None}

    async def write(self, now_s: float) -> None:
        """Write what has changed, at most once in WRITE_S. Raises LeaseLostError.

        The hash is replaced as a whole, so a field that could not be read goes too.
        """
        if now_s < self._due_at or (groups := self._core.lengths()) == self._written_counts:
            return
        row: list[Value] = [word for group, lengths in groups.items() for word in (group, pack(lengths))]
        await self._lease.write(["DEL", self._key], ["HSET", self._key, *row], ["PEXPIRE", self._key, LIVE_TTL_MS])
        self._written_counts, self._due_at = groups, now_s + WRITE_S

    async def close(self) -> None:
        """Write what has changed since the last write, before a clean stop."""
        self._due_at = 0.0
        try:
            await self.write(0.0)
        except (*Unavailable, LeaseLostError) as error:
            log.warning("output lengths not written: %s", error)

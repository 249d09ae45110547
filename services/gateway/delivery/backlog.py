"""Requests on their way into Redis: by class, then in turn by tenant, bounded, and without those that came too late.

The dispatcher puts a request in and takes many at a time for one call of enqueue.lua. Bounds are shares of one backlog,
as they are of the queue in Redis: a less urgent class, and a tenant beside others, leave room for the rest.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared.keys import CLASSES
from shared.redis_client import Value

MOST_REQUESTS = 4096
MOST_BYTES = 64 << 20
BATCH_REQUESTS = 64
BATCH_BYTES = 1 << 20
"""Of one call; a larger request goes alone."""
RATE_SHARE = 0.2
"""Weight of the last batch in the measured rate."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request that waits. arguments: maps the milliseconds left until its deadline to those of enqueue.lua."""

    request_id: str
    tenant: str
    priority: int  # number of its class
    size_bytes: int
    survives: bool  # is enqueued also when its handler has gone
    is_named: bool  # its client can ask for it again
    expires_at: float  # of time.monotonic(); math.inf means never
    keys: list[str]
    arguments: Callable[[int], list[Value]]
    answer: asyncio.Future[list[Any]]

    def left_ms(self, now: float) -> int:
        """Return the milliseconds until the deadline, at least 1; 0 without a deadline."""
        return 0 if math.isinf(self.expires_at) else max(1, int(1000 * (self.expires_at - now)))


class Full(NamedTuple):
    """A bound of the backlog that is reached."""

    of_tenant: bool
    unit: str  # of `held` and `most`: requests or bytes
    held: int
    most: int
    wait_s: float  # until there is room


class Backlog:
    """All requests that wait for enqueue.lua."""

    def __init__(self) -> None:
        self._lanes: list[dict[str, deque[Entry]]] = [{} for _ in CLASSES]  # by class, by tenant; the next tenant first
        self._held: Counter[str] = Counter()  # by tenant
        self._bytes = 0
        self._bytes_of: Counter[str] = Counter()  # by tenant
        self._requests_s = 0.0

    def __len__(self) -> int:
        return self._held.total()

    def most(self, share: float) -> int:
        """Return how many requests may wait when one enters that may fill `share` of the backlog."""
        return max(1, int(share * MOST_REQUESTS))

    def full(self, tenant: str, share: float, tenant_share: float, size_bytes: int) -> Full | None:
        """Return the bound that keeps a request out: of all requests `share` may wait, of its tenant's `tenant_share`
        of that. Return None when there is room; alone a request always has.
        """
        for owner, held, held_bytes, part in (
            ("", len(self), self._bytes, share),
            (tenant, self._held[tenant], self._bytes_of[tenant], share * tenant_share),
        ):
            most, most_bytes = self.most(part), int(part * MOST_BYTES)
            tenants = len(self._held) if owner else 1
            if held >= most:
                return Full(bool(owner), "requests", held, most, self._wait_s(tenants * (held - most + 1)))
            if held and (excess := held_bytes + size_bytes - most_bytes) > 0:
                ahead = min(held, math.ceil(excess * held / held_bytes))
                return Full(bool(owner), "bytes", held_bytes, most_bytes, self._wait_s(tenants * ahead))
        return None

    def put(self, entry: Entry) -> None:
        self._lanes[entry.priority].setdefault(entry.tenant, deque()).append(entry)
        self._held[entry.tenant] += 1
        self._bytes += entry.size_bytes
        self._bytes_of[entry.tenant] += entry.size_bytes

    def take(self, now: float) -> tuple[list[Entry], list[Entry]]:
        """Return the requests of the next call, and those with a deadline that has passed; forget both, and those with
        a handler that has gone.
        """
        batch: list[Entry] = []
        late: list[Entry] = []
        room = BATCH_BYTES
        for lane in self._lanes:
            while lane and len(batch) < BATCH_REQUESTS:
                entry = next(iter(lane.values()))[0]
                if batch and entry.size_bytes > room:
                    return batch, late
                self._remove(lane, entry)
                if entry.answer.done() and not entry.survives:
                    continue
                if now >= entry.expires_at:
                    late.append(entry)
                    continue
                batch.append(entry)
                room -= entry.size_bytes
        return batch, late

    def _remove(self, lane: dict[str, deque[Entry]], entry: Entry) -> None:
        """Take out the first request of the lane's next tenant; the tenant's turn comes again after the others'."""
        entries = lane.pop(entry.tenant)
        entries.popleft()
        if entries:
            lane[entry.tenant] = entries
        self._held[entry.tenant] -= 1
        self._bytes_of[entry.tenant] -= entry.size_bytes
        if not self._held[entry.tenant]:
            del self._held[entry.tenant], self._bytes_of[entry.tenant]
        self._bytes -= entry.size_bytes

    def taken(self, requests: int, seconds: float) -> None:
        """Note how long Redis needed for a batch."""
        rate = requests / max(seconds, 1e-4)
        self._requests_s += RATE_SHARE * (rate - self._requests_s) if self._requests_s else rate

    def _wait_s(self, ahead: int) -> float:
        """Return the seconds until this many requests have left, at the measured rate."""
        return ahead / self._requests_s if self._requests_s else 1.0

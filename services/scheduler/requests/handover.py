"""Requests on their way to other shards: back to the queue those that never started, the others with their tokens.

Whatever moves is moved by one script under the lease of the shard that has it, so no two shards ever have a request. A
begun one goes into the pending list of its new shard, which finds it there as after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from services.scheduler.core.core import Core
from services.scheduler.requests.intake import Entry, Intake
from services.scheduler.requests.publisher import Publisher
from services.scheduler.shard.lease import Lease
from shared.errors import LeaseLostError
from shared.keys import GROUP, Keys
from shared.redis_client import Scripts, Value, persist

log = logging.getLogger("orcinus.scheduler")

AT_ONCE = 64
"""Requests of one script call."""


class Handover:
    """Moves what one shard holds (`entries`). `forget` is called for each request that has left it."""

    def __init__(
        self,
        scripts: Scripts,
        keys: Keys,
        shard: str,
        lease: Lease,
        core: Core,
        publisher: Publisher,
        entries: Mapping[str, Entry],
        forget: Callable[[str], None],
    ) -> None:
        self._scripts = scripts
        self._keys = keys
        self._shard = shard
        self._lease = lease
        self._core = core
        self._publisher = publisher
        self._entries = entries
        self._forget = forget

    async def hand_back(self, most: int = 1 << 30) -> int:
        """What never started goes back to the queue, for any shard; the last that came first, at most so many."""
        back: list[Entry] = []
        for request_id, entry in reversed(list(self._entries.items())):
            if len(back) == most:
                break
            if self._core.release(request_id):
                back.append(entry)
                self._forget(request_id)
        return await self._release(self._lease, back[::-1])

    async def give(self, shards: Sequence[str]) -> int:
        """What has begun goes on at `shards`, in turn, with the tokens that it has."""
        names = [name for name in list(self._entries) if self._core.release(name, begun=True)]
        if not names:
            return 0
        self._publisher.put(self._core.checkpoint())
        await self._publisher.caught_up()
        for number, shard in enumerate(shards):
            await self._move(
                self._lease, self._shard, shard, [self._entries[name] for name in names[number :: len(shards)]]
            )
        for name in names:
            self._forget(name)
        log.info("%d requests go on at %s", len(names), ", ".join(shards))
        return len(names)

    async def take_from(self, orphan: str, lease: Lease, intake: Intake) -> None:
        """Empties the pending list of a shard that nobody leads: what never started goes back to the queue, the rest
        into this shard's own list. `lease`: the orphan's; while it is held nobody else can do so, and whoever led the
        shard before can write nothing any more."""
        if not await lease.take():
            return  # somebody leads it again
        try:
            entries = await intake.left_by(orphan, lease)
            back = await self._release(lease, entries)
            moved = await self._move(lease, orphan, self._shard, entries)
            log.info("shard %s is led by nobody: %d requests handed back, %d taken over", orphan, back, moved)
        except LeaseLostError:
            log.warning("shard %s is led again", orphan)
        finally:
            await lease.release()

    async def _release(self, lease: Lease, entries: Iterable[Entry]) -> int:
        rows = [[self._keys.req(e.request.id), e.stream, e.id, e.request.SerializeToString()] for e in entries]
        count = 0
        for part in _parts(rows):
            head: list[Value] = [lease.epoch, GROUP]
            count += await persist(
                "hand requests back",
                lambda args=[*head, *part]: lease.fenced(self._scripts.release, [], args),
                log,
            )
        return count

    async def _move(self, lease: Lease, giver: str, taker: str, entries: Iterable[Entry]) -> int:
        rows: list[list[Value]] = [[self._keys.req(e.request.id), e.stream, e.id] for e in entries]
        count = 0
        for part in _parts(rows):
            head: list[Value] = [lease.epoch, GROUP, giver, taker]
            count += await persist(
                "give requests to another shard",
                lambda args=[*head, *part]: lease.fenced(self._scripts.give, [], args),
                log,
            )
        return count


def _parts(rows: Sequence[Sequence[Value]]) -> Iterable[list[Value]]:
    """The words of AT_ONCE rows at a time."""
    for begin in range(0, len(rows), AT_ONCE):
        yield [word for row in rows[begin : begin + AT_ONCE] for word in row]

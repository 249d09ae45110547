"""Move requests to other shards: unstarted requests return to the queue, started ones move with their tokens.

One script moves a request under the lease of the shard that holds it, so two shards never hold the same request. A
started request moves to the pending list of its new shard, which reads it there as after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Finish
from services.scheduler.requests.intake import Entry, Intake
from services.scheduler.requests.publisher import Publisher
from shared.errors import LeaseLostError
from shared.keys import GROUP, Keys
from shared.lease import Lease
from shared.redis_client import Scripts, Value, persist

log = logging.getLogger("orcinus.scheduler")

STRANDED_S = 60.0
STRANDED_ALONE_S = 600.0
"""The same in a shard without a worker: its own may be loading again."""
"""Time for which a request with tokens waits for workers of equal numerics while others could run it."""
WRONG_NUMERICS = (
    "numerics: its tokens are of workers with {!r}, of which none came within {:.0f} s; send the request again, or "
    "start the scheduler with --mixed-numerics"
)
PER_CALL = 64
"""Requests in one script call."""


class RequestHandover:
    """Moves the requests of one shard (`entries`). forget: called for each request that has left it."""

    def __init__(
        self,
        scripts: Scripts,
        keys: Keys,
        shard: str,
        lease: Lease,
        core: Scheduler,
        publisher: Publisher,
        entries: Mapping[str, Entry],
        forget: Callable[[str], None],
        end: Callable[[str, Finish, str], None],
    ) -> None:
        self._scripts = scripts
        self._keys = keys
        self._shard = shard
        self._lease = lease
        self._core = core
        self._publisher = publisher
        self._entries = entries
        self._forget = forget
        self._end = end
        self._stranded_since: dict[str, float] = {}  # request that no worker here may go on with -> since when

    async def hand_back(self, limit: int = 1 << 30) -> int:
        """Return at most `limit` unstarted requests to the queue, the latest first; return their number."""
        back: list[Entry] = []
        for request_id, entry in reversed(list(self._entries.items())):
            if len(back) == limit:
                break
            if self._core.release(request_id):
                back.append(entry)
                self._forget(request_id)
        return await self.release(self._lease, back[::-1])

    async def give(self, shards: Mapping[str, str], only: Collection[str] | None = None) -> int:
        """Give the requests that have begun to `shards` in turn, with their tokens; return how many.

        One with tokens goes to a shard of its identity, or stays. shards: name -> identity of its workers, empty where
        that is not known. only: these requests; None means all.
        """
        given: dict[str, list[str]] = {}
        for number, name in enumerate(list(self._entries if only is None else only)):
            identity = self._core.identity(name)
            able = [shard for shard, other in shards.items() if not identity or not other or identity == other]
            if able and name in self._entries and self._core.release(name, begun=True):
                given.setdefault(able[number % len(able)], []).append(name)
        if not given:
            return 0
        self._publisher.put(self._core.checkpoint())
        await self._publisher.caught_up()
        for shard, names in given.items():
            await self.move(self._lease, self._shard, shard, [self._entries[name] for name in names])
            log.info("%d requests go on at %s", len(names), shard)
        for name in (each for names in given.values() for each in names):
            self._forget(name)
        return sum(map(len, given.values()))

    async def settle_stranded(self, shards: Mapping[str, str], now_s: float) -> None:
        """Give requests with tokens of other numerics than those of this shard's workers to a shard that has these.

        After STRANDED_S without one, or STRANDED_ALONE_S, they end with an error. shards: as of `give`.
        """
        self._core.served_elsewhere(frozenset(shards.values()))
        stranded = self._core.stranded_requests()
        # Without any worker, too, as its workers may come and go.
        before = {
            name: at for name, at in self._stranded_since.items() if name in self._entries and not self._core.runs(name)
        }
        self._stranded_since = dict.fromkeys(stranded, now_s) | before
        if stranded and shards:
            await self.give(shards, stranded)
        most_s = STRANDED_S if self._core.alive else STRANDED_ALONE_S
        for name, since in list(self._stranded_since.items()):
            if now_s - since >= most_s and name in stranded and name in self._entries:
                self._end(name, Finish.ERROR, WRONG_NUMERICS.format(stranded[name], most_s))

    async def take_from(self, orphan: str, lease: Lease, intake: Intake) -> None:
        """Empty the pending list of a shard without a scheduler: return unstarted requests to the queue, and take the
        rest into this shard's list.

        lease: of the orphan. While it is held, no other shard can do the same, and the former scheduler of the orphan
        cannot write.
        """
        if not await lease.take():
            return  # it has a scheduler again
        try:
            entries = await intake.left_by(orphan, lease)
            back = await self.release(lease, entries)
            moved = await self.move(lease, orphan, self._shard, entries)
            log.info("shard %s has no scheduler: %d requests handed back, %d taken over", orphan, back, moved)
        except LeaseLostError:
            log.warning("shard %s not taken over: it has a scheduler again", orphan)
        finally:
            await lease.release()

    async def release(self, lease: Lease, entries: Iterable[Entry]) -> int:
        rows: list[list[Value]] = [
            [self._keys.req(e.request.id), e.stream, e.id, e.request.SerializeToString()] for e in entries
        ]
        count = 0
        for part in _parts(rows):
            head: list[Value] = [lease.text, GROUP]
            count += await persist(
                "hand requests back",
                partial(lease.run_fenced, self._scripts.release, [self._keys.queue], [*head, *part]),
                log,
            )
        return count

    async def move(self, lease: Lease, giver: str, taker: str, entries: Iterable[Entry]) -> int:
        rows: list[list[Value]] = [[self._keys.req(e.request.id), e.stream, e.id] for e in entries]
        count = 0
        for part in _parts(rows):
            head: list[Value] = [lease.text, GROUP, giver, taker]
            count += await persist(
                "give requests to another shard",
                partial(lease.run_fenced, self._scripts.give, [self._keys.queue], [*head, *part]),
                log,
            )
        return count


def _parts(rows: Sequence[Sequence[Value]]) -> Iterable[list[Value]]:
    """Yield the words of PER_CALL rows at a time."""
    for begin in range(0, len(rows), PER_CALL):
        yield [word for row in rows[begin : begin + PER_CALL] for word in row]

"""Decide which requests this shard holds: claim, take up, hand back, give away. One task does all of it in turn.

So a read in progress never claims a request that is handed back at that moment, and a command for a newly claimed
request is kept until the request is held. A shard that is alone claims more requests than can run, so that the policy
can choose. It does so without a worker, too, as while its model sleeps: only what is claimed ends at a cancel or at its
deadline. Beside other shards with workers it claims the requests that run soon, and leaves the rest to a shard with
free slots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.scheduler.requests.commands import Commands
from services.scheduler.requests.handover import RequestHandover
from services.scheduler.requests.intake import Claimed, Entry, Intake, room_by_class
from services.scheduler.shards import Shards
from shared.keys import CLASSES
from shared.lease import Lease
from shared.redis_client import Unavailable, backoff_s, temporary

log = logging.getLogger("orcinus.scheduler")

MAX_HELD = 16_384
"""Requests held by a shard that is alone: enough that a flood of one tenant hides no other from the policy."""
HAND_BACK_S = 3.0
GIVE_S = 6.0
"""Times for which a shard without a worker keeps unstarted and started requests while another shard has a worker."""


class Holdings:
    """The stream entries of the requests that this shard holds, until their ends are written."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.by_class = [0] * len(CLASSES)

    def add(self, name: str, entry: Entry) -> None:
        """Hold a request."""
        self.entries[name] = entry
        self.by_class[entry.class_number] += 1

    def drop(self, name: str) -> None:
        """Forget a request, if it is held."""
        if entry := self.entries.pop(name, None):
            self.by_class[entry.class_number] -= 1


class Claims:
    """Decides how many requests the shard holds. `run` ends when cancelled, or when a drain has emptied the shard."""

    def __init__(
        self,
        intake: Intake,
        holdings: Holdings,
        shards: Shards,
        handover: RequestHandover,
        commands: Commands,
        take: Callable[[list[Claimed]], None],
        has_suspects: Callable[[], bool],
        orphans_lease: Callable[[str], Lease],
        window: int = 0,
    ) -> None:
        """take: adds requests to the core. has_suspects: returns whether requests are suspected of killing a worker;
        they must not kill another shard's. orphans_lease: returns the lease of another shard. window: requests held at
        most; 0 uses MAX_HELD.
        """
        self._intake = intake
        self._holdings = holdings
        self._shards = shards
        self._handover = handover
        self._commands = commands
        self._take = take
        self._has_suspects = has_suspects
        self._orphans_lease = orphans_lease
        self._window = window
        self._slots = 0  # of the workers, or of the last ones
        self._workerless: float | None = time.monotonic()  # start of the time without a worker
        self._looks = 0
        self.changed = asyncio.Event()  # a request left, a worker came, or the other shards were read
        self.is_draining = False

    def set_slots(self, slots: int) -> None:
        """Take the number of slots of the workers."""
        self._slots, self._workerless = slots, None
        self.changed.set()

    def on_loss(self) -> None:
        """Note that the last worker is lost."""
        if self._workerless is None:
            self._workerless = time.monotonic()
        self.changed.set()

    def drain(self) -> None:
        """Stop claiming, hand back and give away all requests, and end when none is left."""
        self.is_draining = True
        self.changed.set()

    async def run(self) -> None:
        """Claim, share and hand back until cancelled or drained."""
        attempt = 0
        while not self.is_draining:
            self.changed.clear()
            self._commands.claim_begins()
            try:
                # Entries of a call that failed, of another shard, or of a scheduler that still ran.
                if attempt or (self._shards_changed() and await self._has_stranded()):
                    await self.rebuild()
                await self._share()
                room = self.room()
                claimed = await self._intake.read(room, bool(self._shards.other_shards)) if max(room) > 0 else []
            except Unavailable as error:
                if not temporary(error):
                    raise
                if attempt == 0:
                    log.warning("waiting for Redis to claim requests: %s", error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            attempt = 0
            self._take(claimed)
            self._commands.claim_answered()
            if max(room) <= 0:
                await self.changed.wait()
        await self._empty()

    async def rebuild(self) -> None:
        """Take up the requests of the shard's pending list that are not held."""
        count = await self._intake.read_pending(self._holdings.entries, self._take)
        if count:
            log.info("took up %d claimed requests", count)

    def room(self) -> list[int]:
        """Return how many requests of each class may be claimed now."""
        others = bool(self._shards.other_shards)
        if self._workerless is not None and (others or not self._shards.looks):
            return [0] * len(CLASSES)
        return room_by_class(self._max_held(others), self._holdings.by_class)

    def _max_held(self, others: bool) -> int:
        """Return how many requests may be held."""
        alone = self._window or MAX_HELD
        return min(alone, self._slots + max(self._slots // 4, 1)) if others else alone

    def _shards_changed(self) -> bool:
        before, self._looks = self._looks, self._shards.looks
        return before != self._looks

    async def _has_stranded(self) -> bool:
        held = len(self._holdings.entries)
        return self._shards.pending_requests > held and await self._intake.has_stranded(held)

    async def _share(self) -> None:
        """Give requests to the other shards, and take over those of shards without a scheduler."""
        without_s = 0.0 if self._workerless is None else time.monotonic() - self._workerless
        if self._shards.other_shards:
            await self._give_to_others(without_s)
        await self._settle_stranded()
        if self._workerless is None:
            for orphan in self._shards.orphans:
                await self._handover.take_from(orphan, self._orphans_lease(orphan), self._intake)
            if self._shards.orphans:
                self._shards.orphans = []  # until the next look
                await self.rebuild()

    async def _settle_stranded(self) -> None:
        shards = {} if self._has_suspects() else self._shards.identities
        await self._handover.settle_stranded(shards, time.monotonic())

    async def _give_to_others(self, without_s: float) -> None:
        surplus = len(self._holdings.entries) - self._max_held(others=True)
        if without_s > HAND_BACK_S:
            surplus = len(self._holdings.entries)
        if surplus > 0 and (count := await self._handover.hand_back(surplus)):
            log.info("%d requests handed back, for %s", count, ", ".join(self._shards.other_shards))
        if without_s > GIVE_S and not self._has_suspects():
            await self._handover.give(self._shards.identities)

    async def _empty(self) -> None:
        """Drain: hand back unstarted requests; give the rest to another shard, or finish it here if there is none."""
        count = await self._handover.hand_back()
        self._commands.claim_answered()  # ends a failed claim; the next scheduler takes up its requests
        log.info("draining: %d requests handed back, %d have begun", count, len(self._holdings.entries))
        while await self._has_requests():
            self.changed.clear()
            if self._shards.other_shards and not self._has_suspects():
                await self._handover.give(self._shards.identities)
            await self._settle_stranded()
            if self._holdings.entries:
                await self.changed.wait()

    async def _has_requests(self) -> bool:
        """Return whether requests are left; shards that have not seen the drain may have given more."""
        try:
            if await self._intake.has_stranded(len(self._holdings.entries)):
                self._commands.claim_begins()
                await self.rebuild()
                self._commands.claim_answered()
        except Unavailable as error:
            log.warning("requests given to this shard not read: %s; the next scheduler takes them up", error)
        return bool(self._holdings.entries)

"""Commands of gateways and operators to a shard: `control:{shard}`, read in order and trimmed behind the reader.

A command about a request can overtake the answer of the claim that made the request ours; such a command is kept until
that claim is answered. Other commands about requests that the shard does not hold are dropped: the requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container
from typing import Any

from redis.asyncio import Redis

from protos import queue_pb2
from services.scheduler.requests.publisher import Publisher
from shared.dead_letters import DeadLetters
from shared.lease import Lease
from shared.redis_client import BLOCK_MS, HIGHEST_ID, Unavailable, backoff_s, place_of, temporary

log = logging.getLogger("orcinus.scheduler")

ABOUT_REQUESTS = ("cancel", "stop", "adopt")
ONCE = ("drain", "policy")
"""Commands that leave the stream at once: the next scheduler must not drain because this one did."""

READ_COMMANDS = 1000
MAX_NUMBER = (1 << 64) - 1
"""The last entry of a millisecond has this number."""


class Commands:
    """Reads the stream on a separate connection; `execute` carries out one command."""

    def __init__(
        self,
        reader: Redis,
        key: str,
        held: Container[str],
        execute: Callable[[queue_pb2.Control], None],
        lease: Lease,
        publisher: Publisher,
        letters: DeadLetters | None = None,
    ) -> None:
        self._letters = letters or DeadLetters()
        self._reader = reader
        self._lease = lease
        self._publisher = publisher
        self._key = key
        self._held = held
        self._execute = execute
        self._is_claiming = False
        self.early: list[queue_pb2.Control] = []
        self._early_put = 0  # outcomes that must be written before those that were kept for a claim are trimmed

    def claim_begins(self) -> None:
        """Keep commands about unknown requests from now on."""
        self._is_claiming = True

    def claim_answered(self) -> None:
        """Carry out the commands that were kept: claimed requests are held now."""
        self._is_claiming = False
        early, self.early = self.early, []
        for control in early:
            self._execute(control)
        if early:
            self._early_put = self._publisher.put_count

    async def run(self) -> None:
        """Read commands until cancelled.

        A command stays in the stream until its outcome is written. After a crash the next scheduler reads it again, and
        after an error this one does: a Redis that lost its last writes gives ids again that were read, where its clock
        was set back. So a command may be carried out twice.
        """
        last, attempt = "0-0", 0
        newest = b""  # the last command that was read and stays in the stream
        kept: deque[tuple[int, str]] = deque()  # outcomes that must be written first, last id read by then
        while True:
            try:
                reply: Any = await self._reader.xread({self._key: last}, count=READ_COMMANDS, block=BLOCK_MS)
                if reply:
                    rows = [row for row in reply[0][1] if row[0] != HIGHEST_ID]
                    once = [id_ for id_, fields in reply[0][1] if self.take(fields.get(b"c", b"")) in ONCE]
                    if rows:
                        last = rows[-1][0].decode()
                        newest = next((id_ for id_, _ in reversed(rows) if id_ not in once), newest)
                        kept.append((self._publisher.put_count, last))
                    if once:
                        await self._lease.write(["XDEL", self._key, *once])
                    if len(rows) < len(reply[0][1]):  # an entry without a command sets the stream back
                        await self._lease.write(["XDEL", self._key, HIGHEST_ID], ["XADD", self._key, "*", "x", ""])
                        kept.clear()  # commands that were not read may have lower ids now
                elif await self._ends_before(last, newest):  # the stream was set back, or lost
                    last = "0-0"
                    kept.clear()
                done = ""
                while kept and not self.early and max(kept[0][0], self._early_put) <= self._publisher.written_count:
                    _, done = kept.popleft()
                if done:
                    milliseconds, number = place_of(done.encode())
                    behind = f"{milliseconds}-{number + 1}" if number < MAX_NUMBER else f"{milliseconds + 1}-0"
                    await self._lease.write(["XTRIM", self._key, "MINID", behind])
                attempt = 0
            except Unavailable as error:
                if not temporary(error):
                    raise
                if attempt == 0:
                    log.warning("waiting for Redis to read commands: %s", error)
                last = "0-0"
                kept.clear()
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    async def _ends_before(self, last: str, newest: bytes) -> bool:
        """Return whether the last command in the stream has an earlier id than `last`, and is not the one that is the
        `newest` since those behind it were deleted.
        """
        rows: Any = await self._reader.xrevrange(self._key, count=1)
        return bool(rows) and rows[0][0] != newest and place_of(rows[0][0]) < place_of(last.encode())

    def take(self, payload: bytes) -> str:
        """Carry out a command, or keep it for the claim under way; return its kind."""
        control = self._letters.read(self._key, payload, queue_pb2.Control.FromString)
        if control is None:
            return ""
        kind = control.WhichOneof("command") or ""
        unknown = kind in ABOUT_REQUESTS and getattr(control, kind).id not in self._held
        if unknown and self._is_claiming:
            self.early.append(control)
        elif not unknown:
            self._execute(control)
        return kind

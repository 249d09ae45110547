"""A lease in Redis: one scheduler at a time may write for a shard, one placer for all models; the epoch says which.

The service waits in `acquire` until the shard is free, then `keep` renews the lease. When `keep` returns, the shard is
lost and nothing may be written any more; the scripts refuse it anyway.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import LeaseLostError
from shared.keys import Keys
from shared.redis_client import LIVE_TTL_MS, Script, Scripts, Unavailable, Value, persist
from shared.wire.handshake import digest_of

log = logging.getLogger("orcinus.lease")

STANDBY_S = 0.05
"""Interval at which a standby tries; a released shard pauses for so long, and for the rebuild of its requests."""


class Lease:
    """The right to write for one shard, for `lease_ms` at a time."""

    def __init__(self, scripts: Scripts, keys: Keys, shard: str, lease_ms: int) -> None:
        self._script = scripts.lease
        self._writes = scripts.fenced
        self._keys = [keys.lease(shard), keys.epoch, keys.shard_epoch(shard)]
        self._shard = shard
        self._lease_ms = lease_ms
        self.token = ""
        """Of this process alone: the lease in Redis holds its digest, by which workers know the holder."""
        self.epoch = 0

    @property
    def key(self) -> str:
        """Return the Redis key of the lease."""
        return self._keys[0]

    @property
    def text(self) -> str:
        """Return what the lease holds in Redis while it is this one's, the first word of fenced scripts."""
        return f"{self.epoch}:{digest_of(self.token)}" if self.token else str(self.epoch)

    async def acquire(self, is_stopping: Callable[[], bool]) -> int:
        """Wait for the shard and return the new epoch. Raises CancelledError when `is_stopping` turns true."""
        has_waited = False
        while not is_stopping():
            if await persist(f"take the lease of {self._shard}", self.take, log, is_stopping):
                log.info("lease of %s taken, epoch %d", self._shard, self.epoch)
                return self.epoch
            if not has_waited:
                log.info("waiting for the lease of %s: another process holds it", self._shard)
                has_waited = True
            await asyncio.sleep(STANDBY_S)
        raise asyncio.CancelledError

    async def take(self) -> bool:
        """Take the shard if it is free; return whether it was."""
        token = secrets.token_hex(16)
        self.epoch = int(await self._run("acquire", 0, digest_of(token)))
        self.token = token
        return self.epoch > 0

    async def _run(self, verb: str, value: Value, token: str = "") -> Any:
        return await self._script(self._keys, [verb, self._lease_ms, value, LIVE_TTL_MS, token])

    async def keep(self) -> None:
        """Renew four times per lease until another process has it.

        An unreachable Redis is no loss by itself: the scripts fence every write, and an expired lease that no other
        scheduler took is renewed.
        """
        while True:
            await asyncio.sleep(self._lease_ms / 4000)
            try:
                if int(await self._run("renew", self.text)) != 1:
                    log.warning("lease of %s lost: another process follows epoch %d", self._shard, self.epoch)
                    return
            except Unavailable as error:
                log.warning("lease of %s not renewed: %s; retrying", self._shard, error)

    async def run_fenced(self, script: Script, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """Run a script that compares the epoch with the lease, the first of its keys.

        When Redis was away for longer than the lease, the write may come before the renewal; then the lease is renewed
        first. Raises LeaseLostError when another process has had it.
        """
        try:
            return await script([self.key, *keys], args)
        except LeaseLostError:
            if int(await self._run("renew", self.text)) != 1:
                raise
            return await script([self.key, *keys], args)

    async def write(self, *commands: Sequence[Value]) -> None:
        """Run write commands, the second word of each a key: all of them, or none when the shard is lost.

        Raises LeaseLostError.
        """
        keys = list(dict.fromkeys(str(command[1]) for command in commands))
        words = [word for command in commands for word in (len(command), *command)]
        await self.run_fenced(self._writes, keys, [self.text, *words])

    async def release(self) -> None:
        """Let a standby take the shard at once. Writes under way are refused from now on: they must not renew the
        lease."""
        text, self.epoch = self.text, 0
        try:
            await self._run("release", text)
        except Unavailable as error:
            log.warning("lease of %s not released: %s; it expires", self._shard, error)

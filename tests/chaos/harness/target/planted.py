"""Services with a bug, to see that a chaos run finds it. The product has none of these and no switch for them.

    python -m tests.chaos.harness.target.planted ROLE BUG ...

starts the real service with some parts replaced. `Scenario.programs` takes `programs(BUG, ...)`; tests/chaos does so.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from unittest.mock import patch

from services.cli import app as cli
from services.gateway.delivery.stream import Offer, RequestStream, Row
from services.scheduler.core.kv.blocks import BlockPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.workers.registry import Registration, WorkerRegistry
from shared import redis_client
from shared.errors import LeaseLostError
from shared.lease import Lease
from shared.redis_client import Script, Value

SPARED, EVERY = 4, 5
"""The first requests, which say what is right, are left alone; then one of so many tokens or blocks goes wrong."""


def _without(words: str, but: str = "") -> type[Script]:
    """Scripts, all `but` one, that lack the lines with these words."""

    class Edited(Script):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            lines = self._source.splitlines(keepends=True)
            self._source = b"".join(line for line in lines if self.name == but or words.encode() not in line)
            self._sha = hashlib.sha1(self._source).hexdigest()

    return Edited


@contextlib.contextmanager
def _lost_ack() -> Iterator[None]:
    """A request that ended stays in the pending list, also when the scheduler looks there for what it has forgotten."""
    real = Lease.write

    async def write(self: Lease, *commands: Sequence[Value]) -> None:
        if kept := [command for command in commands if command[0] != "XACK"]:
            await real(self, *kept)

    with patch.object(Lease, "write", write), patch.object(redis_client, "Script", _without("'XACK'")):
        yield


@contextlib.contextmanager
def _leaked_block() -> Iterator[None]:
    """A sequence keeps its last block. The scheduler's own check, which would end it, is off."""
    real, calls = BlockPool.give, count(1)

    def give(self: BlockPool, blocks: Any) -> None:
        number = next(calls)
        real(self, blocks[:-1] if number > SPARED and number % EVERY == 0 else blocks)

    with patch.object(BlockPool, "give", give), patch.object(Scheduler, "check", lambda _: None):
        yield


@contextlib.contextmanager
def _doubled_token() -> Iterator[None]:
    """Some tokens are delivered twice."""
    real, calls = RequestStream.offer, count(1)
    seen: set[str] = set()

    def offer(self: RequestStream, row: Row, first: int) -> Offer:
        taken = real(self, row, first)
        seen.add(self.request_id)
        fresh = taken is Offer.TAKEN and row.tokens and not row.finish
        if fresh and len(seen) > SPARED and next(calls) % EVERY == 0:
            self._rows.append(row)
        return taken

    with patch.object(RequestStream, "offer", offer):
        yield


@contextlib.contextmanager
def _ignored_epoch() -> Iterator[None]:
    """A scheduler that lost its shard goes on, and no script refuses what it writes. It gets no worker: two that
    take one from each other would never come to an end."""
    real_keep = Lease.keep

    async def keep(self: Lease) -> None:
        while True:
            await real_keep(self)

    real_take = WorkerRegistry.take

    async def take(self: WorkerRegistry, *arguments: Any) -> Registration | None:
        with contextlib.suppress(LeaseLostError):
            return await real_take(self, *arguments)
        return None

    with (
        patch.object(Lease, "keep", keep),
        patch.object(WorkerRegistry, "take", take),
        patch.object(redis_client, "Script", _without("FENCED", but="take_worker")),
    ):
        yield


BUGS: Mapping[str, tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "lost_ack": ("scheduler", _lost_ack),
    "doubled_token": ("gateway", _doubled_token),
    "leaked_block": ("scheduler", _leaked_block),
    "ignored_epoch": ("scheduler", _ignored_epoch),
}
"""By name, the role that has it and what it replaces."""


def programs(*bugs: str) -> dict[str, tuple[str, ...]]:
    """By role, what to run behind `python -m`."""
    roles = dict.fromkeys(BUGS[bug][0] for bug in bugs)
    return {
        role: ("tests.chaos.harness.target.planted", role, *(b for b in bugs if BUGS[b][0] == role)) for role in roles
    }


def main(role: str, *bugs: str) -> None:
    with contextlib.ExitStack() as planted:
        for bug in bugs:
            planted.enter_context(BUGS[bug][1]())
        cli.app([role])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Commands are obeyed once what they are about is held, and leave the stream once what came of them is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from protos import queue_pb2
from services.scheduler.requests.commands import Commands
from services.scheduler.service import Service
from shared.settings import SchedulerSettings
from tests.support.waiting import free_port


def stop(name: str) -> queue_pb2.Control:
    return queue_pb2.Control(stop=queue_pb2.Control.Stop(id=name, choice=0, at_token=3))


class Shard:
    """Stands in for stream, lease and publisher; each command that is obeyed has an outcome to be written."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[queue_pb2.Control | None] = asyncio.Queue()
        self.held: set[str] = set()
        self.obeyed: list[str] = []
        self.trimmed: list[str] = []
        self.put_count = self.written_count = self.entries = self.reads = 0
        me = cast(Any, self)
        self.commands = Commands(me, "control", self.held, self.obey, me, me)

    def obey(self, control: queue_pb2.Control) -> None:
        self.obeyed.append(control.stop.id)
        self.put_count += 1

    async def xread(self, streams: dict[str, str], count: int, block: int) -> Any:
        self.reads += 1
        control = await self.coming.get()
        if control is None:  # nothing came for a while
            return []
        self.entries += 1
        return [[b"control", [(b"%d-0" % self.entries, {b"c": control.SerializeToString()})]]]

    async def write(self, *commands: list[str]) -> None:
        self.trimmed += [command[3] for command in commands if command[0] == "XTRIM"]

    async def read(self, *controls: queue_pb2.Control) -> None:
        """These come, then nothing, and all of it has been dealt with."""
        for control in (*controls, None):
            before = self.reads
            self.coming.put_nowait(control)
            async with asyncio.timeout(60):
                while self.reads == before:
                    await asyncio.sleep(0)


@pytest.fixture
async def shard() -> AsyncIterator[Shard]:
    made = Shard()
    running = asyncio.create_task(made.commands.run())
    while not made.reads:
        await asyncio.sleep(0)
    yield made
    running.cancel()


async def test_command_kept_for_a_claim_stays_until_its_outcome(shard: Shard) -> None:
    shard.commands.claim_begins()
    await shard.read(stop("a"))
    assert (shard.obeyed, shard.trimmed) == ([], [])
    shard.held.add("a")
    shard.commands.claim_answered()
    await shard.read()
    assert (shard.obeyed, shard.trimmed) == (["a"], [])
    shard.written_count = 1
    await shard.read()
    assert shard.trimmed == ["1-1"]


async def test_draining_scheduler_keeps_no_command_of_a_failed_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(SchedulerSettings(redis_url=f"redis://127.0.0.1:{free_port()}/0"))

    async def nothing() -> int:
        return 0

    monkeypatch.setattr(service.handover, "hand_back", nothing)
    service.commands.claim_begins()  # and got no answer
    service.claims.drain()
    await asyncio.wait_for(service.claims.run(), 60)
    assert service.commands.take(stop("of-another").SerializeToString()) == "stop"
    assert not service.commands.early


async def test_command_stays_in_the_stream_until_its_outcome_is_written(shard: Shard) -> None:
    shard.held.add("a")
    await shard.read(stop("a"))
    assert (shard.obeyed, shard.trimmed) == (["a"], [])
    shard.written_count = 1
    await shard.read()
    assert shard.trimmed == ["1-1"]

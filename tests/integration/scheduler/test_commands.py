"""Commands of gateways in a real Redis that loses its last writes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from protos import queue_pb2
from services.scheduler.requests.commands import Commands
from shared.lease import Lease
from shared.redis_client import BLOCK_MS, Scripts, connect
from shared.settings import SchedulerSettings
from shared.tasks import end
from tests.support.stack import RedisServer
from tests.support.waiting import wait_until

HELD = {"first", "second"}


def cancel(name: str) -> dict[bytes, bytes]:
    """Return the fields of an entry that cancels a request."""
    return {b"c": queue_pb2.Control(cancel=queue_pb2.Control.Cancel(id=name)).SerializeToString()}


async def test_command_behind_a_loss_is_read_where_the_clock_was_set_back(redis_server: RedisServer) -> None:
    settings, client = SchedulerSettings(redis_url=redis_server.url), redis_server.client
    client.flushall()
    key = settings.keys.control("shard-0")
    writer, reader = connect(settings), connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
    lease = Lease(Scripts(writer), settings.keys, "shard-0", 60_000)
    assert await lease.take()
    obeyed: list[str] = []
    publisher: Any = SimpleNamespace(put_count=1, written_count=0)  # what came of the first command is not written
    commands = Commands(reader, key, HELD, lambda control: obeyed.append(control.cancel.id), lease, publisher)
    running = asyncio.create_task(commands.run())
    client.xadd(key, cast(Any, cancel("first")), "5000-0")
    await wait_until(lambda: obeyed == ["first"])
    # Redis comes back without that entry, and its clock is behind it.
    client.delete(key)
    client.xadd(key, cast(Any, cancel("second")), "3000-0")
    client.execute_command("CLIENT", "KILL", "TYPE", "normal")
    await wait_until(lambda: obeyed[1:] == ["second"], 20)
    assert client.xlen(key) == 1  # until its outcome is written
    publisher.written_count = 1
    await wait_until(lambda: client.xlen(key) == 0)
    await end(running)
    for each in (writer, reader):
        await each.aclose()

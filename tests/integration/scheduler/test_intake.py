"""Requests and commands that wait in a real Redis: one that loses writes, a flood of one tenant, lengths."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np

from protos import queue_pb2
from services.scheduler.core.policy.memory import FEW
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.types import Limits, StepResult
from services.scheduler.requests.claims import Claims, Holdings
from services.scheduler.requests.commands import Commands
from services.scheduler.requests.intake import READ_COUNT, Claimed, Clock, Intake
from shared.keys import Keys
from shared.lease import Lease
from shared.redis_client import BLOCK_MS, Scripts, connect
from shared.settings import SchedulerSettings
from shared.tasks import end
from shared.wire.columns import pack, unpack
from tests.support.stack import RedisServer
from tests.support.stand_ins.token_stack import PROMPT, TokenStack
from tests.support.stand_ins.token_worker import answer
from tests.support.waiting import until, wait_until

FLOOD, PROMPT_TOKENS, SLOTS = 2_000, 200, 4


async def claimed_of_a_flood(server: RedisServer) -> list[Claimed]:
    """Return 2,000 requests of `flood`, then one of `quiet`, as a lone shard with SLOTS slots claims them."""
    settings = SchedulerSettings(redis_url=server.url, lease_ms=60_000)
    keys, redis = settings.keys, connect(settings, socket_timeout_s=60.0)
    pipe = redis.pipeline(transaction=False)
    for number in range(FLOOD + 1):
        name, tenant = f"r{number}", "quiet" if number == FLOOD else "flood"
        prompts = queue_pb2.Prompts(tokens=[pack([5] * PROMPT_TOKENS)])
        request = queue_pb2.Request(id=name, tenant=tenant, gateway="g", prompts=prompts, n=1, max_tokens=1)
        setattr(request, "class", 2)
        pipe.xadd(keys.requests("normal"), {"r": request.SerializeToString()})
        record: dict[Any, Any] = {
            "state": "queued",
            "tenant": tenant,
            "gateway": "g",
            "class": "normal",
            "enqueued_ms": number + 1,
        }
        pipe.hset(keys.req(name), mapping=record)
    await pipe.execute()
    scripts = Scripts(redis)
    lease = Lease(scripts, keys, settings.shard, settings.lease_ms)
    assert await lease.take()
    intake, held = Intake(redis, redis, scripts, keys, settings.shard, lease, Clock()), Holdings()
    await intake.prepare()
    absent: Any = None
    alone: Any = SimpleNamespace(other_shards=())
    claims = Claims(intake, held, alone, absent, absent, absent, lambda: False, absent)
    claims.set_slots(SLOTS)
    found: list[Claimed] = []
    while len(found) <= FLOOD and (part := await intake.read(claims.room())):
        assert len(part) <= READ_COUNT, "running sequences have their steps meanwhile"
        for item in part:
            held.add(item.request.id, item.entry)
        found += part
    await redis.aclose()
    return found


def starts_before_quiet(claimed: list[Claimed]) -> int:
    """Return how many of the flood start before the last request does."""
    core = Scheduler("orcinus", prefix_cache=False)
    core.join(Limits(slots=SLOTS, blocks=256, block_size=16, max_model_len=1024, max_step_tokens=512))
    now_ns, started = 1_000_000_000, 0
    for item in claimed:
        core.add(item.request, now_ns)
    while True:
        now_ns += 10_000_000
        step, _ = core.plan(now_ns)
        assert step is not None
        for enter in step.enters:
            if enter.request.id == claimed[-1].request.id:
                return started
            started += 1
        slots = step.chunk_slots[step.samples]
        core.apply(StepResult(step.id, 0, slots, np.full(slots.size, 7, np.int32)), now_ns)


async def test_request_of_another_tenant_starts_soon_in_a_flood(redis_server: RedisServer) -> None:
    claimed = await claimed_of_a_flood(redis_server)
    assert len(claimed) == FLOOD + 1
    assert starts_before_quiet(claimed) < 40


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


async def test_commands_behind_an_id_close_to_the_highest_are_read(redis_server: RedisServer) -> None:
    settings, client = SchedulerSettings(redis_url=redis_server.url), redis_server.client
    client.flushall()
    key, last = settings.keys.control("shard-0"), (1 << 64) - 1
    writer, reader = connect(settings), connect(settings, connections=1, socket_timeout_s=BLOCK_MS / 1000 + 4)
    lease = Lease(Scripts(writer), settings.keys, "shard-0", 60_000)
    assert await lease.take()
    obeyed: list[str] = []
    publisher: Any = SimpleNamespace(put_count=0, written_count=0)
    held = {"first", "second", "third", "fourth"}
    commands = Commands(reader, key, held, lambda control: obeyed.append(control.cancel.id), lease, publisher)
    running = asyncio.create_task(commands.run())
    client.xadd(key, cast(Any, cancel("first")), f"5000-{last}")
    await wait_until(lambda: obeyed == ["first"])
    client.xadd(key, cast(Any, cancel("second")), f"{last}-{last - 1}")
    await wait_until(lambda: "second" in obeyed)
    for name in ("third", "fourth"):  # the third gets the highest id
        ((_, payload),) = cancel(name).items()
        await lease.write(["XADD", key, "*", "c", payload])
        await wait_until(partial(obeyed.__contains__, name), 20)
    await wait_until(lambda: client.xlen(key) == 0)
    await end(running)
    for each in (writer, reader):
        await each.aclose()


LIMITS = (24, 48)
GROUPS = (b"18", b"22", b"128")
"""Of the two limits, and of both together."""


def stored(client: Any, keys: Keys) -> dict[bytes, list[int]]:
    return {name: unpack(column).tolist() for name, column in client.hgetall(keys.lengths("shard-0")).items()}


def set_aside(client: Any, keys: Keys) -> list[dict[bytes, bytes]]:
    key = keys.lengths("shard-0").encode()
    return [fields for _, fields in client.xrange(keys.dead) if fields[b"key"] == key]


def serve(stack: TokenStack, count: int) -> None:
    """Have `count` requests of each limit answered; the gateway refuses some until it has seen a new scheduler."""
    for limit in LIMITS * count:
        response = until("a request is answered", partial(accepted, stack, limit))
        assert response is not None
        assert response.json()["choices"][0]["token_ids"] == answer(PROMPT, limit)


def accepted(stack: TokenStack, limit: int) -> httpx.Response | None:
    response = stack.ask(tokens=limit)
    return response if response.status_code == 200 else None


def test_restarted_scheduler_goes_on_with_lengths_and_sets_broken_ones_aside(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with TokenStack(tmp_path, redis_server) as stack:
        client, keys = redis_server.client, stack.keys
        key = keys.lengths("shard-0")
        stack.worker("worker-a").start()
        stack.wait_answer(60)
        until("the first lengths are written", lambda: client.exists(key))
        serve(stack, FEW)
        stack.kill_scheduler(signal.SIGTERM)
        first = stored(client, keys)
        assert (first[GROUPS[0]], first[GROUPS[1]]) == ([24] * FEW, [48] * FEW)
        assert first[GROUPS[2]][-2 * FEW :] == [24, 48] * FEW
        assert 0 < client.pttl(key) <= 24 * 3600 * 1000

        stack.start_scheduler()
        stack.wait_answer()
        until("the lengths are written", lambda: len(stored(client, keys)[GROUPS[2]]) > len(first[GROUPS[2]]))
        stack.kill_scheduler(signal.SIGKILL)
        second = stored(client, keys)
        assert all(second[group][: len(lengths)] == lengths for group, lengths in first.items())

        client.hset(key, GROUPS[1], pack(np.array([48, 480])))  # no request of this group may have so many
        client.hset(key, GROUPS[2], b"\xff" * 7)
        client.hset(key, "999", b"x" * 5000)
        stack.start_scheduler()
        stack.wait_answer()
        serve(stack, 2)
        until("both fields lie in `dead`", lambda: len(set_aside(client, keys)) == 2)
        assert [row[b"bytes"] for row in set_aside(client, keys)] == [b"8", b"7"]
        stack.kill_scheduler(signal.SIGTERM)
        third = stored(client, keys)
        assert third[GROUPS[0]] == [24] * (FEW + 2), "its field was whole"
        assert third[GROUPS[1]] == [48] * 2, "it began anew"
        assert third[GROUPS[2]][-4:] == [24, 48, 24, 48] and len(third[GROUPS[2]]) < len(first[GROUPS[2]])
        assert b"999" not in third

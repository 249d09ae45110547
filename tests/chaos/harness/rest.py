"""What a chaos stack holds when nothing runs: from the scheduler's stats, from Redis itself, from the processes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import psutil

from shared.keys import CLASSES, GROUP
from tests.chaos.harness.clock import Deadline
from tests.chaos.harness.history import Rest
from tests.chaos.harness.target.stack import NotReadyError, Stack
from tests.support.kept_bytes import kept_bytes

SEQUENCES = ("running", "waiting", "swapped", "parked", "in_flight", "blocks_draining")


LAST_WORDS = ("; stopping", "the worker ends itself")
"""Logs of a scheduler that lost its shard and of a worker that hangs: they end with status 1 as they should."""


async def observe(stack: Stack) -> Rest:
    """As it is now. Raises NotReadyError while no scheduler has written its stats."""
    stats = await stack.stats()
    if not set(SEQUENCES) <= stats.keys():
        raise NotReadyError("no scheduler has written stats")
    redis, keys = stack.redis, stack.keys
    queue = {name: int(value) for name, value in (await stack.hash(keys.queue)).items()}
    kept: Any = await redis.xrange(keys.queue_kept)  # behind the ends of requests
    if kept:
        queue["bytes"] = queue.get("bytes", 0) - kept_bytes(kept)
    entries = {name: int(await redis.xlen(keys.requests(name))) for name in CLASSES}
    pending = {name: int((await redis.xpending(keys.requests(name), GROUP))["pending"]) for name in CLASSES}
    known: list[bytes] = [key async for key in redis.scan_iter(count=1000)]
    names = {key.decode() for key in known} - stack.lasting
    lasting = [name for name in names if await redis.ttl(name) == -1]
    return Rest(
        blocks_free=int(stats["blocks_free"]) + int(stats["blocks_cached"]),
        blocks_total=int(stats["blocks_total"]),
        sequences={name: int(stats[name]) for name in SEQUENCES},
        queue=queue,
        entries=entries,
        pending=pending,
        lasting_keys=sorted(lasting),
        **_processes(stack),
    )


def _processes(stack: Stack) -> dict[str, Any]:
    processes = {name: psutil.Process(service.pid) for name, service in stack.processes.items() if service.pid}
    return {
        "fds": {name: process.num_fds() for name, process in processes.items()},
        "rss_mib": {name: process.memory_info().rss / 2**20 for name, process in processes.items()},
    }


async def settled(stack: Stack, seconds: float) -> Rest:
    """The first rest at which nothing runs, or what was there when the time was over: the checker says what is wrong.

    The stats must be of a moment after this call: they are up to a second old.
    """
    begun_ms, deadline = time.time() * 1000, Deadline(seconds)
    while True:
        stats = await stack.stats()
        late = deadline.passed()
        if late or (float(stats.get("time_ms", 0)) > begun_ms and stats.get("workers") == stack.replicas):
            rest = await observe(stack)
            if late or rest.quiet():
                return rest
        await asyncio.sleep(0.1)


async def unfinished(stack: Stack) -> list[tuple[str, str]]:
    """Requests that wait or run, by id, with the gateway that delivers each."""
    prefix = stack.keys.req("")
    records: list[bytes] = [key async for key in stack.redis.scan_iter(match=f"{prefix}*", count=1000)]
    fields: Any = [await stack.redis.hmget(record, ["state", "gateway"]) for record in records]
    return [
        (record.decode().removeprefix(prefix), gateway.decode())
        for record, (state, gateway) in zip(records, fields, strict=True)
        if state not in (None, b"finished")
    ]


def said(stack: Stack) -> dict[str, int]:
    """By service, how often its log says that it ends, and why."""
    logs = {name: process.log.read_text(errors="replace") for name, process in stack.processes.items()}
    return {name: sum(text.count(words) for words in LAST_WORDS) for name, text in logs.items()}


async def epochs(stack: Stack) -> dict[str, list[int]]:
    """Epochs by witness: of the steps that the worker ran, and of the stats that Redis took, in their order."""
    steps: list[int] = []
    if stack.step_log is not None:
        with stack.step_log.open() as lines:
            steps = [json.loads(line)["epoch"] for line in lines if line.endswith("\n")]
    steps = [epoch for epoch in steps if epoch]  # without a worker's warm-up
    history: Any = await stack.redis.xrange(stack.keys.stats_history(stack.shard))
    return {"steps of the worker": steps, "stats in Redis": [int(fields[b"epoch"]) for _, fields in history]}

"""The load, equal for every server: closed loops at 1, 8 and 32, and decoding streams between long prompts.

Requests are sent and timed by `bench/serve/client.py`, as in `orcinus bench serve`. No prompt comes twice in a run and
every server gets the same ones. Called by `bench/peers/run.py`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

from bench.peers import model
from bench.peers.process import Running
from bench.peers.servers import Server, request
from bench.serve import client as load_client
from bench.serve.client import Target
from bench.serve.stats import Record, percentiles_ms, summarise

PROMPT, OUTPUT = 128, 64
REQUESTS = {1: 12, 8: 64, 32: 128}
"""Requests of a closed loop by how many run at a time."""
LONGEST, LONGEST_OUTPUT, LONGEST_REQUESTS = 2000, 8, 4
"""A closed loop of one request at a time. Its prompts nearly fill the context."""
MIX_STREAMS, MIX_OUTPUT = 8, 128
LONG_PROMPT, LONG_OUTPUT = 1500, 16
LONG_EVERY_S, LONG_FIRST_S = 1.5, 0.75
MIX_S = 12.0
TIMEOUT_S = 300.0
KEPT = ("requests", "finished", "short", "errors", "wall_s", "output_tok_s", "ttft_ms", "tpot_ms")
# First numbers of the prompts' keys, so that no kind of run repeats the prompts of another.
CHECK, WARM, CLOSED, STREAMS, LONGS, PREFILLS = range(6)


@asynccontextmanager
async def connected(running: Running) -> AsyncIterator[tuple[aiohttp.ClientSession, Target]]:
    """Yield a session that uses every connection once: one of the servers closes them after its answers."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=headers
    ) as session:
        yield session, Target(running.url, "model", True, 0, 0, 0.0, 0, TIMEOUT_S)


async def answers(running: Running, rows: list[dict[str, Any]], at_once: int = 8) -> int:
    """Return how many of the reference's prompts this server answers with the same text, several at a time.

    Bytes that are no text are compared by what stands between them, since servers write them in different ways.
    """
    gate = asyncio.Semaphore(at_once)

    async with connected(running) as (session, target):

        async def same(row: dict[str, Any]) -> bool:
            body = orjson.dumps(request(running.server, row["prompt"], model.CHECK_TOKENS, stream=False))
            async with (
                gate,
                asyncio.timeout(TIMEOUT_S),
                session.post(f"{target.url}/v1/completions", data=body) as reply,
            ):
                if reply.status != 200:
                    raise RuntimeError(f"http {reply.status}: {(await reply.text())[:200]}")
                found = orjson.loads(await reply.read())
            if (counted := found["usage"]["prompt_tokens"]) != row["prompt_tokens"]:
                raise RuntimeError(f"a prompt of {row['prompt_tokens']} tokens was read as {counted}")
            return comparable(found["choices"][0]["text"]) == comparable(row["text"])

        return sum(await asyncio.gather(*(same(row) for row in rows)))


def comparable(text: str) -> str:
    """Return the text without the marks of incomplete characters."""
    return text.replace("\ufffd", "")


async def stream(
    session: aiohttp.ClientSession, target: Target, server: Server, key: tuple[int, ...], prompt: int, output: int
) -> Record:
    """Send one streamed request now."""
    body = orjson.dumps(request(server, model.prompt(prompt, *key), output, stream=True))
    record = Record(key[-1], prompt, output, time.perf_counter())
    await load_client.send(session, target, record, body)
    return record


async def closed_loop(
    running: Running,
    kind: int,
    round_: int,
    total: int,
    concurrency: int,
    prompt: int = PROMPT,
    output: int = OUTPUT,
) -> list[Record]:
    """Send `total` requests, `concurrency` at a time."""
    numbers = iter(range(total))
    records: list[Record] = []

    async with connected(running) as (session, target):

        async def user() -> None:
            for number in numbers:
                key = (kind, round_, concurrency, number)
                records.append(await stream(session, target, running.server, key, prompt, output))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
    return records


async def mix(running: Running, round_: int, window_s: float) -> tuple[list[Record], list[Record]]:
    """Run streams that decode all the time, and long prompts at fixed times. Return both kinds of records."""
    streams: list[Record] = []
    longs: list[Record] = []
    started = time.perf_counter()

    async with connected(running) as (session, target):

        async def user(place: int) -> None:
            number = 0
            while time.perf_counter() - started < window_s:
                key = (STREAMS, round_, place, number)
                streams.append(await stream(session, target, running.server, key, PROMPT, MIX_OUTPUT))
                if streams[-1].error:
                    return  # a server that refuses at once would be asked thousands of times
                number += 1

        async def reader(number: int) -> None:
            await asyncio.sleep(LONG_FIRST_S + number * LONG_EVERY_S)
            key = (LONGS, round_, number)
            longs.append(await stream(session, target, running.server, key, LONG_PROMPT, LONG_OUTPUT))

        async with asyncio.TaskGroup() as group:
            for place in range(MIX_STREAMS):
                group.create_task(user(place))
            for number in range(int((window_s - LONG_FIRST_S) / LONG_EVERY_S) + 1):
                group.create_task(reader(number))
    return streams, longs


def tbt(records: list[Record]) -> dict[str, float | None]:
    """Return percentiles and maximum of the gaps between tokens in ms; tokens of one event are 0 apart."""
    gaps = [gap for record in records if record.finished for gap in record.gaps_s()]
    return {**percentiles_ms(gaps), "max": round(max(gaps) * 1000, 3) if gaps else None}


def mix_figures(streams: list[Record], longs: list[Record], window_s: float) -> dict[str, Any]:
    """Return gaps and tokens within the window of the decoding streams, and TTFT of the long prompts."""
    started = min(record.scheduled_s for record in streams)
    tokens = 0.0
    for record in streams:
        if record.finished:
            inside = sum(at - started <= window_s for at in record.event_s)
            tokens += inside * record.output_tokens / len(record.event_s)
    every = streams + longs
    return {
        "requests": len(every),
        "finished": sum(record.finished for record in every),
        "short": sum(record.finished and record.output_tokens < record.asked_tokens for record in every),
        "errors": sorted({f"{record.error}: {record.detail[:100]}" for record in every if record.error}),
        "output_tok_s": round(tokens / window_s, 3),
        "output_tokens": sum(record.output_tokens for record in every),
        "events": sum(len(record.event_s) for record in every),
        "tbt_ms": tbt(streams),
        "long_ttft_ms": percentiles_ms(record.ttft_s() for record in longs if record.finished),
    }


def closed_figures(records: list[Record]) -> dict[str, Any]:
    found = summarise(records)
    return {
        **{name: found[name] for name in KEPT},
        "errors": sorted({f"{record.error}: {record.detail[:100]}" for record in records if record.error}),
        "output_tokens": found["output_tokens"],
        "tbt_ms": tbt(records),
        "events": sum(len(record.event_s) for record in records),
    }


def busy_s() -> float:
    """Return the CPU seconds of the machine, all cores together."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


def metered(running: Running, work: Coroutine[Any, Any, Any]) -> tuple[Any, dict[str, float]]:
    """Run one measurement; return its cost in cores for the server, this client and all other programs."""
    load = os.getloadavg()[0]
    wall, machine, server, client = time.perf_counter(), busy_s(), running.cpu_s(), time.process_time()
    result = uvloop.run(work)
    took = max(time.perf_counter() - wall, 1e-9)
    server, client = running.cpu_s() - server, time.process_time() - client
    others = max(0.0, busy_s() - machine - server - client)
    return result, {
        "load_1m": round(load, 2),
        "server_cpu_s": round(server, 3),
        "server_cores": round(server / took, 3),
        "client_cores": round(client / took, 3),
        "other_cores": round(others / took, 3),
    }


def measure_closed(running: Running, round_: int, concurrency: int, total: int) -> dict[str, Any]:
    """Warm up, then run one closed loop; return figures and cost."""
    uvloop.run(closed_loop(running, WARM, round_, concurrency, concurrency, output=16))
    records, cost = metered(running, closed_loop(running, CLOSED, round_, total, concurrency))
    return with_cost(closed_figures(records), cost)


def measure_longest(running: Running, round_: int) -> dict[str, Any]:
    """Send the longest prompts one at a time: their TTFT is what the machine needs for a prompt."""
    work = closed_loop(running, PREFILLS, round_, LONGEST_REQUESTS, 1, LONGEST, LONGEST_OUTPUT)
    records, cost = metered(running, work)
    return with_cost(closed_figures(records), cost)


def measure_mix(running: Running, round_: int, window_s: float) -> dict[str, Any]:
    (streams, longs), cost = metered(running, mix(running, round_, window_s))
    return with_cost(mix_figures(streams, longs, window_s), cost)


def with_cost(figures: dict[str, Any], cost: dict[str, float]) -> dict[str, Any]:
    tokens = figures["output_tokens"]
    per_thousand = round(cost["server_cpu_s"] / tokens * 1000, 3) if tokens else None
    return {**figures, **cost, "cpu_s_per_1000_tokens": per_thousand}


def check(running: Running, rows: list[dict[str, Any]]) -> int:
    return uvloop.run(answers(running, rows))

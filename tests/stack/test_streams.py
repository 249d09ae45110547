"""Many streams at once on two cores: each ends, in order, once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import psutil

from tests.support import sse
from tests.support.stack import Stack

STREAMS = 200
ROUNDS = 4
TOKENS = 16
STACK = {"dtype": "float32"}
"""Batches differ between the rounds, and only this type promises the same tokens in whatever batch."""
GROWTH = 0.02
GROWTH_BYTES = 8 << 20
LAZY_FDS = 3
"""Connections of a pool of four that are opened only when as many calls of Redis meet; a leak opens more each round."""


async def stream(session: aiohttp.ClientSession, stack: Stack, index: int) -> list[int]:
    """Return the token ids of one streamed completion. Raise AssertionError where the stream is not well-formed."""
    body = {
        "model": stack.name, "prompt": f"def function_{index}(value):\n    ", "max_tokens": TOKENS, "temperature": 0.8,
        "seed": index, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    usage: dict[str, Any] = {}
    last_index = -1
    ended = done = False
    decoder = sse.Decoder()
    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise AssertionError(await answer.text())
        async for raw in answer.content:
            found = decoder.feed(raw.decode().rstrip())
            if found is None:
                continue
            if found.data == sse.DONE:
                done = True
                continue
            event, event_id = found.json, found.id
            if "error" in event:
                raise AssertionError(event)
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                ids += new
                if new:
                    last_index += len(new)
                    beyond = int(event_id.rsplit(":", 1)[1].split(".")[0]) - last_index
                    if ended or beyond not in (0, 1, 2):
                        raise AssertionError(f"event {event_id} has {len(new)} tokens up to index {last_index}")
                    ended = beyond > 0  # it has the end of the choice, too
            usage = event.get("usage") or usage
    if not done or usage["completion_tokens"] != len(ids):
        raise AssertionError(f"stream {index}: done {done}, usage {usage}, {len(ids)} tokens")
    return ids


async def round_of(stack: Stack) -> list[list[int]]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return list(await asyncio.gather(*(stream(session, stack, index) for index in range(STREAMS))))


def footprint(stack: Stack) -> dict[str, dict[str, int]]:
    found = {}
    for service in ("gateway", "scheduler", "worker"):
        process = psutil.Process(stack.pid(service))
        found[service] = {"rss": process.memory_info().rss, "fds": process.num_fds()}
    return found


def test_200_streams_repeat_their_tokens_and_leave_nothing(stack: Stack) -> None:
    answers, feet, rest = [], [], []
    for _ in range(ROUNDS):
        answers.append(asyncio.run(round_of(stack)))
        rest.append(stack.settled())
        feet.append(footprint(stack))
    assert all(len(ids) == TOKENS for ids in answers[0])
    for answer in answers[1:]:
        assert answer == answers[0]
    for service, second in feet[1].items():
        last = feet[3][service]
        assert last["rss"] <= second["rss"] * (1 + GROWTH) + GROWTH_BYTES, (service, feet)
        assert last["fds"] - second["fds"] <= LAZY_FDS, (service, feet)
    assert rest[3] == rest[1]
    assert rest[3]["blocks"] == rest[3]["total"]
    assert rest[3]["pending"] == [0, 0, 0, 0]

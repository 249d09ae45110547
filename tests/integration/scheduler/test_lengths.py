"""The lengths of finished requests outlive their scheduler in `lengths:{shard}`."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from services.scheduler.core.policy.memory import FEW
from shared.columns import pack, unpack
from shared.keys import Keys
from tests.support.stack import RedisServer
from tests.support.stand_ins.token_stack import PROMPT, TokenStack
from tests.support.stand_ins.token_worker import answer
from tests.support.waiting import until

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

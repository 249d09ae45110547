"""What the kill bench makes of streams that end, break off, or go on, from a server that does each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from bench.peers import kill, servers
from bench.peers.kill import Load

OURS = next(server for server in servers.SERVERS if server.name == "orcinus float32")


def event(text: str) -> bytes:
    return b"id: r:0\ndata: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


class Answers:
    """A server; its n-th stream is whole, breaks off, or tells an error, by n modulo 3."""

    def __init__(self) -> None:
        self.seen = 0
        self.resumed: list[tuple[str, str]] = []

    async def completions(self, call: web.Request) -> web.StreamResponse:
        number, self.seen = self.seen, self.seen + 1
        reply = web.StreamResponse(headers={"x-orcinus-request": f"r{number % 3}"})
        await reply.prepare(call)
        await reply.write(event("one"))
        endings = (event(" two") + b"data: [DONE]\n\n", b"", b'data: {"error": {"message": "gone"}}\n\n')
        await reply.write(endings[number % 3])
        return reply

    async def resume(self, call: web.Request) -> web.StreamResponse:
        self.resumed.append((call.match_info["id"], call.headers["Last-Event-ID"]))
        if call.match_info["id"] == "r2":
            return web.Response(status=404, text="not found")
        return web.Response(body=event(" two") + b"data: [DONE]\n\n", content_type="text/event-stream")


@pytest.fixture
async def answers() -> Any:
    """The server and its address."""
    made = Answers()
    app = web.Application()
    app.router.add_post("/v1/completions", made.completions)
    app.router.add_get("/v1/requests/{id}/stream", made.resume)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield made, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_broken_streams_are_told_from_whole_ones_and_go_on(answers: Any) -> None:
    made, url = answers
    async with kill.connected() as session:
        load = Load(OURS, url, session)
        load.streams = load.streams[:6]
        async with asyncio.timeout(60):
            streams = await load.run()
            whole = [stream for stream in streams if not stream.error]
            assert [stream.text for stream in whole] == ["one two"] * 2
            broken = sorted(stream.error.split(" ", 1)[1][:20] for stream in streams if stream.error)
            assert broken == ["error event: {'messa"] * 2 + ["the stream ended aft"] * 2
            await load.go_on()
    assert sorted(made.resumed) == [("r1", "r:0")] * 2 + [("r2", "r:0")] * 2
    assert sorted(stream.text for stream in streams if not stream.error) == ["one two"] * 4
    assert all("http 404" in stream.error for stream in streams if stream.error)

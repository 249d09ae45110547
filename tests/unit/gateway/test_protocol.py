"""One HTTP connection, without a socket: what a server that stops does with a client that has only connected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.gateway.http import protocol
from services.gateway.http.protocol import Bounds, Protocol
from tests.support.waiting import wait_until

HEAD = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


class Transport(asyncio.Transport):
    """Keep what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def connected(transport: Transport) -> Protocol:
    config = uvicorn.Config(answer, ws="none", log_config=None)
    config.load()
    made = Protocol(Bounds(8, 1 << 16, 60.0), config=config, server_state=ServerState(), app_state={})
    made.connection_made(transport)
    return made


@pytest.mark.parametrize("sends", [True, False], ids=["sends a request", "sends nothing"])
def test_new_connection_may_send_one_request_when_the_server_stops(
    monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    monkeypatch.setattr(protocol, "FIRST_REQUEST_S", 60.0 if sends else 0.0)

    async def run() -> Transport:
        transport = Transport()
        connection = connected(transport)
        connection.shutdown()
        assert not transport.closed
        if sends:
            connection.data_received(HEAD)
        await wait_until(lambda: transport.closed)
        return transport

    written = asyncio.run(run()).written
    assert (b"200 OK" in written and b"connection: close" in written) is sends


def test_connection_between_two_requests_closes_when_the_server_stops() -> None:
    async def run() -> None:
        transport = Transport()
        connection = connected(transport)
        connection.data_received(HEAD)
        await wait_until(lambda: transport.written.endswith(b"ok"))
        assert not transport.closed
        connection.shutdown()
        assert transport.closed

    asyncio.run(run())

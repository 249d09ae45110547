"""HTTP connections, mostly without a socket, of a server that stops, that is busy, and behind an answer."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from services.gateway.admission import bodies
from services.gateway.http import protocol
from services.gateway.http.protocol import BodyLimit, Bounds, Protocol, RequestContext
from services.gateway.http.server import HANDLES, handles
from services.gateway.metrics import Metrics
from shared.processes.listeners import listen
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


class ReadTransport(Transport):
    """Reading can be paused, which changes nothing: the test brings the bytes."""

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def connected(transport: Transport, app: Any = answer) -> Protocol:
    config = uvicorn.Config(app, ws="none", log_config=None)
    config.load()
    made = Protocol(Bounds(8, 1 << 16, 60.0), config=config, server_state=ServerState(), app_state={})
    made.connection_made(transport)
    return made


@pytest.mark.parametrize("sends", [True, False], ids=["sends a request", "sends nothing"])
async def test_new_connection_may_send_one_request_when_the_server_stops(
    monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    monkeypatch.setattr(protocol, "FIRST_REQUEST_S", 60.0 if sends else 0.0)
    connection = connected(transport := Transport())
    connection.shutdown()
    assert not transport.closed
    if sends:
        connection.data_received(HEAD)
    await wait_until(lambda: transport.closed)
    assert (b"200 OK" in transport.written and b"connection: close" in transport.written) is sends


async def test_connection_between_two_requests_closes_when_the_server_stops() -> None:
    connection = connected(transport := Transport())
    connection.data_received(HEAD)
    await wait_until(lambda: transport.written.endswith(b"ok"))
    assert not transport.closed
    connection.shutdown()
    assert transport.closed


async def test_many_requests_in_one_read_are_taken_a_piece_at_a_time() -> None:
    connection = connected(transport := ReadTransport())
    count = 4 * protocol.PIECE_BYTES // len(HEAD)
    connection.data_received(count * HEAD)
    assert 0 < len(connection.pipeline) <= protocol.PIECE_BYTES // len(HEAD), "others have to be parsed later"
    await wait_until(lambda: transport.written.count(b"200 OK") == count)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_what_a_request_held_is_gone_with_it(without_collector: None) -> None:
    class Held:
        """Stands for prompt and stream."""

    held: list[weakref.ref[Held]] = []

    async def keeps(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["held"] = one = Held()
        held.append(weakref.ref(one))
        await answer(scope, receive, send)

    connection = connected(transport := Transport(), RequestContext(keeps, Metrics("m"), pages=["/health/live"]))
    for _ in range(2):
        transport.written = b""
        connection.data_received(HEAD)
        await wait_until(lambda: transport.written.endswith(b"ok"))
    connection.connection_lost(None)
    await asyncio.sleep(0)  # the task of the last answer ends
    assert [one() for one in held] == [None, None]


@pytest.mark.parametrize("sent", [b"", HEAD[:9], b"\0\r\n\r\n", HEAD, HEAD + HEAD, HEAD + HEAD[:9]])
@pytest.mark.parametrize("leaves_early", [True, False])
async def test_connection_is_gone_when_it_is_lost(without_collector: None, sent: bytes, leaves_early: bool) -> None:
    """Beside thousands of requests that wait, a full collection stops a gateway for a second."""
    goes_on = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await goes_on.wait()
        await answer(scope, receive, send)

    app = RequestContext(waits, Metrics("m"), pages=["/health/live"])
    connection = connected(transport := ReadTransport(), app)
    connection.data_received(sent)
    if not leaves_early:
        goes_on.set()
        await wait_until(lambda: transport.written.count(b"200 OK") == sent.count(HEAD))
    connection.connection_lost(None)
    goes_on.set()
    gone = weakref.ref(connection)
    del connection
    await wait_until(lambda: gone() is None)


def test_busy_gateway_accepts_many_connections_in_a_round_of_its_loop() -> None:
    made: list[Any] = []

    class Counted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        with listen("127.0.0.1", 0, "test") as listener:
            clients = [socket.create_connection(listener.getsockname()) for _ in range(HANDLES)]
            servers = [await loop.create_server(Counted, sock=handle) for handle in handles(listener, 1)]
            rounds = []
            while len(made) < HANDLES:
                await asyncio.sleep(0)
                rounds.append(len(made))
            for server in servers:
                server.close()
            for transport in made:
                transport.abort()
            for client in clients:
                client.close()
        return [count for count in rounds if count]

    assert uvloop.run(run()) == [HANDLES]


@pytest.mark.parametrize("declared, status", [("2", b"200 "), ("9", b"413 ")])
async def test_length_of_a_body_is_read_behind_any_zeros(declared: str, status: bytes) -> None:
    transport = Transport()
    context = connected(transport, RequestContext(BodyLimit(answer, 8, {}, bodies(8).hold), Metrics()))
    length = declared.rjust(5000, "0")
    context.data_received(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}".encode())
    await wait_until(lambda: transport.written)
    assert transport.written.startswith(b"HTTP/1.1 " + status)

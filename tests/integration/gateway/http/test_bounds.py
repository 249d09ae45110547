"""What never becomes a request: too many connections, long heads, slow senders, foreign names; and TLS."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy import certs
from tests.support.gateway.process import GatewayProcess, led_gateway, running_gateway
from tests.support.stack import RedisServer
from tests.support.stand_ins.scripted_scheduler import ScriptedScheduler
from tests.support.waiting import until

MAX_CONNECTIONS = 12
GATEWAY = {
    "max_connections": MAX_CONNECTIONS, "max_header_bytes": 4096, "read_timeout_s": 60, "idle_connection_s": 60,
}  # fmt: skip
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bounds")
    certs.make(found, [])
    return found


@pytest.fixture(scope="module")
def over_tls(directory: Path, model: Path, redis_server: RedisServer) -> Iterator[GatewayProcess]:
    files = {"tls_cert": directory / "gateway.pem", "tls_key": directory / "gateway-key.pem"}
    process = GatewayProcess(directory, model, redis_server.url, **files)
    process.start()
    try:
        until("the gateway listens", lambda: answers(process, trusting(directory)), 60)
        yield process
    finally:
        process.stop()


def trusting(directory: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(directory / "ca.pem"))


def answers(process: GatewayProcess, context: ssl.SSLContext) -> bool:
    try:
        url = f"https://127.0.0.1:{process.port}/health/live"
        return httpx.get(url, verify=context, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, model: Path, redis_server: RedisServer) -> Iterator[GatewayProcess]:
    """A gateway that waits for no client; where connections are to last, a busy machine needs the other one."""
    limits = {"read_timeout_s": 1.0, "idle_connection_s": 2}
    with running_gateway(tmp_path_factory.mktemp("hasty"), model, redis_server, **limits) as running:
        yield running


def connected(gateway: GatewayProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=60)


def exchange(gateway: GatewayProcess, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Send the parts on one connection and read to its end: status and error."""
    with connected(gateway) as connection:
        for part in parts:
            connection.sendall(part)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "tail",
    [b"0\r\n" + b"A: b\r\n" * 2000, b"0\r\nA: " + b"a" * 12000, b"1;" + b"a" * 12000],
    ids=["many trailers", "a long trailer", "a long chunk extension"],
)
def test_trailers_and_chunk_extensions_are_bounded_as_a_head(gateway: GatewayProcess, tail: bytes) -> None:
    head = POST + b"Expect: 100-continue\r\n"
    with connected(gateway) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        assert b" 100 " in connection.recv(65536)  # so the head was read alone
        connection.sendall(tail)
        assert b"head_too_large" in connection.recv(65536)


def test_trailers_within_the_bounds_are_ignored(gateway: GatewayProcess) -> None:
    head = POST + b"Connection: close\r\n"
    chunks = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 3000 + b"0\r\nContent-Type: text/html\r\n\r\n"
    assert exchange(gateway, head, chunks)[1]["code"] == "invalid_json"


def test_head_without_an_end_is_cut_at_the_bound(gateway: GatewayProcess) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nA: ")
        sent = 0
        with pytest.raises(OSError):
            while sent < 256 << 20:
                sent += connection.send(b"a" * 65536)
    assert sent < 64 << 20  # what sockets on both sides may hold


def test_request_that_comes_too_slowly_gets_408(hasty: GatewayProcess) -> None:
    half_a_head = b"POST /v1/completions HTTP/1.1\r\n"
    half_a_body = half_a_head + b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with ThreadPoolExecutor(3) as together:
        answers = together.map(lambda part: exchange(hasty, part), (b"", half_a_head, half_a_body))
        assert [(status, error["code"]) for status, error in answers] == [(408, "request_timeout")] * 3
    assert "Traceback" not in hasty.log()


def test_request_refused_before_its_body_gets_one_answer(hasty: GatewayProcess) -> None:
    head = POST.replace(b"application/json", b"text/plain") + b"Content-Length: 100\r\n\r\n"
    with connected(hasty) as connection:
        connection.sendall(head + b"{")
        received = b"".join(iter(lambda: connection.recv(65536), b""))  # until the time for the rest is over
    assert received.startswith(b"HTTP/1.1 415") and received.count(b"HTTP/1.1") == 1


@contextlib.contextmanager
def full(gateway: GatewayProcess, behind: bytes) -> Iterator[list[socket.socket]]:
    """Open as many connections as there may be; each has sent a request, and `behind` with it, and got its answer."""
    held = [connected(gateway) for _ in range(MAX_CONNECTIONS)]
    try:
        for connection in held:
            connection.sendall(MODELS + behind)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        yield held
    finally:
        for connection in held:
            connection.close()
    until("there is room again", lambda: gateway.status("/health/live") == 200)


def test_connections_beyond_the_bound_get_503(gateway: GatewayProcess) -> None:
    with full(gateway, behind=b"G"):  # in the middle of their next request
        status, error = exchange(gateway, MODELS)
    assert (status, error["code"]) == (503, "too_many_connections")


def held_open(gateway: GatewayProcess, priority: str, key: str = "") -> socket.socket:
    """Send a request that no worker answers."""
    body = json.dumps({"model": gateway.name, "prompt": [5], "priority": priority}).encode()
    connection = connected(gateway)
    head = POST
    connection.sendall(
        head + b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (key.encode(), len(body)) + body
    )
    return connection


def test_less_urgent_requests_leave_connections_to_more_urgent_ones(
    gateway: GatewayProcess, scheduler: ScriptedScheduler
) -> None:
    def active() -> int:
        return int(gateway.metric("orcinus_gateway_active_requests"))

    def reached(count: int) -> bool:
        return active() == count

    with contextlib.ExitStack() as waiting:
        for most, priority in ((5, "low"), (8, "normal"), (10, "realtime")):  # of 12, of which requests may hold 0.9
            for count in range(active() + 1, most + 1):
                waiting.enter_context(held_open(gateway, priority))
                until("it waits", partial(reached, count))
            refused = gateway.post("/v1/completions", {"prompt": [5], "priority": priority})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert f"clients hold {most + 1} connections" in refused.text  # with its own
            assert f"of which {most} are allowed" in refused.text
        assert gateway.status("/health/live") == 200
    until("all are cancelled", partial(reached, 0))


def test_tenant_leaves_connections_to_another(directory: Path, model: Path, redis_server: RedisServer) -> None:
    (directory / "keys").write_text("two\n")
    settings = {**GATEWAY, "api_key": "one", "api_key_file": directory / "keys", "served_model_name": "two-tenants"}
    most = 4  # half of what class normal may hold of 12
    with led_gateway(directory, model, redis_server, **settings) as (gateway, _):

        def active() -> int:
            return int(gateway.metric("orcinus_gateway_active_requests"))

        for _ in range(2):  # the second time as well: those that left count no more
            with contextlib.ExitStack() as waiting:
                for _ in range(most):
                    waiting.enter_context(held_open(gateway, "normal", "one"))
                until("all of one tenant wait", lambda: active() == most)
                refused = gateway.post("/v1/completions", {"prompt": [5]})
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_queue_full")
                waiting.enter_context(held_open(gateway, "normal", "two"))
                until("one of the other tenant waits", lambda: active() == most + 1)
            until("all are cancelled", lambda: active() == 0)


def test_new_connection_beyond_the_bound_takes_the_place_of_an_idle_one(gateway: GatewayProcess) -> None:
    with full(gateway, behind=b"") as held, connected(gateway) as further:
        further.sendall(MODELS)
        assert further.recv(65536).startswith(b"HTTP/1.1 200")
        while held[0].recv(65536):  # to the end: the longest idle one
            pass
        held[-1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in b"".join(iter(lambda: held[-1].recv(65536), b""))


@pytest.mark.parametrize(
    ("head", "status"),
    [(b"A: " + b"a" * 5000, b"431"), (b"Connection: close", b"413")],
    ids=["head too large", "body too large, last request"],
)
def test_answer_before_the_body_reaches_a_client_that_sends_on(
    gateway: GatewayProcess, head: bytes, status: bytes
) -> None:
    body = bytes(6 << 20)  # more than the buffers of both sockets hold
    with connected(gateway) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body))
        connection.sendall(head + b"\r\n\r\n" + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 " + status) and b"connection: close" in received


def test_connection_that_sends_empty_lines_is_closed_in_time(hasty: GatewayProcess) -> None:
    with connected(hasty) as connection:
        connection.sendall(MODELS)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        received = b"".join(iter(lambda: connection.recv(65536), b""))  # which fails after 20 s
    assert b"HTTP/1.1 408" in received


def test_connection_stays_open_between_requests_for_the_time_set(hasty: GatewayProcess) -> None:
    with connected(hasty) as connection:
        connection.sendall(MODELS)
        received = b"".join(iter(lambda: connection.recv(65536), b""))  # until the gateway closes
    assert received.startswith(b"HTTP/1.1 200")


def test_web_page_is_refused_across_origins_and_by_foreign_names(gateway: GatewayProcess) -> None:
    origin = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for answer in (
        httpx.options(gateway.url + "/v1/completions", headers=origin, timeout=60),
        httpx.get(gateway.url + "/v1/models", headers=origin, timeout=60),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    for host, status in (
        ("evil.example", 403), ("localhost.evil.example:1", 403), ("", 403), ("localhost:1", 200), ("127.0.0.1", 200),
        ("[::1]:9", 200), ("LOCALHOST", 200),
    ):  # fmt: skip
        for url in (gateway.url + "/v1/models", gateway.url + "/v1/files/x", gateway.url + "/", gateway.url + "/ready"):
            found = httpx.get(url, headers={"Host": host, "Accept": "text/html"}, timeout=60)
            assert (found.status_code == 403) == (status == 403), (url, host)
        answer = httpx.get(gateway.ops_url + "/metrics", headers={"Host": host}, timeout=60)
        assert answer.status_code == status, host
        assert answer.headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_request_without_a_host_is_answered(gateway: GatewayProcess) -> None:
    """As a balancer on this machine checks the health of a server; browsers always name one."""
    for port, path in ((gateway.port, b"/health/live"), (gateway.ops_port, b"/metrics")):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"GET %b HTTP/1.0\r\n\r\n" % path)
            assert b" 200 " in connection.makefile("rb").readline()


def test_gateway_speaks_tls_on_both_ports_and_reloads_at_sighup(over_tls: GatewayProcess, directory: Path) -> None:
    assert over_tls.process is not None
    before = trusting(directory)
    for port in (over_tls.port, over_tls.ops_port):
        path = "/metrics" if port == over_tls.ops_port else "/v1/models"
        assert httpx.get(f"https://127.0.0.1:{port}{path}", verify=before, timeout=60).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{over_tls.port}/v1/models", timeout=60)
    (directory / "gateway.pem").write_text("no certificate")
    over_tls.process.send_signal(signal.SIGHUP)
    until("the log has the reason", lambda: "certificate not reloaded" in over_tls.log())
    assert answers(over_tls, before)
    certs.make(directory, [])
    after = trusting(directory)
    assert not answers(over_tls, after)
    over_tls.process.send_signal(signal.SIGHUP)
    until("the new certificate is shown", lambda: answers(over_tls, after))

"""Listening sockets: which may share a reserved port, and how a child gets those of its supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from shared.errors import ConfigurationError
from shared.processes.listeners import handed_on, listen, reserve
from tests.support.waiting import free_port

HOST = "127.0.0.1"


def sharing(port: int) -> socket.socket:
    """Return a listener with SO_REUSEPORT, as a gRPC server opens it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((HOST, port))
    listener.listen()
    return listener


@pytest.mark.parametrize("listening", [False, True])
def test_reserved_port_takes_only_listeners_that_share_it(listening: bool) -> None:
    port = free_port()
    with contextlib.ExitStack() as held:
        held.enter_context(reserve(HOST, port, "port"))
        if listening:
            for _ in range(2):
                held.enter_context(sharing(port))
        for refused in (lambda: reserve(HOST, port, "port"), lambda: listen(HOST, port, "port")):
            with pytest.raises(ConfigurationError, match=f"port {port} on {HOST} is in use"):
                refused()
    reserve(HOST, port, "port").close()


@pytest.mark.parametrize("opened", [sharing, lambda port: listen(HOST, port, "port")])
def test_port_with_a_listener_is_not_reserved(opened: Callable[[int], socket.socket]) -> None:
    port = free_port()
    with opened(port), pytest.raises(ConfigurationError, match="is in use"):
        reserve(HOST, port, "port")


def test_reservation_takes_no_connection_of_the_listeners() -> None:
    port = free_port()
    with reserve(HOST, port, "port"), sharing(port) as listener:
        listener.settimeout(10)
        for _ in range(50):
            with socket.create_connection((HOST, port), timeout=60):
                listener.accept()[0].close()


ANSWER = """
from shared.processes.listeners import listen
listener = listen("127.0.0.1", {port}, "port")
listener.setblocking(True)
listener.accept()[0].sendall(b"hello")
"""


def test_child_serves_the_clients_that_wait_in_its_supervisors_socket() -> None:
    port = free_port()
    with listen(HOST, port, "port") as held, socket.create_connection((HOST, port), timeout=60) as client:
        client.settimeout(30)
        subprocess.run(
            [sys.executable, "-c", ANSWER.format(port=port)],
            env={**os.environ, **handed_on({"port": held})}, pass_fds=[held.fileno()], timeout=60, check=True,
        )  # fmt: skip
        assert client.recv(16) == b"hello"


def test_descriptor_that_does_not_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as idle:
        for given, problem in ((str(idle.fileno()), "does not listen"), ("99999", "Bad file"), ("x", "invalid")):
            monkeypatch.setenv("SUPERVISOR_SOCKETS", f"ops port=3,port={given}")
            with pytest.raises(ConfigurationError, match=f"port={given}: .*{problem}.*; unset it"):
                listen(HOST, free_port(), "port")
        assert idle.fileno() > 0

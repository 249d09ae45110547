"""A port that several processes share: which sockets may listen on it while it is reserved."""

from __future__ import annotations

import contextlib
import socket

import pytest

from services.gateway.http.listeners import listen, reserve
from shared.errors import ConfigurationError
from tests.support.waiting import free_port

HOST = "127.0.0.1"


@pytest.mark.parametrize("listening", [False, True])
def test_reserved_port_takes_only_listeners_that_share_it(listening: bool) -> None:
    port = free_port()
    with contextlib.ExitStack() as held:
        held.enter_context(reserve(HOST, port, "port"))
        if listening:
            for _ in range(2):
                held.enter_context(listen(HOST, port, "port", shared=True))
        for refused in (lambda: reserve(HOST, port, "port"), lambda: listen(HOST, port, "port")):
            with pytest.raises(ConfigurationError, match=f"port {port} on {HOST} is in use"):
                refused()
    reserve(HOST, port, "port").close()


@pytest.mark.parametrize("shared", [False, True])
def test_port_with_a_listener_is_not_reserved(shared: bool) -> None:
    port = free_port()
    with listen(HOST, port, "port", shared=shared), pytest.raises(ConfigurationError, match="is in use"):
        reserve(HOST, port, "port")


def test_reservation_takes_no_connection_of_the_listeners() -> None:
    port = free_port()
    with reserve(HOST, port, "port"), listen(HOST, port, "port", shared=True) as listener:
        listener.setblocking(True)
        listener.settimeout(10)
        for _ in range(50):
            with socket.create_connection((HOST, port), timeout=10):
                listener.accept()[0].close()
